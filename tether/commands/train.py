"""`tether sft`, `tether reward`, `tether dpo`, `tether grpo`, `tether ppo`: a recipe into a run."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tether import ranks
from tether.errors import UserError
from tether.run import Run

ALGORITHMS = {
    "sft": "tether.algorithms.sft",
    "reward": "tether.algorithms.reward_model",
    "dpo": "tether.algorithms.dpo",
    "grpo": "tether.algorithms.grpo",
    "ppo": "tether.algorithms.ppo",
}

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A YAML recipe, and settings that win over it, such as lora.rank=8."),
]
Model = Annotated[str | None, typer.Option("--model", help="The model to start from (the setting `model`).")]
Data = Annotated[str | None, typer.Option("--data", help="Training rows (the setting `data`).")]
RunFolder = Annotated[str | None, typer.Option("--run", help="The run directory (the setting `run`).")]
Ranks = Annotated[int | None, typer.Option("--ranks", help="Processes on this machine that share the work, by torchrun.", metavar="N")]
Steps = Annotated[int | None, typer.Option("--steps", help="Stop after so many optimiser steps (the setting `max_steps`).")]


def sft(
    words: Words = None, model: Model = None, data: Data = None, run: RunFolder = None, steps: Steps = None, ranks: Ranks = None
) -> None:
    """Raise the likelihood of given answers (supervised fine-tuning)."""
    train("sft", words, ranks, model=model, data=data, run=run, max_steps=steps)


def reward(
    words: Words = None, model: Model = None, data: Data = None, run: RunFolder = None, steps: Steps = None, ranks: Ranks = None
) -> None:
    """Learn from comparisons to give an answer one number (a reward model)."""
    train("reward", words, ranks, model=model, data=data, run=run, max_steps=steps)


def dpo(
    words: Words = None, model: Model = None, data: Data = None, run: RunFolder = None, steps: Steps = None, ranks: Ranks = None
) -> None:
    """Learn from pairs of answers without a reward model (DPO and its family)."""
    train("dpo", words, ranks, model=model, data=data, run=run, max_steps=steps)


def grpo(
    words: Words = None, model: Model = None, data: Data = None, run: RunFolder = None, steps: Steps = None, ranks: Ranks = None
) -> None:
    """Sample several answers to a prompt and learn from which did better (GRPO and the methods around it)."""
    train("grpo", words, ranks, model=model, data=data, run=run, max_steps=steps)


def ppo(
    words: Words = None, model: Model = None, data: Data = None, run: RunFolder = None, steps: Steps = None, ranks: Ranks = None
) -> None:
    """Sample answers and learn from their rewards with a critic (PPO)."""
    train("ppo", words, ranks, model=model, data=data, run=run, max_steps=steps)


def train(command: str, words: list[str] | None, n: int | None = None, **flags: Any) -> None:
    """Make the recipe, open a new run directory, run the command's algorithm in it; on `n` ranks if that is asked for."""
    from tether.config import FLAGS, configure, split_words

    file, overrides = split_words(words or [])
    with ranks.joined():
        configured = configure(file, overrides, command=command, flags=flags)
        options = [word for name, value in flags.items() if value is not None for word in (FLAGS[name], str(value))]
        on_ranks(n, [command, *(words or []), *options])
        folder = ranks.share(configured.folder)
        with shared_run(lambda: Run.create(folder, configured.recipe, command), folder) as run:
            for note in configured.notes:
                run.say(f"note: {note}")
                run.note("setting", note)
            go(run)


def on_ranks(n: int | None, words: list[str]) -> None:
    """Where ranks are asked for that are not there yet: start them with the command line `words`, and end as they do."""
    if n is None or n == 1 or ranks.wanted() > 1:
        return
    from tether.launch import launch

    raise typer.Exit(launch(words, n))


def shared_run(open_run: Callable[[], Run], folder: Path) -> Run:
    """The run on every rank: the first opens it, the others follow."""
    if ranks.first():
        run = open_run()
        ranks.share(None)
    else:
        from tether import progress
        from tether.follower import Follower

        progress.silent = True
        ranks.share(None)
        run = Follower.open(folder)
    if ranks.peers is not None:
        ranks.peers.found_run(folder)
    return run


def go(run: Run) -> None:
    """Run a run's own recipe to its end, from wherever its directory stands."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # between libraries; nothing that a user can act on
    recipe = run.recipe
    run.say(f"tether {run.command}: run directory {run.folder}, every setting in {run.folder / 'recipe.yaml'}")
    algorithm = importlib.import_module(ALGORITHMS[run.command])
    from tether.allocator import keep_freed_memory
    from tether.loop import Interrupted

    keep_freed_memory()
    try:
        summary = algorithm.train(recipe, run)
    except Interrupted as stopped:
        raise typer.Exit(ranks.last_word(str(stopped), 130)) from None
    except UserError as error:
        run.note("error", str(error))
        raise
    except Exception as error:
        error.run_folder = run.folder  # type: ignore[attr-defined] # the command line writes the traceback there
        raise
    steps = f"{summary['steps']} step{'' if summary['steps'] == 1 else 's'}; " if "steps" in summary else ""
    run.say(f"done: {steps}look at it with: tether report {run.folder}")
    if ranks.first():
        print(run.folder / "model")
