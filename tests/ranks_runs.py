"""Runs on several ranks for tests: processes as torchrun would start them, each going through a list of runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.whole_runs import weights

ROOT = Path(__file__).parents[1]


def start(n: int, specs: Sequence[dict[str, Any]], root: Path) -> tuple[Path, list[subprocess.Popen[str]]]:
    """`n` ranks of `ranks_worker.py` at the given {name, command, settings, folder}s."""
    path = root / f"specs-{n}.json"
    path.write_text(json.dumps(specs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tests.ranks_worker", str(path)]
    return path, [
        subprocess.Popen(words, cwd=ROOT, env={**here, "RANK": str(i)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for i in range(n)
    ]


def finish(path: Path, processes: Sequence[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """What each rank has seen."""
    complaints = [p.communicate(timeout=280)[1] for p in processes]
    assert [p.returncode for p in processes] == [0] * len(processes), "\n".join(complaints)[-4000:]
    seen: list[dict[str, Any]] = json.loads(path.with_suffix(".seen.json").read_text())
    return seen


def gap(one: Path, other: Path) -> float:
    """The largest difference between two model folders' weights."""
    a, b = weights(one), weights(other)
    assert sorted(a) == sorted(b)
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
