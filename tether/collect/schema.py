"""The tables of a desk, and connections to them: SQLite with a write-ahead log, each commit flushed to the disk.

One connection for each thread of each process. Within a process writers queue at a lock of our own, because SQLite's waiting is
not fair; other processes wait for up to half a minute.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from tether.errors import UserError

FORMAT = 1
WAIT_S = 30.0

TABLES = """
CREATE TABLE IF NOT EXISTS items (
    place   INTEGER PRIMARY KEY,         -- in the order in which they came
    id      TEXT NOT NULL UNIQUE,
    content TEXT NOT NULL,               -- Item.as_row as JSON
    counted INTEGER NOT NULL DEFAULT 0,  -- votes that are opinions: not undone, no repeat, no skip
    spread  REAL                         -- how unsure a reward model is of it
);
CREATE TABLE IF NOT EXISTS annotators (
    id         INTEGER PRIMARY KEY,
    name       TEXT NOT NULL,
    same       TEXT NOT NULL UNIQUE,     -- the name without regard to case and blanks
    token      TEXT NOT NULL UNIQUE,
    created_at TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS assignments (
    id        INTEGER PRIMARY KEY AUTOINCREMENT,
    annotator INTEGER NOT NULL REFERENCES annotators,
    item      INTEGER NOT NULL REFERENCES items,
    sides     TEXT NOT NULL,             -- the order shown, as JSON
    repeat    INTEGER NOT NULL,
    chosen_by TEXT NOT NULL,
    shown_at  TEXT,
    open      INTEGER NOT NULL           -- waits for a vote
);
CREATE UNIQUE INDEX IF NOT EXISTS given_once ON assignments (annotator, item) WHERE repeat = 0;
CREATE INDEX IF NOT EXISTS open_assignments ON assignments (annotator) WHERE open;
CREATE INDEX IF NOT EXISTS of_item ON assignments (item);
CREATE TABLE IF NOT EXISTS votes (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    assignment INTEGER NOT NULL REFERENCES assignments,
    outcome    TEXT NOT NULL,
    ranks      TEXT,
    strength   INTEGER,
    reason     TEXT NOT NULL,
    voted_at   TEXT,
    seconds    REAL,
    undone_at  TEXT,
    source     TEXT NOT NULL DEFAULT '',
    mark       TEXT UNIQUE,              -- names an imported vote, so that importing twice adds it once
    extra      TEXT NOT NULL DEFAULT '{}'
);
CREATE UNIQUE INDEX IF NOT EXISTS one_vote ON votes (assignment) WHERE undone_at IS NULL;
"""


class Store:
    """Connections to one database file. `reading()` and `writing()` are transactions: all of it happens, or nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        self._writer = threading.Lock()
        self._process = os.getpid()

    def create(self) -> None:
        connection = self._connection()
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise UserError(
                "the folder's file system cannot hold a write-ahead log", where=str(self.path), remedy="Use a folder on a local disk."
            )
        connection.executescript(TABLES)
        connection.execute(f"PRAGMA user_version = {FORMAT}")

    def check(self) -> None:
        """UserError where the file is no desk of a format that is known."""
        with self.reading() as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != FORMAT:
            words = "the file holds no desk" if version == 0 else f"the desk has format {version}, and this Tether knows {FORMAT}"
            raise UserError(words, where=str(self.path), remedy="Install the version of Tether that made it.")

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self._told(), self._transaction("BEGIN") as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """On the disk when the block has ended; undone when it raises."""
        with self._writer, self._told(), self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    def close(self) -> None:
        """Closes this thread's connection; those of other threads close with their threads."""
        if (connection := getattr(self._local, "connection", None)) is not None:
            connection.close()
            self._local.connection = None

    def _connection(self) -> sqlite3.Connection:
        if self._process != os.getpid():
            # A connection must not be used in a forked process, nor closed there: it is left behind.
            self._local, self._writer, self._process = threading.local(), threading.Lock(), os.getpid()
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(self.path, timeout=WAIT_S, isolation_level=None)
            connection.row_factory = sqlite3.Row
            for pragma in ("synchronous = FULL", "fullfsync = ON", "foreign_keys = ON"):
                connection.execute(f"PRAGMA {pragma}")
            self._local.connection = connection
        return connection

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        connection = self._connection()
        connection.execute(begin)
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back by itself
                connection.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What the disk or another process is to blame for, in a sentence; a fault of ours stays a traceback."""
        try:
            yield
        except (sqlite3.OperationalError, sqlite3.DatabaseError) as error:
            if isinstance(error, (sqlite3.IntegrityError, sqlite3.ProgrammingError)) or "syntax" in str(error) or "no such" in str(error):
                raise
            remedy = "Is there room on the disk, and may this user write there? No vote was lost or counted by this."
            raise UserError(f"the desk cannot be read or written: {error}", where=str(self.path), remedy=remedy) from error
