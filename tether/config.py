"""A recipe from a YAML file, `key=value` words and the usual flags. Whatever is not understood is refused, with its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.errors import UserError
from tether.keys import SettingError, nearest
from tether.recipe import RECIPES, TrainRecipe
from tether.run import next_folder
from tether.yaml_file import load_mapping, load_scalar

FLAGS = {"model": "--model", "data": "--data", "run": "--run", "max_steps": "--steps"}


@dataclass(frozen=True)
class Configured:
    """A recipe, and where each of its settings came from."""

    command: str
    recipe: TrainRecipe
    places: dict[str, str] = field(default_factory=dict)  # dotted key -> "dpo.yaml:7", "command line" or "--steps"
    name: str = "recipe"  # what the run is called after: the file's stem
    notes: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The run directory: the one asked for, or the next free one."""
        return Path(self.recipe.run) if self.recipe.run else next_folder(self.command, self.name)


def configure(
    file: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    command: str | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Configured:
    """The recipe of a command line.

    `file` is a YAML recipe, `overrides` are words like `lora.rank=8` (they win over the file), `flags` holds the values of
    --model, --data, --run and --steps by setting name; None means not given. `command` may be left out when the file has a
    `command:` line. Raises UserError that names the key, the file and line or "command line", and what was probably meant.
    """
    settings: dict[str, Any] = {}
    places: dict[str, str] = {}
    notes: list[str] = []
    if file is not None:
        settings, lines = _read(Path(file))
        places = {key: f"{file}:{line}" for key, line in lines.items()}
        if settings.pop("record", None) is not None:
            notes.append(f"{file} is a run's own recipe; what the run was made with (`record`) is left aside")
    command = _command(settings.pop("command", None), command, places.pop("command", str(file or "command line")))
    for key, value, place in [*_words(overrides), *_flag_values(flags or {})]:
        if places.get(key) in ("command line", *FLAGS.values()):
            raise SettingError(
                "is given twice" if places[key] == place else f"is given by {places[key]} and by {place}",
                key=key,
                place=place,
                remedy="Keep one of the two.",
            )
        _put(settings, key, value, place)
        places = {old: where for old, where in places.items() if not old.startswith(f"{key}.")} | {key: place}
    try:
        recipe = RECIPES[command](**settings)
    except SettingError as error:
        raise SettingError(error.what, key=error.key, remedy=error.remedy, place=_place(error.key, places, file)) from None
    name = Path(file).stem if file is not None else _stem(recipe.data)
    return Configured(command, recipe, places, name, [*notes, *recipe.notes])


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe file (the first word, when it is neither a setting nor an option) and the rest of a command line.

    >>> split_words(["dpo.yaml", "beta=0.2"]), split_words(["beta=0.2"])
    (('dpo.yaml', ['beta=0.2']), (None, ['beta=0.2']))
    """
    if words and "=" not in words[0] and not words[0].startswith("-"):
        return words[0], list(words[1:])
    return None, list(words)


def _place(key: str, places: Mapping[str, str], file: str | Path | None) -> str | None:
    """Where the key, something in the block of that name, or the block it is in, was given."""
    inside = next((where for name, where in places.items() if name.startswith(f"{key}.")), None)
    if key not in places and inside is not None:
        return inside
    while key not in places and "." in key:
        key = key.rpartition(".")[0]
    return places.get(key, str(file) if file is not None else None)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    if path.is_dir():
        raise UserError("is a folder, a recipe file is wanted", where=str(path), remedy="To continue a run use: tether resume RUN")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        close = nearest(path.name, near)
        remedy = f"Did you mean {path.parent / close}?" if close else "Pass the path of a YAML file."
        raise UserError("there is no such recipe", where=str(path), remedy=remedy) from None
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text (byte {error.start})", where=str(path), remedy="Save the file as UTF-8.") from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from None
    return load_mapping(text, str(path))


def _command(in_file: Any, asked: str | None, place: str) -> str:
    if in_file is None:
        if asked is None:
            raise UserError(
                "it is not said what the recipe is for", where=place, remedy=f"Add `command: ...`, one of: {', '.join(RECIPES)}."
            )
        return asked
    if in_file not in RECIPES:
        close = nearest(str(in_file), RECIPES)
        remedy = f"Did you mean {close}?" if close else None
        raise SettingError(f"{in_file!r} is not one of: {', '.join(RECIPES)}", key="command", place=place, remedy=remedy)
    if asked is not None and in_file != asked:
        raise SettingError(f"the recipe is for `tether {in_file}`, not for `tether {asked}`", key="command", place=place)
    return str(in_file)


def _words(overrides: Sequence[str]) -> list[tuple[str, Any, str]]:
    out = []
    for word in overrides:
        key, equals, value = word.partition("=")
        if word.startswith("-"):
            key, value = key.lstrip("-"), value or "VALUE"
            remedy = f"Settings are given without dashes: {key.replace('-', '_')}={value}"
            raise UserError(
                f"there is no option {word}", where="command line", remedy=f"{remedy}. Options are: {', '.join(FLAGS.values())}."
            )
        if not equals or not key.strip():
            raise UserError(
                f"{word!r} is not understood", where="command line", remedy="Settings are given as key=value, such as learning_rate=1e-6."
            )
        out.append((key.strip(), load_scalar(value, f"command line: {key}"), "command line"))
    return out


def _flag_values(flags: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    return [(key, value, FLAGS[key]) for key, value in flags.items() if value is not None]


def _put(settings: dict[str, Any], key: str, value: Any, place: str) -> None:
    """Set a dotted key, making blocks as needed."""
    *blocks, last = key.split(".")
    for i, name in enumerate(blocks):
        if settings.get(name) is None:
            settings[name] = {}
        if not isinstance(settings[name], dict):
            raise SettingError(f"{'.'.join(blocks[: i + 1])} is a single value, not a block", key=key, place=place)
        settings = settings[name]
    settings[last] = value


def _stem(data: str | list[str]) -> str:
    return Path(data if isinstance(data, str) else data[0]).stem or "recipe"
