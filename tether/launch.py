"""Several processes for one command on this machine, by torch's own launcher: what `torchrun` does, without its noise."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil

from tether.errors import UserError
from tether.peers import EXIT, RUN, WORDS, again, sentence

STOPPED = 130


def launch(words: Sequence[str], n: int) -> int:
    """Run `tether WORDS` on `n` ranks and return its exit code: that of the rank that spoke, where one went wrong.

    Where none spoke, this process says which rank is gone, and how it ended.
    """
    if n < 1:
        raise UserError(f"must be 1 or more, got {n}", where="--ranks", remedy="It is how many processes share the work.")
    _refuse_without_devices(n)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(threads_each(n)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    os.environ.setdefault("GLOO_LOG_LEVEL", "FATAL")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=n,
        run_id=f"tether-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.2,
        signals_to_handle="SIGQUIT",  # the others are handed on here: torch would end the ranks 30 s after the first signal
    )
    with _words() as folder, _silence(), Stop() as stop:
        try:
            elastic_launch(config, sys.executable)("-m", "tether", *words)
        except ChildFailedError as error:
            if told := _read(folder / EXIT):
                return int(told)
            if stop.asked:
                print("stopped", file=sys.stderr)
                return STOPPED
            print(f"error: {_lost(error.failures.values(), n, _read(folder / RUN))}", file=sys.stderr)
            return 1
    return 0


class Stop:
    """A context in which Ctrl-C or SIGTERM asks the ranks to stop: they finish their step and save. The second one ends them at once."""

    def __init__(self) -> None:
        self.asked = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under nohup the end of the terminal is ignored. SIGINT is taken even where it was ignored, as in a script's background job:
            # whoever sends it means it, and a run on one rank takes it too.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1
        ranks = psutil.Process().children()
        if not ranks:
            raise KeyboardInterrupt
        for process in ranks:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if self.asked == 1:
                    process.terminate()
                else:
                    os.killpg(process.pid, signal.SIGKILL)  # with what the rank itself has started


def _refuse_without_devices(n: int) -> None:
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else n
    if n > devices:
        raise UserError(
            f"{n} ranks need a CUDA device each, and this machine has {devices}",
            where="--ranks",
            remedy=f"Use --ranks {devices}, or CUDA_VISIBLE_DEVICES= (empty) for ranks on the CPU.",
        )


def threads_each(n: int) -> int:
    """How many threads each of `n` processes has of this machine's processors, as far as this process may use them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // n)


def free_port() -> int:
    """A port of this machine's own address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _words() -> Iterator[Path]:
    """A folder in which the ranks leave word for this process."""
    with tempfile.TemporaryDirectory(prefix="tether-ranks-") as folder:
        os.environ[WORDS] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ[WORDS]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """The launcher's log is about processes, not about what the user asked for."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _lost(failures: Iterable[Any], n: int, run: str | None) -> str:
    """Which rank went first: one that was killed rather than those that ended because of it, which exit with 1 or by the launcher's SIGTERM."""
    first = min(failures, key=lambda f: (f.exitcode in (1, -signal.SIGTERM), f.exitcode > 0))
    return sentence(first.local_rank, n, first.pid, _how(first.exitcode), again(run, n))


def _how(code: int) -> str:
    """
    >>> _how(-9), _how(-11), _how(3)
    ('killed by SIGKILL, most often because memory ran out', 'ended by SIGSEGV', 'ended with exit code 3 and without a word')
    """
    if code >= 0:
        return f"ended with exit code {code} and without a word"
    name = signal.Signals(-code).name
    return f"killed by {name}, most often because memory ran out" if name == "SIGKILL" else f"ended by {name}"
