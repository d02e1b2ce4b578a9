"""Every method for a model of a given size over ranks, by numbers alone: `tether plan --parameters 70B --ranks 64 --device-gb 80`.

The model is a transformer of usual shape unless its layers and width are given. Weights are float32 with bfloat16 matmuls, frozen
copies bfloat16, and gradient_checkpointing is on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tether.cluster import Cluster
from tether.errors import UserError
from tether.layout import Count, Layout, layout_by_numbers
from tether.plan_memory import PROJECTION, activation_guess, frozen_bytes
from tether.plan_sizes import FLOAT, HALF, METHODS, Method, lora_share, usual_width
from tether.plan_traffic import seconds_of, training_flows

VOCABULARY = 128_000
TOKENS, MICRO_BATCH = 16_384, 4_096


@dataclass(frozen=True)
class Shape:
    """A model in round numbers. `active`: parameters that take part in computing a token, fewer than all in a mixture of experts."""

    parameters: float
    layers: int
    hidden: int
    active: float

    @property
    def outer(self) -> int:
        """Embedding and head, both."""
        return round(min(2 * VOCABULARY * self.hidden, self.parameters / 2))


@dataclass(frozen=True)
class RankNeed:
    """Of one method, full or LoRA, on one rank. Bytes; seconds of a step, None where they are not known."""

    method: Method
    adapter: bool
    kept: float  # weights, gradients, optimiser and frozen models, in parts
    passing: float  # what is whole for a while, activations and scores
    sampling: float | None  # while the local engine samples here; None: the method samples nothing
    received: float  # in a step
    compute_seconds: float | None
    exchange_seconds: float | None

    @property
    def training(self) -> float:
        return self.kept + self.passing

    def fits(self, device_bytes: float) -> bool:
        return self.training <= device_bytes

    def samples_here(self, device_bytes: float) -> bool:
        return self.sampling is not None and self.sampling <= device_bytes


def shape_of(parameters: float, layers: int | None = None, hidden: int | None = None, active: float | None = None) -> Shape:
    """
    >>> shape_of(6.7e9)
    Shape(parameters=6700000000.0, layers=32, hidden=4150, active=6700000000.0)
    """
    if active is not None and active > parameters:
        raise UserError(f"{active:,.0f} of {parameters:,.0f} parameters cannot be active", where="--active")
    width = hidden or usual_width(parameters)
    return Shape(parameters, layers or round(width / 128), round(width), active or parameters)


def layout_for(shape: Shape, ranks: int, *, adapter: bool) -> Layout:
    """Adapters are on the layers."""
    inner, share = round(shape.parameters) - shape.outer, lora_share(shape.parameters)
    trained = round(share * shape.parameters)
    if adapter:
        return layout_by_numbers(ranks, shape.layers, Count(inner + trained, trained), Count(shape.outer, 0))
    return layout_by_numbers(ranks, shape.layers, Count(inner, inner), Count(shape.outer, shape.outer))


def rank_needs(shape: Shape, cluster: Cluster, tokens: int = TOKENS) -> Iterator[RankNeed]:
    """`tokens` are those that each rank trains on in a step, in micro-batches of at most `MICRO_BATCH`."""
    if tokens < 1:
        raise UserError(f"a step has at least one token, got {tokens}", where="--tokens")
    for adapter in (False, True):
        layout = layout_for(shape, cluster.ranks, adapter=adapter)
        for method in METHODS:
            yield _need(method, shape, layout, cluster, tokens, adapter)


def _need(method: Method, shape: Shape, layout: Layout, cluster: Cluster, tokens: int, adapter: bool) -> RankNeed:
    own, several = layout.own, layout.ranks > 1
    kept: float
    frozen = method.frozen
    if adapter:  # the reference is the policy with its adapter off; a critic is one more adapter, and a reward model is a model
        frozen = 1 if method.name.startswith("ppo") else 0
        kept = FLOAT * own.all + FLOAT * (4 * method.trained - 1) * own.trained
    else:
        kept = method.trained * FLOAT * (own.all + 3 * own.trained)
    kept += frozen * frozen_bytes(layout_for(shape, layout.ranks, adapter=False), "bf16")
    micro = min(tokens, MICRO_BATCH)
    passes = math.ceil(tokens / micro)
    # One layer at a time, each layer's input, and the bfloat16 copies of the layer that is computed.
    activations = micro * (activation_guess(shape.hidden, "bf16") + shape.layers * shape.hidden * FLOAT)
    copies = HALF * (layout.layer.all if several else shape.parameters)
    head = 0 if adapter else FLOAT * shape.outer / 2
    critic = (method.trained - 1) * (FLOAT * layout.gathered_beside() + activations)
    passing = FLOAT * layout.gathered() + critic + activations + copies + PROJECTION + head
    sampling = None
    if method.name.startswith(("grpo", "ppo")):
        whole = (FLOAT if several else 0) + HALF  # on one rank the weights are there already
        sampling = kept - (method.trained * FLOAT * own.trained if several else 0) + whole * shape.parameters
    flows = training_flows(layout, passes) if several else []
    looked = method.looked * passes * FLOAT * layout.received(own)
    handed = FLOAT * layout.received(own) if sampling is not None else 0.0
    received = method.trained * sum(flow.bytes for flow in flows) + looked + handed
    exchange = None
    if cluster.link is not None:
        exchange = method.trained * seconds_of(flows, cluster.link) + cluster.link.seconds(looked + handed, 0)
    compute = None
    if cluster.flops is not None:
        each = 2 + 2 + (2 if adapter else 4)  # forward, again in the backward pass, backward
        compute = tokens * shape.active * (each * method.trained + 2 * method.looked) / cluster.flops
    return RankNeed(method, adapter, kept, passing, sampling, received, compute, exchange)
