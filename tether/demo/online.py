"""The demo's third stage: the reward model becomes the judge, once with the tether to the start and once without.

What is optimised is a stand-in. It learnt from people who lean to the longer answer, so it pays for length; a policy that chases it
without a tether runs to where it is wrong. A cost of `TETHER` per nat of distance from the start holds the same policy back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.demo.sizes import Size
from tether.demo.world import true_taste
from tether.messages import Message, Text
from tether.rewards.texts import text_of

TETHER = 0.4  # standard deviations of the reward model's score per nat; fixed before any of these runs was looked at
NAMES = {"grpo": "GRPO", "ppo": "PPO"}


@dataclass(frozen=True)
class Trial:
    """One run of the third stage."""

    method: str
    tethered: bool

    @property
    def name(self) -> str:
        return f"{NAMES[self.method]}, {'tethered' if self.tethered else 'no tether'}"

    @property
    def folder(self) -> str:
        return f"{self.method}_{'tethered' if self.tethered else 'free'}"


def trials(methods: Sequence[str]) -> list[Trial]:
    return [Trial(method, tethered) for method in methods for tethered in (False, True)]


def settings(trial: Trial, model: Path, prompts: Path, judge: Path, size: Size, seed: int) -> dict[str, Any]:
    """The same for all trials but for the method's own and the tether."""
    out: dict[str, Any] = {
        "model": str(model),
        "data": str(prompts),
        "rewards": [{"reward": "model", "model": str(judge)}, {"reward": "tether.demo.online:true_score", "weight": 0}],
        "batch_size": size.batch_online,
        "num_generations": 8,
        "max_completion_length": size.limit,
        "max_steps": size.steps,
        "learning_rate": size.online_rate,
        "lr_scheduler": "constant",
        "beta": TETHER if trial.tethered else 0.0,
        "keep_checkpoints": 0,  # nobody continues a run of the demo, and a checkpoint is three times the size of the model
        "trackers": [],
        "seed": seed,
    }
    if not trial.tethered:
        out["watch_kl"] = True
    if trial.method == "grpo":
        out["kl_in"] = "reward"  # as PPO has it: the cost is part of what is earned
    else:
        # A critic with so few steps knows little yet: all trust goes to what was earned.
        out |= {"updates_per_batch": 1, "lam": 1.0, "critic_learning_rate": 10 * size.online_rate}
    return out


def true_score(prompts: Sequence[Text], completions: Sequence[str | list[Message]], completion_ids: Sequence[list[int]]) -> list[float]:
    """A reward of weight 0: what the people truly like about each answer, recorded in every step and never learnt from."""
    return [true_taste(text_of(c).strip(), len(ids)) for c, ids in zip(completions, completion_ids, strict=True)]
