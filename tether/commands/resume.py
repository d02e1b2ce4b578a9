"""`tether resume`: continue a run where its newest complete checkpoint stands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tether import ranks
from tether.commands.train import Ranks, go, on_ranks, shared_run
from tether.run import Run


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    n: Ranks = None,
) -> None:
    """Continue a run that was stopped: same recipe, same rows, same numbers as if it had not been."""
    on_ranks(n, ["resume", str(run)])
    with ranks.joined():
        folder = at_home(run)
        with shared_run(lambda: _opened(folder), folder) as opened:
            if ranks.share(opened.finished):
                opened.say(f"{run} is finished already; its model is {opened.folder / 'model'}")
                return
            saved = opened.checkpoints()
            opened.say(f"continuing from {saved[-1]}" if saved else f"{run} has no checkpoint yet; starting it again from step 0")
            go(opened)


def _opened(folder: Path) -> Run:
    run = Run.open(folder)
    if not run.finished:
        run.lock()
    return run


def at_home(run: Path) -> Path:
    """Go to the folder where the run was started, which relative paths of its recipe start from. Returns where the run is from there."""
    with Run.open(run) as opened:
        home = opened.recorded("folder")
    if not home or not Path(home).is_dir() or Path(home) == Path.cwd():
        return run
    run = run.absolute()
    os.chdir(home)
    return run
