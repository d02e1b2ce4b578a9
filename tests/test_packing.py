"""The packed stream: what lies where, what predicts what, and how examples fall into micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tether.batch import Example
from tether.packing import Segment, micro_batches, pack
from tether.padding import pad


def example(prompt: list[int], *answers: list[int]) -> Example:
    return Example(prompt, list(answers), [[True] * len(a) for a in answers])


def test_a_pair_has_its_prompt_once_and_positions_run_on_from_it() -> None:
    packed = pack([example([5, 6], [7, 8], [9])])
    assert packed.tokens.tolist() == [5, 6, 7, 8, 9]
    assert packed.positions.tolist() == [0, 1, 2, 3, 2]
    assert packed.segments == (Segment(0, 2, 0, 0), Segment(2, 4, 0, 2), Segment(4, 5, 0, 2))
    assert packed.predict.tolist() == [1, 2, 1]  # both answers' first tokens are predicted by the prompt's last
    assert packed.targets.tolist() == [7, 8, 9]
    assert packed.answer.tolist() == [0, 0, 1]
    assert packed.last.tolist() == [3, 4]
    assert packed.lengths.tolist() == [2, 1]


def test_a_single_answer_is_one_segment_with_its_prompt() -> None:
    packed = pack([example([5, 6], [7]), example([1], [2, 3])])
    assert packed.segments == (Segment(0, 3, 0, 0), Segment(3, 6, 0, 0))
    assert packed.predict.tolist() == [1, 3, 4]
    assert packed.targets.tolist() == [7, 2, 3]


def test_without_a_prompt_the_first_token_has_no_predictor() -> None:
    packed = pack([example([], [4, 5, 6], [7, 8]), example([], [9, 3])])
    assert packed.predict.tolist() == [0, 1, 3, 5]
    assert packed.targets.tolist() == [5, 6, 8, 3]
    assert packed.lengths.tolist() == [2, 1, 1]
    assert all(s.prompt_start == s.prompt_end for s in packed.segments)


def test_untrained_answer_tokens_are_context_only() -> None:
    packed = pack([Example([1], [[2, 3, 4]], [[False, True, False]])])
    assert packed.tokens.tolist() == [1, 2, 3, 4]
    assert packed.targets.tolist() == [3]
    assert packed.predict.tolist() == [1]
    assert packed.last.tolist() == [3]


def test_an_empty_answer_ends_where_its_prompt_ends() -> None:
    packed = pack([example([5, 6], [], [7])])
    assert packed.last.tolist() == [1, 2]
    assert packed.lengths.tolist() == [0, 1]
    assert packed.answer.tolist() == [1]


def test_sums_by_answer_leave_nothing_to_an_answer_without_trained_tokens() -> None:
    packed = pack([example([5], [6, 7], []), example([5], [8])])
    assert packed.sum_by_answer(torch.tensor([1.0, 2.0, 4.0])).tolist() == [3.0, 0.0, 4.0]


@pytest.mark.parametrize(
    "bad, words",
    [
        (Example([1], [[2, 3]], [[True]]), "2 tokens with a mask of 1"),
        (Example([1], [[2]], []), "1 answers but 0 masks"),
        (Example([], [[]], [[]]), "without any token"),
    ],
)
def test_a_malformed_example_is_refused_by_row(bad: Example, words: str) -> None:
    with pytest.raises(ValueError, match=f"example 1 has .*{words}"):
        pack([example([1], [2]), bad])


def test_a_rank_without_examples_packs_a_stream_that_nothing_is_read_from() -> None:
    packed = pack([])
    assert (len(packed.tokens), packed.n_tokens, packed.n_answers) == (1, 0, 0)
    assert len(packed.predict) == len(packed.last) == 0
    assert packed.sum_by_answer(torch.zeros(0)).shape == (0,)
    with pytest.raises(ValueError, match="nothing to pack"):
        pack([example([])])


examples = st.lists(
    st.builds(
        lambda prompt, answers: example([1] * prompt, *([2] * n for n in answers)),
        st.integers(1, 9),
        st.lists(st.integers(1, 9), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=12,
)


@given(examples, st.integers(1, 40))
def test_micro_batches_hold_every_example_once_within_the_budget(rows: list[Example], budget: int) -> None:
    groups = micro_batches(rows, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(rows)))
    assert all(len(group) == 1 or sum(rows[i].n_tokens for i in group) <= budget for group in groups)
    assert groups == micro_batches(rows, budget)
    # First fit never leaves two groups that would fit into one.
    sizes = sorted(sum(rows[i].n_tokens for i in group) for group in groups)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > budget


def test_a_long_row_does_not_drag_short_ones_along() -> None:
    rows = [example([1], [2]), example([1] * 50, [2]), example([1], [2])]
    assert micro_batches(rows, 10) == [[0, 2], [1]]


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        micro_batches([example([1], [2])], 0)


@given(examples)
def test_padded_rows_hold_the_stream(rows: list[Example]) -> None:
    packed = pack(rows)
    padded = pad(packed)
    assert torch.equal(padded.gather(padded.tokens), packed.tokens)
    assert padded.mask[padded.row, padded.column].all()
    assert int(padded.mask.sum()) == sum(len(e.prompt) + len(a) for e in rows for a in e.answers)
