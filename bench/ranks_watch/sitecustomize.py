"""Python runs this at its start where its folder is on PYTHONPATH: each rank of a run notes what it receives and how long it waits.

With the environment variable RANKS_WATCH naming a folder, every process that makes optimiser steps writes `rank_<n>.json` there, anew
after each step: for every step so far the time, the bytes received by kind of exchange, the seconds spent waiting for others, the bytes
that have come in over the loopback device (all programs'), and the memory at its fullest. Nothing of the run itself changes.

Bytes are those that a rank cannot do without: the parts of others when something is gathered, and as many when gradients are summed. What
the backend sends on top shows in the loopback's count alone. Small values that travel as Python objects are not counted, but waited for.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import sys
import time
from pathlib import Path

STEP = "tether.step"
WHOLE = "sampling"  # exchanges outside of FSDP: the whole model, for sampling, saving and comparing


class Watch:
    def __init__(self, folder: Path) -> None:
        self.path = folder / f"rank_{os.environ.get('RANK', '0')}.json"
        self.received: dict[str, int] = {}
        self.waited = 0.0
        self.depth = 0
        self.steps: list[dict] = []

    def count(self, kind: str, size: int) -> None:
        self.received[kind] = self.received.get(kind, 0) + size

    def note(self) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        now = {"time": time.perf_counter(), "waited": self.waited, "received": dict(self.received), "loopback": loopback(), "peak": peak}
        self.steps.append(now)
        self.path.write_text(json.dumps(self.steps))

    def timed(self, function):
        def wrapped(*args, **options):
            began, self.depth = time.perf_counter(), self.depth + 1
            try:
                return function(*args, **options)
            finally:
                self.depth -= 1
                if not self.depth:  # one wait inside another is one
                    self.waited += time.perf_counter() - began

        return wrapped


def loopback() -> int:
    """Bytes received over it since the machine started, 0 where the system does not say."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:"))


def attach(watch: Watch, step) -> None:
    """After `tether.step` is there, and torch with it."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    apply = step.Update.apply

    def noted(self, *args, **options):
        done = apply(self, *args, **options)
        watch.note()
        return done

    step.Update.apply = noted
    work = torch._C._distributed_c10d.Work
    work.wait = watch.timed(work.wait)
    functional.wait_tensor = watch.timed(functional.wait_tensor)

    def gathering(function):
        def wrapped(output_tensor, input_tensor, *args, **options):
            watch.count("gathered", output_tensor.nbytes - input_tensor.nbytes)
            return function(output_tensor, input_tensor, *args, **options)

        return wrapped

    def summing(function):
        def wrapped(output, input, *args, **options):
            watch.count("summed", input.nbytes - output.nbytes)
            return function(output, input, *args, **options)

        return wrapped

    def gathering_whole(function):
        def wrapped(tensor, *args, **options):
            watch.count(WHOLE, tensor.nbytes * (dist.get_world_size() - 1))
            return watch.timed(function)(tensor, *args, **options)

        return wrapped

    if hasattr(dist, "all_gather_single"):
        dist.all_gather_single, dist.reduce_scatter_single = gathering(dist.all_gather_single), summing(dist.reduce_scatter_single)
        functional.all_gather_single = gathering_whole(functional.all_gather_single)
    else:
        dist.all_gather_into_tensor = gathering(dist.all_gather_into_tensor)
        dist.reduce_scatter_tensor = summing(dist.reduce_scatter_tensor)
        functional.all_gather_tensor = gathering_whole(functional.all_gather_tensor)


class Finder(importlib.abc.MetaPathFinder):
    """Lets `tether.step` be imported as it would be, then attaches the watch."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def find_spec(self, name, path=None, target=None):
        if name != STEP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run, watch = spec.loader.exec_module, self.watch

            def exec_module(module):
                run(module)
                attach(watch, module)

            spec.loader.exec_module = exec_module
        return spec


if os.environ.get("RANKS_WATCH"):
    sys.meta_path.insert(0, Finder(Watch(Path(os.environ["RANKS_WATCH"]))))
