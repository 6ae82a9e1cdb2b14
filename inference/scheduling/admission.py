"""What each sequence of a batch drafts, where all of them share one forward.

Pure: the standard library. The target's forward is as wide as the widest tree of the batch: a
sequence with a narrower one is padded, and pays as much. So rows of the forward are bought for all
sequences at once, and given to those that make most of them (the global admission of
arXiv:2607.05147, for trees, with drafting that costs something, and with padding; arXiv:2502.15197
is the same under a fixed number of rows). A sequence whose drafts are bad does not draft, or drafts
as much as costs nothing beside the others.

Letters: B sequences, N rows per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

CLOSE = 1e-12
"""Relative; rates that differ by less are equal."""


@dataclass(frozen=True)
class Offer:
    """What one sequence could do in a round.

    Attributes:
        tokens: expected, the target's own included.
        size: nodes to verify, root included.
        seconds: of drafting for this sequence.
    """

    tokens: float
    size: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What all sequences do in a round.

    Attributes:
        chosen: per sequence the place of its offer.
        tokens: expected, of all sequences.
        seconds: of the round.
    """

    chosen: tuple[int, ...]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second of the whole batch."""
        return self.tokens / self.seconds


def plan_of(done: Sequence[Offer], chosen: Sequence[int], seconds: Callable[[int], float]) -> Plan:
    """What a round costs and emits.

    Args:
        done: what each sequence does.
        chosen: per sequence the place of that among its offers.
        seconds: of everything but drafting, with so many rows per sequence.
    """
    spent = seconds(max(offer.size for offer in done)) + sum(offer.seconds for offer in done)
    return Plan(tuple(chosen), sum(offer.tokens for offer in done), spent)


def assign(offers: Sequence[Sequence[Offer]], seconds: Callable[[int], float]) -> Plan:
    """The offers, one of each sequence, with the most expected tokens per second.

    The best quotient of tokens and seconds has the best difference tokens - rate · seconds at its
    own rate, so that rates are improved until they stay (Dinkelbach's method; a few steps). At a
    given rate and width every sequence takes what is best for itself.

    Args:
        offers: of each sequence, one at least.
        seconds: of everything but drafting, with so many rows per sequence; need not rise.

    Returns:
        The optimum over all assignments; of equally good offers the narrower, then the first.
    """

    def plan_for(chosen: Sequence[int]) -> Plan:
        done = [own[place] for own, place in zip(offers, chosen, strict=True)]
        return plan_of(done, chosen, seconds)

    plan = plan_for([_narrowest(own) for own in offers])
    price: dict[int, float] = {}
    while True:
        most, chosen = -math.inf, plan.chosen
        for width, value, found in by_width(offers, plan.rate):
            if width not in price:
                price[width] = seconds(width)
            if value - plan.rate * price[width] > most:
                most, chosen = value - plan.rate * price[width], found()
        better = plan_for(chosen)
        if better.rate <= plan.rate * (1.0 + CLOSE):
            return plan
        plan = better


def _narrowest(own: Sequence[Offer]) -> int:
    """The place of the first offer with the fewest rows."""
    return min(range(len(own)), key=lambda place: own[place].size)


def by_width(
    offers: Sequence[Sequence[Offer]], rate: float
) -> Iterator[tuple[int, float, Callable[[], tuple[int, ...]]]]:
    """At every width of the forward, what is best for all sequences at a rate.

    One sequence at least has a tree just as wide as the forward: the one that loses least by it.

    Args:
        offers: of each sequence.
        rate: tokens per second that are earned otherwise.

    Yields:
        The width, the tokens - rate · seconds of drafting, and what gives the assignment, until the
        next width is asked for.
    """
    count = len(offers)
    ordered = sorted(
        (offer.size, row, place, offer.tokens - rate * offer.seconds)
        for row, own in enumerate(offers)
        for place, offer in enumerate(own)
    )
    best, values = [-1] * count, [-math.inf] * count
    for width, group in groupby(ordered, key=lambda one: one[0]):
        exact: dict[int, tuple[float, int]] = {}
        for _, row, place, value in group:
            if value > values[row]:
                best[row], values[row] = place, value
            if row not in exact or value > exact[row][0]:
                exact[row] = value, place
        widest = min(exact, key=lambda row: values[row] - exact[row][0])
        if -1 in best:  # a sequence that has nothing as narrow
            continue
        value, place = exact[widest]

        def assignment(widest: int = widest, place: int = place) -> tuple[int, ...]:
            return (*best[:widest], place, *best[widest + 1 :])

        yield width, sum(values) - values[widest] + value, assignment


def common_width(
    survival: Sequence[Sequence[float]],
    rate: float,
    seconds: Callable[[int], float],
    least: int = 1,
) -> int:
    """Rows per sequence to verify, once chains are drafted and a confidence output has told how
    good they are; for drafts of which any may be dropped
    (`inference.scheduling.schedule.may_look`).

    Args:
        survival: per sequence and draft, the chance that it and all before it are accepted.
        rate: tokens per second of the whole batch that are earned otherwise.
        seconds: of a forward with so many rows per sequence.
        least: rows that another sequence has in any case.

    Returns:
        The width with the most tokens - rate · seconds; the least of equally good ones.
    """
    most = max(least, 1 + max(map(len, survival), default=0))
    gains = [0.0] * most
    for chain in survival:
        for drafts, chance in enumerate(chain, start=1):
            gains[drafts] += chance
    tokens = list(accumulate(gains))
    widths = range(least, most + 1)
    return max(widths, key=lambda width: (tokens[width - 1] - rate * seconds(width), -width))
