"""Tree attention in torch operations that are fast on a CPU.

`joint_attention` is what decoding on a CPU uses: one call of torch's flash attention over prefix
and tree, with the tree's mask behind zeros for the prefix. `split_attention` is the twin of the
Triton kernel and does what that does: prefix and tree apart, merged by their log-sum-exps. On a CPU
the split is not faster: it saves the zeros in front of the mask and pays with a second call and
the merge.

Both pack the G query heads of a key-value head into one block of rows, so that a head's keys and
values are read once, and both read `lengths` on the host, which on a CPU costs nothing.

Letters: B batch, Hq and Hkv query and key-value heads, G = Hq / Hkv, N new rows, R = G · N packed
rows, T tree rows, P committed tokens of a sequence, S columns of the cache, C columns attended to,
W words, d and dv dimensions of a head.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from inference.kernels.reference import AttentionOptions, cache_mask, scores_of, tree_mask

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def joint_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    words: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Attention of N new tree rows, in one pass over the columns that any of them sees.

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
    prefixes: list[int] = lengths.tolist()
    last = max(prefixes) + options.num_pending + q.shape[2]
    first = _first_column(min(prefixes), options)
    rows = _packed(q, keys.shape[1])
    if min(prefixes) == max(prefixes) and not _reaches_back_less(last, options):
        hidden = _hidden_in_tree(words, prefixes[0], last, rows)
    else:
        seen = cache_mask(lengths, words, last, options)[:, :, first:]
        hidden = _packed_mask(_hidden(seen, q.dtype), rows)
    attend = _attend if options.softcap is None and q.shape[3] == values.shape[3] else _attend_plain
    keys, values = keys.narrow(2, first, last - first), values.narrow(2, first, last - first)
    out, lse = attend(rows, keys, values, hidden=hidden, options=options)
    if options.sinks is not None:
        # The denominator grows from exp(lse) to exp(lse) + exp(sink).
        out = out * torch.sigmoid(lse - _packed_sinks(options.sinks, rows, q)).unsqueeze(-1)
    return out.reshape(*q.shape[:3], values.shape[3]).to(q.dtype)


def split_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    words: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """The same attention, prefix and tree apart, as the Triton kernel computes it.

    Arguments and result are those of `joint_attention`.
    """
    prefixes: list[int] = lengths.tolist()
    if min(prefixes) < max(prefixes):
        return torch.cat(
            [
                split_attention(q[b], keys[b], values[b], lengths[b], words[b], _row(options, b))
                for b in (slice(i, i + 1) for i in range(len(prefixes)))
            ]
        )
    prefix, num_tree = prefixes[0], options.num_pending + q.shape[2]
    rows = _packed(q, keys.shape[1])
    seen = cache_mask(lengths, words, prefix + num_tree, options)
    tree = slice(prefix, prefix + num_tree)
    hidden = _packed_mask(_hidden(seen[:, :, tree], q.dtype), rows)
    flash = options.softcap is None and q.shape[3] == values.shape[3]
    attend = _attend if flash else _attend_plain
    parts = [attend(rows, keys[:, :, tree], values[:, :, tree], hidden=hidden, options=options)]
    first = _first_column(prefix, options)
    if first < prefix:
        before = slice(first, prefix)
        windowed = _reaches_back_less(prefix + num_tree, options)
        # With a window some row may see nothing of the prefix, which flash attention cannot say.
        attend = _attend if flash and not windowed else _attend_plain
        mask = _packed_mask(_hidden(seen[:, :, before], q.dtype), rows) if windowed else None
        parts.append(
            attend(rows, keys[:, :, before], values[:, :, before], hidden=mask, options=options)
        )
    sinks = None if options.sinks is None else _packed_sinks(options.sinks, rows, q)
    return merge(parts, sinks).reshape(*q.shape[:3], values.shape[3]).to(q.dtype)


def merge(parts: list[tuple[Tensor, Tensor]], sinks: Tensor | None = None) -> Tensor:
    """One softmax out of several over disjoint columns.

    Args:
        parts: of each (B, Hkv, R, dv) its output and (B, Hkv, R) its log-sum-exp, minus infinity
            where a row sees nothing of it; every row sees something of the first one.
        sinks: (B, Hkv, R) logits that only enter the denominator.

    Returns:
        (B, Hkv, R, dv) float32.
    """
    denominators = [lse for _, lse in parts] + ([] if sinks is None else [sinks])
    total = torch.stack(denominators).logsumexp(0)
    return torch.stack([out.float() * (lse - total).exp().unsqueeze(-1) for out, lse in parts]).sum(
        0
    )


def _attend(
    rows: Tensor, keys: Tensor, values: Tensor, *, hidden: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """(B, Hkv, R, dv) and its log-sum-exp (B, Hkv, R); every row sees some column."""
    out, lse = _flash(rows, keys, values, attn_mask=hidden, scale=options.scale)
    return out, lse


def _attend_plain(
    rows: Tensor, keys: Tensor, values: Tensor, *, hidden: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """The same with anything that flash attention lacks; rows may see nothing."""
    scores = scores_of(rows, keys, options)
    if hidden is not None:
        scores = scores + hidden
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()
    return weights @ values.float(), lse


def _first_column(prefix: int, options: AttentionOptions) -> int:
    """The first column that the root sees, and deeper rows no further back."""
    return 0 if options.window is None else max(0, prefix - options.window + 1)


def _reaches_back_less(num_columns: int, options: AttentionOptions) -> bool:
    """Whether the window can hide one of so many columns from some row."""
    return options.window is not None and num_columns > options.window


def _hidden(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to scores: 0 where seen, minus infinity elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def _hidden_in_tree(words: Tensor, prefix: int, last: int, rows: Tensor) -> Tensor:
    """(B, 1, R, C) for sequences of one length and no window: only tree rows are hidden."""
    batch, num_rows, _ = words.shape
    num_tree, num_packed = last - prefix, rows.shape[2]
    mask = rows.new_zeros(batch, num_packed // num_rows, num_rows, last)
    unseen = tree_mask(words, num_tree).logical_not_().unsqueeze(1)
    mask.narrow(3, prefix, num_tree).masked_fill_(unseen, -torch.inf)
    return mask.view(batch, 1, num_packed, last)


def _packed(q: Tensor, num_kv_heads: int) -> Tensor:
    """(B, Hkv, R, d): the query heads of a key-value head one after another."""
    return q.reshape(q.shape[0], num_kv_heads, -1, q.shape[3])


def _packed_mask(hidden: Tensor, rows: Tensor) -> Tensor:
    """(B, 1, R, C) from (B, N, C): the same for every query head."""
    batch, num_rows, num_columns = hidden.shape
    repeats = rows.shape[2] // num_rows
    packed = hidden[:, None].expand(-1, repeats, -1, -1)
    return packed.reshape(batch, 1, repeats * num_rows, num_columns)


def _packed_sinks(sinks: Tensor, rows: Tensor, q: Tensor) -> Tensor:
    """(B, Hkv, R) float32 from (Hq,): the logit of each row's query head."""
    per_head = sinks.float().view(rows.shape[1], -1, 1)
    per_row = per_head.expand(-1, -1, q.shape[2]).reshape(1, rows.shape[1], rows.shape[2])
    return per_row.expand(rows.shape[0], -1, -1)


def _row(options: AttentionOptions, b: slice) -> AttentionOptions:
    return replace(options, depths=None if options.depths is None else options.depths[b])
