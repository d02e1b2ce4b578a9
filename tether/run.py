"""The run directory: the only state of a run. Torch-free.

Rows are appended and flushed one line at a time; every other file is written beside and renamed, so that what is on disk is
either the old whole or the new whole. A line torn by a crash is taken out when the run is continued.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from tether import progress
from tether.atomic import write_file
from tether.errors import UserError
from tether.lock import Lock
from tether.record import record

if TYPE_CHECKING:
    from tether.recipe import TrainRecipe

RECIPE, METRICS, NOTICES, SUMMARY, LOCK = "recipe.yaml", "metrics.jsonl", "notices.jsonl", "summary.json", ".lock"
# JSON has no such numbers; they are written as these texts and read back as floats, never smoothed away.
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Run:
    """One run and its folder.

    Reading needs nothing; the first write takes a lock that is held until `close`, so that two processes never write one run.
    Steps count optimiser steps that are done: the row of the first step has `step` 1, and `checkpoints/000200` is the state
    after 200.
    """

    def __init__(self, folder: Path, contents: Mapping[str, Any], lines: Mapping[str, int] | None = None) -> None:
        self.folder = folder
        self._contents = dict(contents)
        self._lines = dict(lines or {})  # of recipe.yaml, by dotted key
        self._lock = Lock(folder / LOCK)
        self._files: dict[str, TextIO] = {}
        self._last_step: int | None = None
        self._noted: set[str] | None = None
        self._phases: dict[str, float] = {}
        self._began = time.monotonic()

    # Opening ------------------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, folder: str | Path, recipe: TrainRecipe, command: str | None = None) -> Run:
        """A new run directory. Refuses a folder that holds anything but a run that never took a step."""
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise UserError("is a file, a folder is wanted", where=str(folder), remedy="Pass another name with --run.")
        folder.mkdir(parents=True, exist_ok=True)
        run = cls(folder, {})
        taken = sorted(p.name for p in folder.iterdir() if p.name != LOCK)
        if taken:
            if not _never_stepped(folder, taken):
                what = "holds a run already" if (folder / RECIPE).exists() else f"is not empty (it holds {', '.join(taken[:3])})"
                resume = (
                    f"Continue it with: tether resume {folder}; or pass another name" if (folder / RECIPE).exists() else "Pass another name"
                )
                raise UserError(what, where=str(folder), remedy=f"{resume} with --run.")
            run._lock.take()
            _empty(folder)
        run._lock.take()
        settings = {**recipe.resolved(), "run": str(folder)}
        run._contents = {"command": command or type(recipe).command, **settings, "record": record()}
        run._write_recipe()
        return run

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """A run that exists, to read or to continue."""
        from tether.yaml_file import load_mapping

        folder = Path(folder)
        path = folder / RECIPE
        if not path.is_file():
            found = "no such folder" if not folder.exists() else f"not a run directory: it has no {RECIPE}"
            raise UserError(found, where=str(folder), remedy=f"Runs are: {_runs_near(folder)}.")
        contents, lines = load_mapping(path.read_text(encoding="utf-8"), str(path))
        if "command" not in contents:
            raise UserError(f"{RECIPE} was not written by tether", where=str(folder), remedy="Pass a run directory.")
        return cls(folder, contents, lines)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._close_files()
        self._lock.release()

    # What it is ---------------------------------------------------------------------------------------------------------

    @property
    def command(self) -> str:
        return str(self._contents["command"])

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved recipe as plain data."""
        return {key: value for key, value in self._contents.items() if key not in ("command", "record")}

    @property
    def recipe(self) -> TrainRecipe:
        """The resolved recipe, checked again: a mistake made in recipe.yaml by hand is told with its line."""
        from tether.recipe import RECIPES
        from tether.settings import SettingError

        path = self.folder / RECIPE
        if self.command not in RECIPES:
            raise UserError(f"there is no command {self.command!r}", where=str(path), remedy=f"It is one of: {', '.join(RECIPES)}.")
        try:
            return RECIPES[self.command](**self.settings)
        except SettingError as error:
            key = error.key
            while key not in self._lines and "." in key:
                key = key.rpartition(".")[0]
            place = f"{path}:{self._lines[key]}" if key in self._lines else str(path)
            raise SettingError(error.what, key=error.key, remedy=error.remedy, place=place) from None

    @property
    def is_new(self) -> bool:
        """Whether there is no checkpoint to continue from."""
        return not self.checkpoints()

    @property
    def finished(self) -> bool:
        return (self.folder / SUMMARY).is_file()

    def recorded(self, key: str) -> Any:
        """What `record` wrote under this key, or None."""
        return self._contents.get("record", {}).get(key)

    def record(self, key: str, value: Any) -> None:
        """Keep a fact about the run in recipe.yaml, such as the precision that `auto` came to."""
        if self.recorded(key) != value:
            self._contents["record"] = {**self._contents.get("record", {}), key: value}
            self._write_recipe()

    def fingerprint(self, files: Sequence[str], fingerprint: str) -> None:
        """Record what the data was; on a resumed run, refuse data that has changed since."""
        known = self.recorded("data") or []
        for entry in known:
            if entry["files"] == list(files):
                if entry["fingerprint"] != fingerprint:
                    raise UserError(
                        "the data has changed since this run began, so it cannot be continued as the same run",
                        where=", ".join(files),
                        remedy="Put the old file back, or start a new run.",
                    )
                return
        self.record("data", [*known, {"files": list(files), "fingerprint": fingerprint}])

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, newest last. A folder without a manifest was being written when the run stopped."""
        folder = self.folder / "checkpoints"
        found = [p for p in folder.iterdir() if re.fullmatch(r"\d+", p.name)] if folder.is_dir() else []
        return sorted((p for p in found if (p / "manifest.json").is_file()), key=lambda p: int(p.name))

    # Rows ---------------------------------------------------------------------------------------------------------------

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One row of numbers. A second row of the same step (such as an evaluation) is merged with the first when read."""
        if self._last_step is None:
            rows = self._rows(METRICS)
            self._last_step = int(rows[-1]["step"]) if rows else 0
        if step < self._last_step:
            raise ValueError(f"step {step} comes after step {self._last_step} in {self.folder / METRICS}; truncate first")
        self._append(METRICS, [{"step": step, **metrics}])
        self._last_step = step

    def metrics(self) -> list[dict[str, Any]]:
        """All rows, one per step, oldest first."""
        by_step: dict[int, dict[str, Any]] = {}
        for row in self._rows(METRICS):
            by_step.setdefault(int(row["step"]), {}).update(row)
        return [by_step[step] for step in sorted(by_step)]

    def append(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of another file of the run, such as pairs.jsonl; they are truncated with the metrics."""
        self._append(name, [{"step": step, **row} for row in rows])

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of one of the run's .jsonl files."""
        return self._rows(name)

    def note(self, kind: str, text: str, *, step: int | None = None, **more: Any) -> bool:
        """Something a reader should know: what was warned about, dropped or cut. The same notice is kept once; says whether it is new."""
        row = {"kind": kind, "text": text, **({} if step is None else {"step": step}), **more}
        if self._noted is None:
            self._noted = {json.dumps(_jsonable(old), sort_keys=True) for old in self._rows(NOTICES)}
        key = json.dumps(_jsonable(row), sort_keys=True)
        if key in self._noted:
            return False
        self._noted.add(key)
        self._append(NOTICES, [row])
        return True

    def notices(self) -> list[dict[str, Any]]:
        return self._rows(NOTICES)

    def say(self, text: str) -> None:
        """Tell whoever is watching; the run directory does not keep it."""
        progress.say(text)

    def truncate(self, step: int) -> None:
        """Forget rows after `step` in every .jsonl file: they are about to be made again. Rows without a step stay."""
        self._lock.take()
        self._close_files()
        for path in sorted(self.folder.glob("*.jsonl")):
            rows = self._rows(path.name)
            kept = [row for row in rows if int(row.get("step", 0)) <= step]
            if len(kept) < len(rows) or not _ends_whole(path):
                write_file(path, "".join(_line(row) for row in kept))
        self._last_step, self._noted = None, None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say what a long part of the run is doing, and keep its time for the summary."""
        self.say(f"{name} ...")
        began = time.monotonic()
        yield
        self._phases[name] = round(self._phases.get(name, 0.0) + time.monotonic() - began, 3)

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Write summary.json: the run is complete. Returns the summary with the time that this process took."""
        self._lock.take()
        whole = {**summary, "seconds": round(time.monotonic() - self._began, 1), **({"phases": self._phases} if self._phases else {})}
        write_file(self.folder / SUMMARY, json.dumps(_jsonable(whole), indent=2, ensure_ascii=False) + "\n")
        return whole

    def summary(self) -> dict[str, Any] | None:
        """What `finish` wrote, or None while the run is not complete."""
        path = self.folder / SUMMARY
        return _restored(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None

    # Files --------------------------------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Take the lock now rather than at the first write; raises UserError when another process has it."""
        self._lock.take()

    def _write_recipe(self) -> None:
        import yaml

        self._lock.take()
        text = yaml.safe_dump(self._contents, sort_keys=False, allow_unicode=True, width=120)
        write_file(self.folder / RECIPE, text)

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if name not in self._files:
            self._lock.take()
            path = self.folder / name
            if path.exists() and not _ends_whole(path):
                write_file(path, "".join(_line(row) for row in self._rows(name)))
            self._files[name] = path.open("a", encoding="utf-8", newline="\n")
        file = self._files[name]
        file.write("".join(_line(row) for row in rows))
        file.flush()

    def _rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        if not path.is_file():
            return []
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        lines.pop()  # what follows the last line end: nothing, or a line that was torn
        out = []
        for number, line in enumerate(lines, start=1):
            try:
                out.append(_restored(json.loads(line)))
            except ValueError as error:
                remedy = "Take the line out, or continue from a checkpoint of an intact copy."
                raise UserError(f"not a JSON row ({error})", where=f"{path}:{number}", remedy=remedy) from None
        return out

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def next_folder(command: str, stem: str, root: str | Path = "runs") -> Path:
    """runs/<command>-<stem>-<n> with the first n that is free."""
    n = 1
    while (Path(root) / f"{command}-{stem}-{n}").exists():
        n += 1
    return Path(root) / f"{command}-{stem}-{n}"


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_jsonable(row), ensure_ascii=False, allow_nan=False) + "\n"


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if hasattr(value, "item") and callable(value.item):  # a scalar of numpy or torch
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return str(value) if isinstance(value, Path) else value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


# What a run writes before its first step. A folder with nothing else can be begun again: nothing is lost.
_BEFORE_FIRST_STEP = {RECIPE, "error.txt", "tensorboard", "checkpoints"}


def _never_stepped(folder: Path, names: Sequence[str]) -> bool:
    others = {name for name in names if not name.endswith(".jsonl")}
    if not (folder / RECIPE).is_file() or not others <= _BEFORE_FIRST_STEP:
        return False
    stepped = (folder / METRICS).is_file() and (folder / METRICS).stat().st_size > 0
    saved = (folder / "checkpoints").is_dir() and any((folder / "checkpoints").iterdir())
    return not stepped and not saved


def _empty(folder: Path) -> None:
    for path in [*(folder / name for name in _BEFORE_FIRST_STEP), *folder.glob("*.jsonl")]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _runs_near(folder: Path) -> str:
    for root in (folder, folder.parent, Path("runs")):
        found = sorted(str(p.parent) for p in root.glob(f"*/{RECIPE}")) if root.is_dir() else []
        if found:
            return ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
    return "none found here"
