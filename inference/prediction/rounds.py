"""Rounds along a given text: where they start, how many there are, what they emit.

Pure: the standard library. Given the text that a lossless decoder emits, the starts of its rounds
are a Markov chain over the positions: a round that starts at position i accepts at least d drafts
with a chance S_d(i) that depends on the text alone, whatever came before (see
`inference.prediction.teacher` for the S of each rule). So the expected rounds of a text need no
decoding:

    V(i) = 1 + sum over n of (S_n(i) - S_{n+1}(i)) · V(i + n + 1),     V = 0 behind the end.

Averages over all positions are not averages over rounds. A round starts behind a token that the
draft of the round before got wrong, or that nobody drafted, and the text is harder there than
elsewhere; where drafts are good few rounds start. Here every position counts as often as rounds
start there.

Letters: m tokens that rounds emit (all new ones but the prefill's), K depths, S survival: chance
that a round accepts so many drafts at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Survival = Sequence[Sequence[float]]
"""Per position of m, S_1, S_2, ...: at most as many as tokens are left. Estimates of S may rise
with depth or leave [0, 1]: what is computed here is linear in the S of each position, so it is
unbiased if they are, and those of different positions are independent."""


@dataclass(frozen=True)
class Walk:
    """The rounds of one text, as expected numbers.

    Attributes:
        visits: (m,) chance that a round starts at the position.
        accepted: by depth from 1, rounds that accept it.
        reached: by depth from 1, rounds that draft so deep and accept all before it.
        emitted: rounds by the tokens they emit, from 0.
    """

    visits: list[float]
    accepted: list[float]
    reached: list[float]
    emitted: list[float]

    @property
    def rounds(self) -> float:
        """Expected number of rounds."""
        return sum(self.visits)

    @property
    def tokens(self) -> int:
        """m."""
        return len(self.visits)


def walk(survival: Survival, depths: Sequence[float], longest: int | None = None) -> Walk:
    """Follow the rounds through a text.

    Args:
        survival: S by position and depth.
        depths: (m,) of the trees drafted there; where they are drawn, their mean.
        longest: cut chains to this depth; None leaves them.
    """
    m = len(survival)
    most = max((len(row) for row in survival), default=0)
    visits = [1.0, *[0.0] * (m - 1)] if m else []
    accepted, reached = [0.0] * most, [0.0] * (most + 1)
    emitted = [0.0] * (most + 2)
    for start, row in enumerate(survival):
        here, left = visits[start], m - start
        kept = list(row[: len(row) if longest is None else longest])
        assert len(kept) <= left, "drafts behind the end of the text are never accepted"
        chain = [1.0, *kept, 0.0]
        for count in range(len(kept) + 1):
            chance = here * (chain[count] - chain[count + 1])
            emitted[min(count + 1, left)] += chance
            if count + 1 < left:
                visits[start + count + 1] += chance
        deepest = depths[start] if longest is None else min(depths[start], longest)
        for depth in range(1, len(kept) + 2):
            # A depth between two whole numbers: that share of the trees is so deep.
            reached[depth - 1] += here * chain[depth - 1] * min(max(deepest - depth + 1, 0.0), 1.0)
            if depth <= len(kept):
                accepted[depth - 1] += here * chain[depth]
    return Walk(visits, accepted, reached, emitted)


def geometric(text: int, most: int, alpha: float, depth: int) -> Walk:
    """Rounds through a text whose drafts are right with one probability, each by a coin of its own.

    Behind the ends of texts no draft is made, so this is below `formulas.expected_tokens`.

    Args:
        text: m.
        most: new tokens that the decoding was allowed, the prefill's included.
        alpha: the probability.
        depth: drafts per round.
    """
    rooms = [min(text - place, most - 2 - place, depth) for place in range(text)]
    rows = [[alpha**deep for deep in range(1, room + 1)] for room in rooms]
    return walk(rows, [float(max(room, 0)) for room in rooms])


def conditional_acceptance(
    survival: Survival, depths: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[list[float], list[float]]:
    """How often drafts are accepted by depth where the text does not end before them.

    Args:
        survival: S by position and depth.
        depths: (m,) of the trees drafted there.
        weights: (m,) how often each position counts; None for all alike.

    Returns:
        By depth, what was accepted and what was reached; their quotient is the rate.
    """
    most = max((len(row) for row in survival), default=0)
    accepted, reached = [0.0] * most, [0.0] * most
    for start, row in enumerate(survival):
        weight = 1.0 if weights is None else weights[start]
        before = 1.0
        for depth, chance in enumerate(row, start=1):
            if depth <= depths[start]:
                accepted[depth - 1] += weight * chance
                reached[depth - 1] += weight * before
            before = chance
    return accepted, reached


def pooled(walks: Sequence[Walk], name: str) -> list[float]:
    """The sum over texts of one of the lists by depth or by tokens.

    Args:
        walks: of the texts.
        name: "accepted", "reached" or "emitted".
    """
    lists = {
        "accepted": [one.accepted for one in walks],
        "reached": [one.reached for one in walks],
        "emitted": [one.emitted for one in walks],
    }[name]
    found = [0.0] * max(map(len, lists), default=0)
    for row in lists:
        for place, value in enumerate(row):
            found[place] += value
    return found
