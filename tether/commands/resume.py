"""`tether resume`: continue a run where its newest complete checkpoint stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tether.run import Run


def resume(run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")]) -> None:
    """Continue a run that was stopped: same recipe, same rows, same numbers as if it had not been."""
    from tether.commands.train import go

    with Run.open(run) as opened:
        if opened.finished:
            opened.say(f"{run} is finished already; its model is {run / 'model'}")
            return
        opened.lock()
        saved = opened.checkpoints()
        opened.say(f"continuing from {saved[-1]}" if saved else f"{run} has no checkpoint yet; starting it again from step 0")
        go(opened)
