"""What one process of a run holds, part by part: `plan.py` adds it up and compares it with what is free.

On several ranks weights, gradients and optimiser are the fullest rank's part (`layout.py`), and what passes by comes on top: the groups
that are gathered, and the whole model while the local engine samples. Parts that only one phase of a step holds say which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tether.layout import Layout
from tether.plan_sizes import FLOAT, HALF
from tether.precision import Precision
from tether.probe import Cost
from tether.recipe import DPORecipe, PPORecipe, RewardRecipe, TrainRecipe
from tether.rl_recipe import SamplingRecipe
from tether.row_lengths import RowLengths

PROJECTION = 64 * 2**20  # scores of one tile of the vocabulary, their gradient, and what is in passing

Phase = Literal["always", "starting", "training", "sampling"]


@dataclass(frozen=True)
class Size:
    """A model in numbers."""

    parameters: int
    trainable: int
    layers: int
    hidden: int
    vocabulary: int
    kv_bytes_per_token: int  # bfloat16 keys and values, as sampling keeps them
    adapter: bool
    layout: Layout


@dataclass(frozen=True)
class Part:
    """One line of the memory table."""

    name: str
    bytes: float
    why: str
    phase: Phase = "always"


class Costs(Protocol):
    """What has been measured: the cost of a micro-batch, None where there was no probe, and the process as it is."""

    process_bytes: float

    def of(self, kind: Precision) -> Cost | None: ...


def together(parts: list[Part]) -> float:
    """Bytes at the fullest of the phases."""
    phases: dict[Phase, float] = {"always": 0.0, "starting": 0.0, "training": 0.0, "sampling": 0.0}
    for part in parts:
        phases[part.phase] += part.bytes
    return phases.pop("always") + max(phases.values())


def memory(
    recipe: TrainRecipe,
    size: Size,
    kind: Precision,
    costs: Costs,
    rows: RowLengths | None,
    *,
    beside: Sequence[Part] = (),
    device: bool = False,
    remote: bool = False,
) -> list[Part]:
    """`beside`: what is held for judging; `device`: the run's own memory is not this process's; `remote`: answers are sampled elsewhere.

    On one rank sampling keeps its memory while training goes on, so that there the phases are one.
    """
    layout = size.layout
    several = layout.ranks > 1
    training: Phase = "training" if several else "always"
    sampling: Phase = "sampling" if several else "always"
    of_all = f", 1/{layout.ranks} of " if several else ", "
    tokens = micro_batch_tokens(recipe, rows, layout.ranks)
    parts = [
        Part("weights", FLOAT * layout.own.all, f"float32{of_all}{size.parameters:,} parameters"),
        Part("gradients", FLOAT * layout.own.trained, f"float32{of_all}{size.trainable:,} trainable parameters", training),
        Part("optimiser", 2 * FLOAT * layout.own.trained, "AdamW: two float32 numbers for each trainable parameter"),
        Part("activations", activations(recipe, size, kind, costs, tokens), f"{tokens:,} tokens in a micro-batch, {kind}", training),
    ]
    if several:
        why = "one layer and all outside the layers, whole, with their gradients"
        parts.append(Part("gathered", FLOAT * layout.gathered(), why, training))
    if kind == "bf16":
        kept = size.parameters
        why = "the weights in bfloat16, for the matmuls"
        if several:  # made anew in each pass; what the backward pass needs of them waits for it
            kept = layout.layer.all if recipe.gradient_checkpointing else layout.inner.all
            why += ", of one layer" if recipe.gradient_checkpointing else ", until the backward pass; gradient_checkpointing: one layer's"
        parts.append(Part("copies", HALF * kept, why, training))
    if not isinstance(recipe, RewardRecipe):
        head = 0 if size.adapter else FLOAT * size.hidden * size.vocabulary
        why = f"a tile of {size.vocabulary:,} scores at a time" + ("" if size.adapter else ", and the head's gradient before it is added")
        parts.append(Part("logits", PROJECTION + head, why, training))
    parts += [*_others(recipe, size, kind, rows), *beside]
    if isinstance(recipe, SamplingRecipe) and not remote:
        parts += _sampler(recipe, size, kind, rows, sampling)
    if not device:
        if several:
            parts.append(
                Part("loaded", FLOAT * size.parameters, "the whole model, float32, until each rank has cut out its part", "starting")
            )
        parts.append(Part("process", costs.process_bytes, "Python and its libraries, as they are in this process"))
    return parts


def _others(recipe: TrainRecipe, size: Size, kind: Precision, rows: RowLengths | None) -> list[Part]:
    """Models beside the one that is trained."""
    layout, parts = size.layout, []
    several = layout.ranks > 1
    if isinstance(recipe, DPORecipe) and recipe.has_reference:
        if recipe.reference != "start":
            parts.append(Part("reference", FLOAT * layout.own.all, f"{recipe.reference}, while it scores the data (taken to be as large)"))
        elif rows is not None:
            parts.append(Part("reference", 2 * FLOAT * rows.count, "two numbers for each row, worked out before the first step"))
    if isinstance(recipe, SamplingRecipe):
        if recipe.has_reference and not size.adapter:
            parts.append(Part("reference", frozen_bytes(layout, kind) if several else FLOAT * size.parameters, "a frozen copy"))
        if isinstance(recipe, PPORecipe) and recipe.critic == "separate":
            held = FLOAT * (layout.own.all + 3 * layout.own.trained)
            parts.append(Part("critic", held, "a model of the policy's size with its gradients and AdamW"))
            if several:
                parts.append(Part("gathered", FLOAT * layout.gathered_beside(), "of the critic, outside its layers", "training"))
    return parts


def frozen_bytes(layout: Layout, kind: Precision) -> float:
    """A frozen copy in parts: under bf16 its layers are kept in bfloat16, what lies outside them in float32."""
    return (HALF if kind == "bf16" else FLOAT) * layout.own_inner.all + FLOAT * layout.own_outer.all


def _sampler(recipe: SamplingRecipe, size: Size, kind: Precision, rows: RowLengths | None, phase: Phase) -> list[Part]:
    """What the local engine holds: each rank samples its own prompts' answers from the whole model."""
    ranks = size.layout.ranks
    longest = rows.longest if rows else recipe.max_length
    own = math.ceil(recipe.groups_per_step / ranks) * recipe.num_generations
    held = min(own, recipe.sampling_slots) * (recipe.max_completion_length + longest)
    parts = [
        Part(
            "sampling", size.kv_bytes_per_token * held, f"keys and values while sampling, {size.kv_bytes_per_token:,} bytes a token", phase
        )
    ]
    if ranks > 1:
        parts.append(Part("whole model", FLOAT * size.parameters, "float32, on every rank while the local engine samples", phase))
        if kind == "bf16":
            parts.append(Part("its copy", HALF * size.parameters, "bfloat16, as sampling reads it", phase))
    return parts


