"""One forward that appends rows to a `TreeCache`: a stretch of text, a tree, or a level of one.

Legend: B sequences, F new rows of each (padded to the most), m rows pending before them, T
tokens of a text, D hidden, V vocabulary.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

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


def stretches(model: TargetModel, longest: int) -> list[slice]:
    """How a text is cut that is too long for one forward.

    Not at all where a model's rotary frequencies depend on how far a forward reaches: behind the
    switch every row needs those of the whole text.

    Args:
        model: that runs it.
        longest: tokens of the longest sequence.
    """
    rows = PREFILL_ROWS
    if (switch := model.rotary_switch) is not None and longest > switch:
        rows = longest
    return [slice(start, start + rows) for start in range(0, longest, rows)]


def append_text(
    model: TargetModel,
    cache: Any,
    tokens: Sequence[Sequence[int]],
    feature_layers: Sequence[int] = (),
    append: Callable[..., TargetOutput] | None = None,
) -> list[TargetOutput | None]:
    """Run a stretch of text of each sequence and commit it.

    Args:
        model: whose cache it is; nothing may be pending there.
        cache: appended to.
        tokens: B lists of T_b token ids, at least one of them not empty.
        feature_layers: as in `TargetModel.forward`.
        append: of the engine whose cache it is; None is `append_rows` with ``model``.

    Returns:
        Per sequence, None if it had no tokens: (1, V) logits behind its last token, features
        (T_b, F·D) and last hidden states (T_b, D).
    """
    lasts = {len(some) - 1 for some in tokens if some}
    alike = len(lasts) == 1
    out = (append or partial(append_rows, model))(
        cache,
        [torch.tensor(some, dtype=torch.int64) for some in tokens],
        [torch.arange(len(some)) for some in tokens],
        [torch.ones(len(some), len(some), dtype=torch.bool).tril() for some in tokens],
        feature_layers=feature_layers,
        logits_to_keep=torch.tensor(list(lasts), device=model.device) if alike else 1,
    )
    cache.commit([range(len(some)) for some in tokens])
    found: list[TargetOutput | None] = [None] * len(tokens)
    for row, some in enumerate(tokens):
        if count := len(some):
            hidden = out.last_hidden[row, :count]
            # Every row of logits for every length among the sequences would be B² of them.
            logits = out.logits[row] if alike else model.project(hidden[-1:])
            features = None if out.features is None else out.features[row, :count]
            found[row] = TargetOutput(logits, features, hidden)
    return found


def append_prompts(
    model: TargetModel,
    cache: Any,
    prompts: Sequence[Sequence[int]],
    feature_layers: Sequence[int] = (),
    append: Callable[..., TargetOutput] | None = None,
) -> list[TargetOutput]:
    """Run whole prompts, in stretches, and commit them.

    Args:
        model: as in `append_text`, as are the others.
        cache: empty.
        prompts: B lists of token ids, none of them empty.
        feature_layers: as in `TargetModel.forward`.
        append: of the engine whose cache it is.

    Returns:
        Per sequence (1, V) logits behind its last token, features (T_b, F·D) or None, and last
        hidden states (T_b, D).
    """
    outputs: list[list[TargetOutput]] = [[] for _ in prompts]
    for part in stretches(model, max(map(len, prompts))):
        some = [prompt[part] for prompt in prompts]
        found = append_text(model, cache, some, feature_layers, append)
        for parts, out in zip(outputs, found, strict=True):
            parts += [] if out is None else [out]
    merged = []
    for parts in outputs:
        features = [part.features for part in parts if part.features is not None]
        hidden = torch.cat([part.last_hidden for part in parts])
        whole = torch.cat(features) if features else None
        merged.append(TargetOutput(parts[-1].logits, whole, hidden))
    return merged
