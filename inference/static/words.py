"""Who sees whom in a batch of trees, as one bit per pair of rows.

Bit j of a row's words says that it sees row j: itself and its ancestors. Rows are counted from the
first that is not committed: P pending ones of earlier forwards, then the N new nodes.

Ancestors are found by pointer doubling: every pass joins each node's words with those of the node
that its pointer has reached and lets the pointer jump twice as far, so that a tree of depth D takes
log2(D + 1) passes, whatever its shape.

Legend: B sequences, N nodes, P pending rows, M rows in all, W words, D depth.
"""

import torch
from torch import Tensor

WORD = 64
"""Rows that one word tells apart; the last of them is the sign bit of an int64."""
MOST_ROWS = 2 * WORD
"""Rows behind the committed ones that a forward may see."""


def word_count(rows: int) -> int:
    """W, the words that so many rows need.

    Raises:
        ValueError: more rows than two words tell apart.
    """
    if not 0 <= rows <= MOST_ROWS:
        raise ValueError(
            f"a tree may have {MOST_ROWS} rows (pending ones included), got {rows}: draft a "
            "smaller tree"
        )
    return max(-(-rows // WORD), 1)


def own_bits(rows: Tensor, words: int) -> Tensor:
    """(...) numbers of rows -> (..., W) words with that row's bit alone; none below 0."""
    bits = torch.ones_like(rows) << rows % WORD
    places = torch.arange(words, device=rows.device)
    return torch.where((rows // WORD)[..., None] == places, bits[..., None], 0)


def passes(depth: int) -> int:
    """Doubling passes that join paths of ``depth`` + 1 nodes."""
    return depth.bit_length()


def follow(values: Tensor, pointers: Tensor, nowhere: int) -> Tensor:
    """What lies where the pointers point.

    Args:
        values: (B, M) or (B, M, W).
        pointers: (B, N) places among the M, -1 for nowhere.
        nowhere: what is found there.
    """
    padded = torch.cat([values, torch.full_like(values[:, :1], nowhere)], dim=1)
    places = torch.where(pointers < 0, values.shape[1], pointers)
    if values.dim() == 2:
        return padded.gather(1, places)
    return padded.gather(1, places[..., None].expand(-1, -1, values.shape[2]))


def tree_words(
    parents: Tensor, depth: int | None = None, num_pending: int = 0
) -> tuple[Tensor, Tensor]:
    """Ancestor words and depths of whole trees, whose roots see no row but themselves.

    Args:
        parents: (B, N) int64; -1 for roots and padding, of which each sees itself alone.
        depth: D, no node is deeper; None allows any.
        num_pending: P, which only shifts the bits.

    Returns:
        (B, N, W) int64 words and (B, N) int64 distances from the root.

    Raises:
        ValueError: P + N exceeds what two words hold.
    """
    batch, nodes = parents.shape
    rows = torch.arange(nodes, device=parents.device) + num_pending
    words = own_bits(rows, word_count(num_pending + nodes)).expand(batch, -1, -1)
    depths = (parents >= 0).to(torch.int64)
    pointers = parents
    for _ in range(passes(nodes - 1 if depth is None else depth)):
        words = words | follow(words, pointers, 0)
        depths = depths + follow(depths, pointers, 0)
        pointers = follow(pointers, pointers, -1)
    return words, depths


def words_mask(words: Tensor, rows: int) -> Tensor:
    """(B, N, W) words -> (B, N, M) bool, which of M rows each row sees."""
    bits = words[..., None] >> torch.arange(WORD, device=words.device) & 1
    return bits.flatten(-2)[..., :rows].bool()
