"""A made-up step of a method that samples, as its loop and as the formulas see it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tether.algorithms import grpo, ppo
from tether.ppo_scores import RunningSpread, scores_of
from tether.recipe import GRPORecipe, PPORecipe
from tether.rollout import Rollout
from tether.token_batch import MiniBatch, Part, TokenBatch, mini_batches, token_batch
from tether.verify import policy_formulas
from tether.verify.policy_formulas import Try
from tether.verify.sampled import WEIGHTS, judges

Recipe = GRPORecipe | PPORecipe


def batch_of(recipe: Recipe, groups: list[list[Rollout]], device: torch.device | str = "cpu") -> TokenBatch:
    """As the recipe's loop makes it."""
    least = min(2, recipe.num_generations) if isinstance(recipe, GRPORecipe) else 1
    return token_batch(groups, mask_truncated=recipe.mask_truncated, device=device, least=least)


@dataclass(frozen=True)
class Constants:
    """What held when the batch was sampled, (R, T) each."""

    old: Tensor
    ref: Tensor
    values: Tensor


@dataclass(frozen=True)
class Learnt:
    """What the updates of a loop are given: advantages (R,) or (R, T); returns (R, T) with a critic."""

    advantages: Tensor
    returns: Tensor | None


def learnt(recipe: Recipe, batch: TokenBatch, held: Constants) -> Learnt:
    """By the functions that the loop calls."""
    ref = held.ref if recipe.has_reference else None
    if isinstance(recipe, GRPORecipe):
        old = held.old if grpo.needs_old(recipe) else None
        return Learnt(grpo.advantages_of(recipe, batch, old, ref, recipe.beta, judges()), None)
    before = ppo.Before(held.old, held.values, ref)
    scores, *_ = scores_of(recipe, batch, RunningSpread())
    advantages, returns = ppo.advantages_of(recipe, batch, before, scores, recipe.beta)
    return Learnt(advantages.float(), returns.float())


def by_loop(recipe: Recipe, batch: TokenBatch, held: Constants, given: Learnt, lp: Tensor, values: Tensor) -> Tensor:
    """The loss of the whole step in one part; lp and values (R, T) with gradient."""
    part, mini = whole(batch)
    ref = held.ref if recipe.has_reference else None
    weights = None
    if recipe.importance != "none":
        bounds = {"c_min": recipe.importance_min, "c_max": recipe.importance_max}
        weights = grpo.mismatch_weights(held.old, batch.sampled_logp, batch.mask, recipe.importance, **bounds)
    rows = part.rows
    if isinstance(recipe, GRPORecipe):
        return grpo.part_loss(recipe, batch, part, mini, lp[rows], given.advantages, held.old, ref, weights, recipe.beta)[0]
    assert given.returns is not None
    before = ppo.Before(held.old, held.values, ref)
    return ppo.part_loss(recipe, batch, part, mini, lp[rows], values[rows], before, given.advantages, given.returns, weights)[0]


def whole(batch: TokenBatch) -> tuple[Part, MiniBatch]:
    """All examples as one part of one mini-batch. Its packed stream is not made: no loss reads it."""
    [mini] = mini_batches(batch, 1, "")
    unread: Any = None
    return Part(unread, torch.tensor([row for i in mini.examples for row in batch.rows[i]], device=batch.mask.device)), mini


def tries(batch: TokenBatch, held: Constants) -> list[Try]:
    """The batch as the formulas take it."""
    out = []
    for i, rollout in enumerate(batch.rollouts):
        n = int(batch.mask[i].sum())
        row = {name: getattr(held, name)[i, :n].tolist() for name in ("old", "ref")}
        out.append(
            Try(
                rollout.group,
                rollout.total,
                tuple(rollout.rewards.get(name) for name in "ab"),
                rollout.finished,
                sampled=batch.sampled_logp[i, :n].tolist(),
                old_values=held.values[i, :n].tolist(),
                **row,
            )
        )
    return out


