"""Whole runs of `tether ppo` for tests, on a tiny model with scripted rewards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import save_tiny
from tests.whole_runs import words, write_rows
from tether.algorithms import ppo
from tether.recipe import RECIPES
from tether.rollout import Rollout, View
from tether.run import Run
from tether.token_batch import TokenBatch, token_batch

__all__ = ["Train", "batch_of", "even", "model", "moved", "odd", "rollout", "timeless", "train", "weights"]

Train = Callable[..., tuple[Run, dict[str, Any]]]


def even(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
    """Share of tokens with an even id."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def odd(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
    return [-value for value in even(prompts, completions, completion_ids)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def train(model: Path, tmp_path: Path) -> Train:
    """Runs to the end; each call has a run folder of its own. The closed run can still be read. No rewards: those of the settings."""
    count = 0

    def go(rewards: list[Any] | None, /, n_prompts: int = 12, **settings: Any) -> tuple[Run, dict[str, Any]]:
        nonlocal count
        count += 1
        data = write_rows(tmp_path / f"prompts{count}.jsonl", [{"prompt": words(5 * i, 2 + i % 4), "gold": i} for i in range(n_prompts)])
        given = {"model": str(model), "data": str(data), "run": str(tmp_path / f"run{count}"), "precision": "fp32", "trackers": []}
        small = {"batch_size": 16, "max_completion_length": 6, "learning_rate": 5e-3, "max_steps": 4, "log_every": 1000}
        recipe = RECIPES["ppo"](**{**given, **small, **settings})
        with Run.create(recipe.run or "", recipe) as run:
            return run, ppo.train(recipe, run, rewards)

    return go


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "model/model.safetensors")


def timeless(run: Run) -> list[dict[str, Any]]:
    """The metrics without what the clock says."""
    clock = ("step_time", "tokens_per_second")
    return [{k: v for k, v in m.items() if k not in clock and not k.startswith("time/")} for m in run.metrics()]


def moved(run: Run, model: Path) -> float:
    start = load_file(model / "model.safetensors")
    return max(float((w - start[n]).abs().max()) for n, w in weights(run).items() if n in start)


def rollout(tokens: list[int], reward: float | None, *, finish: Any = "stop", group: int = 0, sample: int = 0) -> Rollout:
    logps = [-1.0 - 0.01 * t for t in range(len(tokens))]
    return Rollout(
        0, group, sample, "p", [7, 8, 9], tokens, [True] * len(tokens), logps, logps, finish, View("", ""), 0, {"r": reward}, reward
    )


def batch_of(*rewards: float | None, finished: bool = True) -> TokenBatch:
    """Answers of 3, 2, 1, 3, ... tokens that earned these rewards, each a group of its own."""
    finish = "stop" if finished else "length"
    return token_batch([[rollout([10 + i, 11, 2][i % 3 :], r, group=i, finish=finish)] for i, r in enumerate(rewards)], least=1)
