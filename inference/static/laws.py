"""From logits to laws to tokens for a whole batch, without a look at the values.

The twin is `inference.sampling`: the same warpers in the same order. It stops looking for a nucleus
once it has found one; here the nucleus is found by three histograms, whatever the law, as nobody
can look whether a guess was enough. Of tokens of equal probability on its edge the lowest ids stay.

Legend: B sequences, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from inference.sampling import MASS, SamplingParams, Stream, exact_mass, keep_top_k, score_dtype
from inference.static.noise import race

Number = TypeVar("Number", int, float)

BLOCK = 256
"""Columns of which a CPU first finds the largest, or a part of it that divides V."""
DIGIT = 11
"""Bits of a probability that one histogram tells apart."""


@dataclass(frozen=True)
class Warpers:
    """The warpers of a batch: a number for all sequences, or (B,) one for each.

    Attributes:
        temperature: 0 is greedy.
        top_k: None, or 0 in a tensor, keeps all.
        top_p: None, or 1 in a tensor, keeps all.
        min_p: None, or 0 in a tensor, keeps all.
        largest_k: bound on a tensor ``top_k``; unused otherwise.
    """

    temperature: float | Tensor = 0.0
    top_k: int | Tensor | None = None
    top_p: float | Tensor | None = None
    min_p: float | Tensor | None = None
    largest_k: int = 0

    @property
    def greedy(self) -> bool:
        """Whether all sequences are known to be."""
        return not isinstance(self.temperature, Tensor) and self.temperature == 0.0

    def tempered(self, factor: float) -> "Warpers":
        """The same at a temperature that is ``factor`` times as high, as draft laws have it."""
        return replace(self, temperature=self.temperature * factor)


def warpers_of(
    params: Sequence[SamplingParams], device: torch.device | str | None = None
) -> Warpers:
    """The warpers of a batch of sequences.

    Args:
        params: B of them.
        device: of the tensors, where sequences differ.

    Raises:
        ValueError: they ask for something that only `inference.decoding` does.
    """
    known = {"temperature", "top_k", "top_p", "min_p", "seed"}
    for field in fields(SamplingParams):
        given = {getattr(one, field.name) for one in params} - {field.default}
        if given and field.name not in known:
            raise ValueError(
                f"{field.name} has no static form: leave it out, or decode without static shapes"
            )
    top_k = [one.top_k or 0 for one in params]
    top_p = [1.0 if one.top_p is None else float(one.top_p) for one in params]
    min_p = [float(one.min_p or 0.0) for one in params]
    return Warpers(
        _shared([float(one.temperature) for one in params], device),
        _shared(top_k, device) if any(top_k) else None,
        _shared(top_p, device) if min(top_p) < 1.0 else None,
        _shared(min_p, device) if any(min_p) else None,
        max(top_k),
    )


def _shared(values: Sequence[Number], device: torch.device | str | None) -> Number | Tensor:
    """The one number that all are, or (B,) all of them."""
    if len(set(values)) == 1:
        return values[0]
    dtype = torch.int64 if isinstance(values[0], int) else torch.float64
    return torch.tensor(values, dtype=dtype, device=device)


def rows_of(values: Tensor, like: Tensor) -> Tensor:
    """(B,) -> (B, 1, ..., 1), to go with ``like`` (B, ..., V)."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


# Laws -------------------------------------------------------------------------------------------


def warp(logits: Tensor, warpers: Warpers) -> Tensor:
    """Temperature, top-k, top-p, min-p.

    Args:
        logits: (B, ..., V) of any floating dtype.
        warpers: if all are greedy nothing is done; in a greedy sequence among others the first of
            the largest logits stays the first.

    Returns:
        (B, ..., V) scores in float32, or in float64 if the logits are; -inf where nothing is kept.
    """
    scores = logits.to(score_dtype(logits))
    if warpers.greedy:
        return scores
    scores = scaled(scores, warpers)
    if isinstance(warpers.top_k, Tensor):
        scores = _keep_own_k(scores, rows_of(warpers.top_k, scores), warpers.largest_k)
    elif warpers.top_k is not None:
        scores = keep_top_k(scores, warpers.top_k)
    if isinstance(warpers.top_p, Tensor):
        own = rows_of(warpers.top_p, scores)
        scores = torch.where(own < 1.0, keep_top_p(scores, own), scores)
    elif warpers.top_p is not None and warpers.top_p < 1.0:
        scores = keep_top_p(scores, warpers.top_p)
    if warpers.min_p is not None:
        least = warpers.min_p
        least = rows_of(least, scores) if isinstance(least, Tensor) else least
        probs = torch.softmax(scores, dim=-1)
        scores = scores.masked_fill(probs < least * probs.amax(-1, keepdim=True), -torch.inf)
    return scores


