"""Running programs that a model wrote: each in processes of its own, shut in by the kernel, ended from outside.

Linux only. `Sandbox("auto")` takes the strongest isolation that this machine allows, after trying it (`probe`), and refuses where
there is none. `sandbox_child` says what is shut and how, `sandbox_harness` how a program is judged without being trusted.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tether.errors import UserError

Isolation = Literal["namespaces", "landlock"]
FOLDER = Path(__file__).parent
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo")
MAX_OUTPUT = 1 << 20
GONE_S = 2.0  # for killed processes to be seen off
START_S = 30.0  # for Python to start and shut itself in, on a busy machine


@dataclass(frozen=True)
class Limits:
    """What one program may use. `seconds` is wall-clock time from its start to its verdict."""

    seconds: float = 6.0
    cpu_s: int = 6
    memory: int = 1 << 30  # bytes of address space
    file_size: int = 16 << 20  # bytes of one file
    scratch: int = 32 << 20  # bytes of all files (with namespaces; otherwise file_size times the open files)
    open_files: int = 64
    threads: int = 32

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise UserError(f"must be above 0, got {value!r}", where=f"limits: {name}")


@dataclass(frozen=True)
class Outcome:
    """How the tests of one program went. `kind`: "passed", "failed", "time", "broken" (the tests or the sandbox, not the program)."""

    kind: Literal["passed", "failed", "time", "broken"]
    passed: int
    total: int
    why: str
    seconds: float


class Sandbox:
    """`isolation` is "auto", "namespaces" or "landlock"; UserError when the machine does not allow it."""

    def __init__(self, isolation: str = "auto", limits: Limits | None = None, *, packages: bool = False) -> None:
        if not sys.platform.startswith("linux"):
            raise UserError(f"the code reward isolates programs with Linux, this is {sys.platform}", remedy="Run it in a Linux container.")
        if isolation not in ("auto", "namespaces", "landlock"):
            raise UserError(f"there is no isolation {isolation!r}", where="isolation", remedy="Use auto, namespaces or landlock.")
        self.limits, self.packages = limits or Limits(), packages
        self.isolation: Isolation = _choose(isolation)

    # -- programs ------------------------------------------------------------------------------------------------------

    def test(
        self, program: str, tests: Sequence[dict[str, Any]], *, setup: str = "", entry: str | None = None, all_needed: bool = True
    ) -> Outcome:
        """Run tests ({"code"} or {"call", "expected"}) against a program: two processes, values over pipes. See `run_tests`."""
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            fds = [fd for _ in range(3) for fd in os.pipe()]
            ask_r, ask_w, say_r, say_w, verdict_r, verdict_w = fds
            stack.callback(_close, [verdict_r])
            try:
                common = {"program": "", "tests": list(tests), "setup": setup, "entry": entry, "all_needed": all_needed}
                judge = self._start(stack, "tests", {**common, "read_fd": say_r, "write_fd": ask_w, "verdict_fd": verdict_w})
                suspect = self._start(stack, "program", {"program": program, "read_fd": ask_r, "write_fd": say_w})
            finally:
                _close([ask_r, ask_w, say_r, say_w, verdict_w])
            for child in (judge, suspect):
                if refused := child.refused():
                    return Outcome("broken", 0, len(tests), refused, time.monotonic() - start)
            lines, ended = _read_lines(verdict_r, time.monotonic() + self.limits.seconds)
        return _judged(lines, ended, len(tests), time.monotonic() - start)

    def script(self, program: str, stdin: str) -> tuple[str | None, str]:
        """(standard output, "") of a program run as a script; (None, why) when it failed, was late or said too much.

        Raises SandboxBroken when the sandbox itself could not start.
        """
        with contextlib.ExitStack() as stack:
            out_r, out_w = os.pipe()
            stack.callback(_close, [out_r])
            try:
                child = self._start(stack, "script", {"program": program, "stdin": stdin}, stdout=out_w)
            finally:
                _close([out_w])
            if refused := child.refused():
                raise SandboxBroken(refused)
            deadline = time.monotonic() + self.limits.seconds
            data, why = _read_all(out_r, deadline)
            if data is None:
                return None, why
            try:
                code = child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return None, f"still running after {self.limits.seconds:g} s"
        if code != 0:
            return None, f"ended with exit code {code}"
        return data.decode(errors="replace"), ""

    def _start(self, stack: contextlib.ExitStack, role: str, config: dict[str, Any], stdout: int | None = None) -> _Child:
        scratch = tempfile.mkdtemp(prefix="tether-sandbox-")
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        status_r, status_w = os.pipe()
        fds = [config[name] for name in ("read_fd", "write_fd", "verdict_fd") if name in config]
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", *([] if self.packages else ["-S"]), str(FOLDER / "sandbox_child.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL if stdout is None else stdout,
                stderr=subprocess.DEVNULL,
                pass_fds=[*fds, status_w],
                start_new_session=True,
                cwd="/",
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/scratch", "OPENBLAS_NUM_THREADS": "1"},
            )
        finally:
            _close([status_w])
        child = _Child(process, status_r, self.isolation == "namespaces")
        stack.callback(child.end)
        message = {
            **config,
            "role": role,
            "status_fd": status_w,
            "fds": fds,
            "isolation": self.isolation,
            "scratch": scratch,
            "readable": readable(self.packages),
            "limits": asdict(self.limits),
            "modules": _modules(),
        }
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(message).encode())
            process.stdin.close()
        return child


class SandboxBroken(Exception):
    """The sandbox could not be put in place; nothing was run."""


class _Child:
    def __init__(self, process: subprocess.Popen[bytes], status_fd: int, supervised: bool) -> None:
        self.process, self.status_fd, self.supervised = process, status_fd, supervised

    def refused(self) -> str | None:
        """Why nothing runs, or None once everything is shut and the program has started."""
        data, why = _read_all(self.status_fd, time.monotonic() + START_S)
        if data == b"ok":
            return None
        return f"the sandbox did not start: {(data or b'').decode(errors='replace') or why or 'it ended at once'}"

    def end(self) -> None:
        """Kill everything that belongs to it, and wait until it is gone."""
        if self.supervised:  # its supervisor kills the program and sees it off
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self._await_group()
        _close([self.status_fd])
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def _await_group(self) -> None:
        """A killed process whose parent is dead is seen off by the system, a moment later."""
        deadline = time.monotonic() + GONE_S
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < deadline:
                os.killpg(self.process.pid, 0)
                time.sleep(0.005)


def _judged(lines: list[dict[str, Any]], ended: bool, total: int, seconds: float) -> Outcome:
    """From what the tests' process reported. Passing needs its word on every test and its last word."""
    passed = {m["test"] for m in lines if m.get("ok") is True}
    broken = next((m["broken"] for m in lines if "broken" in m), None)
    why = next((m["load"] for m in lines if "load" in m), None) or next((m["why"] for m in lines if m.get("why")), "")
    if broken is not None:
        return Outcome("broken", 0, total, broken, seconds)
    if total and len(passed) == total and any(m.get("done") == total for m in lines):
        return Outcome("passed", total, total, "", seconds)
    if not ended:
        return Outcome("time", len(passed), total, why or f"no verdict after {seconds:.1f} s", seconds)
    return Outcome("failed", min(len(passed), max(total - 1, 0)), total, why or "the tests ended early", seconds)


