"""From logits to laws to tokens, with noise that is a function of (seed, stream, position).

There is no generator state: the noise at an absolute position can be recomputed by anyone who
knows the seed. That is what makes speculative output equal plain sampling token for token (the
`coupled` and `match` rules), whatever was drafted, and across batch sizes and devices.

Letters: V target vocabulary.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

NUCLEUS_GUESS = 1024
"""Tokens among which top-p first looks for its nucleus."""


@dataclass(frozen=True)
class SamplingParams:
    """What turns the target's logits into the law to sample from.

    Attributes:
        temperature: 0 decodes greedily.
        top_k: keep the k most likely tokens; None keeps all.
        top_p: keep the smallest set of tokens with at least this mass; None keeps all.
        seed: of the noise; the same seed gives the same text.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values outside their range."""
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a finite number >= 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, or None to keep all; got {self.top_k}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], or be None to keep all; got {self.top_p}")


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The law to sample from, after the warpers of `generate` in its order.

    Args:
        logits: (..., V) of any floating dtype.
        params: temperature 0 gives the one-hot law at the argmax, the lowest index on ties.

    Returns:
        (..., V) probabilities in float32, or in float64 if the logits are.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if params.temperature == 0.0:
        best = lowest_argmax(logits).unsqueeze(-1)
        return torch.zeros_like(logits, dtype=dtype).scatter_(-1, best, 1.0)
    logits = logits.to(dtype) / params.temperature
    if params.top_k is not None:
        logits = keep_top_k(logits, params.top_k)
    if params.top_p is not None and params.top_p < 1.0:
        logits = keep_top_p(logits, params.top_p)
    return torch.softmax(logits, dim=-1)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Logits (..., V) with all but the k largest at -inf; ties with the k-th stay."""
    kth = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Logits (..., V) with all but the nucleus at -inf (arXiv:1904.09751).

    The nucleus is the smallest set of most likely tokens whose mass reaches `top_p`. It is looked
    for among the best few, as sorting a whole vocabulary would cost more than the rest of a draw.
    """
    probs = torch.softmax(logits, dim=-1)
    best = probs.topk(min(NUCLEUS_GUESS, probs.shape[-1]))
    if not bool((best.values.sum(dim=-1) >= top_p).all()):
        best = probs.topk(probs.shape[-1])
    mass_before = best.values.cumsum(dim=-1) - best.values
    kept = logits.gather(-1, best.indices).masked_fill(mass_before >= top_p, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(-1, best.indices, kept)


def lowest_argmax(values: Tensor) -> Tensor:
    """Argmax over the last dimension, the lowest index on ties, on every device.

    Args:
        values: (..., V).

    Returns:
        (...) long.
    """
    largest = values.amax(dim=-1, keepdim=True)
    if not bool((largest > -torch.inf).all()):  # false for NaN too
        raise ValueError("no largest entry: all are -inf or some are NaN; check the model's logits")
    index = torch.arange(values.shape[-1], device=values.device)
    return torch.where(values == largest, index, values.shape[-1]).amin(dim=-1)


# Noise ------------------------------------------------------------------------------------------


class Stream(enum.IntEnum):
    """Independent streams of noise under one seed."""

    TARGET = 0
    """The target's own draws: plain sampling, `match`, `coupled`, and coupled drafts."""
    ACCEPT = 1
    """The accept-or-reject coins of `rejection`."""
    RESIDUAL = 2
    """The draws of `rejection` from a residual or after the last accepted node."""
    DRAFT = 3
    """Drafts verified by `rejection`; to share a stream of the verifier would be biased."""


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 with the bits of `value` mod 2**64."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix_int(value: int) -> int:
    """The finaliser of SplitMix64 on a Python integer."""
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Logical shift of int64, which torch shifts arithmetically."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _hash(seed: int, stream: int, position: int, index: Tensor) -> Tensor:
    """SplitMix64 started at a hash of (seed, stream, position), evaluated at `index`.

    Returns:
        int64 tensor of the shape of `index`: 64 random bits per entry.
    """
    key = 0
    for word in (seed, stream, position):
        key = _mix_int((key ^ (word & _MASK)) + _GOLDEN & _MASK)
    bits = (index + 1).mul_(_signed(_GOLDEN)).add_(_signed(key))
    bits = bits.bitwise_xor_(_shift_right(bits, 30)).mul_(_signed(_MIX_1))
    bits = bits.bitwise_xor_(_shift_right(bits, 27)).mul_(_signed(_MIX_2))
    return bits.bitwise_xor_(_shift_right(bits, 31))


def uniform_at(seed: int, stream: int, position: int, index: Tensor) -> Tensor:
    """Uniform noise at chosen indices; that of one index does not depend on the others.

    Args:
        seed: any integer.
        stream: a `Stream`.
        position: absolute position of the token that the noise decides.
        index: long tensor of any shape, for instance token ids.

    Returns:
        float64 numbers of 52 bits, strictly inside (0, 1), the same on every device.
    """
    bits = _shift_right(_hash(seed, stream, position, index), 64 - 52)
    return bits.double().add_(0.5).mul_(2.0**-52)  # both ends stay out after rounding


def gumbel_at(seed: int, position: int, index: Tensor, stream: int = Stream.TARGET) -> Tensor:
    """Standard Gumbel noise at chosen indices, float64, of the shape of `index`."""
    return uniform_at(seed, stream, position, index).log_().neg_().log_().neg_()


def gumbel(
    seed: int,
    position: int,
    size: int,
    device: torch.device | str | None = None,
    stream: int = Stream.TARGET,
) -> Tensor:
    """Standard Gumbel noise for a whole vocabulary, (size,) float64."""
    return gumbel_at(seed, position, torch.arange(size, device=device), stream)


# Draws ------------------------------------------------------------------------------------------


def draw(probs: Tensor, noise: Tensor) -> int:
    """Draw one token: argmax(log p + g), which has law p when g is standard Gumbel noise.

    Args:
        probs: (V,) law; tokens of probability 0 are never drawn.
        noise: (V,) Gumbel noise.
    """
    scores = probs.to(noise.dtype).log() + noise
    return int(lowest_argmax(scores))


def draw_top(probs: Tensor, noise: Tensor, count: int) -> Tensor:
    """Draw up to `count` tokens without replacement: the top of log p + g, best first.

    Given the earlier ones, each token has the law p restricted to what is left (Gumbel top-k,
    arXiv:1903.06059). With the target's own noise these are the children of a coupled tree.

    Returns:
        (C <= count,) long; tokens of probability 0 are left out.
    """
    scores = probs.to(noise.dtype).log() + noise
    best = scores.topk(min(count, len(scores)))
    return best.indices[best.values > -torch.inf]


def sample(probs: Tensor, seed: int, position: int, stream: int = Stream.TARGET) -> int:
    """The token at an absolute position: `draw(probs, gumbel(seed, position, V))`.

    The noise is evaluated only where the law has mass, so a greedy or truncated law costs next
    to nothing.

    Args:
        probs: (V,) law.
        seed: of the noise.
        position: absolute position of the drawn token.
        stream: TARGET for anything that must equal plain sampling.
    """
    support = probs.nonzero().squeeze(-1)
    if len(support) == 0:
        raise ValueError("cannot draw: the law has no mass; check the model's logits")
    return int(support[draw(probs[support], gumbel_at(seed, position, support, stream))])
