"""`Desk`: what is compared, by whom, and what they said. A folder with a database; the database is the only state.

A vote is on the disk before `vote` returns. What an annotator has in front of them is on the disk too, so a reload or a crash
shows the same item with the same sides; a ballot sent twice is one vote.
"""

from __future__ import annotations

import json
import sqlite3
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tether.atomic import write_file
from tether.collect import assign, records
from tether.collect.assign import stamp
from tether.collect.ballots import AlreadyVoted, BadBallot, Ballot, Opinion, Vote, opinion_of
from tether.collect.imported import Added, ImportedVote, add_votes
from tether.collect.items import Item
from tether.collect.records import Annotator, Shown
from tether.collect.schema import FORMAT, Store
from tether.errors import UserError
from tether.settings import Settings

__all__ = ["Added", "AlreadyVoted", "Annotator", "BadBallot", "Ballot", "Desk", "DeskSettings", "Progress", "Shown", "Vote"]

SETTINGS_FILE, DATABASE = "desk.json", "desk.sqlite"


class DeskSettings(Settings):
    votes_per_item: int = Field(default=1, ge=1, description="Opinions wanted of each item, from as many annotators.")
    repeat_share: float = Field(
        default=0.1, ge=0, le=0.5, description="Share of items shown again to whoever voted on them: self-consistency."
    )
    choice: Literal["random", "uncertain"] = Field(
        default="random", description="uncertain: what a reward model is least sure of comes first."
    )
    guidelines: str = Field(default="", description="What annotators read first, in Markdown.")
    seed: int = Field(default=0, description="Decides the order of items and the sides.")
    reasons: tuple[str, ...] = Field(default=(), description="Reasons offered for a choice; free text is always possible.")
    strength: bool = Field(default=True, description="Ask how much better the better answer is.")
    hold_minutes: float = Field(default=30.0, gt=0, description="How long an item in front of one annotator is kept from others.")


@dataclass(frozen=True)
class Progress:
    """`done` of the `total` opinions wanted are there; `mine` are this annotator's votes; `left` items may still come to them."""

    done: int
    mine: int
    total: int
    left: int


def _utc() -> datetime:
    return datetime.now(timezone.utc)


