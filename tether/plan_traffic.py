"""What travels between ranks in a step, and how long that takes: the arithmetic of `sharding.py`.

Bytes are those that reach one rank, with every part filled up to the fullest: gathering a group of parts of n numbers brings it
(N - 1) x n of them, and so does summing gradients as a ring or any other exchange that moves no number twice does it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tether.layout import Layout
from tether.link import Link
from tether.plan_memory import Size, frozen_bytes, group_tokens
from tether.plan_sizes import FLOAT
from tether.precision import Precision
from tether.recipe import GRPORecipe, PPORecipe, TrainRecipe
from tether.rl_recipe import SamplingRecipe
from tether.row_lengths import RowLengths


@dataclass(frozen=True)
class Passes:
    """Micro-batches of one rank in a step, empty ones included: each is a meeting of all ranks."""

    trained: int  # forward and backward
    looked: int = 0  # forward alone, policy
    reference: int = 0  # forward alone, the reference: another copy, or the policy with its adapter off
    critic: int = 0  # forward and backward, a critic of its own
    critic_looked: int = 0


@dataclass(frozen=True)
class Flow:
    """One line of the traffic table: what a rank receives in a step."""

    name: str
    bytes: float
    meetings: int
    why: str
    summed: bool = False  # gradients, which are added up on the way


def passes_of(recipe: TrainRecipe, rows: RowLengths | None, ranks: int) -> Passes:
    """Rows are taken to be alike, so that each rank has as many."""
    budget = recipe.tokens_per_micro_batch
    if not isinstance(recipe, SamplingRecipe):
        length = rows.tokens if rows else recipe.max_length / 2
        return Passes(micro_batches_per_rank(recipe.batch_size, length, budget, ranks))
    length = group_tokens(recipe, rows.tokens if rows else recipe.max_length / 2)
    every = micro_batches_per_rank(recipe.groups_per_step, length, budget, ranks)
    mini = micro_batches_per_rank(math.ceil(recipe.groups_per_step / recipe.mini_batches), length, budget, ranks)
    trained = recipe.updates_per_batch * recipe.mini_batches * mini
    reference = every if recipe.has_reference else 0
    if isinstance(recipe, PPORecipe):
        separate = recipe.critic == "separate"
        return Passes(trained, every, reference, trained if separate else 0, every if separate else 0)
    assert isinstance(recipe, GRPORecipe)
    tied = recipe.beta > 0 and recipe.kl_in == "reward"
    looked = every if recipe.updates_per_step > 1 or recipe.importance != "none" or tied else 0
    return Passes(trained, looked, reference)


def micro_batches_per_rank(rows: int, length: float, budget: int, ranks: int) -> int:
    """
    >>> micro_batches_per_rank(8, 100.0, 350, 2)  # four rows a rank, three of them to a micro-batch
    2
    """
    together = max(1, int(budget // length)) if length > 0 else rows
    return max(1, math.ceil(math.ceil(rows / ranks) / together))


def traffic(recipe: TrainRecipe, size: Size, kind: Precision, rows: RowLengths | None, *, remote: bool = False) -> list[Flow]:
    """Nothing on one rank."""
    layout = size.layout
    if layout.ranks == 1:
        return []
    passes = passes_of(recipe, rows, layout.ranks)
    flows = [*training_flows(layout, passes.trained)]
    if passes.looked:
        flows.append(_forward("scoring", layout, passes.looked, "log-probs of what was sampled"))
    if passes.reference:
        each = None if size.adapter else (layout.ranks - 1) * frozen_bytes(layout, kind)
        why = "the policy with its adapter off" if size.adapter else "a frozen copy"
        flows.append(_forward("reference", layout, passes.reference, why, each))
    if passes.critic:
        flows += [Flow(f"critic: {f.name}", f.bytes, f.meetings, f.why, f.summed) for f in training_flows(layout, passes.critic)]
        flows.append(_forward("critic: scoring", layout, passes.critic_looked, "values of what was sampled"))
    if isinstance(recipe, SamplingRecipe):
        why = "the whole model to whoever hands it to the servers" if remote else "the whole model to every rank, which samples from it"
        flows.append(Flow("sampling", FLOAT * layout.received(layout.own), layout.tensors, why))
    return flows


def training_flows(layout: Layout, passes: int) -> list[Flow]:
    """Of so many forward and backward passes."""
    summed = layout.layers * (layout.own_inner.trained > 0) + (layout.own_outer.trained > 0)
    return [
        _forward("forward", layout, passes, "all weights, a layer at a time"),
        Flow("backward", passes * FLOAT * layout.received(layout.own_inner), passes * layout.layers, f"{passes} x the layers once more"),
        Flow(
            "gradients",
            passes * FLOAT * layout.received(layout.own.trained),
            passes * summed,
            f"{passes} x summed, each rank its part",
            True,
        ),
    ]


def _forward(name: str, layout: Layout, passes: int, why: str, each: float | None = None) -> Flow:
    size = FLOAT * layout.received(layout.own) if each is None else each
    return Flow(name, passes * size, passes * layout.groups, f"{passes} x {why}")


def seconds_of(flows: list[Flow], link: Link) -> float:
    """If nothing is computed meanwhile."""
    return sum(link.seconds(flow.bytes, flow.meetings, summed=flow.summed) for flow in flows)


def samples_elsewhere(recipe: TrainRecipe) -> bool:
    """Whether the recipe's answers are sampled by another program."""
    return isinstance(recipe, SamplingRecipe) and recipe.engine.remote
