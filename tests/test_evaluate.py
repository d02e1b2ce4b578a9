"""Answers judged and counted: nothing lost and nothing scored in silence."""

from __future__ import annotations

from typing import Any

import pytest

from tests.benchmark_rows import some_tasks
from tether.attempts import Attempt
from tether.errors import UserError
from tether.evaluate import evaluate, judge
from tether.reward import Reward
from tether.tasks import Task, make_reward


def attempt(text: str, task: int = 0, sample: int = 0, **more: Any) -> Attempt:
    return Attempt(task, sample, more.pop("greedy", False), text, "stop", 3, None, len(text.split()), **more)


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
