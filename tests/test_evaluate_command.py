"""`tether evaluate` from the command line: a file of answers, a model, Ctrl-C, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_rows import GSM8K, folder, jsonl
from tether.attempts import Attempt, Folder
from tether.cli import run
from tether.tasks import Task

__all__ = ["folder"]  # fixtures


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
