"""Which callables are rewards: every kind is called, and awaited where it must be, with the columns it names."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from tests.test_rewards import score
from tether.errors import UserError
from tether.reward import Rewards


class Scorer:
    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def method(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [self.value] * len(completions)

    async def later(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        await asyncio.sleep(0.001)
        return [self.value] * len(completions)

    @classmethod
    def of_class(cls, completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    @staticmethod
    async def of_nothing(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)


class Callable_(Scorer):
    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return self.method(prompts, completions)


class AsyncCallable(Scorer):
    async def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return await self.later(prompts, completions)


def weighted(prompts: list[str], completions: list[str], weight: float) -> list[float]:
    return [weight] * len(completions)


async def weighted_later(completions: list[str], weight: float, **_: Any) -> list[float]:
    return [weight] * len(completions)


KINDS = {
    "lambda": (lambda prompts, completions, **_: [1.0] * len(completions), "lambda"),
    "lambda, other names": (lambda p, c: [1.0] * len(c), "lambda"),
    "lambda giving a coroutine": (lambda **kw: weighted_later(kw["completions"], 1.0), "lambda"),
    "stars": (lambda *both: [1.0] * len(both[1]), "lambda"),
    "bound method": (Scorer().method, "Scorer.method"),
    "async bound method": (Scorer().later, "Scorer.later"),
    "class method": (Scorer.of_class, "Scorer.of_class"),
    "async static method": (Scorer.of_nothing, "of_nothing"),
    "partial": (functools.partial(weighted, weight=1.0), "weighted"),
    "async partial": (functools.partial(weighted_later, weight=1.0), "weighted_later"),
    "partial of a method": (functools.partial(Scorer().method, extra=1), "Scorer.method"),
    "partial of an async method": (functools.partial(Scorer().later, extra=1), "Scorer.later"),
    "object": (Callable_(), "Callable_"),
    "async object": (AsyncCallable(), "AsyncCallable"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_callable_is_called_and_awaited(kind: str) -> None:
    function, name = KINDS[kind]
    rewards = Rewards([function])
    assert rewards.score(["q"] * 3, ["a"] * 3).totals == [1.0] * 3
    assert rewards.names == [name]
    assert rewards.counters[name]["rows"] == 3
    assert rewards.report()[f"reward/{name}/count/calls"] == 1
    rewards.close()


def test_a_coroutine_in_place_of_a_function_is_refused() -> None:
    with pytest.raises(UserError, match="without"):
        Rewards([weighted_later([], 1.0)])


def test_a_function_gets_the_columns_it_names() -> None:
    seen: dict[str, Any] = {}

    def f(completions: list[str], answer: list[str], hint: str = "none", **more: Any) -> list[float]:
        seen.update(answer=answer, hint=hint, more=more)
        return [1.0] * len(completions)

    score(f, 2, answer=["1", "2"], level=[3, 4])
    assert seen == {"answer": ["1", "2"], "hint": "none", "more": {"prompts": ["q0", "q1"], "level": [3, 4]}}
    with pytest.raises(UserError, match=r"needs 'answer'.*Did you mean answers.*level"):
        score(lambda completions, answer: [1.0], 1, answers=["1"], level=[1])


def test_async_functions_share_one_loop_over_all_steps() -> None:
    loops = []

    async def f(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.5] * len(completions)

    rewards = Rewards([f, f])
    for _ in range(3):
        rewards.score(["q"], ["a"])
    assert len(set(map(id, loops))) == 1
    assert rewards.names == ["f", "f_2"]
    rewards.close()
