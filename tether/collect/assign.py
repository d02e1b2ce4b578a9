"""Which item an annotator sees next.

1. With chance `repeat_share` an item of the annotator's own, voted on at least `REPEAT_GAP` votes ago and not repeated yet.
2. Else an item that wants votes and that this annotator has not seen: by choice "uncertain" the one of which the reward model is
   least sure; by choice "random" one at random, items already begun before others, so that whenever people stop few are half done.

An item in front of somebody else counts as voted on for `hold_minutes`, so that twenty people do not all vote on the last item.
Draws depend on the desk's seed, the annotator and how much they were shown, on nothing else.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

REPEAT_GAP = 5


def stamp(moment: datetime) -> str:
    """UTC in a form whose order as text is the order in time."""
    return moment.isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Choice:
    """`item` is the place of the item in the desk; `sides` the order in which its answers are shown."""

    item: int
    repeat: bool
    chosen_by: str


WANTING = """
SELECT items.place, items.spread, items.counted + coalesce(held.n, 0) AS taken
FROM items LEFT JOIN (
    SELECT item, count(*) AS n FROM assignments WHERE open AND repeat = 0 AND shown_at >= :since AND annotator != :me GROUP BY item
) AS held ON held.item = items.place
WHERE taken < :wanted AND NOT EXISTS (SELECT 1 FROM assignments WHERE annotator = :me AND item = items.place AND repeat = 0)
ORDER BY items.place
"""

# The annotator's live votes, newest first; those that are opinions and were given once may be asked again.
OWN = """
SELECT assignments.item, assignments.repeat, votes.outcome FROM votes JOIN assignments ON assignments.id = votes.assignment
WHERE annotator = :me AND undone_at IS NULL AND chosen_by != 'imported' ORDER BY votes.id DESC
"""


def generator(seed: int, annotator: int, shown: int) -> random.Random:
    return random.Random(f"{seed}:{annotator}:{shown}")


def wanting(connection: sqlite3.Connection, annotator: int, wanted: int, since: str | None) -> list[sqlite3.Row]:
    """Items that this annotator may be given, each with its votes and holds (`taken`) and `spread`.

    What was put before others at `since` or later is held for them; None holds nothing.
    """
    return connection.execute(WANTING, {"since": since, "me": annotator, "wanted": wanted}).fetchall()


def choose(
    connection: sqlite3.Connection,
    annotator: int,
    rng: random.Random,
    *,
    wanted: int,
    uncertain: bool,
    repeat_share: float,
    now: datetime,
    hold_minutes: float,
) -> Choice | None:
    """None when there is nothing (more) for this annotator."""
    rows = wanting(connection, annotator, wanted, stamp(now - timedelta(minutes=hold_minutes)))
    if not rows:
        return None  # a repeat alone is no work: it would keep people at the desk for nothing
    if rng.random() < repeat_share and (again := repeatable(connection.execute(OWN, {"me": annotator}).fetchall())):
        return Choice(rng.choice(again), True, "random")
    scored = [r for r in rows if r["spread"] is not None] if uncertain else []
    if scored:
        widest = max(r["spread"] for r in scored)
        return Choice(rng.choice([r["place"] for r in scored if r["spread"] == widest]), False, "uncertain")
    most = max(r["taken"] for r in rows)
    return Choice(rng.choice([r["place"] for r in rows if r["taken"] == most]), False, "random")


def repeatable(own: Sequence[sqlite3.Row]) -> list[int]:
    """Items of `own` votes (newest first) that may be shown again."""
    again = {r["item"] for r in own if r["repeat"]}
    return [r["item"] for r in own[REPEAT_GAP:] if not r["repeat"] and r["outcome"] != "skip" and r["item"] not in again]
