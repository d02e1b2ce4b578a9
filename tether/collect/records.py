"""Rows of a desk's tables, read and written inside a transaction of the caller's."""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.collect.ballots import Opinion, Vote
from tether.collect.items import Item
from tether.errors import UserError


@dataclass(frozen=True)
class Annotator:
    id: int
    name: str
    token: str  # for a link that needs no name


@dataclass(frozen=True)
class Shown:
    """item.answers[order[0]] is left, or topmost."""

    assignment: int
    item: Item
    order: tuple[int, ...]
    repeat: bool
    chosen_by: str


# -- items and annotators ----------------------------------------------------------------------------------------------


def add_item(connection: sqlite3.Connection, item: Item) -> bool:
    """Whether it was new. An id stands for one prompt and the same answers, in whatever order: anything else is UserError."""
    row = connection.execute("SELECT content FROM items WHERE id = ?", (item.id,)).fetchone()
    if row is not None:
        known = Item.from_row(json.loads(row["content"]))
        if known.prompt != item.prompt or {(a.id, a.text) for a in known.answers} != {(a.id, a.text) for a in item.answers}:
            words = f"the id {item.id!r} stands for two different items, the first from {known.source or 'an earlier file'}"
            raise UserError(words, where=item.source or None, remedy="Give each item an id of its own.")
        return False
    connection.execute("INSERT INTO items (id, content) VALUES (?, ?)", (item.id, json.dumps(item.as_row())))
    return True


def add_annotator(connection: sqlite3.Connection, name: str, now: str) -> Annotator:
    connection.execute(
        "INSERT INTO annotators (name, same, token, created_at) VALUES (?, ?, ?, ?) ON CONFLICT (same) DO NOTHING",
        (name, name.casefold(), secrets.token_urlsafe(16), now),
    )
    return read_annotator(connection.execute("SELECT * FROM annotators WHERE same = ?", (name.casefold(),)).fetchone())


def read_annotator(row: sqlite3.Row) -> Annotator:
    return Annotator(row["id"], row["name"], row["token"])


# -- assignments -------------------------------------------------------------------------------------------------------


def add_assignment(
    connection: sqlite3.Connection, annotator: int, item: int, order: Sequence[int], *, repeat: bool, chosen_by: str, shown_at: str | None
) -> int:
    """An item put before an annotator, `item` being its place. It waits for a vote until `add_vote`."""
    values = (annotator, item, json.dumps(list(order)), int(repeat), chosen_by, shown_at)
    done = connection.execute(
        "INSERT INTO assignments (annotator, item, sides, repeat, chosen_by, shown_at, open) VALUES (?, ?, ?, ?, ?, ?, 1)", values
    )
    return int(done.lastrowid or 0)


# `stale`: other votes were given or taken back since it was shown, so that it was not what the annotator was looking at.
WAITING = """
SELECT assignments.*, items.content, assignments.shown_at < (
    SELECT max(max(votes.voted_at, coalesce(votes.undone_at, ''))) FROM votes JOIN assignments AS own ON own.id = votes.assignment
    WHERE own.annotator = assignments.annotator AND own.chosen_by != 'imported'
) AS stale
FROM assignments JOIN items ON items.place = assignments.item WHERE annotator = ? AND open ORDER BY assignments.id LIMIT 1
"""


def waiting(connection: sqlite3.Connection, annotator: int) -> sqlite3.Row | None:
    """What waits for this annotator's vote; the oldest where an undo has brought one back."""
    row: sqlite3.Row | None = connection.execute(WAITING, (annotator,)).fetchone()
    return row


def read_shown(row: sqlite3.Row) -> Shown:
    item = Item.from_row(json.loads(row["content"]))
    return Shown(row["id"], item, tuple(json.loads(row["sides"])), bool(row["repeat"]), row["chosen_by"])


# -- votes -------------------------------------------------------------------------------------------------------------

VOTES = """
SELECT votes.*, sides, shown_at, repeat, chosen_by, items.id AS item_id, annotators.name FROM votes
JOIN assignments ON assignments.id = votes.assignment
JOIN items ON items.place = assignments.item JOIN annotators ON annotators.id = assignments.annotator
"""


def add_vote(
    connection: sqlite3.Connection,
    assignment: int,
    opinion: Opinion,
    *,
    voted_at: str | None,
    seconds: float | None,
    source: str = "",
    mark: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> int:
    ranks = None if opinion.ranks is None else json.dumps(list(opinion.ranks))
    about = (assignment, opinion.outcome, ranks, opinion.strength, opinion.reason)
    done = connection.execute(
        """INSERT INTO votes (assignment, outcome, ranks, strength, reason, voted_at, seconds, source, mark, extra)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
        (*about, voted_at, seconds, source, mark, json.dumps(dict(extra or {}))),
    )
    connection.execute("UPDATE assignments SET open = 0 WHERE id = ?", (assignment,))
    _recount(connection, assignment)
    return int(done.lastrowid or 0)


def undo_last(connection: sqlite3.Connection, annotator: int, now: str) -> bool:
    """Whether there was a vote to take back. Imported votes were not given here and stay."""
    last = connection.execute(
        """SELECT votes.id, votes.assignment FROM votes JOIN assignments ON assignments.id = votes.assignment
        WHERE annotator = ? AND undone_at IS NULL AND chosen_by != 'imported' ORDER BY votes.id DESC LIMIT 1""",
        (annotator,),
    ).fetchone()
    if last is None:
        return False
    connection.execute("UPDATE votes SET undone_at = ? WHERE id = ?", (now, last["id"]))
    connection.execute("UPDATE assignments SET open = 1, shown_at = ? WHERE id = ?", (now, last["assignment"]))
    _recount(connection, last["assignment"])
    return True


def _recount(connection: sqlite3.Connection, assignment: int) -> None:
    """Opinions on the item of this assignment, counted again from the votes themselves."""
    connection.execute(
        """UPDATE items SET counted = (
            SELECT count(*) FROM votes JOIN assignments ON assignments.id = votes.assignment
            WHERE assignments.item = items.place AND undone_at IS NULL AND repeat = 0 AND outcome != 'skip'
        ) WHERE place = (SELECT item FROM assignments WHERE id = ?)""",
        (assignment,),
    )


def read_votes(connection: sqlite3.Connection, condition: str = "1", *values: Any) -> list[Vote]:
    rows = connection.execute(f"{VOTES} WHERE {condition} ORDER BY votes.id", values).fetchall()
    return [
        Vote(
            id=r["id"],
            assignment=r["assignment"],
            item=r["item_id"],
            annotator=r["name"],
            outcome=r["outcome"],
            ranks=None if r["ranks"] is None else tuple(json.loads(r["ranks"])),
            strength=r["strength"],
            reason=r["reason"],
            order=tuple(json.loads(r["sides"])),
            shown_at=r["shown_at"],
            voted_at=r["voted_at"],
            seconds=r["seconds"],
            repeat=bool(r["repeat"]),
            chosen_by=r["chosen_by"],
            undone=r["undone_at"] is not None,
            source=r["source"],
            extra=json.loads(r["extra"]),
        )
        for r in rows
    ]
