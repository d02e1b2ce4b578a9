"""Expected updates of `tether ppo` on the policy of `enumerable`, with any critic that can be written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.algorithms import ppo
from tether.ppo_scores import RunningSpread, scores_of
from tether.recipe import PPORecipe
from tether.token_batch import MiniBatch, Part, TokenBatch
from tether.verify import enumerable
from tether.verify.enumerable import LENGTHS, MASK, REWARDS, STRINGS, Tree
from tether.verify.expectation import EVEN, attempts, even_group, in_float64

N, NONE_YET = len(STRINGS), RunningSpread()
STATES = Tree.made().rows  # (40, 3): which prefix is ahead of each token
CUT = torch.tensor([s[-1] != enumerable.END for s in STRINGS])


def foreseen(recipe: PPORecipe, lp: Tensor, ref: Tensor, rewards: Tensor = REWARDS) -> Tensor:
    """(40, 3): what a critic says that has learnt everything: the mean discounted reward to go from the state ahead of each token."""
    to_go = -recipe.beta * (lp - ref) * MASK
    to_go[torch.arange(N), LENGTHS - 1] += rewards
    for t in (1, 0):
        to_go[:, t] += recipe.gamma * to_go[:, t + 1] * MASK[:, t + 1]
    p = lp.sum(1).exp()[:, None] * MASK
    mass, total = (torch.zeros(13, dtype=torch.float64).index_add_(0, STATES[MASK], x[MASK]) for x in (p, p * to_go))
    return (total / mass)[STATES] * MASK


def look_at(
    recipe: PPORecipe, rows: Tensor, lp: Tensor, ref: Tensor, values: Tensor, spread: RunningSpread = NONE_YET
) -> tuple[TokenBatch, ppo.Before, Tensor, Tensor]:
    """Strings `rows` as a step of the loop sees them before its updates: batch, constants, advantages, returns.

    `spread`: of the rewards before this step.
    """
    here = lp.detach()[rows]
    rollouts = [attempts()[i] for i in rows.tolist()]
    batch = TokenBatch(rollouts, [], [], [], MASK[rows], here, REWARDS[rows], torch.zeros(len(rows), dtype=torch.long))
    before = ppo.Before(here, values[rows], ref[rows])
    scores, *_ = scores_of(recipe, batch, spread)
    return batch, before, *ppo.advantages_of(recipe, batch, before, scores, recipe.beta)


def pull(
    recipe: PPORecipe,
    rows: Tensor,
    lp: Tensor,
    ref: Tensor,
    values: Tensor,
    spread: RunningSpread = NONE_YET,
    *,
    per_answer: bool = False,
) -> Tensor:
    """(40, 3): what a step on strings `rows` adds to each log-prob, by the loop's own functions. `per_answer`: a sum over tokens and a
    mean over answers in place of the mean over tokens, which has a random number below the line."""
    batch, before, advantages, returns = look_at(recipe, rows, lp, ref, values, spread)
    leaf, n = lp.detach().clone().requires_grad_(), len(rows)
    whole: Any = None  # the packed stream, which no loss reads
    part, mini = Part(whole, torch.arange(n)), MiniBatch([0], n if per_answer else int(batch.mask.sum()), n, n)
    loss, _ = ppo.part_loss(recipe, batch, part, mini, leaf[rows], values[rows], before, advantages, returns, None)
    return -torch.autograd.grad(loss, leaf)[0]


def led_by_expectation(
    recipe: PPORecipe, start: Path, ref: Tensor, knowing: bool, steps: int = 200, rate: float = 0.01
) -> tuple[Tensor, list[float]]:
    """The distribution (40,) where expected updates bring a transformer, with a critic that knows everything or says 0; and after
    each step the spread of all rewards so far."""
    policy, spread, spreads = in_float64(start), NONE_YET, []
    optimizer = torch.optim.Adam(policy.parameters().values(), lr=rate, betas=(0.8, 0.98))
    rewards = REWARDS if recipe.score_clip is None else REWARDS.clamp(-recipe.score_clip, recipe.score_clip)
    rewards = rewards - recipe.missing_end_penalty * CUT
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, 2 * (1 - step / steps))
        lp = enumerable.table(policy)
        now = lp.detach()
        values = foreseen(recipe, now, ref, rewards) if knowing else torch.zeros_like(now)
        rows = even_group(now.sum(1).exp(), EVEN)
        c = pull(recipe, rows, now, ref, values, spread)
        spread = spread.with_values(REWARDS[rows])
        spreads.append(spread.std)
        optimizer.zero_grad()
        (-(c * lp).sum()).backward()
        optimizer.step()
    return enumerable.distribution(policy), spreads
