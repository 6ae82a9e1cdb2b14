"""From logits to laws to tokens, with noise that is a function of (seed, stream, position).

There is no generator state: the noise at an absolute position can be recomputed by anyone who
knows the seed. That is what makes speculative output equal plain sampling token for token (the
`coupled` and `match` rules), whatever was drafted, and across batch sizes and devices.

Letters: V target vocabulary.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from inference.warpers import keep_min_p, keep_typical

NUCLEUS_GUESS = 1024
"""Tokens among which top-p first looks for its nucleus."""
NUMPY = (torch.float32, torch.float64)  # whose argmax numpy finds in a tenth of torch's time
MASS = 2.0**50
"""What probabilities are counted in parts of, where they are added up."""

Processor = Callable[[Any, Any], Any]
"""Text (1, T) and scores (1, V) -> scores (1, V): a transformers `LogitsProcessor`, or anything
that is called like one."""


@dataclass(frozen=True)
class SamplingParams:
    """What turns the target's logits into the law to sample from.

    Options after `seed` are given by name. None and () switch one off. `temperature`, `top_k`,
    `top_p`, `min_p` and `typical_p` are the warpers: at temperature 0 they do nothing. The others
    look at the text so far (`inference.processors`), and act at temperature 0, too.

    Attributes:
        temperature: 0 decodes greedily.
        top_k: keep the k most likely tokens.
        top_p: keep the smallest set of tokens with at least this mass.
        seed: of the noise; the same seed gives the same text.
        min_p: keep tokens with at least this share of the largest probability.
        typical_p: keep the most typical tokens up to this mass (arXiv:2202.00666).
        repetition_penalty: divides positive and multiplies negative logits of tokens that the
            prompt or the new text holds, as in transformers (arXiv:1909.05858).
        presence_penalty: subtracted from the logits of tokens that the new text holds; the prompt
            does not count, as in OpenAI's API and vLLM.
        frequency_penalty: the same, times how often the new text holds the token.
        no_repeat_ngram_size: no n-gram of prompt and new text comes twice.
        bad_words_ids: sequences of tokens that never come; one that is nothing but an
            end-of-sequence token is let through, as in transformers.
        logit_bias: (token id, number added to its logit).
        suppress_tokens: never come.
        begin_suppress_tokens: do not come first.
        forced_tokens: (place among the new tokens, from 0; token id).
        min_new_tokens: no end-of-sequence token before so many new ones.
        processors: applied in this order after all that is named above but the warpers. Each is
            called once per emitted token, in order, as in plain decoding, so it may keep state.
            Where several sequences are given the same object, each goes on with a deep copy of its
            own, made before the first call; one sequence's is used itself, and if it keeps state
            the next decoding call needs a fresh one. The rules `block` and `lossy_typical` ask
            copies about tokens that may never be emitted. What would have to be copied and cannot
            be is refused (`inference.copies`). State belongs into the object: copies share globals
            and class attributes, and objects of different sequences must not share parts that
            change.

    Raises:
        ValueError: naming the field.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    _: KW_ONLY
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_tokens: tuple[tuple[int, int], ...] = ()
    min_new_tokens: int | None = None
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values outside their range. Lists become tuples, so that it can be hashed."""
        for name in ("suppress_tokens", "begin_suppress_tokens", "processors"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        for name in ("bad_words_ids", "logit_bias", "forced_tokens"):
            nested = tuple(tuple(item) for item in getattr(self, name) or ())
            object.__setattr__(self, name, nested)
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a finite number >= 0, got {self.temperature}")
        if not _is_integer(self.seed):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        for name in ("top_k", "no_repeat_ngram_size", "min_new_tokens"):
            value = getattr(self, name)
            if value is not None and not (_is_integer(value) and value >= 1):
                raise ValueError(
                    f"{name} must be an integer of at least 1, or None for no limit; got {value!r}"
                )
        for name in ("top_p", "typical_p"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= 1.0:
                raise ValueError(f"{name} must lie in (0, 1], or be None to keep all; got {value}")
        if self.min_p is not None and not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must lie in [0, 1], or be None to keep all; got {self.min_p}")
        penalty = self.repetition_penalty
        if penalty is not None and not 0.0 < penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be a finite number > 0, got {penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value}")
        _check_tokens(self)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_tokens(params: SamplingParams) -> None:
    """Refuse lists of tokens that are malformed, or that contradict each other."""
    if not all(params.bad_words_ids):
        raise ValueError("bad_words_ids holds an empty sequence: leave it out")
    for name in ("logit_bias", "forced_tokens"):
        pairs = getattr(params, name)
        if not all(len(pair) == 2 for pair in pairs):
            raise ValueError(f"{name} must hold pairs, got {pairs}")
        if len({first for first, _ in pairs}) < len(pairs):
            raise ValueError(f"{name} holds two pairs with the same first number: {pairs}")
    if not all(math.isfinite(bias) for _, bias in params.logit_bias):
        raise ValueError("logit_bias must hold finite numbers; suppress_tokens rules a token out")
    for name, ids in token_ids(params).items():
        if not all(_is_integer(token) and token >= 0 for token in ids):
            raise ValueError(f"{name} must hold token ids >= 0, got {getattr(params, name)}")
    for place, token in params.forced_tokens:
        if not _is_integer(place) or place < 0:
            raise ValueError(f"forced_tokens: places are integers from 0, got {place!r}")
        if token in params.suppress_tokens or (
            place == 0 and token in params.begin_suppress_tokens
        ):
            raise ValueError(f"forced_tokens: token {token} is suppressed at place {place}")
    if not all(callable(processor) for processor in params.processors):
        raise ValueError("processors must hold callables (input_ids, scores) -> scores")
    if len({id(processor) for processor in params.processors}) < len(params.processors):
        raise ValueError("processors holds the same object twice: leave one out")


def token_ids(params: SamplingParams) -> dict[str, Sequence[int]]:
    """The token ids that each field names."""
    return {
        "bad_words_ids": [token for word in params.bad_words_ids for token in word],
        "logit_bias": [token for token, _ in params.logit_bias],
        "suppress_tokens": params.suppress_tokens,
        "begin_suppress_tokens": params.begin_suppress_tokens,
        "forced_tokens": [token for _, token in params.forced_tokens],
    }


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The law that the warpers of `generate` make of logits, whatever the text.

    Args:
        logits: (..., V) of any floating dtype.
        params: temperature 0 gives the one-hot law at the argmax, the lowest index on ties.

    Returns:
        (..., V) probabilities in float32, or in float64 if the logits are.
    """
    return law_of(warp(logits, params), params)


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, top-k, top-p, min-p, typical-p: the warpers of `generate` in its order.

    Args:
        logits: (..., V) of any floating dtype.
        params: at temperature 0 nothing is done.

    Returns:
        (..., V) scores in float32, or in float64 if the logits are; -inf where nothing is kept.
    """
    scores = logits.to(score_dtype(logits))
    if params.temperature == 0.0:
        return scores
    scores = scores / params.temperature
    if params.top_k is not None:
        scores = keep_top_k(scores, params.top_k)
    if params.top_p is not None and params.top_p < 1.0:
        scores = keep_top_p(scores, params.top_p)
    if params.min_p is not None:
        scores = keep_min_p(scores, params.min_p)
    if params.typical_p is not None and params.typical_p < 1.0:
        scores = keep_typical(scores, params.typical_p)
    return scores


def law_of(scores: Tensor, params: SamplingParams) -> Tensor:
    """(..., V) warped scores -> (..., V) probabilities, one-hot at temperature 0."""
    if params.temperature == 0.0:
        best = lowest_argmax(scores).unsqueeze(-1)
        return torch.zeros_like(scores).scatter_(-1, best, 1.0)
    return torch.softmax(scores, dim=-1)


def score_dtype(logits: Tensor) -> torch.dtype:
    """Float64 stays; everything else is scored in float32, as in `generate`."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Logits (..., V) with all but the k largest at -inf; ties with the k-th stay."""
    kth = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


