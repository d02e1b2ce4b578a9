"""`tether verify`: a recipe's promises, proven on this machine with the recipe's own settings."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tether.progress import say

if TYPE_CHECKING:
    from tether.config import Configured
    from tether.recipe import TrainRecipe
    from tether.verify.check import Check

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE|COMMAND] [KEY=VALUE]...",
        help="A YAML recipe, or the name of a command, and settings that win over it. None: a small recipe of every method.",
    ),
]


INDENT = 45  # where a line's words begin


def verify(words: Words = None, as_json: Annotated[bool, typer.Option("--json", help="The lines as JSON.")] = False) -> None:
    """Prove on this machine that a recipe trains what it says: each line with its largest difference. Exit code 1 if one does not hold."""
    from tether.verify import lines

    recipes = _recipes(words or [])
    table = None if as_json else Table(sys.stdout)
    told: list[dict[str, Any]] = []
    everything: list[tuple[str, Check]] = []
    for name, recipe in recipes.items():
        started = time.perf_counter()
        notes: list[str] = []

        def begin(said: list[str], name: str = name, notes: list[str] = notes) -> None:
            notes += said
            if table is not None:
                table.begin(name, said)

        checks = lines.verify(recipe, begin, lambda check: table.line(check) if table is not None else None)
        if table is not None:
            table.end(time.perf_counter() - started)
        told.append({"recipe": name, "notes": notes, "lines": [check.row() for check in checks]})
        everything += [(name, check) for check in checks]
    failed = [(name, check) for name, check in everything if not check.holds]
    if as_json:
        typer.echo(json.dumps({"recipes": told, "holds": not failed}, indent=2))
    else:
        typer.echo(verdict(everything, several=len(recipes) > 1))
    if failed:
        raise typer.Exit(1)


def _recipes(words: Sequence[str]) -> dict[str, TrainRecipe]:
    from tether.config import configure, split_words
    from tether.recipe import RECIPES
    from tether.verify import lines

    if not words:
        return lines.built_in()
    file, overrides = split_words(words)
    command = file if file in RECIPES else None
    flags: dict[str, Any] = {}
    if command is not None:
        # A command alone is verified with its defaults; what it would learn from is stood in for.
        given = {word.partition("=")[0] for word in overrides}
        missing = {"model": "a model of your own", "data": "rows of your own"}
        if "features" in given:
            del missing["model"]
        flags = {name: value for name, value in missing.items() if name not in given}
    configured: Configured = configure(None if command else file, overrides, command=command, flags=flags)
    for note in configured.notes:
        say(f"note: {note}")
    return {f"tether {configured.command}, {file}" if command is None and file else f"tether {configured.command}": configured.recipe}


def verdict(checks: Sequence[tuple[str, Check]], *, several: bool = False) -> str:
    """The last line."""
    failed = [(name, check) for name, check in checks if not check.holds]
    n = sum(check.verdict in ("holds", "fails") for _, check in checks)
    if not failed:
        return f"all {n} lines hold"
    name, first = failed[0]
    where = f"{name}: " if several else ""
    names = list(dict.fromkeys(check.name for _, check in failed[1:]))
    more = f" (and {len(failed) - 1} more: {', '.join(names)})" if names else ""
    return f"{where}{first.name} does not hold: {first.detail}{more}"


class Table:
    """Lines as they are done: aligned columns, coloured on a terminal."""

    def __init__(self, stream: Any) -> None:
        from rich.console import Console

        self.console = Console(file=stream, highlight=False, soft_wrap=True)
        self.width = self.console.width if self.console.is_terminal else None

    def begin(self, name: str, notes: Sequence[str]) -> None:
        from rich.markup import escape

        self.console.print(f"[bold]{escape(name)}[/]")
        for note in notes:
            self.console.print(f"  {note}", markup=False)
        self.console.print(f"\n  {'line':<21}{'difference':>11}{'limit':>9}  {'':<10}what was compared", style="dim")

    def line(self, check: Check) -> None:
        from rich.markup import escape

        colour = {"holds": "green", "fails": "bold red", "left out": "dim", "reported": "cyan"}[check.verdict]
        gap = "" if check.difference is None else _number(check.difference)
        limit = "" if check.limit is None else _number(check.limit)
        head = f"  {check.name:<21}{gap:>11}{limit:>9}  "
        if check.verdict == "left out":
            self.console.print(f"{escape(head)}[dim]{check.verdict:<10}{escape(check.detail)}[/]")
            return
        self.console.print(f"{escape(head)}[{colour}]{check.verdict:<10}[/]{escape(check.compared)}")
        room = None if self.width is None else max(30, self.width - INDENT)
        for words in textwrap.wrap(check.detail, room) if room else [check.detail]:
            self.console.print(f"{'':<{INDENT}}{words}", markup=False, style=None if check.verdict == "fails" else "dim")

    def end(self, seconds: float) -> None:
        self.console.print(f"  {seconds:.1f} s\n", style="dim")


def _number(value: float) -> str:
    """
    >>> _number(0.0), _number(0), _number(3.14159e-6), _number(4.0)
    ('0', '0', '3.1e-06', '4')
    """
    return f"{value:g}" if value == int(value if abs(value) < 1e9 else 0) else f"{value:.1e}"
