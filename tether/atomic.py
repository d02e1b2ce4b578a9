"""Files and folders that are either the old whole or the new whole: written beside, flushed to the disk, renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def write_file(path: Path, content: bytes | str) -> None:
    """Replace `path` in one move. A crash at any moment leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp makes private files; a result is shared like any other file
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    _sync(path.parent)


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside `target` that takes its place when the block ends well, and vanishes when it does not.

    An existing `target` is replaced whole. A folder cannot be swapped in one system call everywhere, so for an instant only
    the hidden old copy exists; it is deleted last.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        os.chmod(fresh, 0o777 & ~_umask())
        yield fresh
        for path in sorted(fresh.rglob("*")):
            _sync(path)
        _sync(fresh)
        old = fresh.with_suffix(".old")
        if target.exists():
            os.rename(target, old)
        os.rename(fresh, target)
        _sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    """Flush one file, or the names in one folder, to the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows does not open folders; renames are flushed there by the file system
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
