"""Desks, items and votes for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tether.collect.ballots import Vote
from tether.collect.desk import Desk, DeskSettings
from tether.collect.items import Item, make_item


def item(i: int, *, answers: Sequence[str] = ("right answer", "wrong answer here"), models: Sequence[str | None] | None = None) -> Item:
    return make_item(f"question {i}", [f"{a} {i}" for a in answers], models=models, source=f"pairs.jsonl:{i + 1}")


def desk(folder: Path, items: Sequence[Item], **settings: Any) -> Desk:
    made = Desk.create(folder, DeskSettings(**{"repeat_share": 0.0, **settings}))
    made.add_items(items)
    return made


def make(folder: Path, n: int = 5, *, clock: Callable[[], datetime] | None = None, k: int = 2, **settings: Any) -> Desk:
    """`n` items of `k` answers."""
    options: dict[str, Any] = {} if clock is None else {"now": clock}
    desk = Desk.create(folder / "desk", DeskSettings(**{"repeat_share": 0.0, **settings}), **options)
    desk.add_items([item(i, answers=[f"answer {j}" for j in range(k)]) for i in range(n)])
    return desk


class Votes:
    """Makes votes with numbers of their own."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, item: Item | str, annotator: str, outcome: Any, **more: Any) -> Vote:
        self.n += 1
        named = item if isinstance(item, str) else item.id
        defaults: dict[str, Any] = {
            "ranks": None,
            "strength": None,
            "reason": "",
            "order": (0, 1),
            "shown_at": "2025-01-01T00:00:00+00:00",
            "voted_at": "2025-01-01T00:00:20+00:00",
            "seconds": 20.0,
            "repeat": False,
            "chosen_by": "random",
        }
        return Vote(self.n, self.n, named, annotator, outcome, **{**defaults, **more})
