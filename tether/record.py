"""What a run was made with: version, commit, packages, machine. Kept in the run's recipe.yaml."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tether

PACKAGES = ("torch", "transformers", "tokenizers", "peft", "safetensors", "numpy")


def record() -> dict[str, Any]:
    """Plain data for recipe.yaml."""
    return {
        "version": tether.__version__,
        "commit": commit(Path(tether.__file__).parent),
        "folder": str(Path.cwd()),  # what relative paths of the recipe start from
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    import psutil

    return {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def commit(package: Path) -> str | None:
    """The commit the package's code is at, `+changes` when it is not clean; None when it is not part of a checkout."""
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None  # an installed copy that happens to lie inside some other repository
    head = _git(package, "rev-parse", "HEAD")
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", ".")
    return f"{head}+changes" if head and changed else head


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
