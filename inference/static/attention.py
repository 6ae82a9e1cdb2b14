"""Attention of appended rows over a `StaticCache`, as transformers' models call it.

One function is registered with transformers under `NAME`. It writes the new keys and values into
the cache and attends to it, both inside one operator that torch's compiler does not look into, so
that neither the length of the text nor the shape of the tree is part of a compiled graph. A
forward tells it about the rows by the keyword argument ``rows``, which the models hand through.

Two ways to attend:

* with `TreeRows.bias`, made once per forward on the host, which then knows how many columns are in
  use: torch's own kernels, the query rows of a key-value head packed so that its keys are read
  once. The way of a CPU, and of prompts everywhere.
* without it, by ancestor words and lengths on the device (`inference.kernels`): nothing is read
  back, so a CUDA graph can hold it.

Letters: L layers, B batch, Hq query heads, Hkv key-value heads, G query heads per key-value head,
N new rows, C columns in use, S columns of the cache, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from inference.kernels import tree_attention

NAME = "headway_tree"
PACKED_ROWS = 64
"""Up to so many new rows, those of a key-value head's query heads are packed."""


@dataclass
class TreeRows:
    """What attention needs to know about the rows of one forward.

    Attributes:
        kv: (L, 2, B, Hkv, S, d) the cache.
        columns: (B, N) long, where each new row's key and value go.
        windows: per layer, how far back a row sees, itself included, or None.
        bias: (B, 1, N, C) to add to the scores, 0 where attended and -inf elsewhere; None to attend
            by words.
        window_bias: the same for the layers with a window; None without such layers.
        lengths: (B,) long, committed tokens.
        words: (B, N, W) long, ancestor words (`inference.kernels`).
        depths: (B, pending + N) long, of pending and new rows.
        pending: rows between the committed ones and the new ones.
    """

    kv: Tensor
    columns: Tensor
    windows: tuple[int | None, ...]
    bias: Tensor | None = None
    window_bias: Tensor | None = None
    lengths: Tensor | None = None
    words: Tensor | None = None
    depths: Tensor | None = None
    pending: int = 0


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to the scores: 0 where the mask (bool) is true, -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


_library = torch.library.Library("headway", "FRAGMENT")
_library.define(
    "biased_attention(Tensor(a!) kv, int layer, Tensor q, Tensor k, Tensor v, Tensor columns, "
    "Tensor bias, Tensor? sinks, float scale, float? softcap) -> Tensor"
)
_library.define(
    "word_attention(Tensor(a!) kv, int layer, Tensor q, Tensor k, Tensor v, Tensor columns, "
    "Tensor lengths, Tensor words, Tensor? depths, Tensor? sinks, float scale, float? softcap, "
    "int? window, int pending) -> Tensor"
)


