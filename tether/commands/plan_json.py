"""`tether plan --json`: the same figures for programs. Bytes, seconds, and bytes or operations a second."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tether.cluster import Cluster
    from tether.plan import Plan
    from tether.plan_size_ranks import RankNeed, Shape
    from tether.plan_sizes import Need


def plan_json(made: Plan) -> dict[str, Any]:
    """Of a recipe; on several ranks of one of them."""
    size = made.size
    return {
        "command": made.recipe.command,
        "model": made.recipe.model,
        "parameters": size.parameters,
        "trainable": size.trainable,
        "precision": made.precision,
        "cluster": asdict(made.cluster),
        "memory": [asdict(part) for part in made.memory],
        "bytes": made.bytes,
        "free_bytes": made.free_bytes,
        "fits": made.fits,
        "disk_bytes": made.disk_bytes,
        "kv_bytes_per_token": size.kv_bytes_per_token,
        "traffic": [asdict(flow) for flow in made.traffic],
        "received_bytes": sum(flow.bytes for flow in made.traffic),
        "steps": made.steps,
        "compute_seconds": made.compute_seconds,
        "exchange_seconds": made.exchange_seconds,
        "seconds_per_step": made.seconds_per_step,
        "seconds": made.seconds,
        "rows": None if made.rows is None else asdict(made.rows),
        "changes": [asdict(change) for change in made.changes],
        "notes": made.notes,
    }


def sizes_json(parameters: float, made: Iterable[Need]) -> dict[str, Any]:
    """Of every method by numbers alone."""
    methods = [{"method": need.method.name, "full_bytes": need.full, "lora_bytes": need.lora} for need in made]
    return {"parameters": parameters, "methods": methods}


def rank_sizes_json(shape: Shape, cluster: Cluster, tokens: int, made: Iterable[RankNeed]) -> dict[str, Any]:
    """Of every method by numbers alone, on one of several ranks."""
    methods = []
    for need in made:
        row = {**asdict(need), "method": need.method.name, "training": need.training}
        if cluster.device_bytes is not None:
            row["fits"] = need.fits(cluster.device_bytes)
            row["samples_here"] = None if need.sampling is None else need.samples_here(cluster.device_bytes)
        methods.append(row)
    return {"shape": asdict(shape), "cluster": asdict(cluster), "tokens": tokens, "methods": methods}
