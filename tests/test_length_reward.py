"""Length and repetition rewards, worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tether.errors import UserError
from tether.rewards.format import TagsReward
from tether.rewards.length import CosineReward, LengthPenalty, OverlongPenalty, RepetitionPenalty


def ids(*lengths: int) -> list[list[int]]:
    return [[0] * n for n in lengths]


def test_length_rewards_by_hand() -> None:
    """Overlong: limit 100, cache 20, so 85 tokens are 5/20 over. Cosine at L/2 is half way, at L and beyond the low end."""
    assert OverlongPenalty(max_length=100, cache=20)(["q"] * 4, ["a"] * 4, completion_ids=ids(79, 85, 100, 500)) == [0, -0.25, -1, -1]
    assert LengthPenalty(per_token=0.5, free=3, most=2)(["q"] * 3, ["a"] * 3, completion_ids=ids(3, 5, 50)) == [0.0, -1.0, -2.0]
    right = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, None, 1.0]
    cosine = CosineReward(lambda prompts, completions, **_: right, max_length=10, right=(1, 0.5), wrong=(-1, -0.5), cut=-2)
    reasons = ["stop"] * 7 + ["length"]
    values = cosine(["q"] * 8, ["a"] * 8, completion_ids=ids(0, 5, 10, 20, 0, 10, 5, 10), finish_reasons=reasons)
    assert values[6] is None
    assert [v for v in values if v is not None] == pytest.approx([1.0, 0.75, 0.5, 0.5, -1.0, -0.5, -2.0])
    assert RepetitionPenalty(n=1, most=0.5)(["q"] * 3, ["a a a b", "", "a b"]) == [-0.25, 0.0, 0.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: OverlongPenalty(max_length=5, cache=9),
        lambda: LengthPenalty(per_token=-1),
        lambda: CosineReward(len, max_length=0),
        lambda: CosineReward(len, max_length=5, right=(0.1, 0.2), wrong=(0.15, 0.0)),
        lambda: RepetitionPenalty(n=0),
        lambda: TagsReward(["a", "a"]),
    ],
)
def test_mistaken_settings_are_told(make: Any) -> None:
    with pytest.raises(UserError):
        make()


def test_cosine_takes_no_odd_correctness() -> None:
    with pytest.raises(UserError, match="returned 1 values for 2"):
        CosineReward(lambda **_: [1.0], max_length=5)(["q"] * 2, ["a"] * 2, completion_ids=ids(1, 2))