def micro_batch_tokens(recipe: TrainRecipe, rows: RowLengths | None, ranks: int = 1) -> int:
    """Tokens of the fullest micro-batch of one rank. It decides, so a step is taken to be of long rows."""
    longest = rows.longest if rows else recipe.max_length
    if not isinstance(recipe, SamplingRecipe):
        return max(longest, min(recipe.tokens_per_micro_batch, math.ceil(recipe.batch_size / ranks) * longest))
    group = round(group_tokens(recipe, rows.longest if rows else recipe.max_length - recipe.max_completion_length))
    return max(group, min(recipe.tokens_per_micro_batch, math.ceil(recipe.groups_per_step / ranks) * group))  # a group is never cut


def group_tokens(recipe: SamplingRecipe, prompt: float) -> float:
    """Computed tokens of a prompt with all its answers at full length."""
    return prompt + recipe.num_generations * recipe.max_completion_length


def activations(recipe: TrainRecipe, size: Size, kind: Precision, costs: Costs, tokens: int) -> float:
    """What the forward pass keeps. Only what grows with the tokens is taken from the probe: copies of weights stand apart."""
    cost = costs.of(kind)
    if cost is None:
        layer, rest = activation_guess(size.hidden, kind), 0.0
    else:
        layer, rest = cost.activation_bytes.layer_slope, cost.activation_bytes.rest_slope
    if not recipe.gradient_checkpointing:
        return tokens * (size.layers * layer + rest)
    return tokens * (layer + rest + size.layers * size.hidden * FLOAT)  # one layer at a time, and each layer's input


def activation_guess(hidden: int, kind: Precision) -> float:
    """Bytes a token and layer without a probe: about 18 numbers of the hidden size, as measured on Llama-like models."""
    return 18.0 * hidden * (HALF if kind == "bf16" else FLOAT)
