"""Rounds do not pay for the same memory again and again."""

import os
import platform
import subprocess
import sys

import pytest

from inference.freed_memory import BY_HAND, LARGEST

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
FAULTS = f"""
import ctypes, resource, torch
from inference.freed_memory import M_MMAP_THRESHOLD, keep_freed

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros({LARGEST // 16} // 4)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 20

ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)  # as glibc begins
given_back = faults()
kept = keep_freed()
faults()
print(given_back, int(kept), faults())
"""


def run(**environment: str) -> list[int]:
    """Page faults of an allocation of 2 MB before, whether freed memory is kept, faults after."""
    clean = {name: value for name, value in os.environ.items() if name not in BY_HAND}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=clean | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@glibc
def test_memory_that_is_freed_is_there_for_the_next_round() -> None:
    before, kept, after = run()
    assert kept == 1 and before > 50 and after <= 2


@glibc
def test_what_a_user_has_set_stays() -> None:
    before, kept, after = run(MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == 0 and before > 50 and after > 50
