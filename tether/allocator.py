"""Keep freed memory for the next step instead of giving it back to the system.

A training step frees and asks for the same big blocks again and again. glibc returns blocks above a threshold to the kernel, which
must then clear every page anew: on the CPU that cost a seventh of a step of a 135M model. Other C libraries are left alone.
"""

from __future__ import annotations

import ctypes
import os
import sys

# Numbers of <malloc.h>; glibc's own names for its environment variables stand beside them.
SETTINGS = {
    -1: ("MALLOC_TRIM_THRESHOLD_", 2**31 - 1),  # M_TRIM_THRESHOLD: bytes free at the top before any are returned
    -2: ("MALLOC_TOP_PAD_", 256 << 20),  # M_TOP_PAD: bytes asked for beyond the need
    -4: ("MALLOC_MMAP_MAX_", 0),  # M_MMAP_MAX: no block is mapped, and so returned, on its own
}


def keep_freed_memory() -> bool:
    """Tell glibc to reuse freed blocks, for the whole process. What the environment sets stands. True if it was told."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # musl, say
        return False
    return all([mallopt(number, value) == 1 for number, (name, value) in SETTINGS.items() if name not in os.environ])
