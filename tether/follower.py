"""The run directory as a rank sees it that is not the first: it reads what the first wrote, and writes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tether.run import Run


class Follower(Run):
    """A `Run` that keeps in memory what it is given. `phase`, `recorded`, `fingerprint` and what is read are as for the first rank."""

    def lock(self) -> None:
        pass

    def close(self) -> None:
        pass

    def truncate(self, step: int) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        pass

    def append(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        pass

    def note(self, kind: str, text: str, *, step: int | None = None, **more: Any) -> bool:
        """As for the first rank, of what this process has noted."""
        key = json.dumps([kind, text, step, str(more)])
        if self._noted is None:
            self._noted = set()
        new = key not in self._noted
        self._noted.add(key)
        return new

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        return dict(summary)

    def _write_recipe(self) -> None:
        pass
