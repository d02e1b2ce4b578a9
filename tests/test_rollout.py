"""Rollouts: tokens and log-probabilities travel unchanged, and rewards see a view that is the same for every template."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.whole_runs import write_rows
from tether.errors import UserError
from tether.files import Source
from tether.packing import pack
from tether.rollout import Rollout, View, from_sampled, group_example, groups, opened_by, read, view

WORDS = {1: "<s>", 2: "</s>", 3: "<think>", 4: "</think>", 5: "four", 6: "user", 7: "<|end|>"}


def decode(ids: object) -> str:
    return " ".join(WORDS[i] for i in ids)  # type: ignore[attr-defined]


def rollout(**changes: object) -> Rollout:
    fields: dict[str, object] = {
        "prompt_id": 4, "group": 0, "sample": 1, "prompt": "two and two", "prompt_ids": [6, 3], "tokens": [5, 4, 2],
        "trained": [True, True, True], "logps": [-0.5, -1.25, -3.0], "sampling_logps": [-0.5, -1.25, -3.0], "finish_reason": "stop",
        "view": View("four </think>", "four </think> </s>", "<think>"), "policy_version": 3, "source": Source("data.jsonl", 7),
        "columns": {"answer": "4", "n": 2},
    }  # fmt: skip
    return Rollout(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_rollout_survives_json_lines_to_the_bit(tmp_path: Path) -> None:
    """float32 log-probabilities come back as the same float32 numbers, whatever their digits."""
    generator = torch.Generator().manual_seed(0)
    numbers = (-torch.rand(50, generator=generator) * 10).tolist()
    first = rollout(tokens=[5] * 50, trained=[True] * 49 + [False], logps=numbers, sampling_logps=[x * 0.5 for x in numbers])
    second = rollout().scored({"math": 1.0, "format": None}, 1.0).with_advantage(-0.5)
    write_rows(tmp_path / "r.jsonl", [first.row(), second.row()])
    again = list(read(tmp_path / "r.jsonl"))
    assert again[1] == second
    assert again[0].trained == first.trained
    assert torch.equal(torch.tensor(again[0].logps), torch.tensor(first.logps))
    assert torch.equal(torch.tensor(again[0].sampling_logps), torch.tensor(first.sampling_logps))


def test_a_line_that_is_no_rollout_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "r.jsonl", [rollout().row(), {"prompt_id": 1}])
    with pytest.raises(UserError, match=r"r\.jsonl:2"):
        list(read(tmp_path / "r.jsonl"))


@pytest.mark.parametrize("changes", [{"logps": [-1.0]}, {"logps": [-0.5, float("nan"), -1.0]}, {"trained": [True]}])
def test_lists_that_do_not_fit_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"one length|finite"):
        rollout(**changes)


def test_a_group_keeps_its_tokens_for_the_engine() -> None:
    members = [rollout(sample=0), rollout(sample=1, tokens=[5, 2], trained=[True, False], logps=[-1.0, -2.0], sampling_logps=[-1.0, -2.0])]
    other = rollout(group=1)
    assert groups([members[0], other, members[1]]) == [members, [other]]
    example = group_example(members)
    assert (example.prompt, example.answers, example.trained) == ([6, 3], [[5, 4, 2], [5, 2]], [[True] * 3, [True, False]])
    packed = pack([example])
    assert packed.targets.tolist() == [5, 4, 2, 5]
    with pytest.raises(ValueError, match="mixes"):
        groups([rollout(), rollout(prompt_ids=[1])])


@pytest.mark.parametrize(
    "prompt, opened",
    [
        ("user assistant <think>", "<think>"),
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<|im_start|>assistant\n", ""),
        ("<think>\n\n</think>\n\n", ""),
        ("is a < b and c > d?", ""),
    ],
)
def test_what_the_template_opened_belongs_to_the_answer(prompt: str, opened: str) -> None:
    assert opened_by(prompt) == opened


def test_the_view_ends_at_the_first_end_mark_and_keeps_tags_that_are_tokens() -> None:
    seen = view([5, 4, 7, 5, 2], [6, 3], decode, {2, 7})
    assert seen == View("four </think>", "four </think> <|end|> four </s>", "<think>")
    assert seen.answer == "<think>four </think>"
    assert view([5], [6], decode, {2}) == View("four", "four", "")  # cut off: no mark is invented


def test_an_engines_continuation_becomes_a_rollout() -> None:
    codec = SimpleNamespace(decode=lambda ids, control: decode(ids), end_ids={2})
    sampled = SimpleNamespace(sample=2, tokens=[5, 2], logps=[-1.0, -2.0], sampling_logps=[-1.0, -2.0], finish_reason="stop")
    made = from_sampled(
        sampled, prompt="q", prompt_ids=[6, 3], prompt_id=4, group=9, codec=codec, policy_version=1, columns={"answer": "4"}
    )
    assert (made.text, made.view.opened, made.tokens, made.trained, made.finished) == ("four", "<think>", [5, 2], [True, True], True)
    assert json.loads(json.dumps(made.row()))["columns"] == {"answer": "4"}