def scaled(logits: Tensor, warpers: Warpers) -> Tensor:
    """Logits (B, ..., V) over the temperature, 1 where that is 0."""
    if isinstance(warpers.temperature, Tensor):
        own = rows_of(warpers.temperature, logits).to(logits.dtype)
        return logits / torch.where(own > 0, own, 1.0)
    return logits / (warpers.temperature or 1.0)


def law(logits: Tensor, warpers: Warpers) -> Tensor:
    """Logits (B, ..., V) -> probabilities, one-hot at temperature 0."""
    scores = warp(logits, warpers)
    if warpers.greedy:
        return _one_hot(scores)
    probs = torch.softmax(scores, dim=-1)
    if isinstance(warpers.temperature, Tensor):
        own = rows_of(warpers.temperature, scores)
        return torch.where(own > 0, probs, _one_hot(scores))
    return probs


def _one_hot(scores: Tensor) -> Tensor:
    best = first_argmax(scores)[1]
    return torch.zeros_like(scores).scatter(-1, best[..., None], 1.0)


def _keep_own_k(scores: Tensor, top_k: Tensor, largest: int) -> Tensor:
    """`keep_top_k` with a k (B, 1, ..., 1) per sequence, none above ``largest``; 0 keeps all."""
    best = scores.topk(min(largest, scores.shape[-1])).values
    places = (top_k - 1).clamp(0, best.shape[-1] - 1).expand(*best.shape[:-1], 1)
    return scores.masked_fill((scores < best.gather(-1, places)) & (top_k > 0), -torch.inf)


def keep_top_p(scores: Tensor, top_p: float | Tensor) -> Tensor:
    """Scores with all but the nucleus at -inf (arXiv:1904.09751).

    Probabilities are not negative, so they are in the order of their bits. Digit by digit, from the
    first, the mass of all tokens is added up by digit: that finds the smallest probability in the
    nucleus, and the mass above it.

    Args:
        scores: (..., V).
        top_p: below 1; or (B, 1, ..., 1), rows of 1 mean nothing.
    """
    probs = torch.softmax(scores, dim=-1)
    mass, double, wanted = exact_mass(probs), probs.dtype == torch.float64, top_p * MASS
    bits = probs.view(torch.int64) if double else probs.view(torch.int32).to(torch.int64)
    edge = torch.zeros_like(bits[..., :1])
    above = torch.zeros_like(mass[..., :1])  # the mass of what is larger, as far as it is known
    left = 63 if double else 31
    while left > 0:
        width = min(DIGIT, left)
        left -= width
        digit = bits >> left & (1 << width) - 1
        counted = mass * (bits >> left + width == edge)
        empty = mass.new_zeros(*mass.shape[:-1], 1 << width)
        sums = empty.scatter_add(-1, digit, counted)
        reached = above + sums.flip(-1).cumsum(-1).flip(-1)  # by tokens of this digit or larger
        found = ((reached >= wanted).sum(-1, keepdim=True) - 1).clamp_min(0)
        above = reached.gather(-1, found) - sums.gather(-1, found)
        edge = edge << width | found
    tied = bits == edge
    before = above + mass * (tied.cumsum(-1) - 1)
    return scores.masked_fill((bits < edge) | (tied & (before >= wanted)), -torch.inf)


# Draws ------------------------------------------------------------------------------------------


def first_argmax(values: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of the last dimension, and the lowest index where it is.

    Args:
        values: (..., V).

    Returns:
        (...) values, NaN if there is one; (...) int64.
    """
    width = math.gcd(values.shape[-1], BLOCK)
    if values.device.type == "cpu" and values.shape[-1] > BLOCK <= width * 16:
        # A CPU compares one by one where it wants an index: only where a fast look has been before.
        blocks = values.unflatten(-1, (-1, width))
        block = blocks.amax(-1).argmax(-1)
        inside = blocks.gather(-2, block[..., None, None].expand(*block.shape, 1, width))[..., 0, :]
        found = block * width + inside.argmax(-1)
    else:
        found = values.argmax(-1)
    return values.gather(-1, found[..., None])[..., 0], found


def is_law(largest: Tensor) -> Tensor:
    """Whether the largest entry of some scores is one: not -inf, and none of them NaN."""
    return largest > -torch.inf


def draw(
    probs: Tensor, seeds: Tensor, positions: Tensor, stream: int = Stream.TARGET
) -> tuple[Tensor, Tensor]:
    """The tokens that `inference.sampling.sample` draws.

    Args:
        probs: (..., V) laws.
        seeds: (...) int64.
        positions: (...) int64 of the drawn tokens.
        stream: of the noise.

    Returns:
        (...) tokens, and (...) bool, whether there was a law to draw from.
    """
    largest, tokens = first_argmax(race(probs, seeds, positions, stream))
    return tokens, largest > 0.0
