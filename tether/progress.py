"""How far a long job is: a bar on a terminal, plain lines otherwise, with the time left and a few numbers.

Everything goes to standard error, so that a command's standard output stays its result.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

# The numbers worth a place on the line, most telling first; as many as fit are shown.
SHOWN = {
    "loss": "loss",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "accuracy": "accuracy",
    "margin": "margin",
    "mean_token_accuracy": "token accuracy",
    "reward": "reward",
    "kl": "kl",
    "displacement/chosen": "chosen",
    "grad_norm": "grad norm",
}
# The first of many things done side by side says nothing of the rest: no time left is shown until one of the two is reached: seconds, share done.
SOON_S, EARLY = 20.0, 0.02
_open: list[Progress] = []  # the bars on the screen, innermost last
silent = False  # in a process that leaves the word to another


def say(message: str, *, stream: TextIO | None = None) -> None:
    """Print a line without breaking a bar that is on the screen."""
    if silent:
        return
    if stream is None and _open and _open[-1].bar is not None:
        _open[-1].bar.console.print(message, markup=False, highlight=False, soft_wrap=True)
    else:
        print(message, file=stream or sys.stderr, flush=True)


class Progress:
    """A context manager: `with Progress(total, "dpo") as progress: progress.update(step, {"loss": 0.69})`.

    `total` may be None when it is not known. `start` is where a resumed job begins, so that the time left is judged by
    the steps of this process. `every` is how many steps pass between plain lines, which are never closer than
    `interval_s` apart except for the first and the last.
    """

    def __init__(
        self,
        total: int | None,
        title: str,
        *,
        start: int = 0,
        every: int = 1,
        interval_s: float = 5.0,
        stream: TextIO | None = None,
    ) -> None:
        self.total, self.title, self.start, self.every, self.interval_s = total, title, start, every, interval_s
        self.stream = stream or sys.stderr
        self.bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._last_line: float | None = None
        self._line_step: int | None = None
        self._latest: tuple[int, Mapping[str, Any]] | None = None

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        # One bar at a time: a phase within a phase prints lines, which `say` places above the bar.
        if self.stream.isatty() and not _open and not silent:
            self.bar = _bar(self.stream, self.title, self.total)
            self.bar.start()
            self._task = self.bar.add_task(self.title, total=self.total, completed=self.start, numbers="", left="")
        _open.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar is None and self._latest and self._latest[0] != self._line_step:
            self._print_line(*self._latest)
        _open.remove(self)
        if self.bar is not None:
            self.bar.stop()

    def update(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """`step` counts what is done, from `start`."""
        self._latest = (step, metrics or {})
        if self.bar is not None and self._task is not None:
            self.bar.update(self._task, completed=step, numbers=describe(metrics or {}, limit=3), left=self._time_left(step))
            return
        now = time.monotonic()
        first = self._last_line is None
        due = step % self.every == 0 and (first or now - (self._last_line or 0) >= self.interval_s)
        if first or due or step == self.total:
            self._print_line(step, metrics or {})

    def _print_line(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._last_line, self._line_step = time.monotonic(), step
        of = f"/{self.total}" if self.total else ""
        parts = [f"{self.title} {step}{of}", describe(metrics), self._time_left(step)]
        say("  ".join(p for p in parts if p), stream=None if self.stream is sys.stderr else self.stream)

    def _time_left(self, step: int) -> str:
        done = step - self.start
        if not self.total or done < 1 or step >= self.total:
            return ""
        took = time.monotonic() - self._began
        if took < SOON_S and done < EARLY * (self.total - self.start):
            return ""
        return f"{duration(took / done * (self.total - step))} left"


def describe(metrics: Mapping[str, Any], limit: int = 4) -> str:
    """The few numbers worth showing, as text. What is not finite is shown as it is.

    >>> describe({"loss": 0.6931, "rewards/margins": float("nan"), "step_time": 2.0})
    'loss 0.6931  margin nan'
    """
    present = [(label, metrics[name]) for name, label in SHOWN.items() if isinstance(metrics.get(name), (int, float))]
    return "  ".join(f"{label} {value:.4g}" for label, value in present[:limit])


def duration(seconds: float) -> str:
    """Seconds in words that fit a line.

    >>> duration(42), duration(185), duration(7322)
    ('42 s', '3 min 05 s', '2 h 02 min')
    """
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _bar(stream: TextIO, title: str, total: int | None) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column

    # On a narrow terminal the numbers give way, never the count or the time left.
    columns = [
        TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=len(title))),
        BarColumn(bar_width=10, table_column=Column(min_width=10)),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(total or 0)) + 1)),
        TextColumn("[dim]{task.fields[left]}", table_column=Column(no_wrap=True, min_width=11)),
        TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    ]
    return RichProgress(*columns, console=Console(file=stream))
