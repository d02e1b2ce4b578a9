"""Comparisons and rankings: every shape is recognised and read into prompt, chosen and rejected; what is unclear is never guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.shape_rows import DIALOGUE, loaded, one, said, user
from tether import preferences, rankings
from tether.messages import plain

# -- comparisons -------------------------------------------------------------------------------------------------------

TWO = {"instruction": "q", "input": "x"}

PREFERENCES: list[tuple[str, dict[str, Any], tuple[Any, Any, Any]]] = [
    ("preference, explicit prompt, standard", {"prompt": "q", "chosen": "a", "rejected": "b"}, ("q", "a", "b")),
    (
        "preference, explicit prompt, conversational",
        {"prompt": user("q"), "chosen": said("a"), "rejected": said("b")},
        (user("q"), said("a"), said("b")),
    ),
    (
        "preference, explicit prompt, conversational",
        {"system": "s", "question": "q", "chosen": "a", "rejected": "b"},
        ([{"role": "system", "content": "s"}, *user("q")], said("a"), said("b")),
    ),
    (
        "preference, explicit prompt, conversational",  # the answers repeat the prompt, as UltraFeedback's do
        {"prompt": "q", "chosen": user("q") + said("a"), "rejected": user("q") + said("b")},
        (user("q"), said("a"), said("b")),
    ),
    (
        "preference, implicit prompt, standard",
        {"chosen": "The sky is blue.", "rejected": "The sky is black."},
        ("The sky is", " blue.", " black."),
    ),
    ("preference, implicit prompt, standard", {"chosen": "Yes.", "rejected": "No."}, ("", "Yes.", "No.")),
    ("preference, implicit prompt, standard", {"chosen": "The sky is", "rejected": "The sky"}, ("The", " sky is", " sky")),
    (
        "preference, implicit prompt, conversational",
        {"chosen": user("q") + said("a"), "rejected": user("q") + said("b")},
        (user("q"), said("a"), said("b")),
    ),
    (
        "preference, implicit prompt, conversational",  # one goes on where the other stops
        {"chosen": user("q") + said("a") + user("r") + said("c"), "rejected": user("q") + said("b")},
        (user("q"), said("a") + user("r") + said("c"), said("b")),
    ),
    (
        "preference, Human/Assistant dialogues, conversational",
        {"chosen": DIALOGUE + " The sun too.", "rejected": DIALOGUE + " Yes."},
        (user("How do tides work?") + said("The moon pulls.") + user("Only the moon?"), said("The sun too."), said("Yes.")),
    ),
    (
        "preference, ShareGPT, conversational",
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        (user("q"), said("a"), said("b")),
    ),
    (
        "two answers with votes (PandaLM), conversational",
        {**TWO, "response1": "a", "response2": "b", "annotator1": 2, "annotator2": 0, "annotator3": 2},
        (user("q\n\nx"), said("b"), said("a")),
    ),
    (
        "two answers with a verdict, conversational",
        {"input": "q", "output_1": "a", "output_2": "b", "label": 2},
        (user("q"), said("b"), said("a")),
    ),
    (
        "two answers with a verdict, conversational",
        {"instruction": "q", "output_1": "a", "output_2": "b", "preference": 1.2},
        (user("q"), said("a"), said("b")),
    ),
    (
        "two answers with a verdict, standard",
        {"prompt": "q", "completion_a": "a", "completion_b": "b", "preference": "b-is-slightly-better"},
        ("q", "b", "a"),
    ),
    ("two answers with a verdict, standard", {"prompt": "q", "response_a": "a", "response_b": "b", "winner": "model_a"}, ("q", "a", "b")),
]


@pytest.mark.parametrize("shape, row, parts", PREFERENCES, ids=[f"{i} {s}" for i, (s, _, _) in enumerate(PREFERENCES)])
def test_comparisons_are_recognised(tmp_path: Path, shape: str, row: dict[str, Any], parts: tuple[Any, Any, Any]) -> None:
    found = loaded(tmp_path, preferences, row)
    assert found.shape == shape
    assert found.problems == []
    (made,) = found.rows
    assert (made.prompt, made.chosen, made.rejected) == parts
    # The same row as a ranking of two, for reward models.
    (ranking,) = loaded(tmp_path, preferences, row, how="load_comparisons").rows
    assert (ranking.prompt, ranking.answers, ranking.ranks) == (parts[0], [parts[1], parts[2]], [1, 2])


def test_a_file_may_mix_forms_and_says_so(tmp_path: Path) -> None:
    found = loaded(tmp_path, preferences, *[row for _, row, _ in PREFERENCES[:3]])
    assert found.shape == "preference, explicit prompt, conversational (2 rows); preference, explicit prompt, standard (1 rows)"


def test_margin_and_other_columns_travel_along(tmp_path: Path) -> None:
    row = one(tmp_path, preferences, {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 2, "topic": {"x": 1}})
    assert row.margin == 2.0
    assert row.extra == {"topic": {"x": 1}}
    assert one(tmp_path, preferences, {"prompt": "q", "chosen": "a", "rejected": "b", "margin": None}).margin is None
    for bad in ("2", True, [1]):
        found = loaded(tmp_path, preferences, {"prompt": "q", "chosen": "a", "rejected": "b", "margin": bad})
        assert found.counts() == {"not_a_number": 1}, bad
    (ranking,) = loaded(tmp_path, preferences, {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 2}, how="load_comparisons").rows
    assert ranking.extra == {"margin": 2.0}


@pytest.mark.parametrize(
    "votes, better", [((1, 1, 1), "a"), ((1, 2, 1), "a"), ((0, 2, 2), "b"), ((1, 2, 0), None), ((0, 0, 1), None), ((0, 0, 0), None)]
)
def test_votes_need_more_than_half(tmp_path: Path, votes: tuple[int, int, int], better: str | None) -> None:
    row = {"instruction": "q", "response1": "a", "response2": "b", **{f"annotator{i}": v for i, v in enumerate(votes, 1)}}
    found = loaded(tmp_path, preferences, row)
    assert [plain(p.chosen) for p in found.rows] == ([better] if better else [])
    assert found.counts() == ({} if better else {"tie": 1})
    assert found.problems == [] or found.problems[0].action == "drop"


@pytest.mark.parametrize("label", [0, 3, "maybe", True, None, [1]])
def test_an_unclear_verdict_is_rejected_not_guessed(tmp_path: Path, label: Any) -> None:
    found = loaded(tmp_path, preferences, {"input": "q", "output_1": "a", "output_2": "b", "label": label})
    assert [p.action for p in found.problems] == ["reject"]
    assert found.rows == []


SCORES = [
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
    ("reward_chosen", "reward_rejected"),
]


@pytest.mark.parametrize("better, worse", SCORES)
def test_scores_are_checked_against_the_order(tmp_path: Path, better: str, worse: str) -> None:
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert loaded(tmp_path, preferences, {**pair, better: 0.9, worse: 0.1}).counts() == {}
    assert loaded(tmp_path, preferences, {**pair, better: 0.1, worse: 0.9}).counts() == {"scores_contradict": 1}
    tie = loaded(tmp_path, preferences, {**pair, better: 4, worse: 4})
    assert tie.counts() == {"scores_tie": 1}
    assert tie.problems[0].action == "warn"
    assert len(tie.rows) == 1


def test_rows_that_contradict_each_other_are_warned_of(tmp_path: Path) -> None:
    found = loaded(tmp_path, preferences, {"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "b", "rejected": "a"})
    assert len(found.rows) == 2
    assert [(p.source.line, p.kind, p.action) for p in found.problems] == [(2, "contradiction", "warn")]


def test_dialogues_that_part_at_a_question_answer_different_prompts(tmp_path: Path) -> None:
    rows = user("q") + said("a")
    found = loaded(tmp_path, preferences, {"chosen": rows + user("r") + said("c"), "rejected": rows + user("s") + said("d")})
    assert [(p.action, p.kind) for p in found.problems] == [("drop", "different_prompts")]


# -- rankings ----------------------------------------------------------------------------------------------------------

RANKINGS: list[tuple[dict[str, Any], list[int], list[tuple[str, str]]]] = [
    ({"prompt": "q", "answers": ["a", "b", "c"], "ranks": [2, 1, 3]}, [2, 1, 3], [("b", "a"), ("b", "c"), ("a", "c")]),
    ({"prompt": "q", "completions": ["a", "b", "c"], "ranks": [1, 2, 2]}, [1, 2, 2], [("a", "b"), ("a", "c")]),
    ({"prompt": "q", "samples": ["a", "b", "c"], "scores": [0.1, 0.9, 0.1]}, [2, 1, 2], [("b", "a"), ("b", "c")]),
    ({"prompt": "q", "samples": ["a", "b"], "correct": [False, True], "rm_score": [9.0, 1.0]}, [2, 1], [("b", "a")]),
    ({"prompt": "q", "completions": [{"response": "a", "overall_score": 3}, {"response": "b", "overall_score": 5}]}, [2, 1], [("b", "a")]),
    ({"prompt": "q", "answers": [{"text": "a", "rank": 1}, {"text": "b", "rank": 2}]}, [1, 2], [("a", "b")]),
    ({"prompt": "q", "big": {"solution": "a", "is_correct": False}, "small": {"solution": "b", "is_correct": True}}, [2, 1], [("b", "a")]),
]


@pytest.mark.parametrize("row, ranks, wanted", RANKINGS)
def test_rankings_and_their_pairs(tmp_path: Path, row: dict[str, Any], ranks: list[int], wanted: list[tuple[str, str]]) -> None:
    assert one(tmp_path, rankings, row).ranks == ranks
    found = loaded(tmp_path, preferences, row)
    assert sorted((p.chosen, p.rejected) for p in found.rows) == sorted(wanted)
    assert len({str(p.source) for p in found.rows}) == 1


def test_a_tie_or_a_missing_rank_writes_no_pair(tmp_path: Path) -> None:
    tied = loaded(tmp_path, preferences, {"prompt": "q", "answers": ["a", "b"], "ranks": [1, 1]})
    assert (tied.rows, tied.counts()) == ([], {"tie": 1})
    partly = loaded(tmp_path, preferences, {"prompt": "q", "answers": ["a", "b", "c"], "ranks": [1, None, 2]})
    assert [(p.chosen, p.rejected) for p in partly.rows] == [("a", "c")]
    assert partly.counts() == {"no_rank": 1}
    short = loaded(tmp_path, preferences, {"prompt": "q", "answers": ["a", "b", "c"], "ranks": [1, 2]})
    assert [(p.action, p.kind) for p in short.problems] == [("reject", "ranks_missing")]
    odd = loaded(tmp_path, preferences, {"prompt": "q", "answers": ["a", "b"], "ranks": [1.5, 2]})
    assert [(p.action, p.kind) for p in odd.problems] == [("reject", "not_a_rank")]
