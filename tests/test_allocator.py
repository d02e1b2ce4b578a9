"""Freed memory is used again without going back to the system."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

FAULTS = """
import resource, sys
from tether.allocator import keep_freed_memory

told = keep_freed_memory() if sys.argv[1] == "kept" else None

def write() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(64 << 20).count(1)
    block = bytearray(b"x" * (64 << 20))
    del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

write()
print(told, write())
"""


def faults(how: str, **environment: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    told, count = done.stdout.split()
    return told, int(count)


def test_a_block_that_was_freed_is_not_cleared_again() -> None:
    """The second time the same blocks are written, the kernel hands out no page anew; without it, every page of them."""
    told, kept = faults("kept")
    _, returned = faults("returned")
    if platform.libc_ver()[0] != "glibc":
        assert told == "False"
        return
    assert told == "True"
    assert kept < 200
    assert returned > 16 * kept


def test_what_the_environment_sets_stands() -> None:
    """With mapping asked for by the user, blocks go back as they would without tether."""
    names = {"MALLOC_MMAP_MAX_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_TOP_PAD_": "131072"}
    _, count = faults("kept", **names)
    if platform.libc_ver()[0] == "glibc":
        assert count > 10_000
