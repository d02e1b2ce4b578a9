"""`tether plan`: memory and time of a run, before it starts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tether.commands.plan_lines import plan_lines, rank_size_lines, size_lines
from tether.errors import UserError
from tether.progress import say

if TYPE_CHECKING:
    from tether.cluster import Cluster

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
    ranks: Annotated[int | None, typer.Option(help="Plan one of so many ranks, among which the model is cut.")] = None,
    device_gb: Annotated[
        float | None, typer.Option(help="Memory of each rank's device in GB (10^9 bytes), where it is not this machine's.")
    ] = None,
    flops: Annotated[
        str | None,
        typer.Option(help="Operations a second that one rank keeps up in training, such as 4e14; left out, it is measured here."),
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Bytes a second that reach one rank, such as 50GB; left out, it is measured between processes here.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="With --parameters: tokens that a rank trains on in a step.")] = None,
    layers: Annotated[int | None, typer.Option(help="With --parameters: layers of the model; left out, as is usual for its size.")] = None,
    hidden: Annotated[int | None, typer.Option(help="With --parameters: width of the model; left out, as is usual for its size.")] = None,
    active: Annotated[
        str | None, typer.Option(help="With --parameters: how many of them compute a token, in a mixture of experts.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as JSON.")] = False,
) -> None:
    """Memory and time of a run before it starts, and which setting to turn if it does not fit."""
    if parameters is not None:
        if words or model or data:
            raise UserError("--parameters stands alone: it plans a size, not a recipe", where="command line")
        lines = _plan_size(
            parameters, ranks, device_gb, flops, bandwidth, as_json=as_json, tokens=tokens, layers=layers, hidden=hidden, active=active
        )
        typer.echo(lines)
        return
    for option, value in (("--tokens", tokens), ("--layers", layers), ("--hidden", hidden), ("--active", active)):
        if value is not None:
            raise UserError("only acts with --parameters: a recipe says it itself", where=option, remedy="Leave it out.")
    cluster = _cluster(ranks, device_gb, flops, bandwidth)
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
    made = planning.plan(recipe, rows, cluster=cluster, probe=probe, say=say)
    if as_json:
        from tether.commands.plan_json import plan_json

        typer.echo(json.dumps(plan_json(made), indent=1))
    else:
        typer.echo("\n".join(plan_lines(made)))


def _plan_size(
    parameters: str,
    ranks: int | None,
    device_gb: float | None,
    flops: str | None,
    bandwidth: str | None,
    *,
    as_json: bool,
    tokens: int | None,
    layers: int | None,
    hidden: int | None,
    active: str | None,
) -> str:
    from tether.plan_sizes import needs, parse_parameters

    size = parse_parameters(parameters)
    of_ranks = {"--device-gb": device_gb, "--flops": flops, "--bandwidth": bandwidth}
    of_ranks |= {"--tokens": tokens, "--layers": layers, "--hidden": hidden, "--active": active}
    if ranks is None:
        for option, value in of_ranks.items():
            if value is not None:
                raise UserError("only acts with --ranks where a size is planned", where=option, remedy="Add --ranks, such as --ranks 8.")
        if not as_json:
            return "\n".join(size_lines(size))
        from tether.commands.plan_json import sizes_json

        return json.dumps(sizes_json(size, needs(size)), indent=1)
    from tether.plan_size_ranks import TOKENS, rank_needs, shape_of

    cluster = _cluster(ranks, device_gb, flops, bandwidth)
    for option, number in (("--layers", layers), ("--hidden", hidden)):
        if number is not None and number < 1:
            raise UserError(f"must be at least 1, got {number}", where=option)
    shape = shape_of(size, layers, hidden, parse_parameters(active, "--active") if active else None)
    each = TOKENS if tokens is None else tokens
    made = list(rank_needs(shape, cluster, each))
    if not as_json:
        return "\n".join(rank_size_lines(shape, cluster, each, made))
    from tether.commands.plan_json import rank_sizes_json

    return json.dumps(rank_sizes_json(shape, cluster, each, made), indent=1)


def _cluster(ranks: int | None, device_gb: float | None, flops: str | None, bandwidth: str | None) -> Cluster:
    from tether.cluster import Cluster, parse_rate
    from tether.link import Link

    if device_gb is not None and not device_gb > 0:
        raise UserError(f"must be above 0, got {device_gb:g}", where="--device-gb", remedy="Write 80 for a device of 80 GB.")
    if bandwidth is not None and ranks in (None, 1):
        raise UserError("only acts with several ranks", where="--bandwidth", remedy="Add --ranks, such as --ranks 8.")
    rate = parse_rate(bandwidth, "--bandwidth", "50GB or 5e10") if bandwidth else None
    return Cluster(
        1 if ranks is None else ranks,
        None if device_gb is None else device_gb * 1e9,
        parse_rate(flops, "--flops", "400T or 4e14") if flops else None,
        None if rate is None else Link(rate, rate),
    )
