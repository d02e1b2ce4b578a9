"""How fast ranks exchange numbers: measured between processes of this machine over gloo, or as it is given.

A meeting of all ranks takes a time of its own and one for each byte that reaches a rank; both are read off two sizes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from tether.errors import UserError
from tether.launch import free_port, threads_each

SMALL, LARGE = 2**16, 2**24  # bytes of one rank's part
ROUNDS = 5
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Link:
    """Bytes a second that reach one rank, and seconds a meeting takes before the first of them."""

    gathered: float
    summed: float
    latency: float = 0.0

    def seconds(self, size: float, meetings: int, *, summed: bool = False) -> float:
        return size / (self.summed if summed else self.gathered) + meetings * self.latency


def measure(ranks: int, *, threads: int | None = None) -> Link:
    """Between `ranks` processes of this machine, as training starts them: gloo, and the cores shared among them; NCCL where each has
    a device of its own."""
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    common["OMP_NUM_THREADS"] = str(threads or threads_each(ranks))
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tether.link"],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        told = [worker.communicate(timeout=PATIENCE_S) for worker in workers]
    except subprocess.TimeoutExpired:
        raise UserError(f"{ranks} processes did not meet within {PATIENCE_S:.0f} s", where="--ranks", remedy="Give --bandwidth.") from None
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    if failed := [out[1] for out, worker in zip(told, workers, strict=True) if worker.returncode]:
        last = (failed[0].strip().splitlines() or ["no word"])[-1]
        raise UserError(f"the exchange between {ranks} processes failed: {last}", where="--ranks", remedy="Give --bandwidth.")
    return Link(**json.loads(told[0][0].strip().splitlines()[-1]))


def through(small: tuple[float, float], large: tuple[float, float]) -> tuple[float, float]:
    """(seconds a meeting, bytes a second) from two (bytes, seconds).

    >>> through((100.0, 3.0), (300.0, 5.0))
    (2.0, 100.0)
    """
    rate = (large[0] - small[0]) / max(1e-9, large[1] - small[1])
    return max(0.0, small[1] - small[0] / rate), rate


def _exchange() -> Link:
    """In each worker: the fastest of some rounds of either kind, because whatever else the machine does only makes one longer."""
    import torch
    import torch.distributed as dist

    ranks, cuda = int(os.environ["WORLD_SIZE"]), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["RANK"])) if cuda and torch.cuda.device_count() >= ranks else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    lines: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for part in (SMALL, LARGE):
        own, whole = torch.ones(part // 4, device=device), torch.ones(ranks * part // 4, device=device)
        for summed in lines:
            best = float("inf")
            for turn in range(ROUNDS + 1):
                dist.barrier()
                began = time.perf_counter()
                if summed:
                    dist.reduce_scatter_tensor(own, whole)
                else:
                    dist.all_gather_into_tensor(whole, own)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if turn:
                    best = min(best, time.perf_counter() - began)
            lines[summed].append((float((ranks - 1) * part), best))
    dist.barrier()
    dist.destroy_process_group()
    (latency, gathered), (other, added) = (through(*lines[summed]) for summed in (False, True))
    return Link(gathered, added, (latency + other) / 2)


if __name__ == "__main__":
    print(json.dumps(asdict(_exchange())))
