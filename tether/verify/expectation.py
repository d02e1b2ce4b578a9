"""Expected updates of `tether grpo` on the policy of `enumerable`: the loop's own advantages and losses, on all answers at once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.algorithms import grpo
from tether.policy import Policy
from tether.recipe import GRPORecipe
from tether.reward import Reward, Rewards
from tether.rollout import Rollout, View
from tether.token_batch import MiniBatch, Part, TokenBatch
from tether.verify import enumerable
from tether.verify.enumerable import LENGTHS, MASK, PROMPT_IDS, REWARDS, STRINGS

EVEN = 2048  # rows of a group that stands for an endless one
START = 9  # a seed: its answers are of all lengths, so that methods which weigh lengths differently end far apart


def attempt(i: int, group: int = 0, sample: int = 0) -> Rollout:
    """String i as an attempt. Its log-probs as sampled are for metrics alone here, and left at 0."""
    n, tokens, value = int(LENGTHS[i]), list(STRINGS[i]), float(REWARDS[i])
    finish: Any = "stop" if tokens[-1] == enumerable.END else "length"
    same: Any = {"prompt": enumerable.PROMPT, "prompt_ids": PROMPT_IDS, "view": View("", ""), "policy_version": 0, "rewards": {"r": value}}
    return Rollout(
        0,
        group,
        sample,
        tokens=tokens,
        trained=[True] * n,
        logps=[0.0] * n,
        sampling_logps=[0.0] * n,
        finish_reason=finish,
        total=value,
        **same,
    )


@cache
def attempts() -> tuple[Rollout, ...]:
    """Every string as an attempt of one group."""
    return tuple(attempt(i) for i in range(len(STRINGS)))


@cache
def judges() -> Rewards:
    return Rewards([Reward(enumerable.reward, "r")])


def in_float64(folder: Path) -> Policy:
    """On the processor: the forty answers are written out there."""
    policy = Policy.load(folder, precision="fp32")
    policy.model.double().cpu()
    return policy


def step_loss(recipe: GRPORecipe, rows: Tensor, lp: Tensor, ref: Tensor) -> Tensor:
    """The loss of one group, `rows` (R,) of STRINGS, by the functions that the loop itself runs. `lp`, `ref`: (40, 3)."""
    here, mask, n = lp[rows], MASK[rows], len(rows)
    rollouts = [attempts()[i] for i in rows.tolist()]
    batch = TokenBatch(rollouts, [], [], [], mask, here.detach(), REWARDS[rows], torch.zeros(n, dtype=torch.long))
    advantages = grpo.advantages_of(recipe, batch, here.detach(), ref[rows], recipe.beta, judges())
    whole: Any = None  # the packed stream, which no loss reads
    part, mini = Part(whole, torch.arange(n)), MiniBatch([0], int(mask.sum()), n, n)
    return grpo.part_loss(recipe, batch, part, mini, here, advantages, here.detach(), ref[rows], None, recipe.beta)[0]


def even_group(p: Tensor, size: int) -> Tensor:
    """What a group of `size` holds when chance plays no part: each string as often as its probability says, to a whole number."""
    wanted = p * size
    counts = wanted.floor()
    counts[(wanted - counts).argsort(descending=True)[: round(size - float(counts.sum()))]] += 1
    return torch.repeat_interleave(torch.arange(len(STRINGS)), counts.long())


def led_by_expectation(recipe: GRPORecipe, start: Path, ref: Tensor, steps: int = 200, rate: float = 0.01) -> Tensor:
    """The distribution (40,) where the expected updates of a method bring a transformer."""
    policy = in_float64(start)
    optimizer = torch.optim.Adam(policy.parameters().values(), lr=rate, betas=(0.8, 0.98))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, 2 * (1 - step / steps))
        lp = enumerable.table(policy)
        optimizer.zero_grad()
        step_loss(recipe, even_group(lp.detach().sum(1).exp(), EVEN), lp, ref).backward()
        optimizer.step()
    return enumerable.distribution(policy)
