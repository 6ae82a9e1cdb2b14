"""How often drafts are accepted, estimated while decoding.

Pure: the standard library. Two counts are kept of every depth and rank. The slow one remembers
about a thousand rounds and says what the drafts are worth on the whole; the fast one forgets within
some dozens, whether drafts are made meanwhile or not, and says what they are worth in this passage.
The fast one's estimate is drawn towards the slow one's, and that one towards a prior: what earlier
runs or a calibration have counted, and for a depth that nothing is known of, the depth before.

Letters: K depths, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

PRIOR = 0.5
"""Chance that the likeliest child is accepted where nothing is known; rank r has 1/(r+1)² of it."""
MEASURED = 20.0
"""Rounds that measured rates count for where it is not told how many they are from."""
TRUSTED = 100.0
"""Rounds that a prior counts for at most beside the slow counts."""
LONGEST = 1500.0
"""Rounds that are remembered at most from run to run."""
SMALLEST = 2.0**-40
"""Unit of fast counts below which they are written anew."""


@dataclass(frozen=True)
class Prior:
    """What is known of an arm before a text.

    Attributes:
        rates: (K, R) by depth and rank, as `inference.shapes.rates.Rates.table`.
        rounds: (K, R) that each was counted in; 0 where nothing is known.
    """

    rates: Sequence[Sequence[float]]
    rounds: Sequence[Sequence[float]]

    @classmethod
    def measured(cls, rates: Sequence[Sequence[float]]) -> Prior:
        """Rates that count for `MEASURED` rounds.

        Args:
            rates: (K, R).
        """
        return cls(rates, [[MEASURED] * len(row) for row in rates])

    @classmethod
    def counted(
        cls, accepted: Sequence[Sequence[float]], tried: Sequence[Sequence[float]]
    ) -> Prior:
        """Rates out of counts.

        Args:
            accepted: (K, R).
            tried: (K, R).
        """
        pairs = [list(zip(*rows, strict=True)) for rows in zip(accepted, tried, strict=True)]
        rates = [[hits / rounds if rounds else 0.0 for hits, rounds in row] for row in pairs]
        return cls(rates, tried)

    def at(self, level: int, rank: int) -> tuple[float, float]:
        """Rate and rounds of a depth and rank; no rounds beyond what was counted."""
        if level < len(self.rates) and rank < len(self.rates[level]):
            return self.rates[level][rank], self.rounds[level][rank]
        return 0.0, 0.0


NOTHING = Prior([], [])


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
        prior: what is known beforehand.
        half_life: of the fast counts, in rounds.
        long_half_life: of the slow counts, in rounds in which there were drafts.
        strength: rounds that the slow estimate counts for beside the fast one.
        prior_strength: rounds that the depth before counts for, or `PRIOR` at the first.
        seen: outcomes that were counted.
    """

    depths: int
    ranks: int = 1
    prior: Prior = NOTHING
    half_life: float = 64.0
    long_half_life: float = 1024.0
    strength: float = 4.0
    prior_strength: float = 2.0
    seen: int = field(default=0, init=False)
    _age: int = field(default=0, init=False, repr=False)
    _unit: float = field(default=1.0, init=False, repr=False)
    _fast: list[list[list[float]]] = field(init=False, repr=False)
    _slow: list[list[list[float]]] = field(init=False, repr=False)
    _known: list[list[tuple[float, float]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Empty counts: per depth and rank [accepted, tried]. The fast ones are kept in units of
        what a new round counts for, so that what is remembered fades without being touched.
        """
        self._fast, self._slow = self._empty(), self._empty()
        self.tell(self.prior)

    def tell(self, prior: Prior) -> None:
        """Something else is known beforehand.

        Args:
            prior: at least as deep and wide as this.
        """
        self.prior = prior
        self._known = [
            [self._trusted(level, rank) for rank in range(self.ranks)]
            for level in range(self.depths)
        ]

    def _trusted(self, level: int, rank: int) -> tuple[float, float]:
        """Accepted and tried, as far as the prior counts."""
        rate, rounds = self.prior.at(level, rank)
        return rate * min(rounds, TRUSTED), min(rounds, TRUSTED)

    def observe(self, outcome: Outcome) -> None:
        """Count one round of one sequence."""
        self.seen += 1
        for level, offered in enumerate(outcome.offered[: self.depths]):
            hit = outcome.ranks[level] if level < len(outcome.ranks) else -1
            for rank, count in enumerate(self._fast[level][:offered]):
                count[0] += (rank == hit) / self._unit
                count[1] += 1.0 / self._unit
            for rank, count in enumerate(self._slow[level][:offered]):
                _fade(count, self.long_half_life)
                count[0] += rank == hit
                count[1] += 1.0

    def tick(self) -> None:
        """One round has passed."""
        self._age += 1
        self._unit *= 0.5 ** (1.0 / self.half_life)
        if self._unit < SMALLEST:
            for row in self._fast:
                for count in row:
                    count[:] = [value * self._unit for value in count]
            self._unit = 1.0

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
        weight, fading = self.prior_strength, 0.5 ** (self._age / self.half_life)
        unit = self._unit
        for level in range(self.depths):
            row, left = [], 1.0
            cells = zip(self._known[level], self._slow[level], self._fast[level], strict=True)
            for rank, ((before, rounds), (whole, seen), (hits, tried)) in enumerate(cells):
                hits, tried = hits * unit, tried * unit
                slow = (weight * above[rank] + before + whole) / (weight + rounds + seen)
                above[rank] = slow
                rate = (self.strength * slow + hits) / (self.strength + tried)
                if optimistic:
                    known = 1.0 + min(rounds, MEASURED) * fading
                    rate += 1.0 / math.sqrt(tried + known)
                rate = min(rate, left)
                row.append(rate)
                left -= rate
            found.append(row)
        return found

    def of_others(self, most: float) -> Prior:
        """What is known of another text by what was seen of these.

        Args:
            most: rounds that it counts for at most: texts differ.
        """
        above = [PRIOR / (rank + 1) ** 2 for rank in range(self.ranks)]
        rates, rounds, weight = [], [], self.prior_strength
        for accepted, tried in zip(*self.counts(), strict=True):
            above = [
                (weight * rate + hits) / (weight + seen)
                for rate, hits, seen in zip(above, accepted, tried, strict=True)
            ]
            rates.append(above)
            rounds.append([min(weight + seen, most) for seen in tried])
        return Prior(rates, rounds)

    def counts(self) -> tuple[list[list[float]], list[list[float]]]:
        """(K, R) accepted and (K, R) tried, of the prior and since: a prior for the next run."""
        accepted, tried = self._empty_table(), self._empty_table()
        for level in range(self.depths):
            for rank in range(self.ranks):
                rate, rounds = self.prior.at(level, rank)
                hits, seen = self._slow[level][rank]
                known = min(rounds, max(LONGEST - seen, 0.0))
                accepted[level][rank] = known * rate + hits
                tried[level][rank] = known + seen
        return accepted, tried

    def _empty_table(self) -> list[list[float]]:
        return [[0.0] * self.ranks for _ in range(self.depths)]

    def _empty(self) -> list[list[list[float]]]:
        return [[[0.0, 0.0] for _ in range(self.ranks)] for _ in range(self.depths)]


def _fade(count: list[float], half_life: float) -> None:
    factor = 0.5 ** (1.0 / half_life)
    count[0] *= factor
    count[1] *= factor
