"""Memory that a round frees and the next asks for again, kept by the process.

A round's logits and features are some hundred kilobytes to some megabytes, allocated anew in every
round. glibc gives memory of that size back to the system when it is freed, and the system has to
find, clear and map its pages once more: 250 page faults a round for a vocabulary of 49152. In a
virtual machine whose host takes free memory back each of them costs 10 us, a tenth of a round of
SmolLM2-135M.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST = 32 << 20
"""Bytes of a single allocation that is kept, the most that glibc can be asked for."""
KEPT = 256 << 20
"""Bytes at the end of the heap that are kept."""
BY_HAND = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables of a user who has decided otherwise."""


@cache
def keep_freed() -> bool:
    """Ask the C library to keep what is freed, for this process, once.

    Returns:
        Whether it does: not where it is another than glibc, or where one of `BY_HAND` is set.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in BY_HAND):
        return False
    library = ctypes.CDLL(None)
    return all(
        library.mallopt(name, size) == 1
        for name, size in ((M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, KEPT))
    )
