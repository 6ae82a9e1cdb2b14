"""What controllers keep books with: ratios of what came about, seconds lost, costs looked up.

Pure: the standard library.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from inference.scheduling.schedule import RoundCosts

CORRECTION = 20.0
"""Accepted drafts, or rounds of seconds, that a prediction counts for beside what was seen."""


@dataclass
class Ratio:
    """How much of what was predicted came about, with a memory of some hundred rounds.

    Attributes:
        predicted: sum of predictions, older ones fading.
        seen: sum of what came about.
    """

    predicted: float = 0.0
    seen: float = 0.0

    def add(self, predicted: float, seen: float) -> None:
        """One more round."""
        self.predicted = 0.995 * self.predicted + predicted
        self.seen = 0.995 * self.seen + seen

    def value(self) -> float:
        """Factor on the next prediction; 1 as long as nothing was seen."""
        return (CORRECTION + self.seen) / (CORRECTION + self.predicted)


@dataclass
class Account:
    """Seconds lost, which may be at most an allowance and a share of those passed.

    Attributes:
        share: of the seconds passed.
        lost: so far.
    """

    share: float
    lost: float = 0.0

    def affords(self, seconds: float, allowance: float, passed: float) -> bool:
        """Whether so many more may be lost."""
        return self.lost + seconds <= allowance + self.share * passed

    def book(self, seconds: float, least: float) -> None:
        """So many were lost, or won if negative; below ``least`` nothing is saved up."""
        self.lost = max(self.lost + seconds, least)


class Remembered:
    """A cost table whose last answers are kept: a round asks for the same ones as the last.

    Args:
        costs: of this machine.
    """

    def __init__(self, costs: RoundCosts) -> None:
        self.verify = functools.lru_cache(4096)(costs.verify)
        self.draft = functools.lru_cache(4096)(costs.draft)
        self.rest = functools.lru_cache(64)(costs.rest)
        self.widest = functools.lru_cache(64)(costs.widest)
        self.absorb = functools.lru_cache(64)(costs.absorb)
        self.widths = functools.lru_cache(64)(costs.widths)
        self.knows_plain = costs.knows_plain
