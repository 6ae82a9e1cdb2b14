"""Attention masks for the rows of a tree appended to a `TreeCache`.

Every sequence of a batch has its own number of committed tokens, and its tree rows sit directly
behind them: node i of sequence b is at column `lengths[b] + i`. Columns behind the tree of a
short sequence hold stale rows of earlier rounds and are seen by nobody.

Letters: B batch, N tree rows per sequence (padded to the largest), C columns of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig


def tree_attention_mask(
    lengths: Sequence[int], ancestor_masks: Sequence[Tensor], columns: int
) -> Tensor:
    """Which columns of the cache each appended row attends to.

    A row sees the committed tokens of its sequence, its ancestors and itself. A padding row (a
    sequence with fewer nodes than N) sees itself alone: attention to nothing would be NaN.

    Args:
        lengths: committed tokens of each sequence, `TreeCache.lengths`.
        ancestor_masks: per sequence (N_b, N_b) bool, `TokenTree.ancestor_mask()`; a lower triangle
            for a prompt. N_b may differ.
        columns: C, from `TreeCache.columns(N)`; it fixes N.

    Returns:
        (B, 1, N, C) bool, true where attended; `mask_for` gives the model the form it needs.
    """
    num_rows = columns - max(lengths)
    if len(lengths) != len(ancestor_masks) or num_rows < max(map(len, ancestor_masks)):
        raise ValueError(
            f"tree_attention_mask: {len(ancestor_masks)} masks of up to "
            f"{max(map(len, ancestor_masks))} nodes do not fit {len(lengths)} sequences with "
            f"{num_rows} rows each; use columns=cache.columns(N) with N the largest tree"
        )
    device = ancestor_masks[0].device
    mask = torch.zeros(len(lengths), 1, num_rows, columns, dtype=torch.bool, device=device)
    for row, (length, ancestors) in enumerate(zip(lengths, ancestor_masks, strict=True)):
        num_nodes = len(ancestors)
        mask[row, 0, :num_nodes, :length] = True
        tail = mask[row, 0, :, length : length + num_rows]
        tail[:num_nodes, :num_nodes] = ancestors
        tail.diagonal()[num_nodes:] = True
    return mask


def mask_for(config: PreTrainedConfig, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask in the form that a model's attention implementation takes.

    Args:
        config: of the target; `_attn_implementation` decides.
        mask: bool, true where attended.
        dtype: of the target's weights.

    Raises:
        ValueError: the implementation takes no arbitrary mask, so it cannot verify a tree.
    """
    implementation = config._attn_implementation
    if implementation == "sdpa":
        return mask
    if implementation == "eager":
        return as_additive(mask, dtype)
    raise ValueError(
        f"attention implementation {implementation!r} cannot take a tree's mask: load the target "
        "with attn_implementation='sdpa' or 'eager'"
    )


def as_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The same mask as numbers to add to the scores: 0 where attended, the lowest value elsewhere.

    Both "eager" and "sdpa" take it. A bool mask must never reach "eager", which would silently add
    it as 0 and 1.
    """
    lowest = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)