class Desk:
    """Safe to use from many threads and processes at once."""

    def __init__(self, folder: Path, settings: DeskSettings, store: Store, now: Callable[[], datetime] = _utc) -> None:
        self.folder, self.settings, self.store, self._now = folder, settings, store, now

    @classmethod
    def create(cls, folder: str | Path, settings: DeskSettings | None = None, *, now: Callable[[], datetime] = _utc) -> Desk:
        """A new desk. UserError where there is one already, or a file in the way."""
        place = Path(folder).expanduser()
        if (place / SETTINGS_FILE).exists():
            raise UserError("there is a desk already", where=str(place), remedy="Open it, or name another folder.")
        try:
            place.mkdir(parents=True, exist_ok=True)
            if any(p for p in place.iterdir() if not p.name.startswith(DATABASE)):
                raise UserError("the folder is not empty", where=str(place), remedy="Name a new folder for the desk.")
            store = Store(place / DATABASE)
            store.create()
            desk = cls(place, settings or DeskSettings(), store, now)
            desk._write_settings()  # last: a folder with this file is a whole desk
        except (OSError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"no desk can be made here: {reason}", where=str(place), remedy="Name a folder you may write.") from error
        return desk

    @classmethod
    def open(cls, folder: str | Path, *, now: Callable[[], datetime] = _utc) -> Desk:
        place = Path(folder).expanduser()
        file = place / SETTINGS_FILE
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            fields = {**stored["settings"], "reasons": tuple(stored["settings"].get("reasons", ()))}
        except FileNotFoundError:
            raise UserError("there is no desk", where=str(place), remedy="`tether collect FILE` makes one.") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"the settings of the desk cannot be read: {error}", where=str(file)) from error
        if stored.get("format") != FORMAT or not (place / DATABASE).exists():
            words = "the database of the desk is missing" if stored.get("format") == FORMAT else "the desk has another format"
            raise UserError(words, where=str(place), remedy="Restore the whole folder, with the version of Tether that made it.")
        store = Store(place / DATABASE)
        store.check()
        return cls(place, DeskSettings(**fields), store, now)

    def change(self, **changes: Any) -> DeskSettings:
        """Other settings from now on; votes that were given stay."""
        self.settings = self.settings.replace(**changes)
        self._write_settings()
        return self.settings

    def close(self) -> None:
        self.store.close()

    def _write_settings(self) -> None:
        content = {"format": FORMAT, "settings": self.settings.model_dump(mode="json")}
        write_file(self.folder / SETTINGS_FILE, json.dumps(content, indent=2) + "\n")

    # -- items and annotators ------------------------------------------------------------------------------------------

    def add_items(self, items: Iterable[Item]) -> int:
        """How many of them were new. UserError where an id stands for something else already."""
        with self.store.writing() as connection:
            return sum(records.add_item(connection, item) for item in items)

    def items(self) -> dict[str, Item]:
        """By id, in the order in which they came."""
        with self.store.reading() as connection:
            rows = connection.execute("SELECT id, content FROM items ORDER BY place").fetchall()
        return {r["id"]: Item.from_row(json.loads(r["content"])) for r in rows}

    def set_spreads(self, spreads: Mapping[str, float]) -> None:
        """How unsure a reward model is of each item, for the choice "uncertain"."""
        with self.store.writing() as connection:
            known = connection.executemany("UPDATE items SET spread = ? WHERE id = ?", [(float(s), i) for i, s in spreads.items()])
            if known.rowcount != len(spreads):
                raise UserError("some of the scored items are not on this desk", where=str(self.folder), remedy="Score desk.items().")

    def annotator(self, name: str) -> Annotator:
        """Whoever has this name, a new annotator where nobody has. Case and blanks do not make another person."""
        shown = " ".join(unicodedata.normalize("NFC", name).split())
        if not 1 <= len(shown) <= 80 or any(unicodedata.category(c)[0] == "C" for c in shown):
            raise UserError("a name has 1 to 80 printable characters", where=repr(name)[:60], remedy="Choose another name.")
        with self.store.writing() as connection:
            return records.add_annotator(connection, shown, stamp(self._now()))

    def annotators(self) -> list[Annotator]:
        with self.store.reading() as connection:
            return [records.read_annotator(r) for r in connection.execute("SELECT * FROM annotators ORDER BY id")]

    def by_token(self, token: str) -> Annotator | None:
        with self.store.reading() as connection:
            row = connection.execute("SELECT * FROM annotators WHERE token = ?", (token,)).fetchone()
        return None if row is None else records.read_annotator(row)

    # -- a turn at the desk --------------------------------------------------------------------------------------------

    def next(self, annotator: int) -> Shown | None:
        """What this annotator has to vote on. The same until they have, in the same order; None when nothing is left for them."""
        with self.store.reading() as connection:
            self._known(connection, annotator)
            found = records.waiting(connection, annotator)
        if found is not None and not found["stale"]:
            return records.read_shown(found)
        with self.store.writing() as connection:
            now = self._now()
            found = records.waiting(connection, annotator)  # another page of theirs may have come first
            if found is None:
                if not self._assign(connection, annotator, now):
                    return None
                found = records.waiting(connection, annotator)
            assert found is not None
            if found["stale"]:
                # It lay aside while an earlier vote was taken back: its time starts when it comes back.
                connection.execute("UPDATE assignments SET shown_at = ? WHERE id = ?", (stamp(now), found["id"]))
        return records.read_shown(found)

    def _assign(self, connection: sqlite3.Connection, annotator: int, now: datetime) -> bool:
        """Put an item before the annotator. False where there is none for them."""
        s = self.settings
        (shown,) = connection.execute("SELECT count(*) FROM assignments WHERE annotator = ?", (annotator,)).fetchone()
        rng = assign.generator(s.seed, annotator, shown)
        choice = assign.choose(
            connection,
            annotator,
            rng,
            wanted=s.votes_per_item,
            uncertain=s.choice == "uncertain",
            repeat_share=s.repeat_share,
            now=now,
            hold_minutes=s.hold_minutes,
        )
        if choice is None:
            return False
        (content,) = connection.execute("SELECT content FROM items WHERE place = ?", (choice.item,)).fetchone()
        order = list(range(len(json.loads(content)["answers"])))
        rng.shuffle(order)
        records.add_assignment(
            connection, annotator, choice.item, order, repeat=choice.repeat, chosen_by=choice.chosen_by, shown_at=stamp(now)
        )
        return True

    def vote(self, annotator: int, ballot: Ballot) -> Vote:
        """On the disk before it returns. The same ballot again gives the first vote again; another one raises AlreadyVoted.

        Raises BadBallot, and writes nothing, where the ballot is no choice that was offered.
        """
        with self.store.writing() as connection:
            given = connection.execute("SELECT * FROM assignments WHERE id = ?", (ballot.assignment,)).fetchone()
            if given is None or given["annotator"] != annotator:
                raise BadBallot(f"page {ballot.assignment!r:.40} was not shown to this annotator", remedy="Load the page again.")
            opinion = opinion_of(ballot, json.loads(given["sides"]), strength_asked=self.settings.strength)
            if not given["open"]:
                (found,) = records.read_votes(connection, "undone_at IS NULL AND assignment = ?", ballot.assignment)
                if Opinion(found.outcome, found.ranks, found.strength, found.reason) != opinion:
                    raise AlreadyVoted("another vote was given on this page before", remedy="Undo it first, or go on to the next item.")
                return found
            now = self._now()
            seconds = max(0.0, (now - datetime.fromisoformat(given["shown_at"])).total_seconds())
            number = records.add_vote(connection, ballot.assignment, opinion, voted_at=stamp(now), seconds=seconds)
            (vote,) = records.read_votes(connection, "votes.id = ?", number)
        return vote

    def undo(self, annotator: int) -> Shown | None:
        """Takes back this annotator's last vote, which stays in the history, and shows its item again. None when there is none."""
        with self.store.writing() as connection:
            self._known(connection, annotator)
            if not records.undo_last(connection, annotator, stamp(self._now())):
                return None
            found = records.waiting(connection, annotator)
            assert found is not None
        return records.read_shown(found)

    # -- what was said -------------------------------------------------------------------------------------------------

    def votes(self, *, undone: bool = False) -> list[Vote]:
        """All votes in the order in which they came; with those that were taken back where `undone`."""
        with self.store.reading() as connection:
            return records.read_votes(connection, "1" if undone else "undone_at IS NULL")

    def add_votes(self, votes: Sequence[ImportedVote]) -> Added:
        """Votes that were given elsewhere (`imports.load_votes`), with their items and annotators. Each once, however often they are added."""
        with self.store.writing() as connection:
            return add_votes(connection, votes, stamp(self._now()))

    def progress(self, annotator: int) -> Progress:
        wanted = self.settings.votes_per_item
        with self.store.reading() as connection:
            self._known(connection, annotator)
            done, n = connection.execute("SELECT coalesce(sum(min(counted, ?)), 0), count(*) FROM items", (wanted,)).fetchone()
            (mine,) = connection.execute(
                "SELECT count(*) FROM votes JOIN assignments ON assignments.id = assignment WHERE annotator = ? AND undone_at IS NULL",
                (annotator,),
            ).fetchone()
            (open_ones,) = connection.execute("SELECT count(*) FROM assignments WHERE annotator = ? AND open", (annotator,)).fetchone()
            # Without regard to what others have in front of them just now: they may leave it.
            left = len(assign.wanting(connection, annotator, wanted, since=None))
        return Progress(done, mine, n * wanted, left + open_ones)

    def _known(self, connection: sqlite3.Connection, annotator: int) -> None:
        if connection.execute("SELECT 1 FROM annotators WHERE id = ?", (annotator,)).fetchone() is None:
            raise UserError(f"there is no annotator {annotator}", where=str(self.folder), remedy="Give a name first.")
