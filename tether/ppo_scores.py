"""From rewards to the scores that PPO learns from: scaled by their spread so far, clipped, less the price of a missing end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tether.ppo_recipe import PPORecipe
from tether.token_batch import TokenBatch


@dataclass(frozen=True)
class RunningSpread:
    """Count, mean and sum of squared deviations of all scores so far (Chan et al. 1979), as plain numbers for checkpoints.

    >>> one = RunningSpread().with_values(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    >>> two = RunningSpread().with_values(torch.tensor([1.0, 2.0])).with_values(torch.tensor([3.0, 4.0]))
    >>> round(one.std, 9) == round(two.std, 9), round(one.std, 6)
    (True, 1.290994)
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def from_state(cls, state: Any) -> RunningSpread:
        return cls(**state) if state else cls()

    @property
    def std(self) -> float:
        """Sample standard deviation; 1 while there is none to speak of."""
        if self.count < 2 or self.squares <= 1e-12:
            return 1.0
        return math.sqrt(self.squares / (self.count - 1))

    def with_values(self, values: Tensor) -> RunningSpread:
        if not values.numel():
            return self
        v = values.double()
        n, mean, squares = len(v), float(v.mean()), float(((v - v.mean()) ** 2).sum())
        total, delta = self.count + n, mean - self.mean
        return RunningSpread(total, self.mean + delta * n / total, self.squares + squares + delta**2 * self.count * n / total)


def scores_of(recipe: PPORecipe, batch: TokenBatch, spread: RunningSpread) -> tuple[Tensor, dict[str, float], dict[str, float]]:
    """Scores (R,) float64, 0 for rows that take no part; the state of the spread for the next step; metrics.

    The penalty comes after the clip, so that it survives it. `objective/scores_clipped`: share of the rows that the clip changed.
    """
    rewards = torch.where(torch.isfinite(batch.rewards), batch.rewards, 0.0)
    known = spread.with_values(batch.rewards[torch.isfinite(batch.rewards)])
    if recipe.score_scaling == "running":
        rewards = rewards / known.std
    active, metrics = batch.active, {}
    if recipe.score_clip is not None:
        beyond = (rewards.abs() > recipe.score_clip)[active.cpu()]
        if len(beyond):
            metrics["objective/scores_clipped"] = float(beyond.double().mean())
        rewards = rewards.clamp(-recipe.score_clip, recipe.score_clip)
    unfinished = torch.tensor([not r.finished for r in batch.rollouts])
    rewards = rewards - recipe.missing_end_penalty * unfinished
    state = {"count": known.count, "mean": known.mean, "squares": known.squares}
    return torch.where(active, rewards.to(active.device), 0.0), state, metrics
