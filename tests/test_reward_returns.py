"""What a reward function may return: one number or None for each completion, and anything else refused by name."""

from __future__ import annotations

import asyncio
import builtins
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.test_rewards import score
from tether.errors import UserError

FILE = Path(os.environ.get("TETHER_CASES_REWARD_RETURNS") or Path(__file__).parent / "cases/reward_returns.jsonl")
CASES = [json.loads(line) for line in FILE.read_text().splitlines() if line.strip()]


def function_of(case: dict[str, Any]) -> Callable[..., Any]:
    if "coroutine" in case:

        async def handed(prompts: Any, completions: Any, **columns: Any) -> Any:
            await asyncio.sleep(0)
            return case["coroutine"]

        return handed

    def handed_plain(prompts: Any, completions: Any, **columns: Any) -> Any:
        if "raises" in case:
            name, _, text = case["raises"].partition(": ")
            raise getattr(builtins, name, ValueError)(text)
        return case["returns"]

    handed_plain.__name__ = "handed"
    return handed_plain


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.get("why", "")[:40])
def test_handed_returns(case: dict[str, Any]) -> None:
    n, expect = case["n"], case["expect"]
    given = case.get("coroutine", case.get("returns"))
    values, refusal = None, ""
    try:
        values = score(function_of(case), n)
    except UserError as error:
        refusal = str(error)
    if values is not None:
        assert "accept" in expect or "null" in expect or "unscored" in expect, f"accepted {given!r}"
        wanted = [math.nan if v is None or not math.isfinite(v) else float(v) for v in given]
        assert values == pytest.approx(wanted, nan_ok=True)
        return
    assert "error" in expect, f"refused: {refusal}"
    assert "handed" in refusal  # the function
    if isinstance(given, list) and len(given) != n:
        assert str(n) in refusal
        assert str(len(given)) in refusal
    if "raises" in case:
        assert case["raises"] in refusal
    if "row" in expect:
        assert "row 0" in refusal


@pytest.mark.parametrize(
    "returned, words",
    [
        ([1.0, 0.0, "1", 0.0], r"'1' for row 2"),
        ([1.0, [0.0], 1.0, 0.0], r"\[0.0\] for row 1"),
        ("1010", "'1010' where 4 numbers"),
        (b"1010", "where 4 numbers"),
        (np.float64(1.0), "a single value, where 4"),
        (torch.tensor(1.0), "where 4 numbers"),
        (np.zeros((4, 1)), "for row 0"),
        (np.zeros(3), "3 values for 4"),
        ((x for x in [1.0] * 4), "generator"),
        ({1.0, 2.0, 3.0, 4.0}, "where 4 numbers"),
        ({}, "parts need names"),
        ({"a": [1.0]}, "f/a' returned 1 values for 4"),
        ([1 + 2j] * 4, "which is not a number"),
    ],
)
def test_what_is_no_list_of_numbers_is_refused(returned: Any, words: str) -> None:
    def f(prompts: Any, completions: Any) -> Any:
        return returned

    with pytest.raises(UserError, match=words):
        score(f)


def test_a_list_of_coroutines_is_refused_and_none_is_left_waiting(recwarn: pytest.WarningsRecorder) -> None:
    async def one() -> float:
        return 1.0

    with pytest.raises(UserError, match="coroutine"):
        score(lambda prompts, completions: [one() for _ in completions])
    assert not [w for w in recwarn if "never awaited" in str(w.message)]


@pytest.mark.parametrize(
    "returned", [(1, 0, 1, 0), np.array([1, 0, 1, 0]), torch.tensor([1.0, 0, 1, 0]), [np.float32(1), 0, torch.tensor(1), False]]
)
def test_arrays_and_their_numbers_are_numbers(returned: Any) -> None:
    assert score(lambda prompts, completions: returned) == [1, 0, 1, 0]
