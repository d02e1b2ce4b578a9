"""Runs on several ranks for tests: processes as torchrun would start them, each going through a list of runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.whole_runs import weights
from tether.launch import free_port

ROOT = Path(__file__).parents[1]


def processes(n: int, command: Sequence[str], stdout: int, **environment: str) -> list[subprocess.Popen[str]]:
    """`n` processes that are each other's ranks."""
    here = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            command,
            env={**here, **environment, "RANK": str(i), "LOCAL_RANK": str(i)},
            cwd=ROOT,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(n)
    ]


def start(n: int, specs: Sequence[dict[str, Any]], root: Path) -> tuple[Path, list[subprocess.Popen[str]]]:
    """`n` ranks of `ranks_worker.py` at the given {name, command, settings, folder}s."""
    path = root / f"specs-{n}.json"
    path.write_text(json.dumps(specs))
    return path, processes(n, [sys.executable, "-m", "tests.ranks_worker", str(path)], subprocess.DEVNULL)


def finish(path: Path, workers: Sequence[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """What each rank has seen."""
    complaints = [p.communicate(timeout=280)[1] for p in workers]
    assert [p.returncode for p in workers] == [0] * len(workers), "\n".join(complaints)[-4000:]
    seen: list[dict[str, Any]] = json.loads(path.with_suffix(".seen.json").read_text())
    return seen


def gap(one: Path, other: Path) -> float:
    """The largest difference between two model folders' weights."""
    a, b = weights(one), weights(other)
    assert sorted(a) == sorted(b)
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
