"""Rows of real data sets, and every example row of docs/data.md, load as what they are."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path

import pytest

from tests.shape_rows import DIALOGUE, loaded
from tether import conversations, feedback, preferences, prompts
from tether.errors import UserError

REAL = Path(os.environ.get("TETHER_CASES_REAL") or Path(__file__).parent / "cases" / "real")


LOADERS = (preferences, feedback, conversations, prompts)


@pytest.mark.parametrize("path", [p for p in sorted(REAL.rglob("*")) if ".json" in p.name], ids=lambda p: p.name)
def test_real_files_load(path: Path) -> None:
    """By at least one loader, nearly whole: real files have a few bad cells, and those are counted."""
    best = 0.0
    for module in LOADERS:
        try:
            found = module.load(str(path))
        except UserError:
            continue
        lines = {row.source.line for row in found.rows}
        counted = {p.source.line for p in found.problems}
        if lines:
            assert found.shape != "not recognised"
            best = max(best, len(lines) / len(lines | counted))
    assert best >= 0.85, best


def test_real_shapes_are_told_apart() -> None:
    if "TETHER_CASES_REAL" in os.environ:
        return  # the excerpts' names below are ours
    shapes = {
        "votes.json": (preferences, "two answers with votes (PandaLM), conversational", 3),
        "verdicts.json": (preferences, "two answers with a verdict, conversational", 3),
        "five_point.jsonl": (preferences, "two answers with a verdict, standard", 4),
        "sharegpt_pairs.json": (preferences, "preference, ShareGPT, conversational", 2),
        "judged_solutions.jsonl": (preferences, "judged answers, one column each (all pairs), conversational", None),
        "samples.jsonl": (preferences, "scored answers (all pairs), conversational", None),
        "labelled_chats.json": (feedback, "labelled conversations, conversational", 4),
        "alpaca.json": (conversations, "Alpaca instruction, conversational", 3),
        "question_answer.jsonl": (conversations, "question and answer, conversational", 3),
        "self_instruct.jsonl": (conversations, "instruction with instances, conversational", 3),
        "text_code.jsonl": (conversations, "text and code, conversational", 2),
        "instances.jsonl": (prompts, "prompts, standard", 2),
        "word_problems.jsonl": (prompts, "word problems, conversational", 2),
        "input_target.jsonl": (prompts, "instructions as prompts, conversational", 2),
        "checkable.jsonl": (prompts, "prompts, standard", 2),
    }
    for name, (module, shape, n) in shapes.items():
        found = module.load(str(REAL / name))
        assert found.shape == shape, name
        assert n is None or len(found.rows) == n, name


def test_human_assistant_dialogues_load_with_their_shared_turns_as_prompt(tmp_path: Path) -> None:
    """TETHER_CASES_HH may point at a real file of such dialogues; its text is not shown."""
    path = os.environ.get("TETHER_CASES_HH") or str(tmp_path / "d.jsonl.gz")
    if "TETHER_CASES_HH" not in os.environ:
        rows = [
            {"chosen": f"{DIALOGUE} The sun too, {i}.", "rejected": f"{DIALOGUE} Yes.\n\nHuman: {i}?\n\nAssistant: Sure."} for i in range(2)
        ]
        Path(path).write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode()))
    found = preferences.load(path)
    assert "Human/Assistant dialogues" in found.shape
    assert len(found.rows) >= 2
    for row in found.rows:
        assert row.prompt[-1]["role"] == "user"
        assert row.chosen[0]["role"] == row.rejected[0]["role"] == "assistant"
        assert row.chosen != row.rejected
    assert all(p.action in ("drop", "warn") for p in found.problems)


def documented() -> list[tuple[str, str]]:
    """(kind, row) of every example line in docs/data.md."""
    page = (Path(__file__).parents[1] / "docs/data.md").read_text()
    blocks = re.findall(r"```json (\w+)\n(.*?)```", page, re.DOTALL)
    return [(kind, line) for kind, block in blocks for line in block.strip().splitlines()]


@pytest.mark.parametrize("kind, line", documented())
def test_every_documented_row_loads_without_a_word(tmp_path: Path, kind: str, line: str) -> None:
    module = {"preference": preferences, "feedback": feedback, "sft": conversations, "prompt": prompts}[kind]
    found = loaded(tmp_path, module, json.loads(line))
    assert found.problems == []
    assert found.rows
