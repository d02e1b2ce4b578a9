"""The lines that `tether plan` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tether.progress import duration

if TYPE_CHECKING:
    from tether.cluster import Cluster
    from tether.plan import Plan
    from tether.plan_size_ranks import RankNeed, Shape


def plan_lines(made: Plan) -> Iterator[str]:
    """Of a recipe; on several ranks of one of them."""
    size, recipe, ranks = made.size, made.recipe, made.cluster.ranks
    share = f"{size.trainable / size.parameters:.1%}"
    yield f"{recipe.command} of {recipe.model}: {size.parameters:,} parameters, {size.trainable:,} of them trained ({share})"
    yield ""
    yield "Memory" if ranks == 1 else f"Memory of the fullest of {ranks} ranks"
    for part in made.memory:
        phase = "" if part.phase == "always" else f" (while {part.phase})"
        yield f"  {part.name:<12} {gib(part.bytes):>10}   {part.why}{phase}"
    top = "together" if ranks == 1 else "at most"
    yield f"  {top:<12} {gib(made.bytes):>10}   {gib(made.free_bytes)} are free: {'it fits' if made.fits else 'it does not fit'}"
    yield f"  {'on disk':<12} {gib(made.disk_bytes):>10}   {recipe.keep_checkpoints} checkpoints, one being written, and the result"
    if not any(part.name == "sampling" for part in made.memory):
        yield f"  {'sampling':<12} {size.kv_bytes_per_token / 1024:>6.0f} KiB   keys and values of each token, when this model answers"
    if not made.fits:
        yield from _change_lines(made)
    if made.traffic:
        yield ""
        yield "What a rank receives in a step"
        for flow in made.traffic:
            yield f"  {flow.name:<12} {gib(flow.bytes):>10}   {flow.why}; {flow.meetings} meetings"
        yield f"  {'together':<12} {gib(sum(flow.bytes for flow in made.traffic)):>10}   {_exchange_line(made)}"
    yield ""
    yield "Time"
    if made.rows is not None:
        rows = made.rows
        share = f", {rows.trained_share:.0%} trained" if rows.trained_share else ""  # prompts alone have no trained token
        yield f"  {rows.count:,} rows of {rows.tokens:.0f} tokens on average (longest of the sample {rows.longest}){share}"
    yield from _time_lines(made)
    for note in made.notes:
        yield f"note: {note}"


def _change_lines(made: Plan) -> Iterator[str]:
    yield ""
    if made.changes:
        yield "Turn, in this order, each on top of those before it:"
        for change in made.changes:
            verdict = "fits" if change.bytes <= made.free_bytes else "not yet"
            yield f"  {change.setting:<32} {gib(change.bytes):>10}   {verdict}"
    if made.changes and made.changes[-1].bytes <= made.free_bytes:
        return
    phases = {phase: sum(part.bytes for part in made.memory if part.phase == phase) for phase in ("training", "sampling")}
    if phases["sampling"] > phases["training"]:
        yield "Sampling takes the most: it needs the whole model on every rank. With engine=vllm servers sample, and no rank holds it whole."
    elif made.cluster.ranks > 1:
        yield "No setting makes this model fit: take more ranks, devices with more memory, or a smaller model."
    else:
        yield "No setting makes this model fit here: take a smaller model or a machine with more memory."


def _exchange_line(made: Plan) -> str:
    link = made.cluster.link
    if link is None:
        return "how fast is not known"
    return (
        f"about {duration_of_step(made.exchange_seconds)} at {link.gathered / 1e9:.2g} GB/s gathering, {link.summed / 1e9:.2g} GB/s summing"
    )


def _time_lines(made: Plan) -> Iterator[str]:
    if made.seconds_per_step is None or made.compute_seconds is None:
        yield "  not measured" if made.cluster.device_bytes is None else "  not known"
        return
    yield f"  a step       about {duration_of_step(made.seconds_per_step)}"
    if made.exchange_seconds:
        alone = f"{duration_of_step(made.compute_seconds)} of it computing, {duration_of_step(made.exchange_seconds)} exchanging"
        least = duration_of_step(max(made.compute_seconds, made.exchange_seconds))
        yield f"  {'':<12} {alone}, one after the other; at least {least} where they overlap"
    if made.scoring_seconds is not None:
        yield f"  reference    about {duration(made.scoring_seconds)}, once; nothing on a second run with the same data"
    if made.seconds is not None:
        yield f"  the run      about {duration(made.seconds)} for {made.steps} steps"


def size_lines(parameters: float) -> Iterator[str]:
    """The table of `tether plan --parameters N`."""
    from tether.plan_sizes import lora_share, needs

    yield f"A model of {parameters:,.0f} parameters: weights, gradients and AdamW; activations come on top."
    yield f"Trained weights are float32, frozen copies bfloat16; LoRA of rank 16 trains about {lora_share(parameters):.2%}."
    yield ""
    yield f"  {'method':<20} {'models':>6} {'full':>12} {'LoRA':>12}   held in memory"
    for need in needs(parameters):
        method = need.method
        yield f"  {method.name:<20} {method.models:>6} {gib(need.full):>12} {gib(need.lora):>12}   {method.why}"


def rank_size_lines(shape: Shape, cluster: Cluster, tokens: int, made: list[RankNeed]) -> Iterator[str]:
    """The table of `tether plan --parameters N --ranks M`."""
    from tether.plan_size_ranks import MICRO_BATCH

    active = "" if shape.active == shape.parameters else f", {shape.active:,.0f} of them active for a token"
    yield f"A model of {shape.parameters:,.0f} parameters{active}: {shape.layers} layers of width {shape.hidden:,}, over {cluster.ranks} ranks."
    yield "Each number is of one rank. Trained weights are float32 with bfloat16 matmuls, frozen copies bfloat16, gradient_checkpointing is on."
    yield f"A rank trains on {tokens:,} tokens a step, {min(tokens, MICRO_BATCH):,} at a time. Sampling and rewards take their time on top."
    for adapter in (False, True):
        yield ""
        yield "LoRA of rank 16" if adapter else "Full training"
        yield (
            f"  {'method':<20} {'kept':>10} {'passing':>10} {'training':>10} {'sampling':>10} {'received':>11} {'computing':>10} {'exchange':>9}"
            + ("   it fits; answers come from" if cluster.device_bytes else "")
        )
        for need in made:
            if need.adapter == adapter:
                yield _rank_size_line(need, cluster)


def _rank_size_line(need: RankNeed, cluster: Cluster) -> str:
    def time(seconds: float | None) -> str:
        return "" if seconds is None else duration_of_step(seconds)

    sampling = "" if need.sampling is None else gib(need.sampling)
    line = f"  {need.method.name:<20} {gib(need.kept):>10} {gib(need.passing):>10} {gib(need.training):>10} {sampling:>10} {gib(need.received):>11}"
    line += f" {time(need.compute_seconds):>10} {time(need.exchange_seconds):>9}"
    if cluster.device_bytes is None:
        return line
    verdict = "yes" if need.fits(cluster.device_bytes) else "no"
    if need.sampling is not None and verdict == "yes":
        verdict += "; the ranks" if need.samples_here(cluster.device_bytes) else "; servers"
    return f"{line}   {verdict}"


def gib(size: float) -> str:
    """
    >>> gib(1.5 * 2**30), gib(300 * 2**20), gib(10 * 2**20), gib(2000)
    ('1.5 GiB', '300 MiB', '10 MiB', '2 KiB')
    """
    for unit, step in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= step:
            return f"{size / step:.1f} {unit}" if unit == "GiB" else f"{size / step:.0f} {unit}"
    return f"{size / 1024:.0f} KiB"


def duration_of_step(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)
