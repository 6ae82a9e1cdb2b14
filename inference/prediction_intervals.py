"""Intervals of pooled ratios, by resampling whole requests.

Pure: torch and the standard library. Rounds of one text are alike, so what is drawn anew is the
request, with all that belongs to it. A percentile interval of few requests is too narrow; it is
widened to the percentiles at which it has the width of a t interval (arXiv:1411.5279, "expanded
percentile"). Simulation: tests/inference/test_prediction_intervals.py.

Letters: n requests, B resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DRAWS = 4000
SHOWN, ALARM = 0.95, 0.99
"""Levels of intervals that are shown, and of those beyond which a warning is raised."""


@dataclass(frozen=True)
class Estimate:
    """A number and its interval.

    Attributes:
        value: NaN where there is nothing to divide by.
        low: lower end; None below two requests.
        high: upper end.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def holds(self, value: float) -> bool:
        """Whether a number is within; always, if there is no interval."""
        return self.low is None or self.high is None or self.low <= value <= self.high

    def to_dict(self) -> dict[str, float | None]:
        """Plain numbers; None for NaN."""
        value = None if math.isnan(self.value) else self.value
        return {"value": value, "low": self.low, "high": self.high}


Pair = tuple[Sequence[float], Sequence[float]]
"""Numerators and denominators, one of each per request."""


def ratio(above: Sequence[float], below: Sequence[float], level: float = SHOWN) -> Estimate:
    """Sum of the numerators by sum of the denominators.

    Args:
        above: n numerators.
        below: n denominators, at least 0.
        level: of the interval.
    """
    total = sum(below)
    value = sum(above) / total if total else math.nan
    return _interval(value, resampled((above, below)), len(above), level)


def gap(one: Pair, other: Pair, level: float = SHOWN) -> Estimate:
    """The pooled ratio of one less that of the other, both over the same requests.

    Args:
        one: n numerators and n denominators.
        other: of the same requests in the same order.
        level: of the interval.
    """
    assert len(one[0]) == len(other[0]), "the same requests"
    value = ratio(*one).value - ratio(*other).value
    return _interval(value, resampled(one) - resampled(other), len(one[0]), level)


def gap_by_t(one: Pair, other: Pair, level: float = ALARM) -> Estimate:
    """The same by a t interval of what each request adds to the gap (the delta method).

    Far out in the tails few requests cannot be resampled often enough to give a wide interval: the
    most extreme resample is the most extreme request over and over.

    Args:
        one: n numerators and n denominators.
        other: of the same requests in the same order.
        level: of the interval.
    """
    value, count = ratio(*one).value - ratio(*other).value, len(one[0])
    if count < 2 or math.isnan(value):
        return Estimate(value)
    shares = [_share(one, place) - _share(other, place) for place in range(count)]  # sum: 0
    spread = math.sqrt(sum(share**2 for share in shares) * count / (count - 1))
    half = t_quantile(0.5 + level / 2.0, count - 1) * spread
    return Estimate(value, value - half, value + half)


def _share(pair: Pair, place: int) -> float:
    """What one request adds to a pooled ratio."""
    above, below = pair
    pooled = sum(above) / sum(below)
    return (above[place] - pooled * below[place]) / sum(below)


def resampled(pair: Pair, draws: int = DRAWS, seed: int = 0) -> Tensor:
    """(B,) float64 pooled ratios of resampled requests; the same requests for the same n and seed.

    Args:
        pair: n numerators and n denominators.
        draws: B.
        seed: of the resampling.
    """
    count = len(pair[0])
    if count < 2:
        return torch.empty(0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(count, (draws, count), generator=generator)
    above, below = (torch.tensor(list(part), dtype=torch.float64)[places].sum(1) for part in pair)
    return above / below


def _interval(value: float, found: Tensor, count: int, level: float) -> Estimate:
    found = found[found.isfinite()]
    if len(found) < 2:
        return Estimate(value)
    tail = expanded_tail((1.0 - level) / 2.0, count)
    ends = found.quantile(torch.tensor([tail, 1.0 - tail], dtype=torch.float64)).tolist()
    return Estimate(value, *ends)


def expanded_tail(tail: float, count: int) -> float:
    """The share of resamples to leave out at each end, which gives a t interval's width.

    Args:
        tail: (1 - level) / 2.
        count: n, at least 2.
    """
    wide = t_quantile(1.0 - tail, count - 1) * math.sqrt(count / (count - 1))
    return 0.5 * math.erfc(wide / math.sqrt(2.0))


def t_quantile(share: float, degrees: int) -> float:
    """Quantile of Student's t, by bisection of its distribution function.

    Args:
        share: in (0.5, 1).
        degrees: of freedom, at least 1.
    """
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_share(middle, degrees) < share else (low, middle)
    return (low + high) / 2


def _t_share(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0, from the finite sums for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    term, total = (1.0, 0.0) if degrees % 2 == 0 else (cosine, 0.0)
    for step in range(degrees % 2, degrees - 1, 2):
        total += term
        term *= (step + 1) / (step + 2) * cosine**2
    if degrees % 2 == 0:
        return 0.5 + 0.5 * sine * total
    return 0.5 + (angle + sine * total) / math.pi
