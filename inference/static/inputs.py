"""What the host knows about appended rows, as tensors of one width.

Letters: B sequences, F_b new rows of each, N rows after padding, m rows pending, W words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.static.words import WORD, word_count


def row_inputs(
    lengths: Sequence[int], tokens: Sequence[Tensor], depths: Sequence[Tensor], width: int
) -> tuple[Tensor, Tensor]:
    """Token ids and positions (B, N) of new rows; zeros behind those of a sequence.

    Args:
        lengths: committed tokens of each sequence.
        tokens: B lists of F_b token ids.
        depths: B lists of m + F_b distances from the last committed position plus one.
        width: N, at least the largest F_b.
    """
    ids = torch.zeros(len(tokens), width, dtype=torch.int64)
    positions = torch.zeros_like(ids)
    for row, (some, depth) in enumerate(zip(tokens, depths, strict=True)):
        ids[row, : len(some)] = some
        positions[row, : len(some)] = lengths[row] + depth[len(depth) - len(some) :]
    return ids, positions


def row_depths(depths: Sequence[Tensor], total: int) -> Tensor:
    """(B, m + N) depths of pending and new rows; 0 at padding.

    Args:
        depths: B lists of m + F_b.
        total: m + N.
    """
    found = torch.zeros(len(depths), total, dtype=torch.int64)
    for row, depth in enumerate(depths):
        found[row, : len(depth)] = depth
    return found


def row_words(seen: Sequence[Tensor], width: int, pending: int) -> Tensor:
    """(B, N, W) ancestor words of new rows; a padding row sees itself alone.

    Args:
        seen: B matrices (F_b, m + F_b) of who attends to whom.
        width: N.
        pending: m.

    Raises:
        ValueError: more rows than two words tell apart.
    """
    words = word_count(pending + width)
    mask = torch.zeros(len(seen), width, words * WORD, dtype=torch.bool)
    for row, matrix in enumerate(seen):
        rows, columns = matrix.shape
        mask[row, :rows, :columns] = matrix
        mask[row].diagonal(pending)[rows:width] = True
    bits = mask.unflatten(-1, (words, WORD)).to(torch.int64) << torch.arange(WORD)
    return bits.sum(-1)
