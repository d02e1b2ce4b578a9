"""`tether plan`: memory and time of a run, before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tether.errors import UserError
from tether.progress import duration, say

if TYPE_CHECKING:
    from tether.plan import Plan

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE|COMMAND [KEY=VALUE]...",
        help="A YAML recipe, or the name of a command (sft, reward, dpo, grpo, ppo), and settings that win over it.",
    ),
]


def plan(
    words: Words = None,
    model: Annotated[str | None, typer.Option("--model", help="The model to start from (the setting `model`).")] = None,
    data: Annotated[str | None, typer.Option("--data", help="Training rows (the setting `data`).")] = None,
    parameters: Annotated[
        str | None, typer.Option(help="By numbers alone: every method for a model of this size, such as 7e9 or 7B.")
    ] = None,
    probe: Annotated[bool, typer.Option(help="Run a few random layers of the model to measure memory and time.")] = True,
) -> None:
    """Memory and time of a run before it starts, and which setting to turn if it does not fit."""
    if parameters is not None:
        if words or model or data:
            raise UserError("--parameters stands alone: it plans a size, not a recipe", where="command line")
        from tether.plan_sizes import parse_parameters

        typer.echo("\n".join(size_lines(parse_parameters(parameters))))
        return
    from tether.config import configure, split_words
    from tether.recipe import RECIPES

    file, overrides = split_words(words or [])
    command = file if file in RECIPES else None
    known_data = bool(data) or command is None or any(word.startswith("data=") for word in overrides)
    flags: dict[str, Any] = {"model": model, "data": data if known_data else "unknown"}
    configured = configure(None if command else file, overrides, command=command, flags=flags)
    for note in configured.notes:
        say(f"note: {note}")
    recipe = configured.recipe
    from tether import plan as planning

    rows = None
    if known_data and recipe.model is not None:
        from tether import row_lengths

        say("reading the data ...")
        rows = row_lengths.sample(recipe, planning.load_tokenizer(recipe.model, trust_remote_code=recipe.trust_remote_code))
    typer.echo("\n".join(plan_lines(planning.plan(recipe, rows, probe=probe, say=say))))


def plan_lines(made: Plan) -> Iterator[str]:
    """The lines that `tether plan RECIPE` prints."""
    size, recipe = made.size, made.recipe
    share = f"{size.trainable / size.parameters:.1%}"
    yield f"{recipe.command} of {recipe.model}: {size.parameters:,} parameters, {size.trainable:,} of them trained ({share})"
    yield ""
    yield "Memory"
    for part in made.memory:
        yield f"  {part.name:<12} {gib(part.bytes):>10}   {part.why}"
    yield f"  {'together':<12} {gib(made.bytes):>10}   {gib(made.free_bytes)} are free: {'it fits' if made.fits else 'it does not fit'}"
    yield f"  {'on disk':<12} {gib(made.disk_bytes):>10}   {recipe.keep_checkpoints} checkpoints, one being written, and the result"
    if not any(part.name == "sampling" for part in made.memory):
        yield f"  {'sampling':<12} {size.kv_bytes_per_token / 1024:>6.0f} KiB   keys and values of each token, when this model answers"
    if not made.fits:
        yield ""
        if made.changes:
            yield "Turn, in this order, each on top of those before it:"
            for change in made.changes:
                verdict = "fits" if change.bytes <= made.free_bytes else "not yet"
                yield f"  {change.setting:<32} {gib(change.bytes):>10}   {verdict}"
        if not made.changes or made.changes[-1].bytes > made.free_bytes:
            yield "No setting makes this model fit here: take a smaller model or a machine with more memory."
    yield ""
    yield "Time"
    if made.rows is not None:
        rows = made.rows
        share = f", {rows.trained_share:.0%} trained" if rows.trained_share else ""  # prompts alone have no trained token
        yield f"  {rows.count:,} rows of {rows.tokens:.0f} tokens on average (longest of the sample {rows.longest}){share}"
    if made.seconds_per_step is None:
        yield "  not measured"
    else:
        yield f"  a step       about {duration_of_step(made.seconds_per_step)}"
        if made.scoring_seconds is not None:
            yield f"  reference    about {duration(made.scoring_seconds)}, once; nothing on a second run with the same data"
        if made.seconds is not None:
            yield f"  the run      about {duration(made.seconds)} for {made.steps} steps"
    for note in made.notes:
        yield f"note: {note}"


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