def rows_of(matrix: Tensor, batch: TokenBatch) -> list[list[float]]:
    """(R, T) as lists of the active tokens."""
    return [matrix[i, : int(batch.mask[i].sum())].tolist() for i in range(len(matrix))]


def by_formula(recipe: Recipe, rows: list[Try], given: tuple[Any, Any], lp: Any, values: Any, at: Any = None) -> float:
    """The loss in plain arithmetic. `given`: advantages per token, and returns with a critic; `at` as `held` of the formula."""
    loss = policy_formulas.policy(recipe, rows, lp, given[0], at)
    if isinstance(recipe, PPORecipe):
        loss += recipe.vf_coef * policy_formulas.value(recipe, rows, values, given[1])
    return loss


def targets(recipe: Recipe, rows: list[Try]) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages per token and returns (none without a critic), in plain arithmetic."""
    if isinstance(recipe, PPORecipe):
        return policy_formulas.gae(recipe, rows)
    return policy_formulas.advantages(recipe, rows, WEIGHTS), []


def cut(values: Sequence[float], sizes: Sequence[int]) -> list[list[float]]:
    """A flat list as rows of these sizes.

    >>> cut([1.0, 2.0, 3.0], [2, 0, 1])
    [[1.0, 2.0], [], [3.0]]
    """
    ends = list(itertools.accumulate(sizes, initial=0))
    return [list(values[a:b]) for a, b in itertools.pairwise(ends)]


def without_reference(rows: list[Try]) -> list[Try]:
    """The tie pulls nowhere where there is no reference."""
    return [dataclasses.replace(t, ref=list(t.old)) for t in rows]


def constants(batch: TokenBatch, seed: int = 1) -> Constants:
    """Random ones, float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size: float) -> Tensor:
        return torch.randn(batch.mask.shape, generator=generator, dtype=torch.float64) * size

    old = -0.3 - draw(1.0).abs()
    return Constants(old, old - draw(0.4), draw(0.5))


# How far the policy has moved since it sampled, in nats: far above and far below the bounds, inside them, and just there.
MOVES = (1.6, -1.6, 0.05, 0.5, -0.5, 0.0, 0.9)
OF_ANSWERS = frozenset({"seq_ratio", "gspo", "gspo_token"})


def moved(recipe: Recipe, batch: TokenBatch, held: Constants, given: Learnt) -> tuple[Tensor, Tensor]:
    """Log-probs and values (R, T) of a policy and a critic that have moved in every way that a loss tells apart.

    Good tokens and bad ones each go through all of `MOVES`; with one ratio per answer, good and bad answers do.
    """
    a = given.advantages.double()
    a = a if a.dim() == 2 else a[:, None].expand_as(held.old)
    shift, whole = torch.zeros_like(held.old), isinstance(recipe, GRPORecipe) and recipe.surrogate in OF_ANSWERS
    for good in (True, False):
        if whole:
            rows = torch.nonzero(batch.active & ((a.sum(1) > 0) == good)).flatten().tolist()
            for k, row in enumerate(rows):
                # The ratio of seq_ratio adds its tokens up, which is to stay a number that says something.
                n = int(batch.mask[row].sum()) if isinstance(recipe, GRPORecipe) and recipe.surrogate == "seq_ratio" else 1
                shift[row] = MOVES[k % len(MOVES)] / n
        else:
            places = torch.nonzero(batch.mask & ((a > 0) == good)).tolist()
            for k, (row, token) in enumerate(places):
                shift[row, token] = MOVES[k % len(MOVES)]
    noise = torch.randn(shift.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    clip = getattr(recipe, "value_clip", None) or 0.2
    steps = torch.tensor([0.3, -3.0, 2.0, -0.2, 0.0], dtype=torch.float64)
    places_ = torch.arange(shift.numel()).reshape(shift.shape) % 5
    return held.old + shift + 0.003 * noise, held.values + clip * (steps[places_] + 0.01 * noise)
