"""The run's curves in TensorBoard, and in Weights & Biases or trackio when they are asked for.

The run directory is the record; trackers only mirror it. TensorBoard's files are written with its own package, which needs
neither torch nor TensorFlow.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tether.errors import UserError
from tether.run import Run


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """All trackers of a run as one. Opened at the first logged step, so that a run that fails to start leaves no empty curve."""

    def __init__(self, names: Sequence[str], run: Run) -> None:
        self.names, self.run = list(names), run
        self._open: list[Tracker] | None = None
        for name in self.names:
            _need(name)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._open is None:
            self._open = [KINDS[name](self.run, step) for name in self.names]
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}
        for tracker in self._open:
            tracker.log(step, numbers)

    def close(self) -> None:
        for tracker in self._open or []:
            tracker.close()
        self._open = None


class TensorBoard:
    """Event files under `tensorboard/`. On resume the steps that will be taken again are marked as replaced."""

    def __init__(self, run: Run, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.folder / "tensorboard"
        resumed = folder.is_dir() and any(folder.iterdir())
        self._writer = EventFileWriter(str(folder))
        if resumed:
            self._writer.add_event(Event(wall_time=time.time(), step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Service:
    """Weights & Biases, or trackio, which has the same three calls."""

    def __init__(self, module: str, run: Run) -> None:
        self._module = importlib.import_module(module)
        options: dict[str, Any] = {"project": "tether", "name": run.folder.name, "config": run.settings}
        if module == "wandb":
            options |= {"dir": str(run.folder), "id": _stable_id(run.folder), "resume": "allow"}
        self._module.init(**options)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._module.log(dict(metrics), step=step)

    def close(self) -> None:
        self._module.finish()


KINDS: dict[str, Callable[[Run, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": lambda run, first_step: Service("wandb", run),
    "trackio": lambda run, first_step: Service("trackio", run),
}


def _need(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise UserError(f"{name} is not installed", where=f"trackers: {name}", remedy=f"Install it with: pip install 'tether-lm[{name}]'")


def _stable_id(folder: Path) -> str:
    """The same id when a run is resumed, so that its curve continues."""
    import hashlib

    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
