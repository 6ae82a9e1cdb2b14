"""How often drafts are accepted, estimated while decoding.

Pure: the standard library. Two counts are kept of every depth and rank. The slow one remembers
about a thousand rounds and says what the drafts are worth on the whole; the fast one forgets within
some dozens, whether drafts are made meanwhile or not, and says what they are worth in this passage.
The fast one's estimate is drawn towards the slow one's, and that one towards a prior: the rates of
calibration, or for a depth that nothing is known of, those of the depth before.

Letters: K depths, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

PRIOR = 0.5
"""Chance that the likeliest child is accepted where nothing is known; rank r has 1/(r+1)² of it."""
MEASURED = 10.0
"""How much more a measured prior is worth."""


@dataclass(frozen=True)
class Outcome:
    """What became of the drafts of one sequence in one round.

    Attributes:
        ranks: of each accepted draft among its siblings, 0 the first, from the root down.
        offered: children of the root, of the first accepted draft, and so on: one number more than
            there are ranks if the last accepted one had children too, which were all rejected.
        emitted: tokens, the target's own included.
        size: nodes that were verified, root included.
        depth: of the tree.
    """

    ranks: Sequence[int]
    offered: Sequence[int]
    emitted: int
    size: int = 1
    depth: int = 0


@dataclass
class SurvivalEstimator:
    """Rates of acceptance by depth and rank.

    Attributes:
        depths: K.
        ranks: R.
        prior: (K, R) rates of calibration, or None.
        half_life: of the fast counts, in rounds.
        long_half_life: of the slow counts, in rounds in which there were drafts.
        strength: rounds that the slow estimate counts for beside the fast one.
        prior_strength: rounds that the prior counts for; `MEASURED` as many if it was measured.
    """

    depths: int
    ranks: int = 1
    prior: Sequence[Sequence[float]] | None = None
    half_life: float = 64.0
    long_half_life: float = 1024.0
    strength: float = 4.0
    prior_strength: float = 2.0
    _age: int = field(default=0, init=False, repr=False)
    _fast: list[list[list[float]]] = field(init=False, repr=False)
    _slow: list[list[list[float]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Empty counts: per depth and rank [accepted, tried]."""
        if self.prior is not None:
            shape = (len(self.prior), min(map(len, self.prior), default=0))
            if shape[0] < self.depths or shape[1] < self.ranks:
                raise ValueError(
                    f"prior must be ({self.depths}, {self.ranks}) rates by depth and rank at "
                    f"least, got {shape}"
                )
        self._fast, self._slow = self._empty(), self._empty()

    def observe(self, outcome: Outcome) -> None:
        """Count one round of one sequence."""
        for level, offered in enumerate(outcome.offered[: self.depths]):
            hit = outcome.ranks[level] if level < len(outcome.ranks) else -1
            for counts, half_life in ((self._fast, None), (self._slow, self.long_half_life)):
                for rank, count in enumerate(counts[level][:offered]):
                    if half_life is not None:
                        _fade(count, half_life)
                    count[0] += rank == hit
                    count[1] += 1.0

    def tick(self) -> None:
        """One round has passed."""
        self._age += 1
        for row in self._fast:
            for count in row:
                _fade(count, self.half_life)

    def table(self) -> list[list[float]]:
        """(K, R) estimates; a row sums to 1 at most, as one child at most is accepted."""
        return self._estimates(optimistic=False)

    def optimistic(self) -> list[list[float]]:
        """(K, R) what the rates might be, for all that is known: estimates plus (n + 1)^-1/2, two
        standard deviations of n fair coins. Nothing is known after long without drafts: n fades,
        and so does what a measured prior adds to it.
        """
        return self._estimates(optimistic=True)

    def _estimates(self, optimistic: bool) -> list[list[float]]:
        found: list[list[float]] = []
        above = [PRIOR / (rank + 1) ** 2 for rank in range(self.ranks)]
        measured = self.prior is not None
        weight = self.prior_strength * (MEASURED if measured else 1.0)
        known = 1.0 + (weight * 0.5 ** (self._age / self.half_life) if measured else 0.0)
        for level in range(self.depths):
            prior = above if self.prior is None else self.prior[level]
            row, above, left = [], [], 1.0
            for rank in range(self.ranks):
                hits, tried = self._slow[level][rank]
                slow = (weight * prior[rank] + hits) / (weight + tried)
                hits, tried = self._fast[level][rank]
                rate = (self.strength * slow + hits) / (self.strength + tried)
                rate += 1.0 / math.sqrt(tried + known) if optimistic else 0.0
                above.append(slow)
                row.append(min(rate, left))
                left -= row[-1]
            found.append(row)
        return found

    def _empty(self) -> list[list[list[float]]]:
        return [[[0.0, 0.0] for _ in range(self.ranks)] for _ in range(self.depths)]


def _fade(count: list[float], half_life: float) -> None:
    factor = 0.5 ** (1.0 / half_life)
    count[0] *= factor
    count[1] *= factor
