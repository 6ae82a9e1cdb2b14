"""Weights on a CPU in huge pages, where Linux has some to give.

A decoding step reads all weights once and little else. In pages of 4 kB it looks up half a million
addresses for every 2 GB, and waits for many of them. Linux moves memory that is in use into pages
of 2 MB where a process asks for it, whoever has allocated it. What is refused stays as it was, and
no value changes.

Where an administrator has turned huge pages off (``never``), and on other systems, nothing is done.
Caches of keys and values are left alone: behind 8192 tokens it made no difference that could be
measured.
"""

from __future__ import annotations

import ctypes
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25
"""Since Linux 6.1; before, a region that asks is gone through by a daemon in time."""
LARGEST = 32 << 20
"""Bytes of a huge page that are worth rounding weights to."""
LEAST = 8
"""Huge pages' worth of bytes below which nothing is done: a processor keeps as many addresses."""
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
MAPS = Path("/proc/self/smaps")

Range = tuple[int, int]
"""First address, and the one behind the last."""


@cache
def page_bytes() -> int:
    """Of a huge page; 0 where there are none to be had."""
    if not sys.platform.startswith("linux") or not MAPS.exists():
        return 0
    try:
        enabled = (SETTINGS / "enabled").read_text(encoding="ascii")
        size = int((SETTINGS / "hpage_pmd_size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
    return 0 if "[never]" in enabled or size > LARGEST else size


def collapse(ranges: Iterable[Range]) -> float:
    """Move memory that is in use into huge pages; what lies beside it in the same pages moves too.

    Args:
        ranges: addresses of tensors that are read whole and often.

    Returns:
        The share of those bytes that is in huge pages now; 0 where nothing was done.
    """
    page, ranges = page_bytes(), sorted(ranges)
    if not page or sum(end - first for first, end in ranges) < LEAST * page:
        return 0.0
    advise = _advise()
    for first, end in whole_pages(ranges, [where for where, _ in _mappings()], page):
        advise(first, end - first, MADV_HUGEPAGE)
        advise(first, end - first, MADV_COLLAPSE)
    return huge_share(ranges)


def whole_pages(ranges: Sequence[Range], mappings: Sequence[Range], page: int) -> list[Range]:
    """The huge pages that hold some ranges, neighbours in a mapping as one.

    Args:
        ranges: in order.
        mappings: of the process. A page that is not wholly in one of them cannot be huge.
        page: bytes.
    """
    numbers = sorted(
        {number for first, end in ranges for number in range(first // page, -(-end // page))}
    )
    found: list[Range] = []
    for low, high in mappings:
        start = bisect_left(numbers, -(-low // page))
        inside = numbers[start : bisect_left(numbers, high // page)]
        for place, number in enumerate(inside):
            first, end = number * page, (number + 1) * page
            if place and found[-1][1] == first:
                found[-1] = (found[-1][0], end)
            else:
                found.append((first, end))
    return found


def huge_share(ranges: Sequence[Range]) -> float:
    """The share of some bytes that is in huge pages, from 0 to 1.

    Linux counts huge pages by mapping, so a mapping's share is taken for that of what lies in it.

    Args:
        ranges: addresses, one byte at least.
    """
    total, huge = sum(end - first for first, end in ranges), 0.0
    for (low, high), nbytes in _mappings():
        inside = sum(max(0, min(end, high) - max(first, low)) for first, end in ranges)
        huge += inside * min(1.0, nbytes / (high - low))
    return huge / total


def _mappings() -> list[tuple[Range, int]]:
    """Writable memory of this process that no file is behind, and bytes of it in huge pages."""
    found: list[tuple[Range, int]] = []
    anonymous = False
    for line in MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)\s*(.*)", line)
        if head is not None:
            low, high, rights, inode, name = head.groups()
            anonymous = (
                rights.startswith("rw")
                and inode == "0"
                and (name in ("", "[heap]") or name.startswith("[anon:"))
            )
            if anonymous:
                found.append(((int(low, 16), int(high, 16)), 0))
        elif anonymous and line.startswith("AnonHugePages:"):
            found[-1] = (found[-1][0], 1024 * int(line.split()[1]))
    return found


@cache
def _advise() -> Callable[[int, int, int], int]:
    """The C library's `madvise`: address, bytes, advice; 0, or -1 where it is refused."""
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