def _read_lines(fd: int, deadline: float) -> tuple[list[dict[str, Any]], bool]:
    data, _ = _read_all(fd, deadline, keep=True)
    lines = (data or b"").split(b"\n")
    return [json.loads(line) for line in lines[:-1]], time.monotonic() < deadline


def _read_all(fd: int, deadline: float, *, keep: bool = False) -> tuple[bytes | None, str]:
    """Everything until the other end closes; (None, why) when it is late or too much (what came so far with `keep`)."""
    parts: list[bytes] = []
    size = 0
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            return (b"".join(parts) if keep else None), "no end within the time limit"
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return b"".join(parts), ""
        parts.append(chunk)
        size += len(chunk)
        if size > MAX_OUTPUT:
            return (b"".join(parts) if keep else None), f"more than {MAX_OUTPUT >> 10} KiB of output"


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


@functools.cache
def _modules() -> list[tuple[str, str]]:
    names = ("sandbox_values", "sandbox_harness")
    return [(f"tether.rewards.{name}", Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")) for name in names]


@functools.cache
def readable(packages: bool) -> tuple[str, ...]:
    """What a sandboxed process may read: the system's libraries and Python's own, none of them inside another."""
    paths = sysconfig.get_paths()
    wanted = [*SYSTEM, paths["stdlib"], paths["platstdlib"], sysconfig.get_config_var("LIBDIR") or ""]
    wanted += [paths["purelib"], paths["platlib"]] if packages else []
    found: list[str] = []
    for path in sorted({p for p in wanted if p and os.path.exists(p)}, key=len):
        if os.path.islink(path) or not any(path == other or path.startswith(other + "/") for other in found if not os.path.islink(other)):
            found.append(path)
    return tuple(found)


PROBE = """
def look(secret, outside):
    import os, socket, subprocess, threading
    done = []
    def attempt(name, what):
        try:
            what()
            done.append(name)
        except BaseException:
            pass
    attempt('network', lambda: socket.socket().connect(('127.0.0.1', 9)))
    attempt('socket', socket.socket)
    attempt('process', lambda: subprocess.run(['true']))
    attempt('fork', os.fork)
    attempt('read', lambda: open(secret).read())
    attempt('write', lambda: open(outside, 'w'))
    attempt('signal', lambda: os.kill(os.getppid() or 1, 0))
    threading.Thread(target=lambda: open('here', 'w').write('x')).start()
    return done
"""


@functools.cache
def probe(isolation: Isolation) -> str | None:
    """None when this isolation holds on this machine, tried out with a program that attempts what it must not; else what is wrong."""
    sandbox = Sandbox.__new__(Sandbox)
    sandbox.limits, sandbox.packages, sandbox.isolation = Limits(seconds=30.0, cpu_s=20), False, isolation
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_text("kept")
        outside = str(Path(folder) / "written")
        os.chmod(folder, 0o777)
        tests = [{"code": f"found = look({str(secret)!r}, {outside!r})\nassert set(found) <= {{'socket'}}, found\n"}]
        outcome = sandbox.test(PROBE, tests)
    return None if outcome.kind == "passed" else outcome.why or outcome.kind


def _choose(isolation: str) -> Isolation:
    kinds: tuple[Isolation, ...] = ("namespaces", "landlock") if isolation == "auto" else (isolation,)  # type: ignore[assignment]
    problems = {}
    for kind in kinds:
        problem = probe(kind)
        if problem is None:
            return kind
        problems[kind] = problem
    raise UserError(
        "this machine does not let programs be isolated: " + "; ".join(f"{k}: {v}" for k, v in problems.items()),
        where="isolation",
        remedy="Allow user namespaces (or run as root with CAP_SYS_ADMIN), or use a kernel with Landlock and seccomp. Nothing was run.",
    )
