"""Attention of draft rows over the text and over their own block or rollout, in two parts.

Draft rows are many times the text's length, but each of them sees only text and the few rows it is
drafted together with. So the scores are (Q, T) for the text, of which only a piece of Q is alive at
a time (``spans``), plus (Q, g) for those, under one softmax, never (T+Q)². The rules of
``training.masks`` over all pairs of rows are the definition.

Legend: B batch, T sequence, Q draft rows, A blocks, g rows per block, H query heads, Hkv key/value
heads, d head size, K drafts.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.layers import repeat_heads
from training.masks import (
    Rows,
    Rule,
    block_rows,
    build_mask,
    parallel,
    rollout_rows,
    sequence_rows,
    windowed,
)
from training.objectives.spans import (
    Spans,
    attend_text,
    attend_text_and,
    causal_spans,
    document_starts,
)


class DraftAttention(ABC):
    """The attention of draft rows; an ``Attend``.

    Text rows give their keys first, by :meth:`text` or, where they ask nothing themselves, by
    :meth:`store`.

    Args:
        text: attributes of the text's rows (B, T).
        drafts: attributes of the draft rows (B, Q).
        rules: of each layer, who sees whom.
        until: (B, Q) the column behind the last one of the text that each draft row sees.
        windows: sliding window of each layer, or None.
    """

    def __init__(
        self,
        text: Rows,
        drafts: Rows,
        rules: Sequence[Rule],
        until: Tensor,
        windows: Sequence[int | None],
    ) -> None:
        self._text, self._drafts = text, drafts
        self._kinds = list(zip(rules, windows, strict=True))
        self._causal = causal_spans(text.document)
        starts = document_starts(text.document).gather(1, (until - 1).clamp_min(0))
        self._spans = Spans(starts, torch.where(drafts.document >= 0, until, 0))
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self._known: dict[tuple[Rule, int | None], tuple[Spans, Spans, Tensor]] = {}

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep the text's keys and values (B, Hkv, T, d) of a layer."""
        self._stored[layer] = (k, v)

    def text(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """An ``Attend`` of the text's own rows: causal within each document."""
        self.store(layer, k, v)
        return attend_text(q, k, v, self._seen(layer)[0])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, Q, d) queries, (B, Hkv, Q, d) keys and values of draft rows -> (B, H, Q, d)."""
        groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        k, v = repeat_heads(k, groups), repeat_heads(v, groups)
        _, spans, mask = self._seen(layer)
        near = self._scores(q, k) * scale  # (B, H, Q, g)
        near = near.masked_fill(~mask[:, None], float("-inf"))
        out, weights = attend_text_and(q, *self._stored[layer], near, spans)
        return out + self._values(weights, v)

    def _seen(self, layer: int) -> tuple[Spans, Spans, Tensor]:
        """What text rows see, what draft rows see of the text, and the mask of :meth:`_own_mask`;
        made once for all layers of the same rule and window.
        """
        rule, window = kind = self._kinds[layer]
        if kind not in self._known:
            self._known[kind] = (
                self._causal.within(self._text.position, window),
                self._spans.within(self._drafts.position, window),
                self._own_mask(windowed(rule, window)),
            )
        return self._known[kind]

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
        rules: of each layer, ``masks.block`` or ``masks.causal_block``.
        windows: sliding window of each layer, or None.
    """

    def __init__(
        self,
        document_ids: Tensor,
        roots: Tensor,
        size: int,
        rules: Sequence[Rule],
        windows: Sequence[int | None],
    ) -> None:
        drafts = block_rows(document_ids, roots, size)
        super().__init__(sequence_rows(document_ids), drafts, rules, drafts.anchor, windows)
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
        until = drafts.anchor + 1
        rules = [parallel] * len(windows)
        super().__init__(sequence_rows(document_ids), drafts, rules, until, windows)
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
