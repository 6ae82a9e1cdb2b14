"""How many drafts of each sequence of a batch to verify, where the batch shares the cost.

Pure: the standard library. Drafts are known by their survival: the chance that a draft and all
before it in its chain are accepted. (arXiv:2607.05147 has the scheduler, arXiv:2502.15197 the same
greedy choice under a fixed number of rows.)

Letters: B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence


def admit(
    survival: Sequence[Sequence[float]], seconds: Sequence[float], backward: bool
) -> list[int]:
    """How many drafts of each sequence to verify, where rows of a batch share the cost.

    All drafts are sorted by survival; of any number of them the likeliest are the best, and as
    survival never rises along a chain each comes after those before it.

    With ``backward`` this is algorithm 1 of arXiv:2607.05147: drafts are admitted one by one as
    long as tokens per second rise, and the first that does not pay ends it. Nothing is looked at
    but drafts that are likelier, which are ancestors or other sequences'; so drawn drafts stay
    lossless (`inference.schedule.may_look`). It is the optimum where every row costs at least as
    much as the one before, and may stop short before a step of the cost that is worth climbing.
    Without, every number is looked at and the best one taken, for any cost: chosen and coupled
    drafts only.

    Args:
        survival: per sequence, of its chain's drafts.
        seconds: of B, B+1, ... rows in all: with 0, 1, ... drafts. As many drafts as it knows of
            are admitted at most.
        backward: stop at the first draft that does not pay.

    Returns:
        Per sequence the number of drafts.
    """
    for chain in survival:
        assert list(chain) == sorted(chain, reverse=True), "survival cannot rise along a chain"
    order = sorted(
        ((chance, row) for row, chain in enumerate(survival) for chance in chain),
        key=lambda draft: (-draft[0], draft[1]),
    )[: len(seconds) - 1]
    tokens, admitted, best = float(len(survival)), 0, len(survival) / seconds[0]
    for count, (chance, _) in enumerate(order, start=1):
        tokens += chance
        rate = tokens / seconds[count]
        if rate > best:
            admitted, best = count, rate
        elif backward:
            break
    found = [0] * len(survival)
    for _, row in order[:admitted]:
        found[row] += 1
    return found


def padded_width(survival: Sequence[Sequence[float]], seconds: Sequence[float]) -> int:
    """How many drafts of each sequence to verify, where all are run with equally many rows.

    Args:
        survival: per sequence, of its chain's drafts.
        seconds: of 1, 2, ... rows per sequence.
    """
    most = min(max(map(len, survival), default=0), len(seconds) - 1)
    tokens = [sum(1.0 + sum(chain[:drafts]) for chain in survival) for drafts in range(most + 1)]
    rates = [sum_ / cost for sum_, cost in zip(tokens, seconds, strict=False)]
    return rates.index(max(rates))
