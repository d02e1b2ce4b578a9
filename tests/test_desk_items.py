"""Files of answers to compare, in every shape that people have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tether.collect.items import Item, load_items, make_item
from tether.errors import UserError
from tether.messages import BadRow

REAL = Path(__file__).parent / "cases/real"


def written(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def only(folder: Path, row: dict[str, Any]) -> Item:
    loaded = load_items(written(folder, row))
    assert [p for p in loaded.problems if p.action != "warn"] == []
    (item,) = loaded.rows
    return item


ASKED = [{"role": "user", "content": "Name a planet."}]


@pytest.mark.parametrize(
    "row, prompt, answers, models",
    [
        ({"prompt": "P", "chosen": "Mars.", "rejected": "Soup."}, "P", ["Mars.", "Soup."], [None, None]),
        (
            {"prompt": "P", "chosen": "Mars.", "rejected": "Soup.", "chosen_model": "A", "rejected_model": "B"},
            "P",
            ["Mars.", "Soup."],
            ["A", "B"],
        ),
        ({"question": "Name a planet.", "answer_a": "Mars.", "answer_b": "Soup.", "model_a": "A"}, ASKED, ["Mars.", "Soup."], ["A", None]),
        ({"prompt": "P", "response_1": "Mars.", "response_2": "Soup."}, "P", ["Mars.", "Soup."], [None, None]),
        ({"prompt": "P", "answers": ["Mars.", "Soup.", "Io."], "ranks": [1, 3, 2]}, "P", ["Mars.", "Soup.", "Io."], [None] * 3),
        ({"prompt": "P", "completions": ["Mars.", "Soup."]}, "P", ["Mars.", "Soup."], [None, None]),
        (
            {"prompt": "P", "completions": [{"model": "A", "completion": "Mars."}, {"model": "B", "completion": "Soup."}]},
            "P",
            ["Mars.", "Soup."],
            ["A", "B"],
        ),
        ({"prompt": ASKED, "responses": ["Mars.", "Soup."]}, ASKED, ["Mars.", "Soup."], [None, None]),
        (
            {"question": "Name a planet.", "small": {"text": "Soup."}, "large": {"text": "Mars."}},
            ASKED,
            ["Soup.", "Mars."],
            ["small", "large"],
        ),
    ],
)
def test_shapes(tmp_path: Path, row: dict[str, Any], prompt: Any, answers: list[str], models: list[str | None]) -> None:
    item = only(tmp_path, row)
    assert item.prompt == prompt
    assert [a.text for a in item.answers] == answers
    assert [a.model for a in item.answers] == models
    assert item.source.endswith("rows.jsonl:1")
    assert Item.from_row(json.loads(json.dumps(item.as_row()))) == item


def test_answers_go_back_into_training_data_as_they_came(tmp_path: Path) -> None:
    """Text beside text, messages beside messages; an answer of several turns keeps them, and shows them all."""
    turns = [{"role": "assistant", "content": "Mars."}, *ASKED, {"role": "assistant", "content": "Venus."}]
    item = only(tmp_path, {"prompt": ASKED, "chosen": turns, "rejected": [{"role": "assistant", "content": "Soup."}]})
    assert item.answers[0].text == "assistant: Mars.\n\nuser: Name a planet.\n\nassistant: Venus."
    assert item.answer(0) == turns
    assert item.answer(1) == [{"role": "assistant", "content": "Soup."}]
    assert only(tmp_path, {"prompt": "P", "chosen": "Mars.", "rejected": "Soup."}).answer(0) == "Mars."


def test_verdicts_are_kept_aside(tmp_path: Path) -> None:
    item = only(tmp_path, {"prompt": "P", "answers": ["Mars.", "Soup."], "scores": [1, 0], "topic": "sky"})
    assert item.extra == {"scores": [1, 0], "topic": "sky"}
    assert only(tmp_path, {"prompt": "P", "chosen": "Mars.", "rejected": "Soup.", "margin": 2.0}).extra == {"margin": 2.0}


def test_an_id_says_what_is_compared_and_not_in_which_order(tmp_path: Path) -> None:
    rows = [
        {"prompt": "P", "answer_a": "Mars.", "answer_b": "Soup.", "n": 1},
        {"prompt": "P", "answer_a": "Soup.", "answer_b": "Mars.", "n": 2},
        {"prompt": "Q", "answer_a": "Mars.", "answer_b": "Soup."},
    ]
    loaded = load_items(written(tmp_path, *rows))
    assert len(loaded.rows) == 2
    (problem,) = loaded.problems
    assert (problem.kind, problem.action, problem.source.line) == ("repeat", "drop", 2)
    assert make_item("P", ["a", "b"]).id != make_item("P", ["a", "b"], models=["A", "B"]).id
    assert make_item("P", ["a", "b"], models=["A", "B"]).id != make_item("P", ["a", "b"], models=["B", "A"]).id


def test_rows_with_nothing_to_compare_are_counted_and_named(tmp_path: Path) -> None:
    rows = [
        {"prompt": "P", "answers": ["same", "same"]},
        {"prompt": "P", "answers": ["one"]},
        {"prompt": "P", "answers": ["a", "b", "a"]},
        {"prompt": "P", "answer_a": "same", "answer_b": "same", "model_a": "A", "model_b": "B"},
        {"prompt": "P", "answers": [{"model": "A"}, {"model": "B"}]},
        {"prompt": "P", "answers": "a, b"},
        {"prompt": "P", "answer_a": False, "answer_b": "b"},
        {"prompt": "P", "answers": ["a", "b"]},
    ]
    loaded = load_items(written(tmp_path, *rows))
    assert len(loaded.rows) == 1
    kinds = [(p.source.line, p.kind, p.action) for p in loaded.problems]
    assert kinds == [
        (1, "identical", "drop"),
        (2, "one_answer", "drop"),
        (3, "identical", "drop"),
        (4, "identical", "drop"),
        (5, "not_text", "reject"),
        (6, "not_a_list", "reject"),
        (7, "not_text", "reject"),
    ]
    with pytest.raises(UserError, match="the column 'answers' is missing"):
        load_items(written(tmp_path, {"prompt": "P"})).enforce("refuse")
    with pytest.raises(BadRow, match="nothing to compare"):
        make_item("P", ["a"])


@pytest.mark.parametrize("name, n, models", [("instances.jsonl", 2, True), ("votes.json", 4, True), ("five_point.jsonl", 5, True)])
def test_real_files(name: str, n: int, models: bool) -> None:
    loaded = load_items(str(REAL / name))
    assert len(loaded.rows) == n
    assert all(a.model for item in loaded.rows for a in item.answers) == models
