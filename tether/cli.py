"""The command line. A command's module is imported when that command is called, so that `tether --help` is instant.

Exit codes: 0 done; 2 a mistake that the user can mend, told in one sentence; 130 stopped by Ctrl-C; 1 anything else, with the
traceback in a file.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from tether import ranks
from tether.errors import RankLost, UserError


@dataclass(frozen=True)
class Entry:
    """Where a command's function is, and its line in the list of commands."""

    function: str  # module:name
    line: str
    panel: str
    recipe: str | None = None  # the recipe whose settings its help lists; "" for commands that take any recipe


TRAIN, COLLECT, LOOK, MODELS = "Train", "Collect", "Look and compare", "Data and models"
COMMANDS: dict[str, Entry] = {
    "demo": Entry("tether.demo.story:demo", "Comparisons in, a better model and the evidence out, on this machine.", TRAIN),
    "sft": Entry("tether.commands.train:sft", "Raise the likelihood of given answers.", TRAIN, "sft"),
    "reward": Entry("tether.commands.train:reward", "Learn from comparisons to give an answer one number.", TRAIN, "reward"),
    "dpo": Entry("tether.commands.train:dpo", "Learn from pairs of answers without a reward model (DPO and its family).", TRAIN, "dpo"),
    "grpo": Entry("tether.commands.train:grpo", "Sample several answers to a prompt, learn from which did better.", TRAIN, "grpo"),
    "ppo": Entry("tether.commands.train:ppo", "Sample answers, learn from their rewards with a critic.", TRAIN, "ppo"),
    "resume": Entry("tether.commands.resume:resume", "Continue a run that was stopped.", TRAIN),
    "collect": Entry("tether.commands.collect:collect", "People compare answers, in a browser or at a terminal.", COLLECT),
    "export": Entry("tether.commands.export:export", "Votes of a desk as rows to train on.", COLLECT),
    "agreement": Entry(
        "tether.commands.agreement:agreement", "How far the votes of a desk can be trusted; a judge held against them.", COLLECT
    ),
    "explain": Entry("tether.commands.explain:explain", "What a recipe does: its formula and every setting.", LOOK, ""),
    "plan": Entry("tether.commands.plan:plan", "Memory and time of a run before it starts.", LOOK, ""),
    "lab": Entry("tether.commands.lab:lab", "Small worlds that show what each method does, exactly.", LOOK),
    "verify": Entry("tether.commands.verify:verify", "Prove on this machine that a recipe trains what it says.", LOOK, ""),
    "report": Entry("tether.commands.report:report", "A run as one HTML page.", LOOK),
    "compare": Entry("tether.commands.compare:compare", "Which of two models is better, with intervals.", LOOK),
    "evaluate": Entry("tether.commands.evaluate:evaluate", "How often a model solves tasks that can be checked.", LOOK),
    "generate": Entry("tether.commands.generate:generate", "Answers to a file of prompts.", LOOK),
    "chat": Entry("tether.commands.generate:chat", "Talk to a model.", LOOK),
    "data": Entry("tether.commands.data:data", "Check a data file row by row before a run.", MODELS),
    "fetch": Entry("tether.commands.fetch:fetch", "Bring a model onto this machine.", MODELS),
    "merge": Entry("tether.commands.merge:merge", "Put an adapter into its model's weights.", MODELS),
}
# Settings are words like key=value; what looks like an option and is none is kept, to be refused with the right spelling.
RECIPE_WORDS = {"ignore_unknown_options": True, "allow_interspersed_args": True}


class Commands(TyperGroup):
    """Commands that are imported on their first use; the list of them needs no import."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        if self._listing:
            return TyperCommand(cmd_name, help=entry.line, rich_help_panel=entry.panel)
        return load(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


class RecipeCommand(TyperCommand):
    """A command whose help lists the settings of its recipe."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        recipe = COMMANDS[str(self.name)].recipe
        if recipe:
            from tether.commands.explain import settings_help

            typer.echo(settings_help(recipe))


def load(name: str) -> Any:
    """The command `name`, its options read off the signature of its function."""
    entry = COMMANDS[name]
    module, _, attribute = entry.function.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    kind = TyperCommand if entry.recipe is None else RecipeCommand
    app.command(name, cls=kind, context_settings={} if entry.recipe is None else RECIPE_WORDS)(function)
    return typer.main.get_command(app)


app = typer.Typer(
    cls=Commands,
    name="tether",
    help="Turns human comparisons into a better language model, tethered to the one it started from.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from tether import __version__

        typer.echo(f"tether {__version__}")
        raise typer.Exit


@app.callback()
def _options(version: bool = typer.Option(False, "--version", help="Show the version.", callback=_version, is_eager=True)) -> None:
    """Turns human comparisons into a better language model, tethered to the one it started from."""


def run(words: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. `words` leaves out the program's name; None takes the process's own."""
    try:
        app(args=None if words is None else list(words), prog_name="tether")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0 if done.code is None else 1
    except UserError as error:
        return ranks.last_word(f"error: {error}", 2)
    except RankLost as error:
        from tether.peers import launched

        return 1 if launched() else ranks.last_word(f"error: {error}", 1)
    except KeyboardInterrupt:
        return ranks.last_word("stopped", 130)
    except Exception as error:
        if not ranks.may_speak():
            return 1
        kept = _keep_traceback(error)
        return ranks.last_word(
            f"error: {type(error).__name__}: {error}\nThis is a fault in tether, not in your command. The traceback is in {kept}", 1
        )
    return 0


def _keep_traceback(error: Exception) -> Path:
    """Write the traceback to the run it belongs to, else to a file of its own."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    folder = getattr(error, "run_folder", None)
    if folder is not None:
        path = Path(folder) / "error.txt"
        path.write_text(text, encoding="utf-8")
        return path
    with tempfile.NamedTemporaryFile("w", prefix="tether-error-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write(text)
    return Path(file.name)


def main() -> None:
    """The entry point of the `tether` program."""
    sys.exit(run())
