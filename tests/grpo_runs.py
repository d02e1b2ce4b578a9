"""Whole runs of `tether grpo` (and of `tether ppo`, by one word) for tests, on a tiny model with scripted rewards."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ppo_runs import even, model, moved, odd, rollout, timeless, weights
from tests.whole_runs import words, write_rows
from tether.algorithms import grpo, ppo
from tether.policy import Policy
from tether.recipe import RECIPES, GRPORecipe
from tether.run import Run
from tether.token_batch import TokenBatch

__all__ = ["PRESETS", "Train", "even", "finite", "gradients", "model", "moved", "odd", "rollout", "timeless", "train", "weights"]

ALGORITHMS: dict[str, Any] = {"grpo": grpo, "ppo": ppo}
PRESETS = ("reinforce", "rloo", "reinforce_pp", "grpo", "dr_grpo", "dapo", "gspo", "cispo")
Train = Callable[..., tuple[Run, dict[str, Any]]]


@pytest.fixture
def train(model: Path, tmp_path: Path) -> Train:
    """Runs to the end; each call has a run folder of its own. The closed run can still be read. Rewards: functions, or as in a recipe."""
    count = 0

    def go(rewards: list[Any], n_prompts: int = 12, command: str = "grpo", **settings: Any) -> tuple[Run, dict[str, Any]]:
        nonlocal count
        count += 1
        data = write_rows(tmp_path / f"prompts{count}.jsonl", [{"prompt": words(5 * i, 2 + i % 4), "gold": i} for i in range(n_prompts)])
        given = {"model": str(model), "data": str(data), "run": str(tmp_path / f"run{count}"), "precision": "fp32", "trackers": []}
        small = {"batch_size": 16, "num_generations": 4, "max_completion_length": 6, "learning_rate": 5e-3, "max_steps": 4}
        named = all(isinstance(r, (str, dict)) for r in rewards)
        recipe = RECIPES[command](**{**given, **small, "log_every": 1000, **({"rewards": rewards} if named else {}), **settings})
        with Run.create(recipe.run or "", recipe) as run:
            return run, ALGORITHMS[command].train(recipe, run, None if named else rewards)

    return go


def gradients(policy: Policy, recipe: GRPORecipe, batch: TokenBatch, advantages: torch.Tensor, **more: Any) -> list[torch.Tensor]:
    """What each optimiser step on the batch would be handed, as one vector; a rest is a vector of one zero. No weight moves."""

    class Loop:
        step = 0
        made: list[torch.Tensor]

        def apply(self, loss: float) -> None:
            self.made.append(torch.cat([p.grad.reshape(-1) for p in policy.parameters().values()]))  # type: ignore[union-attr]
            for p in policy.parameters().values():
                p.grad = None

        def rest(self) -> None:
            self.made.append(torch.zeros(1))

    loop: Any = Loop()
    loop.made = []
    old, ref, beta = more.pop("old", None), more.pop("ref", None), more.pop("beta", 0.0)
    grpo.updates(recipe, policy, loop, batch, advantages, old, ref, beta, **more)
    made: list[torch.Tensor] = loop.made
    return made


def finite(run: Run) -> bool:
    return all(math.isfinite(v) for m in run.metrics() for v in m.values() if isinstance(v, float))
