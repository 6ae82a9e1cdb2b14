"""What a forward reads of new rows: lists that the host has, as tensors of one width, and what
attention needs of trees that the host does not see.

Letters: B sequences, F_b new rows of each, N rows after padding, m rows pending, W words, C columns
in use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.static.attention import TreeRows, as_bias
from inference.static.cache import StaticCache
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


def target_rows(cache: StaticCache, lengths: Tensor, words: Tensor, depths: Tensor) -> TreeRows:
    """What attention needs of trees whose lengths are on the device.

    On a CPU they can be read for nothing, and one bias serves all layers.

    Args:
        cache: of the target.
        lengths: (B,).
        words: (B, N, W).
        depths: (B, N).
    """
    windows, nodes = cache.shape.windows, words.shape[1]
    columns = lengths[:, None] + torch.arange(nodes, device=lengths.device)
    rows = TreeRows(cache.kv, columns, windows, lengths=lengths, words=words, depths=depths)
    if lengths.device.type == "cpu":
        rows.bias, rows.window_bias = word_biases(cache, lengths, words, depths)
    return rows


def word_biases(
    cache: StaticCache, lengths: Tensor, words: Tensor, depths: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Biases (B, 1, N, C) for the layers without and with a window; arguments as above."""
    nodes = depths.shape[1]
    places = torch.arange(int(lengths.max()) + nodes)
    behind = places - lengths[:, None]  # (B, C) tree row of each column; below 0: committed
    row = behind.clamp(0, nodes - 1)
    word = words.gather(2, (row // WORD)[:, None].expand(-1, nodes, -1))
    seen = (word >> (row % WORD)[:, None]) & 1  # (B, N, C)
    seen = torch.where(behind[:, None] < 0, 1, seen.masked_fill(behind[:, None] >= nodes, 0))
    bias = as_bias(seen.bool(), cache.shape.dtype)[:, None]
    window = next((window for window in cache.shape.windows if window is not None), None)
    if window is None:
        return bias, None
    positions = torch.where(behind < 0, places, lengths[:, None] + depths.gather(1, row))
    distance = (lengths[:, None] + depths)[..., None] - positions[:, None]
    return bias, as_bias(seen.bool() & (distance < window), cache.shape.dtype)[:, None]
