"""`Gate`: requests that are under way, by the weights they are sampled with, and moments when there are none. Torch-free."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Many are inside at a time, each under a name; `closed` waits until all have left and lets nobody in meanwhile.

    >>> gate = Gate()
    >>> gate.enter("weights-1")
    >>> gate.names()
    {'weights-1'}
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: Counter[str] = Counter()
        self._shut = False

    def enter(self, name: str) -> None:
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._inside[name] += 1

    def leave(self, name: str) -> None:
        with self._changed:
            self._inside[name] -= 1
            self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._shut = True
            try:
                while self.names():
                    self._changed.wait()
            except BaseException:
                self._shut = False
                self._changed.notify_all()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._shut = False
                self._changed.notify_all()

    def names(self) -> set[str]:
        """Under which names anybody is inside."""
        with self._changed:
            return {name for name, n in self._inside.items() if n}
