"""Tree attention in plain torch: one explicit mask, one softmax, float32.

Slow and obviously right: every other implementation is tested against this one.

A sequence's cache holds P committed tokens in columns 0 .. P-1 and, directly behind them, T rows of
a tree: `num_pending` rows of earlier forwards and the N rows of this one. Columns behind those hold
anything finite and are seen by nobody. A row sees the committed tokens, its ancestors and itself.

Ancestors come as words: bit j of word j // 64 of a row says that it sees tree row j. A row has its
own bit set. Two words serve 128 rows.

Letters: B batch, Hq and Hkv query and key-value heads, G = Hq / Hkv, N new rows, T tree rows,
P committed tokens of a sequence, S columns of the cache, W words, d and dv dimensions of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

WORD_BITS = 64
MAX_WORDS = 2
"""The kernel reads this many words of a row, so a tree has at most 128 rows."""


@dataclass(frozen=True)
class AttentionOptions:
    """What a target's attention does besides softmax(scale · q kᵀ) v.

    Attributes:
        scale: of the scores; usually d ** -0.5.
        num_pending: tree rows that earlier forwards appended, in front of the new ones.
        depths: (B, T) long, distance of each tree row from the root, which follows the last
            committed token: row or column j is at position P + depths[j]. Only with `window`.
        window: a row sees what is less than this many positions behind it; None: everything.
        softcap: scores become softcap · tanh(score / softcap) (Gemma 2).
        sinks: (Hq,) a logit per query head that only enters the denominator (gpt-oss).
    """

    scale: float
    num_pending: int = 0
    depths: Tensor | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@cache
def _bits(device: torch.device) -> Tensor:
    """(64,) long: the number with only bit j set; the last one is negative."""
    return torch.ones((), dtype=torch.int64, device=device) << torch.arange(
        WORD_BITS, device=device
    )


def tree_mask(words: Tensor, num_columns: int) -> Tensor:
    """Which tree rows each new row sees.

    Args:
        words: (B, N, W) long.
        num_columns: T.

    Returns:
        (B, N, T) bool.
    """
    seen = (words.unsqueeze(-1) & _bits(words.device)) != 0
    return seen.flatten(-2).narrow(-1, 0, num_columns)


def cache_mask(
    lengths: Tensor, words: Tensor, num_columns: int, options: AttentionOptions
) -> Tensor:
    """Which columns of the cache each new row sees.

    Args:
        lengths: (B,) long, committed tokens P per sequence.
        words: (B, N, W) long.
        num_columns: leading columns of the cache to say it for, C.
        options: `num_pending`, `depths` and `window` are used.

    Returns:
        (B, N, C) bool.
    """
    num_rows = words.shape[1]
    num_tree = options.num_pending + num_rows
    behind = torch.arange(num_columns, device=lengths.device) - lengths[:, None]  # (B, C); 0: root
    in_tree = (behind >= 0) & (behind < num_tree)
    column = behind.clamp(0, num_tree - 1)  # of the tree
    ancestors = tree_mask(words, num_tree).gather(2, column[:, None].expand(-1, num_rows, -1))
    seen = (behind < 0)[:, None] | (in_tree[:, None] & ancestors)
    if options.window is not None:
        assert options.depths is not None
        position = torch.where(behind < 0, behind, options.depths.gather(1, column))
        seen &= options.depths[:, options.num_pending :, None] - position[:, None] < options.window
    return seen


def scores_of(q: Tensor, keys: Tensor, options: AttentionOptions) -> Tensor:
    """Scaled and capped scores in float32, (..., rows, columns)."""
    scores = (q.float() @ keys.float().transpose(-1, -2)) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    return scores


def masked_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    words: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Attention of N new tree rows to the cache, over all of its columns at once.

    Args:
        q: (B, Hq, N, d).
        keys: (B, Hkv, S, d); the tree's rows are in columns P .. P + T - 1 of each sequence.
        values: (B, Hkv, S, dv).
        lengths: (B,) long, P.
        words: (B, N, W) long.
        options: the rest.

    Returns:
        (B, Hq, N, dv) in the dtype of q.
    """
    batch, num_heads, num_rows, _ = q.shape
    num_groups, num_columns = keys.shape[1], keys.shape[2]
    grouped = q.unflatten(1, (num_groups, num_heads // num_groups))  # (B, Hkv, G, N, d)
    seen = cache_mask(lengths, words, num_columns, options)[:, None, None]
    scores = scores_of(grouped, keys[:, :, None], options).masked_fill(~seen, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, num_groups, -1, 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., :num_columns]
    out = weights @ values[:, :, None].float()
    return out.reshape(batch, num_heads, num_rows, -1).to(q.dtype)
