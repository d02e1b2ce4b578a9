"""Rewards of length and repetition: penalties beside correctness, each bounded, none of them able to pay for a wrong answer.

Lengths are sampled tokens (`completion_ids`), the end mark included.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from tether.errors import UserError
from tether.rewards.texts import text_of


class OverlongPenalty:
    """0 up to `max_length - cache` tokens, falling to -1 at `max_length` (DAPO, arXiv:2503.14476, eq. 13).

    >>> OverlongPenalty(max_length=100, cache=20)(["q"] * 3, ["a"] * 3, completion_ids=[[0] * 80, [0] * 90, [0] * 100])
    [0.0, -0.5, -1.0]
    """

    reward_name = "overlong"

    def __init__(self, *, max_length: int, cache: int) -> None:
        if not 0 < cache <= max_length:
            raise UserError(f"cache must lie in 1 to max_length, got {cache} of {max_length}", where="cache")
        self.max_length, self.cache = max_length, cache

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float]:
        from tether.advantage import overlong_penalty

        return [float(overlong_penalty(len(ids), self.max_length, self.cache)) for ids in completion_ids]


class LengthPenalty:
    """-`per_token` for every token beyond `free`, at most `most` in all.

    >>> LengthPenalty(per_token=0.1, free=2, most=1.0)(["q"] * 2, ["a"] * 2, completion_ids=[[0] * 5, [0] * 50])
    [-0.30000000000000004, -1.0]
    """

    reward_name = "length"

    def __init__(self, *, per_token: float = 0.001, free: int = 0, most: float = 1.0) -> None:
        if not (per_token > 0 and free >= 0 and most > 0):
            raise UserError(f"per_token and most must be above 0 and free at least 0, got {per_token}, {most}, {free}", where="length")
        self.per_token, self.free, self.most = per_token, free, most

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float]:
        return [0.0 - min(self.per_token * max(0, len(ids) - self.free), self.most) for ids in completion_ids]


class CosineReward:
    """Correctness scaled by length along half a cosine (Yeo et al. 2025, arXiv:2502.03373, section 4): short right answers earn most,
    wrong ones are better long (the model was still thinking) than short.

        length n, L = max_length:  low + (high - low)/2 (1 + cos(pi min(n, L)/L))

    with (high, low) = `right` for right answers and (high, low) = `wrong` for wrong ones: `high` at n = 0, `low` at L. The length is
    clamped at L, since the cosine comes back up; an answer cut off at the limit earns `cut`. `correct` is a reward of 0 and 1; what it
    cannot judge stays unscored.

    >>> half = CosineReward(lambda prompts, completions, **_: [1.0], max_length=10)
    >>> round(half(["q"], ["a"], completion_ids=[[0] * 5], finish_reasons=["stop"])[0], 6)  # half way between 1 and 0.5
    0.75
    """

    reward_name = "cosine"

    def __init__(
        self,
        correct: Callable[..., Any],
        *,
        max_length: int,
        right: tuple[float, float] = (1.0, 0.5),
        wrong: tuple[float, float] = (-1.0, -0.5),
        cut: float = -1.0,
    ) -> None:
        if max_length < 1:
            raise UserError(f"must be at least 1, got {max_length}", where="max_length")
        if inspect.iscoroutinefunction(correct):
            raise UserError("the reward that cosine builds on must be a plain function", where="correct")
        if min(right) <= max(wrong):
            raise UserError(f"a right answer must always earn more than a wrong one, got {right} and {wrong}", where="right")
        self.correct, self.max_length, self.right, self.wrong, self.cut = correct, max_length, right, wrong, cut

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        finish_reasons: Sequence[str] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        from tether.reward_call import checked

        reasons = finish_reasons if finish_reasons is not None else ["stop"] * len(completions)
        given = {**columns, "completion_ids": completion_ids, "finish_reasons": reasons}
        judged = checked("cosine's correctness", len(completions), self.correct(prompts=prompts, completions=completions, **given)).values
        return [self._scaled(v, len(ids), reason) for v, ids, reason in zip(judged, completion_ids, reasons, strict=True)]

    def _scaled(self, correct: float, n: int, reason: str) -> float | None:
        if math.isnan(correct):
            return None
        if reason == "length":
            return self.cut
        high, low = self.right if correct >= 0.5 else self.wrong
        return low + (high - low) / 2 * (1 + math.cos(math.pi * min(n, self.max_length) / self.max_length))

    def close(self) -> None:
        close = getattr(self.correct, "close", None)
        if callable(close):
            close()


class RepetitionPenalty:
    """-`most` times the share of word n-grams that have come before in the answer (Yeo et al. 2025, arXiv:2502.03373).

    >>> RepetitionPenalty(n=2, most=1.0)(["q"] * 2, ["a b a b a b", "all of it is new"])  # 5 pairs, 2 of them different
    [-0.6, 0.0]
    """

    reward_name = "repetition"

    def __init__(self, *, n: int = 3, most: float = 1.0) -> None:
        if n < 1 or not most > 0:
            raise UserError(f"n must be at least 1 and most above 0, got {n} and {most}", where="repetition")
        self.n, self.most = n, most

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        return [self.score(text_of(c)) for c in completions]

    def score(self, text: str) -> float:
        words = text.lower().split()
        grams = [tuple(words[i : i + self.n]) for i in range(len(words) - self.n + 1)]
        return 0.0 - self.most * (1 - len(set(grams)) / len(grams)) if grams else 0.0
