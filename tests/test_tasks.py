"""Benchmarks in their own layouts: questions and gold answers read as they are, and rows that cannot be judged named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_rows import GSM8K, HUMANEVAL, MATH, MBPP, SANITIZED, SVAMP, TARGET, jsonl
from tests.test_evaluate import attempt
from tether.errors import UserError
from tether.evaluate import judge
from tether.messages import plain, user
from tether.reward import Reward
from tether.tasks import Task, load_tasks, make_reward


def verdicts(tasks: list[Task], texts: list[str], reward: Reward) -> list[float | None]:
    return [a.reward for a in judge(tasks, [attempt(t, i) for i, t in enumerate(texts)], reward).attempts]


@pytest.mark.parametrize(
    "rows, gold, asked, right, wrong",
    [
        (GSM8K[:1], None, "Ann has 3 boxes of 4 pens. How many pens?", "So 12.\n#### 12", "#### 13"),
        (MATH, None, "What is $1/2$ as a fraction?", "It is \\boxed{0.5}.", "\\boxed{2}"),
        (SVAMP, "Answer", "There are 4 birds. How many wings?", "The answer is 8.", "The answer is 4."),
        (TARGET, "target", "Tom had 5 pears and ate 2. How many are left?", "3", "7"),
    ],
)
def test_math_benchmarks_are_read_as_they_are(tmp_path: Path, rows: Any, gold: Any, asked: str, right: str, wrong: str) -> None:
    reward = make_reward("math", gold)
    tasks = load_tasks(jsonl(tmp_path / "t.jsonl", rows), reward).rows
    assert tasks[0].prompt == [{"role": "user", "content": asked}]
    assert verdicts([tasks[0], tasks[0]], [right, wrong], reward) == [1.0, 0.0]


PLUS = "```python\ndef plus(a, b):\n    return a + b\n```"


@pytest.mark.parametrize(
    "rows, ask, right, wrong",
    [
        (MBPP, None, PLUS, PLUS.replace("+", "-")),
        (MBPP, "{text}\nYour code should pass:\n{test_list}", PLUS, "no program"),
        (SANITIZED, "{prompt}", PLUS, PLUS.replace("+", "-")),
        (HUMANEVAL, None, "    return sum(xs)\n", "    return len(xs)\n"),
        (
            HUMANEVAL,
            "Complete this:\n{prompt}",
            "```python\ndef total(xs: List[int]) -> int:\n    return sum(xs)\n```",
            "```python\ndef total(xs): return 3\n```",
        ),
        (HUMANEVAL, "Complete this:\n{prompt}", "```python\n    return sum(xs)\n```", "```\n    return xs\n```"),
    ],
)
def test_code_benchmarks_are_read_as_they_are(tmp_path: Path, rows: Any, ask: str | None, right: str, wrong: str) -> None:
    """HumanEval's imports are those of its prompt, however the model was asked."""
    reward = make_reward("code")
    tasks = load_tasks(jsonl(tmp_path / "t.jsonl", rows), reward, ask=ask).rows
    assert verdicts([tasks[0], tasks[0]], [right, wrong], reward) == [1.0, 0.0]
    if ask is not None:
        assert plain(tasks[0].prompt).startswith(ask.split("{")[0])


def test_tests_whose_function_is_named_nowhere_are_pointed_out(tmp_path: Path) -> None:
    path, reward = jsonl(tmp_path / "t.jsonl", MBPP), make_reward("code")
    assert "do not name the function" in load_tasks(path, reward).notices[0]
    shown = load_tasks(path, reward, ask="{text}\n{test_list}")
    assert shown.notices == []
    assert plain(shown.rows[0].prompt).endswith("\nassert plus(1, 2) == 3\nassert plus(0, 0) == 0")


def test_a_question_of_columns(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"q": "1 + 1", "n": 2.0, "answer": "2"}])
    assert load_tasks(path, make_reward("math"), ask="{q}, {n} times. \\boxed{} please.", system="Be brief.").rows[0].prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1, 2 times. \\boxed{} please."},
    ]
    (tmp_path / "ask.txt").write_text("First line.\n{q}\n")
    assert load_tasks(path, make_reward("math"), ask=str(tmp_path / "ask.txt")).rows[0].prompt == user("First line.\n1 + 1")
    for ask, told in (("{answer}", "show the model the gold answer"), ("no column", "names no column"), ("{qq}", "no column 'qq'")):
        with pytest.raises(UserError, match=told):
            load_tasks(path, make_reward("math"), ask=ask).rows  # noqa: B018


@pytest.mark.parametrize(
    "rows, options, told",
    [
        ([{"question": "1+1"}], {}, r"t.jsonl:1: answer: the row has no gold answer: no column 'answer' or 'solution'.*--gold"),
        ([GSM8K[0], {"question": "2+2", "answer": " "}], {}, r"t.jsonl:2: answer: the row has no gold answer.*--on-bad-rows drop"),
        ([GSM8K[0], {"question": "2+2", "answer": None}], {}, r"t.jsonl:2: answer"),
        ([{"text": "x", "test_list": []}], {"spec": "code"}, r"t.jsonl:1: test_list: the row has no tests"),
        ([{"text": "x", "tests": [{"a": 1}]}], {"spec": "code"}, r"t.jsonl:1: tests: this is no test"),
        (GSM8K, {"category": "level"}, "no column 'level'"),
        ([{"question": "1", "answer": "1", "level": "x"}], {"category": "level", "bins": 2}, r"t.jsonl:1: level: 'x' is not a number"),
        (GSM8K, {"gold": "gold_answer"}, r"t.jsonl:1: gold_answer"),
    ],
)
def test_rows_that_cannot_be_judged_are_one_sentence(tmp_path: Path, rows: Any, options: dict[str, Any], told: str) -> None:
    path = jsonl(tmp_path / "t.jsonl", rows)
    with pytest.raises(UserError, match=told):
        load_tasks(path, make_reward(options.pop("spec", "math"), options.pop("gold", None)), **options)


def test_rows_without_gold_can_be_left_out_and_are_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [GSM8K[0], {"question": "2+2", "answer": ""}, GSM8K[1]])
    tasks = load_tasks(path, make_reward("math"), on_bad_rows="drop")
    assert [t.source.line for t in tasks.rows] == [1, 3]
    assert any("1 rows left out: no gold answer" in n and "t.jsonl:2" in n for n in tasks.notices)


def test_categories_may_be_bins_of_numbers(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"question": str(i), "answer": "1", "level": i} for i in range(4)])
    assert [t.category for t in load_tasks(path, make_reward("math"), category="level").rows] == ["0", "1", "2", "3"]
    assert [t.category for t in load_tasks(path, make_reward("math"), category="level", bins=2).rows] == ["0 to 1"] * 2 + ["2 to 3"] * 2


def test_rewards_are_named_as_in_recipes() -> None:
    assert make_reward("{reward: math, column: target, percent: unit}").function.column == "target"  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="Only math and code"):
        make_reward("format", "answer")
