"""Checkpoints: everything the next step depends on, as safetensors and JSON, with a hash of each file.

    checkpoints/000200/
      model.safetensors, config.json, tokenizer ...   a model folder (or an adapter folder): loads like any other
      optimizer.safetensors   moments and step counts by parameter name; from several ranks a folder optimizer/ of each one's part
      random.safetensors      torch's generators
      state.json              step, schedule, python's and numpy's generators, what the method keeps (`extra`)
      manifest.json           sha256 of every file, written last

A folder is written beside, flushed and renamed, so a crash leaves no half checkpoint under its own name. Loading checks the
hashes; a broken checkpoint is named and the one before it is taken.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tether import atomic, ranks, sharded_state
from tether.errors import UserError
from tether.step import Update

MANIFEST, OPTIMIZER, RANDOM, STATE = "manifest.json", "optimizer.safetensors", "random.safetensors", "state.json"
PARTS = "optimizer"
FORMAT = 1


class Checkpointable(Protocol):
    """What a checkpoint needs of a policy or a reward model."""

    def write_weights(self, folder: Path) -> None:
        """Write trained weights into the folder, losing no bit of them."""

    def read_weights(self, folder: Path) -> None:
        """Put them back into this model; UserError when they do not fit."""


class HasFolder(Protocol):
    folder: Path

    def note(self, kind: str, text: str) -> object: ...

    def say(self, text: str) -> None: ...


@dataclass(frozen=True)
class Resumed:
    """What was found: optimiser steps done, and what the method had kept."""

    step: int
    extra: dict[str, Any]
    folder: Path


# -- saved -------------------------------------------------------------------------------------------------------------


def save_checkpoint(
    run: HasFolder, step: int, model: Checkpointable, update: Update, extra: Mapping[str, Any] | None = None, *, keep: int | None = None
) -> Path:
    """Write the state after `step` optimiser steps; then delete all but the newest `keep` checkpoints.

    A meeting of all ranks. The first writes weights, random states and the rest, each its part of the optimiser's state.
    """
    folder = run.folder / "checkpoints"
    target = folder / f"{step:06d}"
    if ranks.first():
        _sweep(folder)
    optimizer = update.state_dict()
    with _new_folder(target) as fresh:
        model.write_weights(fresh)
        if ranks.size() > 1:
            sharded_state.write(update, optimizer["tensors"], fresh / PARTS)
        else:
            save_file({k: v.contiguous() for k, v in optimizer["tensors"].items()}, fresh / OPTIMIZER)
        if ranks.first():
            _write_rest(fresh, step, optimizer["scalars"], extra)
    if keep is not None and ranks.first():
        for old in checkpoints(run.folder)[:-keep]:
            if old != target:
                shutil.rmtree(old)
    return target


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` for all ranks, which the first moves into place once all have written."""
    with atomic.new_folder(target) if ranks.first() else contextlib.nullcontext() as fresh:
        shared: Any = ranks.share(fresh)
        yield shared
        ranks.share(None)  # all have written
    ranks.share(None)  # and it is in place


def _write_rest(fresh: Path, step: int, update: dict[str, Any], extra: Mapping[str, Any] | None) -> None:
    python, arrays, tensors = random_state()
    save_file(tensors, fresh / RANDOM)
    state = {"format": FORMAT, "step": step, "update": update, "python": python, "numpy": arrays, "extra": dict(extra or {})}
    (fresh / STATE).write_text(json.dumps(state))
    hashes = {str(p.relative_to(fresh)): sha256(p) for p in sorted(fresh.rglob("*")) if p.is_file()}
    (fresh / MANIFEST).write_text(json.dumps({"step": step, "sha256": hashes}, indent=1))


def checkpoints(run_folder: Path) -> list[Path]:
    """Checkpoint folders of a run, newest last, complete or not."""
    folder = run_folder / "checkpoints"
    found = [p for p in folder.iterdir() if p.is_dir() and re.fullmatch(r"\d+", p.name)] if folder.is_dir() else []
    return sorted(found, key=lambda p: int(p.name))


def _sweep(folder: Path) -> None:
    """Remove what a killed process left half-written (the run's lock means nobody else is writing)."""
    for path in folder.glob(".*") if folder.is_dir() else ():
        if path.suffix in (".tmp", ".old"):
            shutil.rmtree(path, ignore_errors=True)


# -- loaded ------------------------------------------------------------------------------------------------------------


def load_checkpoint(run: HasFolder, model: Checkpointable, update: Update) -> Resumed | None:
    """Put the newest whole checkpoint back into model, update and random generators; None when the run has none yet.

    A broken or partial checkpoint is named in a notice and the one before it is taken; when all are broken, UserError. A whole
    checkpoint of other settings (another adapter rank, other trained parameters) is UserError at once.
    """
    found = ranks.share(checkpoints(run.folder))
    faults: list[str] = []
    for folder in reversed(found):
        fault = ranks.share(verify(folder) if ranks.first() else None)
        if fault is None:
            if faults:
                run.note("broken_checkpoint", f"{'; '.join(faults)}: going back to {folder.name}")
                run.say(f"warning: {'; '.join(faults)}: going back to {folder.name}")
            return _restore(folder, model, update)
        faults.append(f"checkpoint {folder.name} is broken ({fault})")
    if faults:
        raise UserError(
            "; ".join(faults),
            where=str(run.folder / "checkpoints"),
            remedy="No whole checkpoint is left. Restore one from a copy, or delete the folder to begin the run anew.",
        )
    return None


def verify(folder: Path) -> str | None:
    """None for a whole checkpoint, else what is wrong with it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        hashes: dict[str, str] = dict(manifest["sha256"])
    except FileNotFoundError:
        return f"{MANIFEST} is missing: it was not completely written"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    for name, expected in hashes.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if sha256(folder / name) != expected:
            return f"{name} is not what was written"
    return None


def _restore(folder: Path, model: Checkpointable, update: Update) -> Resumed:
    state = json.loads((folder / STATE).read_text())
    if state["format"] != FORMAT:
        raise UserError(f"was written in format {state['format']}, this is format {FORMAT}", where=str(folder), remedy="Use that version.")
    model.read_weights(folder)
    update.check_names(state["update"], where=str(folder))
    parts = (folder / PARTS).is_dir()
    tensors = sharded_state.read(update, folder / PARTS) if parts else sharded_state.parts_of(update, load_file(folder / OPTIMIZER))
    update.load_state_dict({"tensors": tensors, "scalars": state["update"]}, where=str(folder))
    set_random_state(state["python"], state["numpy"], load_file(folder / RANDOM))
    return Resumed(step=int(state["step"]), extra=dict(state["extra"]), folder=folder)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256_310(file)


def _sha256_310(file: Any) -> str:
    digest = hashlib.sha256()  # Python 3.10 has no file_digest
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


# -- random generators -------------------------------------------------------------------------------------------------


def random_state() -> tuple[list[Any], list[Any], dict[str, Tensor]]:
    """States of python's, numpy's and torch's generators: two JSON values and tensors."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {"torch": torch.get_rng_state()}
    tensors |= {f"cuda{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])}
    return [version, list(internal), gauss], [name, [int(k) for k in keys], int(position), int(has_gauss), float(cached)], tensors


def set_random_state(python: list[Any], arrays: list[Any], tensors: Mapping[str, Tensor]) -> None:
    version, internal, gauss = python
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = arrays
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda{i}" in tensors:  # a run may continue on a machine with other accelerators
            torch.cuda.set_rng_state(tensors[f"cuda{i}"], i)
