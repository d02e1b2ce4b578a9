"""Every shape of docs/data.md is recognised, said, and read into the right parts; every unusable row is named."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.toy_text import case_file, case_lines, check_expected, expectations
from tether import conversations, feedback, preferences, prompts, rankings
from tether.errors import UserError
from tether.messages import plain

REAL = Path(os.environ.get("TETHER_CASES_REAL") or Path(__file__).parent / "cases" / "real")


def loaded(tmp_path: Path, module: Any, *rows: dict[str, Any], how: str = "load") -> Any:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return getattr(module, how)(str(path))


def one(tmp_path: Path, module: Any, row: dict[str, Any]) -> Any:
    found = loaded(tmp_path, module, row)
    assert found.problems == [], found.problems
    assert len(found.rows) == 1
    return found.rows[0]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


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


# -- comparisons -------------------------------------------------------------------------------------------------------

DIALOGUE = "\n\nHuman: How do tides work?\n\nAssistant: The moon pulls.\n\nHuman: Only the moon?\n\nAssistant:"
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


# -- rows of real data sets --------------------------------------------------------------------------------------------

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
