"""Attention of a tree of draft tokens to a cache: Triton on CUDA, torch elsewhere.

* `reference`: one mask, one softmax, float32; what the tests trust.
* `twin`: torch operations that are fast on a CPU, and the twin of the kernel.
* `triton_attention`: the kernel.

Letters: B batch, Hq and Hkv query and key-value heads, N new rows, T tree rows, S columns of the
cache, W words, d and dv dimensions of a head.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from inference.kernels.reference import (
    MAX_WORDS,
    WORD_BITS,
    AttentionOptions,
    masked_attention,
)
from inference.kernels.twin import joint_attention

__all__ = ["MAX_WORDS", "WORD_BITS", "has_triton", "kernel_refusal", "tree_attention"]

MAX_HEAD_DIM = {torch.float32: 128, torch.float16: 256, torch.bfloat16: 256}
"""Per dtype that the kernel takes; with larger heads its registers would not suffice."""
MIN_CAPABILITY = (8, 0)


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    words: Tensor,
    *,
    scale: float,
    num_pending: int = 0,
    depths: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of N new rows of a tree to the committed tokens, their ancestors and themselves.

    On CUDA nothing is read by the host and the grid depends on shapes alone, so the call can be
    captured in a CUDA graph. What the kernel does not serve (`kernel_refusal`) is computed with
    one explicit mask over all columns of the cache.

    Args:
        q: (B, Hq, N, d).
        keys: (B, Hkv, S, d) of the cache. The tree's own rows are already in it, in columns
            lengths[b] .. lengths[b] + T - 1, T = num_pending + N; what is behind them is ignored
            but has to be finite.
        values: (B, Hkv, S, dv).
        lengths: (B,) long, committed tokens per sequence, all of which every row sees.
        words: (B, N, W) long: bit j of word j // 64 of a row says that it sees tree row j. A row
            has its own bit set; bits behind T are ignored. 64 W must be at least T.
        scale: of the scores; usually d ** -0.5.
        num_pending: tree rows that earlier forwards appended, in front of the new ones.
        depths: (B, T) long, distance of each tree row from the root, which follows the last
            committed token. With `window` only.
        window: a row sees what is less than this many positions behind it.
        softcap: scores become softcap · tanh(score / softcap).
        sinks: (Hq,) a logit per query head that only enters the denominator.

    Returns:
        (B, Hq, N, dv) in the dtype of q; from the kernel a view of (B, N, Hq, dv), otherwise
        contiguous.

    Raises:
        ValueError: the shapes do not fit together, or the tree has more than 128 rows.
    """
    options = AttentionOptions(scale, num_pending, depths, window, softcap, sinks)
    check_arguments(q, keys, values, lengths, words, options)
    if q.device.type == "cpu":
        return joint_attention(q, keys, values, lengths, words, options)
    if kernel_refusal(q, keys, values) is None:
        from inference.kernels.triton_attention import triton_attention  # needs triton

        return triton_attention(q, keys, values, lengths, words, options)
    return masked_attention(q, keys, values, lengths, words, options)


def kernel_refusal(q: Tensor, keys: Tensor, values: Tensor) -> str | None:
    """Why the Triton kernel does not serve these tensors; None if it does.

    Meaning first, then shapes, then the device, so that all but the last can be tested without a
    GPU (on the "meta" device).
    """
    if q.dtype not in MAX_HEAD_DIM:
        return f"dtype {q.dtype}: the kernel takes float32, float16 and bfloat16"
    if not q.dtype == keys.dtype == values.dtype:
        return f"a cache of {keys.dtype} and {values.dtype} with queries of {q.dtype}"
    for name, size in (("keys", q.shape[3]), ("values", values.shape[3])):
        if size > (most := MAX_HEAD_DIM[q.dtype]):
            return f"{name} have head dimension {size}: the kernel takes up to {most} in {q.dtype}"
    for name, tensor in (("q", q), ("keys", keys), ("values", values)):
        if tensor.stride(3) != 1:
            return f"{name} are not contiguous in the head dimension"
    if not has_triton():
        return "triton is not installed"
    if q.device.type != "cuda":
        return f"the device is {q.device.type!r}, not 'cuda'"
    if torch.cuda.get_device_capability(q.device) < MIN_CAPABILITY:
        return "compute capability below 8.0"
    return None


@cache
def has_triton() -> bool:
    """Whether Triton is installed, which it is not on macOS."""
    return find_spec("triton") is not None


def check_arguments(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    words: Tensor,
    options: AttentionOptions,
) -> None:
    """Refuse what does not fit together; reads shapes only.

    Raises:
        ValueError: naming the argument.
    """
    batch, num_heads, num_rows, dim = q.shape
    key_batch, kv_heads, capacity, key_dim = keys.shape
    value_batch, value_heads, value_capacity, _ = values.shape
    word_batch, word_rows, num_words = words.shape
    num_tree = options.num_pending + num_rows
    if key_batch != batch or key_dim != dim or num_heads % kv_heads:
        raise ValueError(
            f"keys of shape {tuple(keys.shape)} do not fit q of shape {tuple(q.shape)}: batch and "
            "head dimension must be equal, and key-value heads divide query heads"
        )
    if value_batch != batch or value_heads != kv_heads or value_capacity != capacity:
        raise ValueError(f"values {tuple(values.shape)} do not fit keys {tuple(keys.shape)}")
    if lengths.shape != (batch,):
        raise ValueError(f"lengths must have shape ({batch},), not {tuple(lengths.shape)}")
    if word_batch != batch or word_rows != num_rows or not 1 <= num_words <= MAX_WORDS:
        raise ValueError(
            f"words must have shape ({batch}, {num_rows}, 1 or {MAX_WORDS}), "
            f"not {tuple(words.shape)}"
        )
    if num_tree > WORD_BITS * num_words:
        raise ValueError(
            f"words: {num_tree} tree rows need {-(-num_tree // WORD_BITS)} words per row, "
            f"not {num_words} (at most {MAX_WORDS})"
        )
    if (options.window is None) != (options.depths is None):
        raise ValueError("depths and window come together: a window is counted in positions")
    if options.depths is not None and options.depths.shape != (batch, num_tree):
        raise ValueError(
            f"depths must have shape ({batch}, {num_tree}), not {tuple(options.depths.shape)}"
        )
    if options.sinks is not None and options.sinks.shape != (num_heads,):
        raise ValueError(f"sinks must have shape ({num_heads},), not {tuple(options.sinks.shape)}")