def exact_mass(probs: Tensor) -> Tensor:
    """Probabilities as whole numbers of 1 / `MASS`, in float64: sums are exact in any order."""
    return (probs.double() * MASS).round()


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Logits (..., V) with all but the nucleus at -inf (arXiv:1904.09751).

    The nucleus is the smallest set of most likely tokens whose mass reaches `top_p`; of tokens of
    equal probability on its edge the lowest ids stay. It is looked for among the best few, as
    sorting a whole vocabulary would cost more than the rest of a draw.
    """
    probs = torch.softmax(logits, dim=-1)
    best = probs.topk(min(NUCLEUS_GUESS, probs.shape[-1])).values
    if not bool((exact_mass(best).sum(dim=-1) >= top_p * MASS).all()):
        best = probs.topk(probs.shape[-1]).values
    mass = exact_mass(best)
    inside = mass.cumsum(dim=-1) - mass < top_p * MASS
    count = inside.sum(dim=-1, keepdim=True)
    edge = best.gather(-1, (count - 1).clamp_min(0))
    kept = probs >= edge
    if bool((kept.sum(dim=-1, keepdim=True) != count).any()):  # the edge lies among equal ones
        tied = probs == edge
        room = (inside & (best == edge)).sum(dim=-1, keepdim=True)
        kept = (probs > edge) | (tied & (tied.cumsum(dim=-1) <= room))
    return logits.masked_fill(~kept, -torch.inf)


def lowest_argmax(values: Tensor) -> Tensor:
    """Argmax over the last dimension, the lowest index on ties, on every device.

    Args:
        values: (..., V).

    Returns:
        (...) long.
    """
    if values.ndim == 1 and values.device.type == "cpu" and values.dtype in NUMPY:
        best = values.detach().numpy().argmax()  # the first of equal ones, and NaN before all
        _check_largest(values[best])
        return torch.tensor(best, device=values.device)
    largest = values.amax(dim=-1, keepdim=True)
    _check_largest(largest)
    index = torch.arange(values.shape[-1], device=values.device)
    return torch.where(values == largest, index, values.shape[-1]).amin(dim=-1)


def _check_largest(largest: Tensor) -> None:
    if not bool((largest > -torch.inf).all()):  # false for NaN too
        raise ValueError(
            "no largest entry: all are -inf or some are NaN; check the model's logits, and whether "
            "the processors leave any token"
        )


# Noise ------------------------------------------------------------------------------------------


class Stream(enum.IntEnum):
    """Independent streams of noise under one seed."""

    TARGET = 0
    """The target's own draws: plain sampling, `match`, `coupled`, and coupled drafts."""
    ACCEPT = 1
    """The accept-or-reject coins of `rejection` and `block`."""
    RESIDUAL = 2
    """The draws of `rejection` and `block` from a residual or after the last accepted node."""
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

    The noise is evaluated only where the law has mass: greedy and truncated laws cost little.

    Args:
        probs: (V,) law.
        seed: of the noise.
        position: absolute position of the drawn token.
        stream: TARGET for anything that must equal plain sampling.
    """
    on_cpu = probs.device.type == "cpu"  # elsewhere every question waits for the device
    if on_cpu and probs.amax() == 1.0 and probs.count_nonzero() == 1:  # faster than to list them
        return int(lowest_argmax(probs))
    support = probs.nonzero().squeeze(-1)
    if len(support) == 0:
        raise ValueError(
            "cannot draw: the law has no mass; check the model's logits, and whether the "
            "processors leave any token"
        )
    if len(support) == 1:
        return int(support[0])
    return int(support[draw(probs[support], gumbel_at(seed, position, support, stream))])
