"""`ImportedVote`: a vote that was given elsewhere, and how it gets on a desk."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tether.collect import records
from tether.collect.ballots import Opinion, Outcome, Ranks
from tether.collect.items import Item, digest


@dataclass(frozen=True)
class ImportedVote:
    """`outcome` and `ranks` are about item.answers of this very item. `order`: places as they were shown, () where not known."""

    item: Item
    annotator: str
    outcome: Outcome
    ranks: Ranks | None = None
    strength: int | None = None
    reason: str = ""
    order: tuple[int, ...] = ()
    shown_at: str | None = None
    voted_at: str | None = None
    seconds: float | None = None
    repeat: bool = False
    source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Added:
    """What importing did: new items, new votes, how many of these are repeats, and votes that were there already."""

    items: int
    votes: int
    repeats: int
    known: int


def _marks(votes: Sequence[ImportedVote]) -> list[str]:
    """A name for each vote by what it says, the same whenever the file is read; equal votes of one file are told apart by number."""
    said: Counter[str] = Counter()
    found = []
    for v in votes:
        by_answer = sorted((a.id, r) for a, r in zip(v.item.answers, v.ranks or _places(v), strict=True))
        none_above = v.outcome if v.outcome in ("bad", "skip") else ""
        mark = digest("v", [v.item.id, v.annotator.casefold(), none_above, by_answer, v.strength, v.reason, v.voted_at])
        said[mark] += 1
        found.append(f"{mark}.{said[mark]}")
    return found


def _places(vote: ImportedVote) -> Sequence[int]:
    """Ranks that an outcome stands for; equal ones where it puts no answer above another."""
    return {"first": (1, 2), "second": (2, 1)}.get(vote.outcome, (1,) * len(vote.item.answers))


# There already: imported before, or given on this very desk, whose export comes back.
KNOWN = """
SELECT 1 FROM votes JOIN assignments ON assignments.id = votes.assignment
WHERE mark = :mark OR (annotator = :who AND item = :item AND voted_at = :when AND mark IS NULL)
"""


def add_votes(connection: sqlite3.Connection, votes: Sequence[ImportedVote], now: str) -> Added:
    """Inside a transaction of the caller's. A vote that is there already is left alone, so a file may be imported again.

    Of several votes by one annotator on one item the earliest is the opinion and the others are repeats.
    """
    ordered = sorted(zip(votes, _marks(votes), strict=True), key=lambda pair: pair[0].voted_at or "")
    items = added = repeats = known = 0
    for vote, mark in ordered:
        items += records.add_item(connection, vote.item)
        annotator = records.add_annotator(connection, vote.annotator, now)
        place, content = connection.execute("SELECT place, content FROM items WHERE id = ?", (vote.item.id,)).fetchone()
        if connection.execute(KNOWN, {"mark": mark, "when": vote.voted_at, "who": annotator.id, "item": place}).fetchone():
            known += 1
            continue
        given = "SELECT 1 FROM assignments WHERE annotator = ? AND item = ? AND repeat = 0"
        again = vote.repeat or connection.execute(given, (annotator.id, place)).fetchone() is not None
        opinion, order = _as_stored(vote, Item.from_row(json.loads(content)))
        number = records.add_assignment(connection, annotator.id, place, order, repeat=again, chosen_by="imported", shown_at=vote.shown_at)
        records.add_vote(
            connection,
            number,
            opinion,
            voted_at=vote.voted_at,
            seconds=vote.seconds,
            source=vote.source,
            mark=mark,
            extra=vote.extra,
        )
        added, repeats = added + 1, repeats + again
    return Added(items, added, repeats, known)


def _as_stored(vote: ImportedVote, stored: Item) -> tuple[Opinion, list[int]]:
    """The vote about the answers in the order in which the desk has them."""
    places = [stored.place(a.id) for a in vote.item.answers]
    outcome, ranks = vote.outcome, vote.ranks
    if outcome in ("first", "second"):
        outcome = "first" if places[0 if outcome == "first" else 1] == 0 else "second"
    if ranks is not None:
        ranks = tuple(ranks[places.index(i)] for i in range(len(places)))
    return Opinion(outcome, ranks, vote.strength, vote.reason), [places[i] for i in vote.order]
