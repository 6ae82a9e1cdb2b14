"""Attention masks for the rows of a tree appended to a `TreeCache`.

Every sequence of a batch has its own number of committed tokens, and its tree rows sit directly
behind them: node i of sequence b is at column `starts[b] + i`. Columns behind the tree of a
short sequence hold stale rows of earlier rounds and are seen by nobody.

Letters: B batch, N rows appended per sequence (padded to the largest), m rows already pending,
C columns of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from inference.cache import TreeCache


def tree_masks(
    cache: TreeCache,
    ancestor_masks: Sequence[Tensor],
    depths: Sequence[Tensor],
    config: PreTrainedConfig,
    dtype: torch.dtype,
    first_layer: int = 0,
) -> Tensor | dict[str, Tensor]:
    """What to pass as `attention_mask` with rows that are about to be appended.

    A row sees the committed tokens of its sequence, its ancestors and itself; in a layer with a
    window, as far back as the window reaches **along its path**. A padding row (a sequence with
    fewer new rows than N) sees itself alone: attention to nothing would be NaN.

    Args:
        cache: that the rows will be appended to.
        ancestor_masks: per sequence (n_b, m + n_b) bool: its new rows against the m rows already
            pending in `first_layer` (padding rows included) and themselves;
            `TokenTree.ancestor_mask()` where nothing is pending, a lower triangle for a prompt.
        depths: per sequence (m + n_b,) long, distance from the root of the same rows: a row at
            depth d sits at position `cache.lengths[b] + d`.
        config: of the target; `_attn_implementation` decides the form of the mask.
        dtype: of the target's weights.
        first_layer: the lowest layer that will run.

    Returns:
        (B, 1, N, C) if the layers are of one kind; otherwise a dict of such masks by layer type,
        which is what transformers' models with mixed layers take.

    Raises:
        ValueError: the shapes do not fit, or the implementation takes no arbitrary mask.
    """
    pending = cache.layers[first_layer].pending
    _check_shapes(cache, ancestor_masks, depths, pending)
    num_rows = max(map(len, ancestor_masks))
    masks = {}
    for layer_type, layer in zip(cache.layer_types, cache.layers, strict=True):
        if layer_type not in masks:
            columns = max(layer.starts) + pending + num_rows
            mask = row_mask(layer.starts, ancestor_masks, columns, pending)
            if layer.window is not None:
                narrow(mask, layer.starts, depths, pending, layer.window)
            masks[layer_type] = mask_for(config, mask, dtype)
    return masks if len(masks) > 1 else masks.popitem()[1]


def _check_shapes(
    cache: TreeCache, ancestor_masks: Sequence[Tensor], depths: Sequence[Tensor], pending: int
) -> None:
    if not len(cache.lengths) == len(ancestor_masks) == len(depths):
        raise ValueError(
            f"tree_masks: {len(ancestor_masks)} ancestor masks and {len(depths)} depths for "
            f"{len(cache.lengths)} sequences"
        )
    for mask, depth in zip(ancestor_masks, depths, strict=True):
        columns = pending + len(mask)
        if mask.shape[1] != columns or depth.shape != (columns,):
            raise ValueError(
                f"tree_masks: an ancestor mask of shape {tuple(mask.shape)} with depths of shape "
                f"{tuple(depth.shape)}; {len(mask)} new rows behind {pending} pending ones need "
                f"({len(mask)}, {columns}) and ({columns},)"
            )


def row_mask(
    starts: Sequence[int], ancestor_masks: Sequence[Tensor], columns: int, pending: int
) -> Tensor:
    """Committed columns, ancestors, and for a padding row itself.

    Args:
        starts: per sequence, the column behind its committed tokens.
        ancestor_masks: per sequence (n_b, m + n_b) bool, as for `tree_masks`.
        columns: C.
        pending: m.

    Returns:
        (B, 1, N, C) bool.
    """
    num_rows = columns - max(starts) - pending
    device = ancestor_masks[0].device
    mask = torch.zeros(len(starts), 1, num_rows, columns, dtype=torch.bool, device=device)
    for row, (start, ancestors) in enumerate(zip(starts, ancestor_masks, strict=True)):
        num_nodes, width = ancestors.shape
        mask[row, 0, :num_nodes, :start] = True
        mask[row, 0, :num_nodes, start : start + width] = ancestors
        itself = mask[row, 0, :, start + pending : start + pending + num_rows]
        itself.diagonal()[num_nodes:] = True
    return mask


def narrow(
    mask: Tensor, starts: Sequence[int], depths: Sequence[Tensor], pending: int, window: int
) -> None:
    """Take away, in place, what is `window` or more positions behind a row.

    Args:
        mask: of `row_mask`.
        starts: as there.
        depths: per sequence (m + n_b,), as for `tree_masks`.
        pending: m.
        window: positions that a row sees, its own included.
    """
    for row, (start, depth) in enumerate(zip(starts, depths, strict=True)):
        depth = depth.to(mask.device)
        committed = torch.arange(-start, 0, device=mask.device)  # the root is at 0
        distance = depth[pending:, None] - torch.cat((committed, depth))
        mask[row, 0, : len(distance), : distance.shape[1]] &= distance < window


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
