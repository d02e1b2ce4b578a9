"""Ctrl-C: the first asks for a stop at the next step boundary, the second stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from tether import ranks
from tether.progress import say


class Interrupt:
    """A context in which Ctrl-C (or a SIGTERM from a job scheduler) sets `.requested` instead of stopping the program.

    >>> with Interrupt() as interrupt:
    ...     interrupt.requested
    False

    Outside the main thread Python delivers no signals: there `.requested` stays False unless it is set by hand.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self._restore()
            raise KeyboardInterrupt
        self.requested = True
        if ranks.peers is None or ranks.peers.lost() is None:  # else a launcher ends the ranks that are left
            say("stopping after this step and saving a checkpoint; press Ctrl-C again to stop at once")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
