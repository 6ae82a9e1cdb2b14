"""One forward that appends rows to a `TreeCache`: a stretch of text, a tree, or a level of one.

Legend: B sequences, F new rows of each (padded to the most), m rows pending before them, D hidden.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from drafters import TargetModel, TargetOutput
from inference.attention import tree_masks
from inference.cache import TreeCache

PREFILL_ROWS = 2048
"""Rows of a prompt that one forward runs: bounds the memory of masks and activations."""


def append_rows(
    model: TargetModel,
    cache: TreeCache,
    tokens: Sequence[Tensor],
    depths: Sequence[Tensor],
    seen: Sequence[Tensor],
    *,
    feature_layers: Sequence[int] = (),
    logits_to_keep: int | Tensor = 0,
    run_layers: Collection[int] | None = None,
    entering: Tensor | None = None,
) -> TargetOutput:
    """Run rows behind what is committed and pending; they stay pending.

    Args:
        model: whose cache it is.
        cache: appended to, in the layers that run.
        tokens: B lists of F_b token ids, at least one of them not empty.
        depths: B lists of the m + F_b distances from the last committed position plus one, pending
            rows first.
        seen: B matrices (F_b, m + F_b) of who attends to whom.
        feature_layers: as in `TargetModel.forward`, as are the following.
        logits_to_keep: places among the F padded rows.
        run_layers: None runs all. All of them must have the same rows pending.
        entering: (B, F, D).

    Returns:
        Of the F rows. What stands behind a sequence's own F_b is padding.
    """
    device, width = model.device, max(map(len, tokens))
    ids = torch.zeros(len(tokens), width, dtype=torch.int64)
    positions = torch.zeros_like(ids)
    for row, (some, depth) in enumerate(zip(tokens, depths, strict=True)):
        ids[row, : len(some)] = some
        positions[row, : len(some)] = cache.lengths[row] + depth[len(depth) - len(some) :]
    masks = tree_masks(
        cache,
        [matrix.to(device) for matrix in seen],
        [depth.to(device) for depth in depths],
        model.config,
        model.dtype,
        first_layer=0 if run_layers is None else min(run_layers),
    )
    return model.forward(
        ids.to(device),
        attention_mask=masks,
        position_ids=positions.to(device),
        cache=cache,
        feature_layers=feature_layers,
        logits_to_keep=logits_to_keep,
        run_layers=run_layers,
        entering=entering,
    )


def append_text(
    model: TargetModel, cache: TreeCache, tokens: Sequence[Sequence[int]]
) -> list[Tensor | None]:
    """Run a stretch of text of each sequence and commit it.

    Args:
        model: whose cache it is; nothing may be pending there.
        cache: appended to.
        tokens: B lists of token ids, at least one of them not empty.

    Returns:
        Per sequence the logits (V,) behind its last token; None if it had none.
    """
    lasts = sorted({len(some) - 1 for some in tokens if some})
    out = append_rows(
        model,
        cache,
        [torch.tensor(some, dtype=torch.int64) for some in tokens],
        [torch.arange(len(some)) for some in tokens],
        [torch.ones(len(some), len(some), dtype=torch.bool).tril() for some in tokens],
        logits_to_keep=torch.tensor(lasts, device=model.device),
    )
    cache.commit([range(len(some)) for some in tokens])
    return [
        out.logits[row, lasts.index(len(some) - 1)] if some else None
        for row, some in enumerate(tokens)
    ]
