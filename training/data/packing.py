"""Rows to sequences: packing as rows arrive, and sequences as JSON."""

import base64
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from training.data.chat import TokenizedRow

WINDOW = 64
"""Open sequences among which a row looks for room."""


class Packer:
    """First-fit packing in the order of arrival, with bounded memory.

    A row goes to the first of the last ``WINDOW`` sequences that has room for it, or opens one;
    sequences leave in the order in which they were opened.

    Args:
        length: T, most tokens in a sequence.
        packed: False puts each row in a sequence of its own.
    """

    def __init__(self, length: int, packed: bool = True) -> None:
        self.length, self.packed = length, packed
        self._open: deque[list[TokenizedRow]] = deque()
        self._room: deque[int] = deque()

    def add(self, row: TokenizedRow) -> list[list[TokenizedRow]]:
        """Take a row of at most ``length`` tokens; returns the sequences that are complete."""
        size = len(row.ids)
        assert size <= self.length, "rows are cut before they are packed"
        if not self.packed:
            return [[row]]
        slot = next((i for i, room in enumerate(self._room) if room >= size), None)
        if slot is not None:
            self._open[slot].append(row)
            self._room[slot] -= size
            return []
        self._open.append([row])
        self._room.append(self.length - size)
        if len(self._open) <= WINDOW:
            return []
        self._room.popleft()
        return [self._open.popleft()]

    def flush(self) -> list[list[TokenizedRow]]:
        """The open sequences, as no row follows."""
        rest = list(self._open)
        self._open.clear()
        self._room.clear()
        return rest

    def state(self) -> dict[str, Any]:
        """The open sequences as JSON."""
        return pack_state(self._open)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state` returned."""
        groups = unpack_state(state)
        self._open = deque(groups)
        self._room = deque(self.length - sum(len(row.ids) for row in group) for group in groups)


def pack(
    rows: Iterable[TokenizedRow], length: int, packed: bool = True
) -> list[list[TokenizedRow]]:
    """First-fit packing in the given order.

    Args:
        rows: longer ones are cut at ``length``; those left with nothing supervised are dropped.
        length: T.
        packed: False puts each row in a sequence of its own.

    Returns:
        Groups of rows, each at most ``length`` tokens together.

    Raises:
        ValueError: nothing is left.
    """
    packer, groups = Packer(length, packed), []
    for row in rows:
        fitting = cut(row, length)
        if fitting is not None:
            groups += packer.add(fitting)
    groups += packer.flush()
    if not groups:
        raise ValueError(
            "data: no row has a supervised token within data.max_length: nothing to train on"
        )
    return groups


def cut(row: TokenizedRow, length: int) -> TokenizedRow | None:
    """The row's first ``length`` tokens; None where nothing of them is supervised."""
    if len(row.ids) > length:
        row = replace(row, ids=row.ids[:length], supervised=row.supervised[:length])
    return row if any(row.supervised) else None


def size_of(group: Sequence[TokenizedRow]) -> int:
    """Tokens of a sequence."""
    return sum(len(row.ids) for row in group)


def pack_state(groups: Iterable[Sequence[TokenizedRow]]) -> dict[str, Any]:
    """Sequences as JSON: tokens and masks compressed, about three bytes per token."""
    groups = list(groups)
    rows = [row for group in groups for row in group]
    ids = np.array([token for row in rows for token in row.ids], dtype="<i4")
    flags = np.array([flag for row in rows for flag in row.supervised], dtype=bool)
    return {
        "documents": [len(group) for group in groups],
        "sizes": [len(row.ids) for row in rows],
        "numbers": [row.number for row in rows],
        "ids": _to_text(ids.tobytes()),
        "supervised": _to_text(np.packbits(flags).tobytes()),
    }


def unpack_state(state: dict[str, Any]) -> list[list[TokenizedRow]]:
    """The sequences of :func:`pack_state`."""
    sizes, numbers = state["sizes"], state["numbers"]
    ids = np.frombuffer(_to_bytes(state["ids"]), dtype="<i4").tolist()
    flags = np.unpackbits(np.frombuffer(_to_bytes(state["supervised"]), dtype=np.uint8))
    flags = flags[: len(ids)].astype(bool).tolist()
    rows, start = [], 0
    for size, number in zip(sizes, numbers, strict=True):
        span = slice(start, start + size)
        rows.append(TokenizedRow(ids[span], flags[span], number))
        start += size
    ordered = iter(rows)
    return [[next(ordered) for _ in range(count)] for count in state["documents"]]


def _to_text(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw, 1)).decode("ascii")


def _to_bytes(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
