"""Intervals of pooled ratios and other functions of sums, by resampling whole conversations.

Pure: torch and the standard library. Rounds of one text are alike, so what is drawn anew is the
conversation, with all its turns and rounds (a cluster bootstrap). A percentile interval of few is
too narrow; it is widened to the percentiles at which it has the width of a t interval
(arXiv:1411.5279, "expanded percentile"). Conversations that add nothing to a figure, as those that
never got to some depth, do not count for it. Simulation: tests/inference/test_intervals.py.

Letters: n conversations, B resamples, k columns of sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

DRAWS, SEED = 4000, 0
SHOWN, ALARM = 0.95, 0.99
"""Levels of intervals that are shown, and of those beyond which a warning is raised."""


@dataclass(frozen=True)
class Estimate:
    """A number and its interval.

    Attributes:
        value: NaN where there is nothing to divide by.
        low: lower end; None below two conversations.
        high: upper end.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def holds(self, value: float) -> bool:
        """Whether a number is within; always, if there is no interval."""
        return self.low is None or self.high is None or self.low <= value <= self.high

    @property
    def interval(self) -> list[float] | None:
        """Both ends; None if there is no interval."""
        return None if self.low is None or self.high is None else [self.low, self.high]

    def to_dict(self) -> dict[str, float | None]:
        """Plain numbers; None for NaN."""
        value = None if math.isnan(self.value) else self.value
        return {"value": value, "low": self.low, "high": self.high}


Columns = Sequence[Sequence[float]]
"""k columns of n numbers, one per conversation."""
Pair = tuple[Sequence[float], Sequence[float]]
"""Numerators and denominators, one of each per conversation."""
Statistic = Callable[[Tensor], Tensor]
"""(B, k) sums over conversations -> (B,) figures; not finite where there is none."""


def figure(columns: Columns, statistic: Statistic, level: float = SHOWN) -> Estimate:
    """Any function of sums over conversations.

    Args:
        columns: k of n numbers.
        statistic: (B, k) -> (B,).
        level: of the interval.
    """
    table = torch.tensor([list(column) for column in columns], dtype=torch.float64)  # (k, n)
    value = float(statistic(table.sum(1)[None])[0])
    found = resampled(columns, statistic)
    found = found[found.isfinite()]
    if not math.isfinite(value) or len(found) < 2:
        return Estimate(value if math.isfinite(value) else math.nan)
    tail = expanded_tail((1.0 - level) / 2.0, int(table.any(0).sum()))
    ends = found.quantile(torch.tensor([tail, 1.0 - tail], dtype=torch.float64)).tolist()
    return Estimate(value, *ends)


def ratio(above: Sequence[float], below: Sequence[float], level: float = SHOWN) -> Estimate:
    """Sum of the numerators by sum of the denominators.

    Args:
        above: n numerators.
        below: n denominators, at least 0.
        level: of the interval.
    """
    return figure([above, below], lambda sums: sums[:, 0] / sums[:, 1], level)


def gap(one: Pair, other: Pair, level: float = SHOWN) -> Estimate:
    """The pooled ratio of one less that of the other, paired: both of the same conversations.

    Args:
        one: n numerators and n denominators.
        other: of the same conversations in the same order.
        level: of the interval.
    """
    assert len(one[0]) == len(other[0]), "the same conversations"
    columns = [*one, *other]
    return figure(columns, lambda s: s[:, 0] / s[:, 1] - s[:, 2] / s[:, 3], level)


def gap_by_t(one: Pair, other: Pair, level: float = ALARM) -> Estimate:
    """The same by a t interval of what each conversation adds to the gap (the delta method).

    Far out in the tails few conversations cannot be resampled often enough to give a wide interval:
    the most extreme resample is the most extreme conversation over and over.

    Args:
        one: n numerators and n denominators.
        other: of the same conversations in the same order.
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
    """What one conversation adds to a pooled ratio."""
    above, below = pair
    pooled = sum(above) / sum(below)
    return (above[place] - pooled * below[place]) / sum(below)


def resampled(columns: Columns, statistic: Statistic) -> Tensor:
    """(B,) float64 figures of resampled conversations: the same ones for the same n, whatever the
    figure, so that differences of figures are paired. Empty below two that add anything.

    Args:
        columns: k of n numbers.
        statistic: (B, k) -> (B,).
    """
    table = torch.tensor([list(column) for column in columns], dtype=torch.float64)
    table = table[:, table.any(0)]  # (k, n) without those that add nothing
    if table.shape[1] < 2:
        return torch.empty(0, dtype=torch.float64)
    return statistic(_times(table.shape[1]) @ table.T)


@lru_cache(maxsize=2)
def _times(count: int) -> Tensor:
    """(B, n) how often each conversation is drawn in each resample."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(count, (DRAWS, count), generator=generator)
    ones = torch.ones(DRAWS, count, dtype=torch.float64)
    return torch.zeros_like(ones).scatter_add_(1, drawn, ones)


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
