"""`tether merge`: an adapter folded into its base model, proven to compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tether.errors import UserError

if TYPE_CHECKING:
    from tether.merging import Merged

DTYPES = ("float32", "bfloat16", "float16")


def merge(
    adapter: Annotated[Path, typer.Argument(help="The adapter folder, such as runs/x/model.")],
    out: Annotated[Path, typer.Argument(help="The model folder to write.")],
    dtype: Annotated[
        str | None, typer.Option(help="Type of the stored weights: float32, bfloat16 or float16; the base's own if left out.")
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the base model.")] = False,
) -> None:
    """Put an adapter into its model's weights; nothing is written unless the result computes the same."""
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"unknown weight type {dtype!r}", where="--dtype", remedy=f"One of: {', '.join(DTYPES)}.")
    import torch

    from tether.merging import merge_adapter

    merged = merge_adapter(adapter, out, dtype=getattr(torch, dtype) if dtype else None, trust_remote_code=trust_remote_code)
    for line in describe(merged):
        typer.echo(line)


def describe(merged: Merged) -> list[str]:
    """What to tell the user, line by line."""
    kind = str(merged.dtype).removeprefix("torch.")
    lines = [f"merged into {merged.folder} ({kind}); scores agree within {merged.difference:.1e} in float32"]
    if kind != "float32":
        lines.append(f"storing it as {kind} moves scores by up to {merged.rounding:.1e}; --dtype float32 keeps them")
    if merged.untied:
        lines.append("input and output embeddings were shared and now differ, so both are stored")
    return lines
