"""Attention of draft rows over the text and over their own block or rollout, in two parts.

Draft rows are many times the text's length, but each of them sees only text and the few rows it is
drafted together with. So the scores are (Q, T) for the text plus (Q, g) for those, under one
softmax, never (T+Q)², and of the former only a piece of Q is alive at a time. The rules of
``training.masks`` over all pairs of rows are the definition.

Legend: B batch, T sequence, Q draft rows, A blocks, g rows per block, H query heads, Hkv key/value
heads, d head size, K drafts.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafters.layers import repeat_heads
from training.masks import (
    Rows,
    Rule,
    block_rows,
    build_mask,
    causal,
    parallel,
    rollout_rows,
    sequence_rows,
    windowed,
)

PIECE = 1024
"""Draft rows whose scores on the text are alive at once; those of more rows are computed again in
the backward pass."""


def _two_parts(
    q: Tensor, keys: Tensor, values: Tensor, near: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """One softmax over text and fellow rows.

    Args:
        q: (B, H, n, d).
        keys, values: (B, H, T, d) of the text.
        near: (B, H, n, g) scaled and masked scores on fellow rows.
        mask: (B, 1, n, T) bool, which text each row sees.

    Returns:
        The text's part of the output (B, H, n, d), and the weights (B, H, n, g) of fellow rows.
    """
    far = (q @ keys.transpose(-1, -2)) * q.shape[-1] ** -0.5  # (B, H, n, T)
    far = far.masked_fill(~mask, float("-inf"))
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = torch.cat((far, near), dim=-1).softmax(-1, dtype=wide).to(values.dtype)
    length = keys.shape[2]
    return weights[..., :length] @ values, weights[..., length:]


class DraftAttention(ABC):
    """The attention of draft rows; an ``Attend``.

    Text rows give their keys first, by :meth:`text` or, where they ask nothing themselves, by
    :meth:`store`.

    Args:
        text: attributes of the text's rows (B, T).
        drafts: attributes of the draft rows (B, Q).
        rule: who sees whom.
        windows: sliding window of each layer, or None.
    """

    def __init__(self, text: Rows, drafts: Rows, rule: Rule, windows: Sequence[int | None]) -> None:
        self._text, self._drafts = text, drafts
        self._rules = [windowed(rule, window) for window in windows]
        self._windows = list(windows)
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[str, int | None], Tensor] = {}

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep the text's keys and values (B, Hkv, T, d) of a layer."""
        self._stored[layer] = (k, v)

    def text(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """An ``Attend`` of the text's own rows: causal within each document."""
        self.store(layer, k, v)
        groups = q.shape[1] // k.shape[1]
        mask = self._mask("causal", layer)[:, None]
        return F.scaled_dot_product_attention(
            q, repeat_heads(k, groups), repeat_heads(v, groups), attn_mask=mask
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, Q, d) queries, (B, Hkv, Q, d) keys and values of draft rows -> (B, H, Q, d)."""
        groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        keys, values = (repeat_heads(x, groups) for x in self._stored[layer])
        k, v = repeat_heads(k, groups), repeat_heads(v, groups)
        near = self._scores(q, k) * scale  # (B, H, Q, g)
        near = near.masked_fill(~self._mask("own", layer)[:, None], float("-inf"))
        mask = self._mask("text", layer)[:, None]  # (B, 1, Q, T)
        parts = []
        for rows in torch.arange(q.shape[2], device=q.device).split(PIECE):
            piece = slice(int(rows[0]), int(rows[-1]) + 1)
            inputs = (q[:, :, piece], keys, values, near[:, :, piece], mask[:, :, piece])
            if torch.is_grad_enabled() and q.shape[2] > PIECE:
                parts.append(checkpoint(_two_parts, *inputs, use_reentrant=False))
            else:
                parts.append(_two_parts(*inputs))
        outs, weights = (torch.cat(found, dim=2) for found in zip(*parts, strict=True))
        return outs + self._values(weights, v)

    def _mask(self, kind: str, layer: int) -> Tensor:
        """(B, rows, keys) bool, made once for all layers of the same window."""
        window = self._windows[layer]
        if (kind, window) not in self._masks:
            if kind == "causal":
                found = build_mask(self._text, self._text, windowed(causal, window))
            elif kind == "text":
                found = build_mask(self._drafts, self._text, self._rules[layer])
            else:
                found = self._own_mask(self._rules[layer])
            self._masks[kind, window] = found
        return self._masks[kind, window]

    @abstractmethod
    def _own_mask(self, rule: Rule) -> Tensor:
        """(B, Q, g) which of its fellow rows each row sees."""

    @abstractmethod
    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Queries (B, H, Q, d) on the keys of fellow rows, unscaled, (B, H, Q, g)."""

    @abstractmethod
    def _values(self, weights: Tensor, v: Tensor) -> Tensor:
        """(B, H, Q, g) weights times the values of fellow rows -> (B, H, Q, d)."""


class BlockAttention(DraftAttention):
    """DFlash, DSpark and JetSpec: text before the root, and the whole block.

    Args:
        document_ids: (B, T).
        roots: (B, A) column of each block's first row, -1 for padding.
        size: g.
        rule: ``masks.block`` or ``masks.causal_block``.
        windows: sliding window of each layer, or None.
    """

    def __init__(
        self,
        document_ids: Tensor,
        roots: Tensor,
        size: int,
        rule: Rule,
        windows: Sequence[int | None],
    ) -> None:
        drafts = block_rows(document_ids, roots, size)
        super().__init__(sequence_rows(document_ids), drafts, rule, windows)
        self._size = size

    def _own_mask(self, rule: Rule) -> Tensor:
        rows = self._drafts
        batch, count = rows.position.shape
        split = Rows(
            *(
                x.reshape(-1, self._size)
                for x in (rows.position, rows.document, rows.step, rows.anchor, rows.block)
            )
        )
        return build_mask(split, split, rule).reshape(batch, count, self._size)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = self._blocks(q), self._blocks(k)
        return (q @ k.transpose(-1, -2)).flatten(2, 3)

    def _values(self, weights: Tensor, v: Tensor) -> Tensor:
        return (self._blocks(weights) @ self._blocks(v)).flatten(2, 3)

    def _blocks(self, x: Tensor) -> Tensor:
        """(B, H, A·g, ...) -> (B, H, A, g, ...)."""
        return x.unflatten(2, (-1, self._size))


class RolloutAttention(DraftAttention):
    """P-EAGLE: text up to the rollout's anchor, and the rollout's rows so far.

    Draft rows lie depth by depth, from depth 1: row i of a depth belongs to rollout i, of which the
    first so many reach that depth.

    Args:
        document_ids: (B, T).
        anchors: (B, R) the first row of each rollout, -1 for padding.
        reach: of how many rollouts each depth 1, 2, ... has a row; never more than the depth
            before.
        windows: sliding window of each layer, or None.
    """

    def __init__(
        self,
        document_ids: Tensor,
        anchors: Tensor,
        reach: Sequence[int],
        windows: Sequence[int | None],
    ) -> None:
        device = anchors.device
        parts = [torch.arange(count, device=device) for count in reach]
        rollout = torch.cat(parts)  # (Q,)
        counts = torch.tensor(reach, device=device)
        depth = torch.arange(1, len(reach) + 1, device=device).repeat_interleave(counts)
        drafts = rollout_rows(document_ids, anchors[:, rollout], depth)
        super().__init__(sequence_rows(document_ids), drafts, parallel, windows)
        starts = counts.cumsum(0) - counts  # of each depth
        self.rollout, self.depth = rollout, depth
        """(Q,) which rollout each row belongs to, and its depth there, from 1."""
        fellow = starts[None] + rollout[:, None]  # (Q, K-1)
        self._there = torch.arange(1, len(reach) + 1, device=device)[None] <= depth[:, None]
        self._fellow = torch.where(self._there, fellow, 0)

    def _own_mask(self, rule: Rule) -> Tensor:
        rows, fellow = self._drafts, self._fellow
        batch, count = rows.position.shape
        attributes = (rows.position, rows.document, rows.step, rows.anchor, rows.block)
        query = Rows(*(x.reshape(-1, 1) for x in attributes))
        key = Rows(*(x[:, fellow].reshape(-1, fellow.shape[1]) for x in attributes))
        return build_mask(query, key, rule).reshape(batch, count, -1) & self._there

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q[:, :, :, None] * k[:, :, self._fellow]).sum(-1)

    def _values(self, weights: Tensor, v: Tensor) -> Tensor:
        return (weights[..., None] * v[:, :, self._fellow]).sum(-2)
