"""All rewards of a step: what goes wrong is named and counted, sums and advantages are those worked by hand."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tether.advantage import group_norm, normalize_then_sum
from tether.errors import UserError
from tether.reward import Reward, Rewards
from tether.rollout import Rollout, View


def score(function: Any, n: int = 4, **columns: Any) -> list[float]:
    return Rewards([function]).score([f"q{i}" for i in range(n)], [f"a{i}" for i in range(n)], columns).totals


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_an_exception_names_function_row_place_and_line() -> None:
    def picky(prompts: list[str], completions: list[str]) -> list[float]:
        return [1.0 / (c != "a2") for c in completions]

    with pytest.raises(UserError, match=r"'picky' raised ZeroDivisionError: .* on row 2 \(d.jsonl:9\), at test_rewards.py:\d+") as caught:
        Rewards([picky]).score(["q"] * 4, [f"a{i}" for i in range(4)], places=["d.jsonl:7", "d.jsonl:8", "d.jsonl:9", "d.jsonl:10"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_exception_of_the_whole_batch_says_so() -> None:
    def batchy(prompts: list[str], completions: list[str]) -> list[float]:
        raise KeyError("x") if len(completions) > 1 else StopIteration

    with pytest.raises(UserError, match="row 0"):
        score(batchy)


def test_nan_and_inf_are_unscored_counted_and_named() -> None:
    values = [1.0] * 18 + [math.nan, -math.inf]
    rewards = Rewards([Reward(lambda prompts, completions: values, "shaky"), Reward(lambda prompts, completions: [2.0] * 20, "firm", 0.5)])
    scored = rewards.score(["q"] * 20, ["a"] * 20, places=[f"d:{i}" for i in range(20)])
    assert scored.totals == [2.0] * 18 + [1.0, 1.0]
    assert scored.counters == {"shaky/null": 0, "shaky/broken": 2, "firm/null": 0, "firm/broken": 0}
    assert scored.row(18) == {"shaky": None, "firm": 2.0}
    assert "rows 18 (d:18), 19 (d:19)" in scored.notices[0]
    assert scored.metrics()["reward/shaky/broken"] == 0.1
    values[0] = math.nan
    with pytest.raises(UserError, match=r"'shaky' gave NaN or inf for 3 of 20.*10%"):
        rewards.score(["q"] * 20, ["a"] * 20)


def test_none_is_unscored_and_no_error_however_many() -> None:
    rewards = Rewards([Reward(lambda prompts, completions: [None, 1.0, None], "may"), Reward(lambda **_: [0.0] * 3, "watch", 0.0)])
    scored = rewards.score(["q"] * 3, ["a"] * 3)
    assert [scored.total(i) for i in range(3)] == [None, 1.0, None]  # a part without weight does not make a row scored
    assert scored.advantages([0, 0, 0]) == [0.0, 0.0, 0.0]
    assert Rewards([lambda **_: [None, None]]).score(["q"] * 2, ["a"] * 2).notices


def test_a_function_that_hangs_is_reported_and_ended_in_time() -> None:
    release = threading.Event()
    said: list[str] = []

    def stuck(prompts: list[str], completions: list[str]) -> list[float]:
        release.wait(30)
        return [0.0] * len(completions)

    async def asleep(completions: list[str]) -> list[float]:
        await asyncio.sleep(30)
        return []

    for function in (stuck, asleep):
        rewards = Rewards([Reward(function, timeout_s=0.4)], slow_s=0.1, say=said.append)
        start = time.monotonic()
        with pytest.raises(UserError, match=rf"'{function.__name__}' gave no answer within 0.4 s for 2 completions"):
            rewards.score(["q"] * 2, ["a"] * 2)
        assert time.monotonic() - start < 5
        assert "still running" in said.pop()
        assert rewards.counters[function.__name__]["timeouts"] == 1
    release.set()


def test_functions_run_side_by_side() -> None:
    """Each waits for the other: one after the other, both would wait in vain."""
    both = threading.Barrier(2, timeout=10)

    def f(prompts: list[str], completions: list[str]) -> list[float]:
        both.wait()
        return [1.0] * len(completions)

    assert Rewards([f, lambda prompts, completions: f(prompts, completions)]).score(["q"], ["a"]).totals == [2.0]


def test_a_reward_of_zero_everywhere_is_warned_about_once() -> None:
    rewards = Rewards([Reward(lambda completions: [0.0] * len(completions), "format"), Reward(lambda **_: [1.0], "one")])
    notices = [rewards.score(["q"], ["a"]).notices for _ in range(6)]
    assert [len(n) for n in notices] == [0, 0, 1, 0, 0, 0]
    assert "'format' was 0 for every completion of the first 3 steps" in notices[2][0]


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Rewards([]), "no reward"),
        (lambda: Rewards([Reward(lambda: 1, weight=0.0)]), "no reward with a weight"),
        (lambda: Rewards([lambda: 1], mixture="sum_than_normalize"), "Use sum_then_normalize"),  # type: ignore[arg-type]
        (lambda: Reward(3), "must be a function"),  # type: ignore[arg-type]
        (lambda: Reward(len, weight=math.inf), "finite"),
        (lambda: Reward(len, timeout_s=0), "above 0"),
    ],
)
def test_mistakes_are_told(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()


# -- sums and advantages -----------------------------------------------------------------------------------------------


def test_parts_weights_and_both_mixtures() -> None:
    """Rewards (1, 0, 0, 1) and (0, 10, 20, 30) with weights 1 and 0.1: totals 1, 1, 2, 4."""
    a, b = [1.0, 0.0, 0.0, 1.0], [0.0, 10.0, 20.0, 30.0]
    parts = [Reward(lambda **_: a, "a"), Reward(lambda **_: {"x": [v / 2 for v in b], "y": [v / 2 for v in b]}, "b", 0.1)]
    scored = Rewards(parts).score(["q"] * 4, ["c"] * 4)
    assert scored.totals == [1.0, 1.0, 2.0, 4.0]
    assert scored.parts == {"b/x": [0.0, 5.0, 10.0, 15.0], "b/y": [0.0, 5.0, 10.0, 15.0]}
    assert scored.row(1) == {"a": 0.0, "b": 10.0, "b/x": 5.0, "b/y": 5.0}
    groups = torch.tensor([0, 0, 0, 0])
    assert scored.advantages([0] * 4) == pytest.approx(group_norm(torch.tensor(scored.totals, dtype=torch.float64), groups).tolist())
    other = Rewards(parts, mixture="normalize_then_sum").score(["q"] * 4, ["c"] * 4)
    matrix = torch.tensor([a, b], dtype=torch.float64).T
    wanted = normalize_then_sum(matrix, torch.tensor([1.0, 0.1], dtype=torch.float64), groups)
    assert other.advantages([0] * 4) == pytest.approx(wanted.tolist())
    assert other.advantages([0] * 4) != pytest.approx(scored.advantages([0] * 4))
    metrics = scored.metrics()
    assert (metrics["reward/mean"], metrics["reward/a/mean"], metrics["reward/b/mean"]) == (2.0, 0.5, 15.0)


def made(text: str, prompt: Any = "q", **columns: Any) -> Rollout:
    view = View(text, text + "</s>", "<think>")
    return Rollout(0, 0, 0, prompt, [1], [5, 2], [True] * 2, [-1.0] * 2, [-1.0] * 2, "stop", view, 0, columns=columns)


def test_rollouts_come_back_scored_and_functions_see_the_documented_view() -> None:
    seen: dict[str, Any] = {}

    def f(**columns: Any) -> list[float]:
        seen.update(columns)
        return [1.0, 0.5]

    chat = [{"role": "user", "content": "q"}]
    scored, table = Rewards([f]).score_rollouts([made("x", answer="1"), made("y", chat, level=2)])
    assert [r.total for r in scored] == table.totals == [1.0, 0.5]
    assert scored[0].rewards == {"f": 1.0}
    assert seen == {
        "prompts": ["q", chat],
        "completions": ["x", [{"role": "assistant", "content": "y"}]],
        "completion_ids": [[5, 2]] * 2,
        "raw_completions": ["x</s>", "y</s>"],
        "opened": ["<think>"] * 2,
        "finish_reasons": ["stop"] * 2,
        "answer": ["1", None],
        "level": [None, 2],
    }
    with pytest.raises(UserError, match="column named 'opened'"):
        Rewards([f]).score_rollouts([made("x", opened=1)])


# -- no main guard -----------------------------------------------------------------------------------------------------


def test_a_script_without_a_main_guard_under_spawn(tmp_path: Path) -> None:
    """Lambdas, local functions and rewards with helper processes at the top level of a script, spawn forced: it runs once."""
    script = tmp_path / "script.py"
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong random')")
    script.write_text(
        textwrap.dedent(
            """
            import sys
            sys.path.pop(0)  # this folder, as an installed script would have it
            import multiprocessing
            multiprocessing.set_start_method("spawn")
            from tether.reward import Rewards
            from tether.rewards.math import MathReward

            def local():
                def inner(completions, **_):
                    return [1.0] * len(completions)
                return inner

            rewards = Rewards([lambda prompts, completions: [0.5] * len(completions), local(), MathReward(workers=2)])
            print("totals", rewards.score(["q"] * 2, ["It is 4.", "It is 5."], {"answer": ["4", "4"]}).totals)
            rewards.close()
            """
        )
    )
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "totals [2.5, 1.5]\n"


# -- where they run ------------------------------------------------------------------------------------------------------


class Computing:
    computes = True

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None

    def __call__(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        self.thread = threading.current_thread()
        return [1.0] * len(prompts)


def test_what_computes_with_torch_runs_on_the_thread_that_trains_and_the_rest_beside_it() -> None:
    """A second thread's processor threads would slow down every operation of training for the rest of the run."""
    computing, threads = Computing(), []

    def waiting(prompts: list[str], completions: list[str]) -> list[float]:
        threads.append(threading.current_thread())
        return [2.0] * len(prompts)

    scored = Rewards([waiting, computing]).score(["p"], ["c"])
    assert computing.thread is threading.main_thread()
    assert threads[0] is not threading.main_thread()
    assert scored.totals == [3.0]
