"""Where the time of a step goes, by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """
    >>> watch = Stopwatch()
    >>> with watch("sampling"):
    ...     pass
    >>> list(watch.metrics())
    ['time/sampling']
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """Seconds by phase since the last call, which starts the watch anew."""
        out = {f"time/{phase}": round(seconds, 4) for phase, seconds in self._seconds.items()}
        self._seconds.clear()
        return out
