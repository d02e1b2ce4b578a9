"""The other processes of a run with several ranks: noticed when one is gone, and who says so.

A rank that ends without a word (killed, out of memory) leaves the others in a meeting that never comes to an end. Each rank therefore
looks after those on its own machine, from a thread, because a rank that waits or computes cannot. What goes wrong is said by one rank.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil

from tether.errors import RankLost, UserError

EVERY_S, PAUSE_S = 0.5, 1.0  # between two looks; for a rank that ends with a word of its own to say it
VERDICT = "TETHER_VERDICT"  # a file in which the rank that spoke leaves its exit code, for whoever started the ranks


class Peers:
    """`others` are (rank, host, process id) of all ranks; `store` is where they leave a mark for each other."""

    def __init__(self, rank: int, others: list[tuple[int, str, int]], store: Any) -> None:
        host = socket.gethostname()
        self.rank, self.size = rank, len(others)
        self.here = {
            number: psutil.Process(pid) for number, there, pid in others if there == host and number != rank and psutil.pid_exists(pid)
        }
        self.folder: str | None = None  # of the run, once there is one
        self._store, self._spoke = store, False
        self._leaving = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within, this process ends when a peer does, with one sentence from one of those that are left."""
        thread = threading.Thread(target=self._watch, name="tether-peers", daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            # While the connections still stand: when they close, the others will have something to say, too.
            if self.rank and isinstance(error, UserError):
                time.sleep(PAUSE_S / 2)  # where all have found the same mistake the first tells it, after what it has said before
            lost = None if isinstance(error, (KeyboardInterrupt, SystemExit)) else self._lost_soon(error)
            self.claim()
            if lost is not None:
                raise RankLost(self.sentence(lost)) from None
            raise
        finally:
            self._leaving.set()

    def claim(self) -> bool:
        """Whether this rank is the one that says what went wrong. The first that asks is."""
        if not self._spoke:
            with contextlib.suppress(Exception):  # the store dies with the machine that holds it
                key = "tether/spokesman"
                self._spoke = self._store.compare_set(key, "", str(self.rank)).decode() == str(self.rank)
        return self._spoke

    def leave(self) -> None:
        """All is done: from now on a peer may end."""
        self._leaving.set()

    def lost(self) -> int | None:
        """The lowest rank of this machine that is gone."""
        return next((number for number, process in sorted(self.here.items()) if not _alive(process)), None)

    def sentence(self, lost: int) -> str:
        command = f"tether resume {self.folder} --ranks {self.size}" if self.folder else "the same command"
        return (
            f"rank {lost} of {self.size} (process {self.here[lost].pid}) is gone without a word: it was killed, most often because memory ran "
            f"out. All ranks have stopped, and what was saved is whole. Continue with: {command}"
        )

    def _lost_soon(self, error: BaseException) -> int | None:
        """Whether a connection broke because its other end is gone: the process may take a moment to disappear."""
        if not isinstance(error, RuntimeError) or hasattr(error, "exit_code"):  # typer's way to end is one, too
            return None
        deadline = time.monotonic() + 2 * PAUSE_S
        while (lost := self.lost()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return lost

    def _watch(self) -> None:
        while not self._leaving.wait(EVERY_S):
            lost = self.lost()
            if lost is not None and not self._leaving.wait(PAUSE_S):
                if self.claim():
                    print(f"error: {self.sentence(lost)}", file=sys.stderr, flush=True)
                    leave_verdict(1)
                os._exit(1)


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def leave_verdict(code: int) -> None:
    path = os.environ.get(VERDICT)
    if path:
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write(str(code))
