"""A lock that dies with its process, so that two processes never write one run and a crash leaves nothing to clean up."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO

from tether.errors import UserError


class Lock:
    """Held from `take` to `release`. Taking it twice is harmless; taking what another holder has raises UserError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def take(self) -> None:
        if self._file is not None:
            return
        file = self.path.open("a+b")
        if not _try(file):
            file.seek(0)
            holder = file.read(32).decode(errors="replace").strip()
            file.close()
            raise UserError(
                f"another process is writing this run{f' (process {holder})' if holder else ''}",
                where=str(self.path.parent),
                remedy="Wait until it ends, or start a run of another name with --run.",
            )
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        file.flush()
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            self._file.close()  # the system drops the lock with the file
            self._file = None


def _try(file: IO[bytes]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(1 << 20)  # far behind the text, which stays readable to others
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
