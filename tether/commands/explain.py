"""`tether explain`: what a recipe does before anything is run; and the lists of settings in help and documentation."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, get_args

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tether.config import Configured, configure, split_words
from tether.dpo_recipe import LOSS_NAMES, settings_of
from tether.recipe import RECIPES

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE|COMMAND [KEY=VALUE]...",
        help="A YAML recipe, or the name of a command (sft, reward, dpo, grpo, ppo), and settings that win over it.",
    ),
]


def explain(words: Words = None) -> None:
    """What a recipe does: its formula with its numbers in it, and every setting with its value and where that came from."""
    file, overrides = split_words(words or [])
    command = file if file in RECIPES else None
    if command is None:
        configured = configure(file, overrides)
    else:
        # A command alone is explained with its defaults; what it needs to run is not needed to explain it.
        needed = [f"{name}={name.upper()}" for name in ("model", "data") if not any(word.startswith(f"{name}=") for word in overrides)]
        if command == "reward" and any(word.startswith("features=") for word in overrides):
            needed = [word for word in needed if not word.startswith("model")]
        configured = configure(None, [*overrides, *needed], command=command)
    typer.echo("\n".join(explanation(configured)))


def explanation(configured: Configured) -> Iterator[str]:
    """The lines that `tether explain` prints."""
    from tether import explain as formulas

    yield f"tether {configured.command}"
    yield ""
    yield formulas.explain(configured.recipe)
    yield ""
    yield from (f"note: {note}" for note in configured.notes)
    yield "Settings (value, where it comes from, what moving it does):"
    recipe = configured.recipe
    fields = type(recipe).paths()
    for key, value in _flat(recipe.resolved()):
        place = configured.places.get(key) or configured.places.get(key.rpartition(".")[0]) or "default"
        yield f"  {key} = {shown(value)}  ({place})"
        yield from _wrapped(fields[key].description or "", indent=6)


def settings_help(command: str) -> str:
    """Every setting of a command with its default and description: the end of `tether <command> --help`."""
    lines = ["Settings, in the recipe as `key: value` or on the command line as key=value:", ""]
    for key, info in RECIPES[command].paths().items():
        lines.append(f"  {key}  {_small(info)}{default_of(command, key, info)}")
        lines += _wrapped(info.description or "", indent=6)
    return "\n".join(lines)


def default_of(command: str, key: str, info: FieldInfo) -> str:
    """The default in words; for the settings of a loss, the default of each loss that has a place for it."""
    if command == "dpo":
        by_value: dict[float, list[str]] = {}
        for loss in LOSS_NAMES:
            if key in settings_of(loss):
                by_value.setdefault(settings_of(loss)[key], []).append(loss)
        if by_value:
            common, *rest = sorted(by_value, key=lambda value: -len(by_value[value]))
            others = "".join(f"; {value:g} in {', '.join(by_value[value])}" for value in rest)
            only = "" if len(by_value[common]) > 1 or rest else f" in {by_value[common][0]}"
            return f"{common:g}{only}{others}"
    if info.default is PydanticUndefined:
        return "needed"
    return shown(info.default)


def shown(value: Any) -> str:
    """A value as it would stand in a recipe.

    >>> shown(None), shown(True), shown(1e-6), shown([]), shown(["a"]), shown("x")
    ('null', 'true', '1e-06', '[]', '[a]', 'x')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(shown(item) for item in value)}]"
    return str(value)


def choices(info: FieldInfo) -> tuple[str, ...]:
    """The names that a setting allows, if it allows only some."""
    kinds = [info.annotation, *get_args(info.annotation)]
    for kind in kinds:
        names = get_args(kind)
        if names and all(isinstance(name, str) for name in names):
            return tuple(str(name) for name in names)
    return ()


def _small(info: FieldInfo) -> str:
    names = choices(info)
    return f"({', '.join(names)})  " if names else ""


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _wrapped(text: str, indent: int) -> list[str]:
    width = max(60, min(120, shutil.get_terminal_size((100, 20)).columns))
    return textwrap.wrap(text, width, initial_indent=" " * indent, subsequent_indent=" " * indent)
