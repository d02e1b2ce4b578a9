"""Python threads with one torch thread each, for loops of many small tensor operations on CPU.

Splitting every small operation over torch's own threads means a barrier after each of them; a loop cut into shares has one at
its end, and does not stall when another process takes a core away.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
_pools: dict[int, ThreadPoolExecutor] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # a forked child has none of these threads


def workers(device: torch.device) -> int:
    """How many shares a loop on `device` is best cut into."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def run_shares(work: Callable[[T], None], shares: Sequence[T]) -> None:
    """`work(share)` for each share, at once, without recording gradients; the first exception is raised here."""
    if len(shares) == 1:
        with torch.no_grad():
            work(shares[0])
        return

    def quietly(share: T) -> None:
        with torch.no_grad():
            work(share)

    for future in [_pool(len(shares)).submit(quietly, share) for share in shares]:
        future.result()


def _pool(size: int) -> ThreadPoolExecutor:
    if size not in _pools:
        threads = torch.get_num_threads()
        started = threading.Barrier(size + 1)

        def start() -> None:
            torch.set_num_threads(1)  # of this thread, and of threads still to come: hence put back below
            started.wait()

        pool = ThreadPoolExecutor(size, thread_name_prefix="tether")
        waiting = [pool.submit(start) for _ in range(size)]
        started.wait()
        for future in waiting:
            future.result()
        torch.set_num_threads(threads)
        _pools[size] = pool
    return _pools[size]
