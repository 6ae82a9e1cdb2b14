"""Attention over text, a few query rows at a time.

Of the text, a row of any family sees one range of columns: so two numbers per row say what a mask
would, and neither scores nor masks over all pairs are ever made. The rows are cut into pieces; a
piece sees only the columns that some row of it does, and where there are several pieces, the scores
of each are computed again in the backward pass. The rules of ``training.masks`` over all pairs of
rows are the definition.

Legend: B batch, T text columns, Q query rows, n rows and s columns of a piece, g fellow rows, H
query heads, Hkv key/value heads, d head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafters.layers import repeat_heads

ROWS = 512
"""Query rows of a piece."""


@dataclass(frozen=True)
class Spans:
    """Which text each query row sees.

    Attributes:
        first: (B, Q) its first column.
        last: (B, Q) the column behind its last; not above ``first`` where it sees none.
    """

    first: Tensor
    last: Tensor

    def within(self, position: Tensor, window: int | None) -> "Spans":
        """The part less than ``window`` positions before (B, Q) ``position``; None is all."""
        if window is None:
            return self
        return replace(self, first=torch.maximum(self.first, position - window + 1))

    @cached_property
    def pieces(self) -> list[tuple[slice, slice]]:
        """Rows, and the columns that those see, of each piece."""
        rows = [
            slice(start, min(start + ROWS, self.first.shape[1]))
            for start in range(0, self.first.shape[1], ROWS)
        ]
        seen = self.last > self.first
        first = torch.where(seen, self.first, torch.iinfo(torch.int64).max)
        last = torch.where(seen, self.last, 0)
        ends = [torch.stack((first[:, part].min(), last[:, part].max())) for part in rows]
        columns = [slice(min(low, high), high) for low, high in torch.stack(ends).tolist()]
        return list(zip(rows, columns, strict=True))


def document_starts(document_ids: Tensor) -> Tensor:
    """(B, T) documents -> (B, T) first column of each row's own; padding is alone in its row."""
    length = document_ids.shape[1]
    column = torch.arange(length, device=document_ids.device).expand_as(document_ids)
    places = torch.full((len(document_ids), length + 1), length, device=document_ids.device)
    found = places.scatter_reduce(1, document_ids + 1, column, "amin").gather(1, document_ids + 1)
    return torch.where(document_ids >= 0, found, column)


def causal_spans(document_ids: Tensor) -> Spans:
    """(B, T) documents -> what each row sees of its own up to itself."""
    column = torch.arange(document_ids.shape[1], device=document_ids.device)
    return Spans(document_starts(document_ids), column.expand_as(document_ids) + 1)


def attend_text(q: Tensor, keys: Tensor, values: Tensor, spans: Spans) -> Tensor:
    """Attention over text alone.

    Args:
        q: (B, H, Q, d).
        keys, values: (B, Hkv, T, d).
        spans: of the query rows, none of them empty.

    Returns:
        (B, H, Q, d).
    """
    parts = []
    for rows, columns in spans.pieces:
        inputs = (q[:, :, rows], keys, values, spans.first[:, rows], spans.last[:, rows], columns)
        parts.append(_again(len(spans.pieces) > 1, _text_piece, *inputs))
    return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]


def attend_text_and(
    q: Tensor, keys: Tensor, values: Tensor, near: Tensor, spans: Spans
) -> tuple[Tensor, Tensor]:
    """One softmax over text and a few fellow rows.

    Args:
        q: (B, H, Q, d).
        keys, values: (B, Hkv, T, d) of the text.
        near: (B, H, Q, g) scaled and masked scores on fellow rows.
        spans: which text each query row sees.

    Returns:
        The text's part of the output (B, H, Q, d), and the weights (B, H, Q, g) of fellow rows.
    """
    parts = []
    for rows, columns in spans.pieces:
        limits = (spans.first[:, rows], spans.last[:, rows], columns)
        inputs = (q[:, :, rows], keys, values, near[:, :, rows], *limits)
        parts.append(_again(len(spans.pieces) > 1, _two_part_piece, *inputs))
    if len(parts) == 1:
        return parts[0]
    out, weights = (torch.cat(found, dim=2) for found in zip(*parts, strict=True))
    return out, weights


def _again(several: bool, function: Callable[..., Any], *inputs: Any) -> Any:
    """The function's result; of several pieces, each is computed again in the backward pass."""
    if several and torch.is_grad_enabled():
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return function(*inputs)


def _text_piece(
    q: Tensor, keys: Tensor, values: Tensor, first: Tensor, last: Tensor, columns: slice
) -> Tensor:
    """Rows (B, H, n, d) on some columns of the text."""
    groups = q.shape[1] // keys.shape[1]
    keys, values = (repeat_heads(x[:, :, columns], groups) for x in (keys, values))
    return F.scaled_dot_product_attention(
        q, keys, values, attn_mask=_mask(first, last, columns)[:, None]
    )


def _two_part_piece(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    near: Tensor,
    first: Tensor,
    last: Tensor,
    columns: slice,
) -> tuple[Tensor, Tensor]:
    """Rows (B, H, n, d), with their scores on fellow rows, on some columns of the text.

    Query heads that share keys are rows of one matrix product.
    """
    heads, count = keys.shape[1], q.shape[2]
    keys, values = keys[:, :, columns], values[:, :, columns]
    length = keys.shape[2]
    scaled = (q * q.shape[-1] ** -0.5).unflatten(1, (heads, -1)).flatten(2, 3)
    far = (scaled @ keys.transpose(-1, -2)).view(*q.shape[:3], length)  # (B, H, n, s)
    far = far.masked_fill_(~_mask(first, last, columns)[:, None], float("-inf"))
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = torch.cat((far, near.to(far.dtype)), dim=-1).softmax(-1, dtype=wide)
    weights = weights.to(values.dtype)
    folded = weights.unflatten(1, (heads, -1)).flatten(2, 3)  # (B, Hkv, H/Hkv·n, s+g)
    out = (folded[..., :length] @ values).unflatten(2, (-1, count)).flatten(1, 2)
    return out, weights[..., length:].clone()  # a view would keep the whole piece alive


def _mask(first: Tensor, last: Tensor, columns: slice) -> Tensor:
    """(B, n) limits -> (B, n, s) bool, which of the columns each row sees."""
    column = torch.arange(columns.start, columns.stop, device=first.device)
    return (column >= first[..., None]) & (column < last[..., None])
