"""`tether evaluate`: benchmarks in their own layouts, answers judged and counted, nothing lost and nothing scored in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import save_tiny
from tether.answers import Speaker
from tether.attempts import Attempt, Folder, complete, read_attempts, sample
from tether.cli import run
from tether.engines.sampling import Sampling
from tether.errors import UserError
from tether.evaluate import evaluate, judge
from tether.messages import plain, user
from tether.reward import Reward
from tether.tasks import Task, load_tasks, make_reward

# Rows in the layouts of the usual benchmarks.
GSM8K = [
    {"question": "Ann has 3 boxes of 4 pens. How many pens?", "answer": "3 * 4 = <<3*4=12>>12 pens.\n#### 12"},
    {"question": "Half of 10?", "answer": "10 / 2 = <<10/2=5>>5\n#### 5"},
]
MATH = [
    {
        "problem": "What is $1/2$ as a fraction?",
        "solution": "It is $\\boxed{\\frac12}$.",
        "answer": "\\frac{1}{2}",
        "subject": "Prealgebra",
        "level": 1,
    }
]
SVAMP = [{"Body": "There are 4 birds", "Question": "How many wings?", "Answer": 8.0, "ID": "x"}]
TARGET = [{"input": "Tom had 5 pears and ate 2. How many are left?", "target": 3.0}]
MBPP = [
    {
        "text": "Write a function to add two numbers.",
        "code": "def plus(a, b): return a + b",
        "task_id": 1,
        "test_setup_code": "",
        "test_list": ["assert plus(1, 2) == 3", "assert plus(0, 0) == 0"],
    }
]
SANITIZED = [
    {
        "prompt": "Write a function to add two numbers.",
        "task_id": 2,
        "code": "...",
        "test_imports": ["import math"],
        "test_list": ["assert math.isclose(plus(1, 2), 3)"],
    }
]
HUMANEVAL = [{"task_id": "X/0", "prompt": "from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    \"\"\" The sum. \"\"\"\n", "entry_point": "total", "canonical_solution": "    return sum(xs)\n", "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n"}]  # fmt: skip


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def attempt(text: str, task: int = 0, sample: int = 0, **more: Any) -> Attempt:
    return Attempt(task, sample, more.pop("greedy", False), text, "stop", 3, None, len(text.split()), **more)


def verdicts(tasks: list[Task], texts: list[str], reward: Reward) -> list[float | None]:
    return [a.reward for a in judge(tasks, [attempt(t, i) for i, t in enumerate(texts)], reward).attempts]


# -- layouts -----------------------------------------------------------------------------------------------------------


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


# -- judging -----------------------------------------------------------------------------------------------------------


def some_tasks(n: int, answer: str = "12") -> list[Task]:
    from tether.files import Source

    return [Task(f"question {i}", {"answer": answer}, Source("t.jsonl", i + 1)) for i in range(n)]


def test_votes_follow_the_math_rewards_equality() -> None:
    """0.5, 1/2 and \\frac12 are one answer; so are 7 and 7.0, wrong; 9 is alone. 3 against 2 against 1, and one says nothing."""
    texts = ["It is 0.5", "\\boxed{1/2}", "\\boxed{\\frac12}", "It is 7", "\\boxed{7.0}", "It is 9", "no idea"]
    reward = make_reward("math")
    tasks = some_tasks(1, "0.5")
    judged = judge(tasks, [attempt(t, 0, i) for i, t in enumerate(texts)], reward)
    result = evaluate(tasks, judged, reward, [1, 7])
    found = {m.name: m.value.value for m in result.measures}
    assert found["maj@7"] == 1.0
    assert found["pass@1"] == pytest.approx(3 / 7)
    fewer = judge(tasks, [attempt(t, 0, i) for i, t in enumerate(texts[1:5])], reward)
    assert {m.name: m.value.value for m in evaluate(tasks, fewer, reward, [4]).measures}["maj@4"] == 0.5  # two against two


def test_a_task_that_breaks_the_reward_is_unscored_and_said() -> None:
    def fussy(prompts: Any, completions: Any) -> list[float | None]:
        if any(p == "question 1" for p in prompts):
            raise RuntimeError("no such world")
        return [None if p == "question 2" else 1.0 for p in prompts]

    tasks = some_tasks(4)
    judged = judge(tasks, [attempt("x", i, s) for i in range(4) for s in range(2)], Reward(fussy))
    assert [a.reward for a in judged.attempts] == [1.0, 1.0, None, None, None, None, 1.0, 1.0]
    assert "no such world" in (judged.attempts[2].why or "")
    assert "4 of 8 samples are unscored" in judged.notices[0]
    result = evaluate(tasks, judged, Reward(fussy), [1])
    assert result.unscored == 4
    assert result.measures[0].value.value == 1.0
    assert (result.measures[0].value.n, result.measures[0].left_out) == (2, 2)


def test_a_reward_that_always_fails_is_an_error() -> None:
    def broken(prompts: Any, completions: Any) -> list[float]:
        raise RuntimeError("never")

    with pytest.raises(UserError, match="never"):
        judge(some_tasks(3), [attempt("x", i) for i in range(3)], Reward(broken))


def test_rewards_are_given_what_they_are_given_in_training() -> None:
    seen: dict[str, Any] = {}

    def look(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [1.0] * len(prompts)

    chat = Task([{"role": "user", "content": "q"}], {"level": 3}, some_tasks(1)[0].source)
    judge([chat], [Attempt(0, 0, False, "a", "length", 1, [7, 8], 2, "<think>", "a</s>")], Reward(look))
    assert seen == {
        "prompts": [chat.prompt],
        "completions": [[{"role": "assistant", "content": "a"}]],
        "completion_ids": [[7, 8]],
        "raw_completions": ["a</s>"],
        "opened": ["<think>"],
        "finish_reasons": ["length"],
        "level": [3],
    }


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("m") / "model"))


def test_greedy_and_samples_of_a_model(folder: str) -> None:
    """The samples are those of `tether generate` with the same seed; the greedy answer is the likeliest one."""
    speaker = Speaker(folder, precision="fp32")
    tasks = [Task(f"w{i} w{i + 1}", {}, some_tasks(1)[0].source) for i in range(10, 13)]
    kept: list[Attempt] = []
    made = sample(speaker, tasks, Sampling(max_new_tokens=5), n=3, seed=4, keep=kept.append)
    assert [(a.task, a.greedy, a.sample) for a in made] == [
        (j, g, s) for j in range(3) for g, s in ((False, 0), (False, 1), (False, 2), (True, 0))
    ]
    assert sorted(kept, key=lambda a: (a.task, a.greedy, a.sample)) == made
    wanted = speaker.answer([t.prompt for t in tasks], Sampling(max_new_tokens=5), n=3, seed=4)
    assert [a.text.split() for a in made if not a.greedy] == [a.text.split() for a in wanted]
    greedy = speaker.answer([t.prompt for t in tasks], Sampling(max_new_tokens=5, temperature=0.0))
    assert [a.text.split() for a in made if a.greedy] == [a.text.split() for a in greedy]


def test_a_stop_string_is_not_part_of_the_answer(folder: str) -> None:
    speaker = Speaker(folder, precision="fp32")
    made = sample(
        speaker, [Task("w10", {}, some_tasks(1)[0].source)], Sampling(max_new_tokens=40, stop=("w1", "w2", "w3")), n=4, greedy=False
    )
    stopped = [a for a in made if a.finish_reason == "stop_string"]
    assert stopped
    assert not any(s in a.text for a in stopped for s in ("w1", "w2", "w3"))


def test_what_was_made_is_not_made_again(folder: str, tmp_path: Path) -> None:
    """Stopped in the middle: answers are on disk, questions with all of theirs are skipped, and the end is the same."""
    speaker = Speaker(folder, precision="fp32", slots=2)
    tasks = [Task(f"w{i}", {}, some_tasks(1)[0].source) for i in range(10, 16)]
    whole = sample(speaker, tasks, Sampling(max_new_tokens=4), n=2)
    place = Folder(tmp_path / "e", {"seed": 0})

    def keep(a: Attempt) -> None:
        place.add(a, tasks[a.task])
        if len((tmp_path / "e/samples.jsonl").read_text().splitlines()) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(speaker, tasks, Sampling(max_new_tokens=4), n=2, keep=keep)
    with open(tmp_path / "e/samples.jsonl", "a") as file:
        file.write('{"task": 5, "sam')  # and the power went
    again = Folder(tmp_path / "e", {"seed": 0})
    made = again.made(tasks, speaker.codec, 2, True)
    assert 0 < len(made) < 8
    assert complete(made, 2, True) == {a.task for a in made}
    asked: list[Attempt] = []
    assert sample(speaker, tasks, Sampling(max_new_tokens=4), n=2, made=made, keep=asked.append) == whole
    assert len(asked) == len(whole) - len(made)
    with pytest.raises(UserError, match="another seed: 0, not 1"):
        Folder(tmp_path / "e", {"seed": 1})


def test_answers_of_a_file_find_their_tasks(tmp_path: Path) -> None:
    tasks = some_tasks(3)
    rows = [{"prompt": f"question {i}", "completion": f"{i}", "sample": s} for i in (0, 1) for s in range(2)]
    path = jsonl(tmp_path / "a.jsonl", [*rows, {"prompt": "question 2", "completion": "x"}, {"prompt": "other", "completion": "y"}])
    made, notices = read_attempts(path, tasks)
    assert [(a.task, a.sample) for a in made] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert "1 answers are to no task" in notices[0]
    assert "1 of 3 tasks have fewer than 2 answers" in notices[1]
    with pytest.raises(UserError, match="none of the answers"):
        read_attempts(jsonl(tmp_path / "b.jsonl", [{"prompt": "other", "completion": "y"}]), tasks)


# -- the command -------------------------------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_file_of_answers_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four samples and a greedy answer to each of two questions: 2 and 0 of 4 right, so pass@1 1/4, pass@2 (1 - 1/6)/2, maj@4 1/4 by a tie."""
    data = jsonl(tmp_path / "t.jsonl", [r | {"kind": k} for r, k in zip(GSM8K, "ab", strict=True)])
    said = [["12", "#### 12.0", "13", "13"], ["1", "2", "none", "4"]]
    rows = [
        {"prompt": r["question"], "completion": text, "finish_reason": "stop", "completion_tokens": 2, "sample": i}
        for r, texts in zip(GSM8K, said, strict=True)
        for i, text in enumerate(texts)
    ]
    rows += [{"prompt": r["question"], "completion": "5", "greedy": True} for r in GSM8K]
    answers = jsonl(tmp_path / "a.jsonl", rows)
    out = tmp_path / "e"
    words = ["evaluate", answers, data, "--reward", "math", "--k", "1,2,4", "--category", "kind"]
    assert run([*words, "--out", str(out), "--json"]) == 0
    result = told(capsys)["result"]
    found = {name: m["value"] for name, m in result["measures"].items()}
    assert found == pytest.approx(
        {"pass@1": 0.25, "pass@2": 5 / 12, "pass@4": 0.5, "maj@2": found["maj@2"], "maj@4": 0.25, "greedy": 0.5, "cut": 0.0, "length": 2.0}
    )
    assert result["categories"]["a"]["pass@1"]["value"] == 0.5
    assert result["spread"] == {"never": 1, "sometimes": 1, "always": 0}
    assert all(m["low"] <= m["value"] <= m["high"] and m["interval"] for m in result["measures"].values())
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [x["reward"] for x in lines] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert lines[1]["extracted"] == "12.0"
    assert json.loads((out / "evaluation.json").read_text())["record"]["version"]
    assert run([*words, "--out", str(out)]) == 2
    assert "finished evaluation" in capsys.readouterr().err
    assert run([*words, "--out", str(tmp_path / "e2")]) == 0
    shown = capsys.readouterr().out
    for words_shown in ("pass@1", "25.0%", "Agresti-Coull", "maj@4: 100% of the votes are tied", "by category"):
        assert words_shown in shown
    assert (
        run(
            [
                "evaluate",
                str(out / "samples.jsonl"),
                data,
                "--reward",
                "{reward: math, rules: [hash]}",
                "--out",
                str(tmp_path / "e3"),
                "--json",
            ]
        )
        == 0
    )
    assert told(capsys)["result"]["measures"]["pass@1"]["value"] == 0.125  # only one answer stands behind ####


