"""A helper process that can be stopped: one line of JSON to it, one line back, within a time limit.

Started with `python -c`, not with multiprocessing, so that no script needs a main guard, no start method matters, and nothing is
pickled. The limit needs no signal in the caller: it holds in threads, event loops, process pools and on every platform, because a
worker that is late is killed and replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from tether.errors import UserError

START_LIMIT_S = 120.0
ROOT = str(Path(__file__).parents[2])
# The current folder is no place to import from: a file there may be called random.py.
BOOT = "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.append({root!r}); from {module} import main; main()"


class WorkerLate(Exception):
    """No reply within the limit. The worker is gone; the next question starts another."""


class WorkerDied(Exception):
    """The process ended, by its own fault or by a memory limit, before it replied."""


class Worker:
    """One process running `main()` of a module: a loop over lines of standard input (see `serve`). Thread-safe, one question at a time."""

    def __init__(self, module: str) -> None:
        self.module = module
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.Queue[str | None] = queue.Queue()
        self._owner, self._ready = os.getpid(), False

    def ask(self, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The reply. WorkerLate, WorkerDied; UserError when the worker cannot be started. Starting it does not count in the limit."""
        if self._owner != os.getpid():  # after a fork the process and its pipes belong to the parent
            self._owner, self._process, self._lock, self._ready = os.getpid(), None, threading.Lock(), False
        with self._lock:
            self._get_ready()
            try:
                return self._talk(question, limit_s)
            except (WorkerLate, WorkerDied):
                self._kill()
                self._spawn()  # it gets ready while the caller goes on
                raise
            except BaseException:
                self._kill()
                raise

    def _spawn(self) -> None:
        self._replies, self._ready = queue.Queue(), False
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT.format(root=ROOT, module=self.module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        threading.Thread(target=_pump, args=(self._process, self._replies), daemon=True).start()
        _STARTED.add(self)

    def _get_ready(self) -> None:
        """Wait for a process that answers. One that died before it was asked anything is replaced once."""
        if self._process is not None and self._ready and self._process.poll() is None:
            return
        for last in (False, True):
            if self._process is None or self._process.poll() is not None:
                self._kill()
                self._spawn()
            try:
                ready = self._talk({"ready": True}, START_LIMIT_S)
                break
            except (WorkerLate, WorkerDied) as error:
                self._kill()
                if last:
                    raise UserError(f"the helper process {self.module} did not start ({type(error).__name__}: {error})") from error
        if "error" in ready:
            self._kill()
            raise UserError(ready["error"], remedy=ready.get("remedy"))
        self._ready = True

    def _talk(self, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._replies.get(timeout=limit_s)
        except queue.Empty:
            raise WorkerLate(f"no reply within {limit_s:g} s") from None
        except OSError as error:
            raise WorkerDied(str(error)) from error
        if line is None:
            raise WorkerDied(f"exit code {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process = None

    def close(self) -> None:
        if self._owner == os.getpid():
            with self._lock:
                self._kill()


class Workers:
    """Several workers of one kind: whoever asks takes a free one and waits for it if none is."""

    def __init__(self, module: str, n: int = 1) -> None:
        if n < 1:
            raise UserError(f"at least one worker is needed, got {n}", where="workers")
        self.module, self.n = module, n
        self._new()

    def _new(self) -> None:
        self._owner = os.getpid()
        self._all = [Worker(self.module) for _ in range(self.n)]
        self._free: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in self._all:
            self._free.put(worker)

    def ask(self, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
        if self._owner != os.getpid():
            self._new()
        worker = self._free.get()
        try:
            return worker.ask(question, limit_s)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        for worker in self._all:
            worker.close()

    def __getstate__(self) -> dict[str, Any]:  # for process pools: settings travel, processes do not
        return {"module": self.module, "n": self.n}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module, self.n = state["module"], state["n"]
        self._new()


_STARTED: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for worker in list(_STARTED):
        worker.close()


def _pump(process: subprocess.Popen[str], replies: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(OSError, ValueError):
        for line in process.stdout:
            replies.put(line)
    replies.put(None)


def serve(answer: Any) -> None:
    """The worker's side: answer questions until the input ends or the parent is gone. What libraries print goes to stderr."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    for line in sys.stdin:
        replies.write(json.dumps(answer(json.loads(line))) + "\n")
        replies.flush()


def _leave_with(parent: int) -> None:
    """A forked sibling may keep our input open after the parent has died."""
    while os.getppid() == parent:
        time.sleep(2)
    os._exit(0)


__all__ = ["Worker", "WorkerDied", "WorkerLate", "Workers", "serve"]
