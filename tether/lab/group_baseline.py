"""What a group of draws is worth as a baseline: its noise by size, prompts of other scales, prompts nearly solved.

    A = R - mean of the group, or that divided by the deviation (Shao et al. 2024, arXiv:2402.03300, section 4.1.2)

Advantages are `advantage.group_norm`, `group_mean` and `rloo`, updates `losses.policy_gradient.policy_loss` by autograd in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tether.advantage import group_mean, rloo
from tether.lab.bandit import ascend, surrogate, vector
from tether.lab.group_runs import GROUP, NORM, RATE, REF_LOGP, REWARDS
from tether.stats import Interval, mean_interval

MEAN = float(REWARDS.mean())  # what the uniform policy earns
VARIANCE = float(REWARDS.var(correction=0)) + 1 / 12  # of one reward under it: of the actions, and of noise over a width of 1


# Group sizes ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Variances over groups of the uniform policy's rewards, measured with 95 % intervals; theory beside them."""

    size: int
    with_self: Interval  # of the group's mean
    without: Interval  # of the mean of the others
    centred: Interval  # of R - the group's mean
    left_out: Interval  # of R - the mean of the others

    @property
    def theory(self) -> tuple[float, float, float, float]:
        g = self.size
        return VARIANCE / g, VARIANCE / (g - 1), VARIANCE * (1 - 1 / g), VARIANCE * g / (g - 1)


def spread(size: int, groups: int = 2000) -> Spread:
    generator = torch.Generator().manual_seed(size)
    rewards = _rewards(REF_LOGP.exp().expand(groups, 4), size, generator)[1].flatten()
    group_ids = torch.arange(groups).repeat_interleave(size)

    def first(values: Tensor) -> Tensor:
        return values.view(groups, size)[:, 0]  # one row a group: rows of different groups are independent

    def variance(values: Tensor, mean: float) -> Interval:
        return mean_interval(((first(values) - mean) ** 2).tolist())

    # The groups a hundred at a time: each is looked up among all rows.
    parts = list(zip(rewards.split(100 * size), group_ids.split(100 * size), strict=True))
    centred, left_out = (torch.cat([kind(r, ids) for r, ids in parts]) for kind in (group_mean, rloo))
    return Spread(size, variance(rewards - centred, MEAN), variance(rewards - left_out, MEAN), variance(centred, 0), variance(left_out, 0))


def _rewards(probs: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Actions and noisy rewards (N, G) of N policies (N, 4)."""
    actions = torch.multinomial(probs, size, replacement=True, generator=generator)
    noise = torch.rand(actions.shape, generator=generator, dtype=torch.float64) - 0.5
    return actions, REWARDS[actions] + noise


def many(steps: int, *, group_size: int = GROUP, scale: float = 1.0, divide: bool = True, runs: int = 40, seed: int = 0) -> Tensor:
    """Expected reward (runs,), before `scale`, of policies that learn apart from each other. `scale` multiplies every reward.

    No penalty, so that each can go as far as its advantages take it.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.zeros(runs, 4, dtype=torch.float64)
    group_ids = torch.arange(runs).repeat_interleave(group_size)
    for _ in range(steps):
        actions, rewards = _rewards(logits.softmax(-1), group_size, generator)
        advantages = (NORM if divide else group_mean)((scale * rewards).flatten(), group_ids)

        def objective(logp: Tensor, actions: Tensor = actions, advantages: Tensor = advantages) -> Tensor:
            chosen = logp.gather(1, actions).flatten()
            return surrogate(chosen, chosen.detach(), advantages, total_tokens=group_size)[0]  # each policy's own mean

        logits = ascend(logits, objective, RATE)
    return logits.softmax(-1) @ REWARDS


# Prompts that are solved to different degrees ---------------------------------------------------------------------------------------------


def pull(p: float, size: int, divide: bool) -> float:
    """Expected push on the logit of the right answer, by enumeration: k of `size` answers are right with binomial probability."""
    actions, advantages = _every_group(size, divide)
    chances = vector([math.comb(size, k) * p**k * (1 - p) ** (size - k) for k in range(size + 1)]).repeat_interleave(size)
    logits = vector([math.log(p), math.log1p(-p)])  # right, wrong

    def objective(logp: Tensor) -> Tensor:
        return surrogate(logp[actions], logp[actions].detach(), advantages, weights=chances / size, total_tokens=1)[0]

    return float((ascend(logits, objective, 1.0) - logits)[0])


@cache
def _every_group(size: int, divide: bool) -> tuple[Tensor, Tensor]:
    """Actions (0 right, 1 wrong) and advantages of the groups with 0 to `size` right answers, one after the other: (size (size + 1),) each."""
    actions = torch.cat([torch.tensor([0] * k + [1] * (size - k)) for k in range(size + 1)])
    return actions, (NORM if divide else group_mean)(1.0 - actions.double(), torch.arange(size + 1).repeat_interleave(size))