def test_a_model_from_the_command_line(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "def has(prompts, completions, want, **_):\n    return [float(w in str(c)) for w, c in zip(want, completions)]\n"
    )
    data = jsonl(tmp_path / "t.jsonl", [{"prompt": f"w{i}", "want": "w1"} for i in range(10, 14)])
    words = ["evaluate", folder, data, "--reward", "own.py:has", "--n", "4", "--max-new-tokens", "6", "--precision", "fp32"]
    assert run([*words, "--json"]) == 0
    first = told(capsys)
    assert set(first["result"]["measures"]) == {"pass@1", "pass@4", "greedy", "cut", "greedy cut", "length", "greedy length"}
    assert first["result"]["samples"] == 20
    assert any("plain strings" in n for n in first["notices"])
    assert (tmp_path / "runs/evaluate-t-1/samples.jsonl").exists()
    assert run([*words, "--json"]) == 0
    assert told(capsys)["result"] == first["result"]
    assert (tmp_path / "runs/evaluate-t-2").exists()


def test_ctrl_c_keeps_the_answers_and_says_how_to_go_on(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = jsonl(tmp_path / "t.jsonl", [{"prompt": f"w{i}", "answer": "1"} for i in range(10, 16)])
    out = tmp_path / "e"
    words = ["evaluate", folder, data, "--reward", "math", "--n", "2", "--max-new-tokens", "4", "--precision", "fp32", "--slots", "2"]
    words += ["--out", str(out), "--json"]
    whole = [*words[:-2], str(tmp_path / "whole"), "--json"]
    assert run(whole) == 0
    wanted = told(capsys)["result"]
    add = Folder.add

    def interrupted(self: Folder, a: Attempt, task: Task) -> None:
        add(self, a, task)
        if len((out / "samples.jsonl").read_text().splitlines()) == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(Folder, "add", interrupted)
    assert run(words) == 130
    said = capsys.readouterr().err
    assert "8 of 18 answers are kept" in said
    assert "tether" in said
    assert len((out / "samples.jsonl").read_text().splitlines()) == 8
    monkeypatch.setattr(Folder, "add", add)
    assert run(words) == 0
    assert told(capsys)["result"] == wanted


@pytest.mark.parametrize(
    "words, said",
    [
        (["t.jsonl"], "who judges"),
        (["t.jsonl", "--reward", "maths"], "Did you mean math"),
        (["t.jsonl", "--reward", "math", "--temperature", "0"], "all be the same"),
        (["t.jsonl", "--reward", "math", "--n", "0"], "--n: must be at least 1"),
        (["t.jsonl", "--reward", "math", "--k", "1,16"], "between 1 and the 8 samples"),
        (["t.jsonl", "--reward", "math", "--k", "one"], "no list of whole numbers"),
        (["t.jsonl", "--reward", "math", "--bins", "3"], "--category"),
        (["t.jsonl", "--reward", "math", "--on-bad-rows", "skip"], "no 'skip'"),
        (["bare.jsonl", "--reward", "math"], "bare.jsonl:1: answer: the row has no gold answer"),
        (["t.jsonl", "--reward", "math", "--out", "used"], "not empty"),
    ],
)
def test_mistakes_are_one_sentence(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "t.jsonl", GSM8K)
    jsonl(tmp_path / "bare.jsonl", [{"question": "1+1"}])
    (tmp_path / "used").mkdir()
    (tmp_path / "used/x").write_text("x")
    assert run(["evaluate", folder, *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
