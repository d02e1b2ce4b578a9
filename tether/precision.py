"""bf16 or fp32: decided by how fast this machine multiplies, never by the name of its processor."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import time
from pathlib import Path
from typing import Literal

import torch

from tether import atomic, ranks
from tether.models import cache_dir

Precision = Literal["bf16", "fp32"]
CLEARLY_FASTER = 1.5  # below this, rounding to 8 bits of mantissa buys too little
SHAPE = (1024, 576, 1536)  # tokens, in and out of a small model's linear layer


def choose(asked: str = "auto") -> Precision:
    """`asked` itself, or for "auto" bf16 when its matmuls are clearly faster here. Measured once per machine, then remembered."""
    if asked == "bf16":
        return "bf16"
    if asked == "fp32":
        return "fp32"
    if asked != "auto":
        raise ValueError(f"precision is auto, bf16 or fp32, got {asked!r}")
    path = cache_dir() / "precision.json"
    key = f"{machine()} | torch {torch.__version__} | {torch.get_num_threads()} threads"
    known = _read(path)
    if key not in known:
        known[key] = round(speedup(), 3)
        with contextlib.suppress(OSError):  # a cache that cannot be written costs 0.1 s next time, nothing else
            atomic.write_file(path, json.dumps(known, indent=2, sort_keys=True))
    return ranks.share("bf16" if known[key] >= CLEARLY_FASTER else "fp32")  # what one rank measures, all do


def speedup() -> float:
    """How many times faster a bfloat16 matmul is than a float32 one, best of several each, taken in turn."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, width, out = SHAPE
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator).to(device)
    w = torch.randn(width, out, generator=generator).to(device)
    pairs = {dtype: (x.to(dtype), w.to(dtype)) for dtype in (torch.float32, torch.bfloat16)}
    best = dict.fromkeys(pairs, float("inf"))
    with torch.no_grad():
        for turn in range(6):
            for dtype, (a, b) in pairs.items():
                started = time.perf_counter()
                a @ b
                if device == "cuda":
                    torch.cuda.synchronize()
                if turn:  # the first call also sets up
                    best[dtype] = min(best[dtype], time.perf_counter() - started)
    return best[torch.float32] / best[torch.bfloat16]


def machine() -> str:
    """What tells this machine from another that shares the cache folder: processor model and accelerator."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        # Virtual machines hide the model's name; the instruction set tells them apart.
        flags = " ".join(sorted((values.get("flags") or values.get("Features") or "").split()))
        return f"{values.get('model name', platform.machine())} {hashlib.blake2b(flags.encode(), digest_size=4).hexdigest()}"
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}"


def _read(path: Path) -> dict[str, float]:
    try:
        content = json.loads(path.read_text())
        return {str(k): float(v) for k, v in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
