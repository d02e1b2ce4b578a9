"""Demonstrations, labels and prompts: every shape is recognised, said, and read into the right parts; every unusable row is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.shape_rows import loaded, one, said, user
from tests.toy_text import case_file, case_lines, check_expected, expectations
from tether import conversations, feedback, preferences, prompts
from tether.errors import UserError

# -- demonstrations ----------------------------------------------------------------------------------------------------

CONVERSATIONS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("messages, conversational", {"messages": user("q") + said("a")}, {"messages": user("q") + said("a")}),
    (
        "ShareGPT conversations, conversational",
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}, {"from": "observation", "value": "4"}]},
        {"messages": [*user("q"), *said("a"), {"role": "tool", "content": "4"}]},
    ),
    (
        "ShareGPT conversations, conversational",
        {"system": "Be brief.", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"messages": [{"role": "system", "content": "Be brief."}, *user("q"), *said("a")]},
    ),
    ("prompt and completion, standard", {"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "a"}),
    (
        "prompt and completion, conversational",
        {"prompt": user("q"), "completion": said("a")},
        {"prompt": user("q"), "completion": said("a")},
    ),
    (
        "Alpaca instruction, conversational",
        {"instruction": "i", "input": "", "output": "a"},
        {"prompt": user("i"), "completion": said("a")},
    ),
    (
        "Alpaca instruction, conversational",
        {"instruction": "i", "input": "x", "output": "a", "history": [["h", "b"]]},
        {"prompt": [*user("h"), *said("b"), *user("i\n\nx")], "completion": said("a")},
    ),
    ("question and answer, conversational", {"question": "q", "answer": "a"}, {"prompt": user("q"), "completion": said("a")}),
    ("text and code, conversational", {"text": "q", "code": "a"}, {"prompt": user("q"), "completion": said("a")}),
    ("text, standard", {"text": "A document."}, {"text": "A document."}),
    (
        "messages, conversational",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {"role": "assistant", "content": None, "tool_calls": [1]},
            ]
        },
        {"messages": [*user("q"), {"role": "assistant", "content": "", "tool_calls": [1]}]},
    ),
]


@pytest.mark.parametrize("shape, row, parts", CONVERSATIONS, ids=[f"{i} {s}" for i, (s, _, _) in enumerate(CONVERSATIONS)])
def test_demonstrations_are_recognised(tmp_path: Path, shape: str, row: dict[str, Any], parts: dict[str, Any]) -> None:
    found = loaded(tmp_path, conversations, row)
    assert found.shape == shape
    assert found.problems == []
    (made,) = found.rows
    assert {k: v for k in ("messages", "prompt", "completion", "text") if (v := getattr(made, k)) is not None} == parts


def test_one_instruction_with_several_instances_is_several_demonstrations(tmp_path: Path) -> None:
    row = {"instruction": "i", "instances": [{"input": "", "output": "a"}, {"input": "x", "output": "b"}, {"input": "y", "output": ""}]}
    found = loaded(tmp_path, conversations, row)
    assert [(c.prompt, c.completion) for c in found.rows] == [(user("i"), said("a")), (user("i\n\nx"), said("b"))]
    assert found.counts() == {"empty_instance": 1}


def test_answers_labelled_bad_are_nothing_to_imitate(tmp_path: Path) -> None:
    found = loaded(
        tmp_path, conversations, {"messages": user("q") + said("a"), "label": True}, {"messages": user("q") + said("b"), "label": False}
    )
    assert len(found.rows) == 1
    assert found.counts() == {"labelled_bad": 1}


# -- labels and prompts ------------------------------------------------------------------------------------------------


def test_labelled_answers_in_three_shapes(tmp_path: Path) -> None:
    plain_row = one(tmp_path, feedback, {"prompt": "q", "completion": "a", "label": True})
    assert (plain_row.prompt, plain_row.completion, plain_row.label) == ("q", "a", True)
    chat = one(tmp_path, feedback, {"messages": user("q") + said("b") + user("r") + said("a"), "label": False})
    assert (chat.prompt, chat.completion, chat.label) == (user("q") + said("b") + user("r"), said("a"), False)
    pair = loaded(tmp_path, feedback, {"prompt": "q", "chosen": "a", "rejected": "b"})
    assert [(f.completion, f.label) for f in pair.rows] == [("a", True), ("b", False)]
    assert "taken apart" in pair.shape


@pytest.mark.parametrize(
    "label, wanted", [("true", True), ("False", False), ("TRUE ", True), (1, True), (0, False), (1.0, True), ("0", False)]
)
def test_labels_that_are_not_booleans_are_converted_and_counted(tmp_path: Path, label: Any, wanted: bool) -> None:
    found = loaded(tmp_path, feedback, {"prompt": "q", "completion": "a", "label": label})
    assert found.rows[0].label is wanted
    assert [p.action for p in found.problems] == ["warn"]
    assert found.problems[0].kind.startswith("label_from_")


@pytest.mark.parametrize("label", [None, "good", "", 2, -1, 0.5, [True], {"a": 1}])
def test_other_labels_are_rejected(tmp_path: Path, label: Any) -> None:
    found = loaded(tmp_path, feedback, {"prompt": "q", "completion": "a", "label": label})
    assert found.rows == []
    assert [p.action for p in found.problems] == ["reject"]


def test_csv_labels_are_text_by_nature(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion,label\nq,a,True\nq,b,0\nq,c,maybe\n")
    found = feedback.load(str(path))
    assert [f.label for f in found.rows] == [True, False]
    assert found.counts() == {"bad_label": 1}


def test_prompts_keep_every_other_column(tmp_path: Path) -> None:
    row = one(tmp_path, prompts, {"question": "q", "answer": 42.0, "level": "easy"})
    assert (row.prompt, row.extra) == (user("q"), {"answer": 42.0, "level": "easy"})
    chat = one(tmp_path, prompts, {"messages": user("q") + said("a"), "id": 7})
    assert (chat.prompt, chat.extra) == (user("q"), {"id": 7, "completion": "a"})
    assert one(tmp_path, prompts, {"prompt": "q"}).prompt == "q"
    assert loaded(tmp_path, prompts, {"prompt": " "}).counts() == {"empty": 1}


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_data_of_another_kind_is_refused_in_one_sentence(tmp_path: Path) -> None:
    wrong = [
        (conversations, {"prompt": "q", "chosen": "a", "rejected": "b"}, "tether dpo"),
        (preferences, {"prompt": "q", "completion": "a"}, "tether sft"),
        (preferences, {"messages": user("q"), "label": True}, "kto"),
        (feedback, {"question": "q", "answer": "a"}, "tether sft"),
        (preferences, {"x": 1, "y": 2}, "Wanted:"),
        (prompts, {"id": 1}, "Wanted: prompt"),
    ]
    for module, row, words in wrong:
        with pytest.raises(UserError, match=words) as error:
            loaded(tmp_path, module, row)
        assert "rows.jsonl:1" in str(error.value)


@pytest.mark.parametrize("wrong, right", [("choosen", "chosen"), ("rejcted", "rejected"), ("Prompt", "prompt")])
def test_a_misspelt_column_is_named_with_the_right_one(tmp_path: Path, wrong: str, right: str) -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    row[wrong] = row.pop(right)
    found = loaded(tmp_path, preferences, row)
    (problem,) = found.problems
    assert (problem.action, problem.source.line, problem.field) == ("reject", 1, right)
    assert repr(wrong) in problem.remedy
    assert repr(right) in problem.what


@pytest.mark.parametrize(
    "row, field, words",
    [
        ({"messages": []}, "messages", "empty"),
        ({"messages": "Hi"}, "messages", "list of messages"),
        ({"messages": ["Hi"]}, "messages[0]", "message is wanted"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "no 'content'"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "role is empty"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "null"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "text is wanted"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]", "not text"),
        ({"messages": [{"role": "user", "content": "x \ud83d"}]}, "messages[0].content", "half of a character"),
        ({"prompt": "q", "completion": 7}, "completion", "text is wanted"),
        ({"prompt": "q", "completion": None}, "completion", "null"),
    ],
)
def test_a_malformed_value_is_named_by_its_path(tmp_path: Path, row: dict[str, Any], field: str, words: str) -> None:
    found = loaded(tmp_path, conversations, row)
    (problem,) = found.problems
    assert (problem.action, problem.field) == ("reject", field)
    assert words in problem.what


# -- the handed files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", expectations("kto_rows"), ids=lambda c: f"line {c['line']} {c['expect']}")
def test_each_labelled_row_gets_what_it_should(case: dict[str, Any]) -> None:
    found = feedback.load(str(case_file("kto_rows")))
    raw = json.loads(case_lines("kto_rows")[case["line"] - 1])
    made = [row for row in found.rows if row.source.line == case["line"]]
    about = [p for p in found.problems if p.source.line == case["line"]]
    check_expected(case["expect"], {p.action for p in about}, bool(made))
    truth = str(raw.get("label")).strip().lower() in ("true", "1", "1.0")
    assert [row.label for row in made] == [truth] * len(made)
    assert bool(about) or type(raw.get("label")) is bool, "a converted label is reported"
