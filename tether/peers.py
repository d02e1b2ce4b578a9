"""The other processes of a run with several ranks: noticed when one is gone, and who says so.

A rank that ends without a word (killed, out of memory) leaves the others in a meeting that never comes to an end. Each rank therefore
looks after those on its own machine, from a thread, because a rank that waits or computes cannot. What goes wrong is said by one rank,
or by the command that started them all where that knows better.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from tether.errors import RankLost

EVERY_S, PAUSE_S = 0.5, 1.0  # between two looks; for a rank that ends with a word of its own to say it
WORDS = "TETHER_WORDS"  # a folder in which ranks leave word for `tether ... --ranks`, which has started them:
RUN, EXIT = "run", "exit"  # where the run is, and the exit code of the rank that spoke


class Peers:
    """`others` are (rank, host, process id) of all ranks; `store` is where they leave a mark for each other."""

    def __init__(self, rank: int, others: list[tuple[int, str, int]], store: Any) -> None:
        host = socket.gethostname()
        self.rank, self.size = rank, len(others)
        self.one_machine = all(there == host for _, there, _ in others)
        self.here = {
            number: psutil.Process(pid) for number, there, pid in others if there == host and number != rank and psutil.pid_exists(pid)
        }
        self.run: str | None = None  # its folder, once there is one
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._store, self._spoke = store, False
        self._leaving = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within, this process ends when a peer does, with one sentence from one of those that are left."""
        thread = threading.Thread(target=self._watch, name="tether-peers", daemon=True)
        thread.start()
        main = threading.current_thread() is threading.main_thread()  # nowhere else does Python deliver signals
        before = signal.signal(signal.SIGTERM, self._on_term) if main else None
        try:
            yield
        except BaseException as error:
            # While the connections still stand: when they close, the others will have something to say, too.
            why = self._broken_by(error)
            self.claim()
            if why is not None:
                raise RankLost(why) from None
            raise
        finally:
            if main:
                signal.signal(signal.SIGTERM, before)
            self._leaving.set()

    def claim(self) -> bool:
        """Whether this rank is the one that says what went wrong. The first that asks is."""
        if not self._spoke:
            try:
                self._spoke = self._store.compare_set("tether/spokesman", "", str(self.rank)).decode() == str(self.rank)
            except Exception:  # it is gone with the process that holds it: the lowest rank that is left on a machine
                self._spoke = not any(number < self.rank and _alive(process) for number, process in self.here.items())
        return self._spoke

    def found_run(self, folder: Path) -> None:
        self.run = str(folder)
        if self.rank == 0:
            leave_word(RUN, self.run)

    def leave(self) -> None:
        """All is done: from now on a peer may end."""
        self._leaving.set()

    def lost(self) -> int | None:
        """The lowest rank of this machine that is gone."""
        return next((number for number, process in sorted(self.here.items()) if not _alive(process)), None)

    def sentence(self, lost: int) -> str:
        how = "it was killed, most often because memory ran out"
        return sentence(lost, self.size, self.here[lost].pid, how, again(self.run, self.size, self.one_machine))

    def _broken_by(self, error: BaseException) -> str | None:
        """What to say of an error that is only the end of a connection. The process at its other end may take a moment to disappear."""
        if not isinstance(error, RuntimeError) or hasattr(error, "exit_code"):  # typer's way to end is one, too
            return None
        deadline = time.monotonic() + 2 * PAUSE_S
        while (lost := self.lost()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if lost is not None:
            return self.sentence(lost)
        if self.one_machine or not _of_connection(error):
            return None
        return (
            "a rank on another machine is gone, or the network to it is. All ranks have stopped, and what was saved is whole. "
            f"Continue with: {again(self.run, self.size, False)}"
        )

    def _watch(self) -> None:
        while not self._leaving.wait(EVERY_S):
            if self._launcher is not None and os.getppid() != self._launcher:
                self._launcher = None
                os.kill(os.getpid(), signal.SIGTERM)  # whoever started the ranks is gone: as if it had asked them to stop
            lost = self.lost()
            if lost is not None and not self._leaving.wait(PAUSE_S):
                if not launched() and self.claim():
                    print(f"error: {self.sentence(lost)}", file=sys.stderr, flush=True)
                os._exit(1)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        """Where no step is to be finished first. A launcher ends the ranks that are left in this way, too."""
        lost = self.lost()
        if lost is not None:
            raise RankLost(self.sentence(lost))
        raise KeyboardInterrupt


def again(run: str | None, n: int, one_machine: bool = True) -> str:
    """The command that continues a run on `n` ranks.

    >>> again("runs/a", 2), again("runs/a", 64, False), again(None, 2)
    ('tether resume runs/a --ranks 2', 'torchrun ... -m tether resume runs/a', 'the same command')
    """
    if run is None:
        return "the same command"
    return f"tether resume {run} --ranks {n}" if one_machine else f"torchrun ... -m tether resume {run}"


def sentence(rank: int, n: int, pid: int, how: str, command: str) -> str:
    return (
        f"rank {rank} of {n} (process {pid}) is gone: {how}. All ranks have stopped, and what was saved is whole. Continue with: {command}"
    )


def launched() -> bool:
    """Whether `tether ... --ranks` has started this rank. It sees how a rank ended, which ranks do not."""
    return WORDS in os.environ


def leave_word(name: str, text: str) -> None:
    folder = os.environ.get(WORDS)
    if folder:
        with contextlib.suppress(OSError):
            (Path(folder) / name).write_text(text, encoding="utf-8")


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _of_connection(error: RuntimeError) -> bool:
    """Gloo's errors are plain ones: "[.../gloo/transport/tcp/pair.cc:534] Connection closed by peer"."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or ("gloo" in str(error) and "onnection" in str(error))