def store(kv: Tensor, layer: int, k: Tensor, v: Tensor, columns: Tensor) -> None:
    """Write k and v (B, Hkv, N, d) of a layer at ``columns`` (B, N), in place."""
    index = columns[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
    kv[layer, 0].scatter_(2, index, k)
    kv[layer, 1].scatter_(2, index, v)


def biased_attention(
    kv: Tensor,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    columns: Tensor,
    bias: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Store, and attend with a bias.

    Args:
        kv: (L, 2, B, Hkv, S, d), written to.
        layer: whose.
        q: (B, Hq, N, d).
        k: (B, Hkv, N, d).
        v: (B, Hkv, N, d).
        columns: (B, N).
        bias: (B, 1, N, C), in the dtype of ``q``.
        sinks: (Hq,) a score per head that takes part in the softmax and has no value, or None.
        scale: of the scores.
        softcap: scores become cap·tanh(score / cap); None leaves them.

    Returns:
        (B, N, Hq, d).
    """
    store(kv, layer, k, v, columns)
    (batch, heads, rows, size), groups = q.shape, q.shape[1] // k.shape[1]
    keys, values = (kv[layer, part, :, :, : bias.shape[-1]] for part in (0, 1))
    packed = rows <= PACKED_ROWS
    if packed:  # (B, Hkv, G·N, d): keys and values are read once
        q = q.reshape(batch, k.shape[1], groups * rows, size)
        bias = bias.repeat(1, 1, groups, 1) if groups > 1 else bias
    else:
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    if sinks is None and softcap is None:
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=scale)
    else:
        per_row = None if sinks is None else _sinks_of_rows(sinks, q, groups, rows, packed)
        out = plain_attention(q, keys, values, bias, scale, softcap, per_row)
    return out.reshape(batch, heads, rows, -1).transpose(1, 2).contiguous()


def _sinks_of_rows(sinks: Tensor, q: Tensor, groups: int, rows: int, packed: bool) -> Tensor:
    """(H, 1 or M, 1) sink of each query row, H and M as in ``q`` (B, H, M, d)."""
    if not packed:
        return sinks[:, None, None]
    return sinks.reshape(q.shape[1], groups).repeat_interleave(rows, dim=1)[..., None]


def plain_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention in single steps, for scores that no fused kernel of torch takes.

    Args:
        q: (B, H, M, d).
        keys: (B, H, C, d).
        values: (B, H, C, d).
        bias: (B, 1, M, C).
        scale: of the scores.
        softcap: see `biased_attention`.
        sinks: (H, M or 1, 1).

    Returns:
        (B, H, M, d).
    """
    scores = torch.matmul(q, keys.transpose(2, 3)).mul_(scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + bias).float() if scores.dtype != torch.float64 else scores + bias
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)


def word_attention(
    kv: Tensor,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    columns: Tensor,
    lengths: Tensor,
    words: Tensor,
    depths: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    pending: int,
) -> Tensor:
    """Store, and attend by ancestor words; arguments as in `biased_attention` and `TreeRows`.

    Returns:
        (B, N, Hq, d).
    """
    store(kv, layer, k, v, columns)
    out = tree_attention(
        q,
        kv[layer, 0],
        kv[layer, 1],
        lengths,
        words,
        scale=scale,
        num_pending=pending,
        depths=None if window is None else depths,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    return out.transpose(1, 2).contiguous()


def _shape_only(kv: Tensor, layer: int, q: Tensor, *rest: Any) -> Tensor:
    batch, heads, rows, size = q.shape
    return q.new_empty(batch, rows, heads, size)


for _name, _function in (
    ("biased_attention", biased_attention),
    ("word_attention", word_attention),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"headway::{_name}", _shape_only, lib=_library)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    rows: TreeRows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers' models call; the names of the arguments are theirs.

    Args:
        module: the attention layer; its ``layer_idx`` finds its part of the cache.
        query: (B, Hq, N, d).
        key: (B, Hkv, N, d), of the new rows alone.
        value: (B, Hkv, N, d).
        attention_mask: None; ``rows`` says who sees whom.
        scaling: of the scores.
        dropout: 0.
        softcap: see `biased_attention`.
        s_aux: sinks.
        rows: of this forward.
        kwargs: what else a model hands over, ``sliding_window`` among it; the windows are the
            cache's.

    Returns:
        (B, N, Hq, d), and no weights.

    Raises:
        RuntimeError: the model does not hand keyword arguments through.
    """
    if rows is None:
        raise RuntimeError("the model does not hand keyword arguments to its attention layers")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    window = rows.windows[layer]
    if rows.bias is not None:
        bias = rows.bias if window is None else rows.window_bias
        out = torch.ops.headway.biased_attention(
            rows.kv, layer, query, key, value, rows.columns, bias, s_aux, scaling, softcap
        )
    else:
        out = torch.ops.headway.word_attention(
            rows.kv,
            layer,
            query,
            key,
            value,
            rows.columns,
            rows.lengths,
            rows.words,
            rows.depths,
            s_aux,
            scaling,
            softcap,
            window,
            rows.pending,
        )
    return out, None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """transformers' masks are not used: `TreeRows` says who sees whom."""


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, _no_mask)
