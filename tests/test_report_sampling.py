"""The page of a run that samples: what it says first, what it draws, and which answers it shows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.test_report import checked
from tether.recipe import GRPORecipe
from tether.report import report_html
from tether.report.findings import findings
from tether.report.view import RunView
from tether.rollout import FILE
from tether.run import Run


def made(folder: Path, steps: int = 20, *, notices: tuple[dict[str, Any], ...] = (), **columns: Any) -> Path:
    """A run of so many steps; `columns` are numbers, or functions of the share of the run that is done."""
    draw = random.Random(1)
    usual = {"reward": lambda t: 0.3 + 0.4 * t + draw.gauss(0, 0.02), "reward_std": 0.2, "loss": lambda t: 0.1, "grad_norm": 0.5}
    usual |= {"completions/mean_length": 20.0, "completions/clipped_ratio": 0.1, "frac_reward_zero_std": 0.1}
    recipe = GRPORecipe(model="smollm2", data="questions.jsonl", preset="dapo", rewards=["math", {"reward": "format", "weight": 0.1}])
    with Run.create(folder, recipe, "grpo") as run:
        for step in range(1, steps + 1):
            row = {k: v(step / steps) if callable(v) else v for k, v in {**usual, **columns}.items()}
            run.log(step, {k.replace("__", "/"): v for k, v in row.items()})
        for notice in notices:
            run.note(**notice)
        run.finish({"steps": steps, "prompts": 8})
    return folder


def first(folder: Path) -> tuple[str, str]:
    """Tone and words of the first finding, remedy included."""
    found = findings(RunView.read(folder))[0]
    return found.tone, f"{found.text} {found.remedy}"


def said(folder: Path) -> str:
    return " ".join(f"{f.text} {f.remedy}" for f in findings(RunView.read(folder)))


def test_answers_that_are_cut_off_stand_at_the_top(tmp_path: Path) -> None:
    tone, text = first(made(tmp_path / "run", **{"completions/clipped_ratio": 0.9, "frac_reward_zero_std": 0.8}))
    assert tone == "bad"
    assert "90 % of the answers were cut off at max_completion_length=512" in text
    assert "Raise max_completion_length" in text
    early = said(made(tmp_path / "early", **{"completions/clipped_ratio": lambda t: 0.9 if t < 0.3 else 0.0}))
    assert "in the first steps, 0 % at the end" in early


def test_groups_that_teach_nothing_are_told_with_which_way_to_go(tmp_path: Path) -> None:
    name = "frac_reward_zero_std"
    hard = said(made(tmp_path / "hard", **{name: 0.8, f"{name}/all_wrong": 0.7, f"{name}/all_right": 0.1}))
    assert "In 80 % of the groups" in hard
    assert "easier prompts" in hard
    easy = made(tmp_path / "easy", **{name: 1.0, f"{name}/all_wrong": 0.0, f"{name}/all_right": 1.0})
    assert first(easy)[0] == "bad"
    assert "take harder ones" in first(easy)[1]
    assert "groups" not in said(made(tmp_path / "fine"))


def test_a_loss_of_zero_is_explained_and_any_other_is_not(tmp_path: Path) -> None:
    zero = said(made(tmp_path / "zero", loss=lambda t: 1e-8))
    assert "no stand-still" in zero
    assert "a norm of 0.5" in zero
    assert "no stand-still" not in said(made(tmp_path / "other"))
    assert "no stand-still" not in said(made(tmp_path / "still", loss=0.0, grad_norm=0.0)), "without a gradient it is one"


@pytest.mark.parametrize(
    ("reward", "words"), [(lambda t: 0.3 + 0.4 * t, "rose from"), (lambda t: 0.7 - 0.4 * t, "fell from"), (None, "did not clearly change")]
)
def test_whether_the_reward_moved(tmp_path: Path, reward: Any, words: str) -> None:
    draw = random.Random(0)
    text = said(made(tmp_path / "run", reward=reward or (lambda t: 0.4 + draw.gauss(0, 0.1)), eval_reward=lambda t: t))
    assert f"The reward {words}" in text
    assert "on held-out prompts from" in text


def test_what_could_not_be_judged_and_what_must_not_be_are_told(tmp_path: Path) -> None:
    notice = {"kind": "negative_kl", "text": "below 0", "step": 7}
    text = said(made(tmp_path / "run", notices=(notice,), **{"rewards/math/unscored": 0.2, "sampling/sampling_logp_difference/mean": 0.2}))
    assert "The reward math could not judge 20 % of the answers" in text
    assert "first at step 7" in text
    assert "differ by 0.2 nats per token" in text


def test_the_page_draws_the_reward_and_shows_what_was_said_first_and_last(tmp_path: Path) -> None:
    folder = made(
        tmp_path / "run", **{"rewards/math/mean": lambda t: t, "rewards/format/mean": 1.0, "time/sampling": 1.0, "eval_reward": 0.4}
    )

    def attempt(step: int, prompt: int, sample: int, text: str, finish: str = "stop") -> dict[str, Any]:
        row = {"prompt_id": prompt, "sample": sample, "prompt": [{"role": "user", "content": f"question <{prompt}>"}], "tokens": [1, 2]}
        return {**row, "step": step, "view": {"text": text}, "finish_reason": finish, "total": 0.25}

    with Run.open(folder) as run:
        run.append(FILE, 1, [attempt(1, 0, 0, "FIRST", "length"), attempt(1, 0, 1, "OTHER"), attempt(1, 1, 0, "ALONE")])
        run.append(FILE, 9, [attempt(9, 0, 0, "<b>LAST</b>")])
    with (folder / FILE).open("a") as file:
        file.write('{"torn')  # still being written
    html = report_html(folder)
    text = "".join(checked(html).text)
    for words in (
        "(dapo)",
        "math, format",
        "Reward",
        "Rewards by name",
        "Length of the answers",
        "Time of a step",
        "FIRST [cut off]",
        "<b>LAST</b>",
        "ALONE",
    ):
        assert words in text, words
    assert "OTHER" not in text, "one answer for each prompt, by number"
    assert "question <0>" in text
    assert "loss per pair" not in text
    assert "baseline used" not in text


def test_an_error_that_stopped_the_run_stands_at_the_top(tmp_path: Path) -> None:
    notice = {"kind": "error", "text": "reward 'score' returned 1 values for 16 completions. Return a list."}
    folder = made(tmp_path / "run", notices=(notice,), **{"completions/clipped_ratio": 0.9})
    assert "stopped" not in said(folder), "it was continued to its end"
    (folder / "summary.json").unlink()
    assert "The run stopped with an error. reward 'score' returned 1 values" in said(folder)
    checked(report_html(folder))


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    checked(report_html(made(tmp_path / "run", steps=0)))
    assert "could not" not in said(tmp_path / "run")
