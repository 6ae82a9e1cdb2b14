"""Measuring a `CostTable`: interleaved repeats, medians, and no cost that falls with the context.

What is measured is given as functions that run one part of a round and return its seconds, so that
every engine is measured by itself. Points are gone through over and over, forwards and backwards in
turn: a machine that gets slower meanwhile, or shares its cores now and then, does so for all alike.
Each is run several times in a row, as decoding does, and the first of them is not counted: what ran
before, wider or narrower, makes it faster or slower by some percent, and always in one direction.

Letters: N rows per sequence, B sequences, P committed tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from inference.scheduling.costs import CostTable, MachineKey

REPEATS = 3
"""Times that every point is come back to at least, whatever the budget."""
MOST_REPEATS = 25
IN_A_ROW = 4
"""Runs of a point then, the first of which is not counted."""
LONG = 0.2
"""Seconds of a point that is run twice instead."""

Verify = Callable[[int, int, int], float]
"""(N, P, B) -> seconds of one target forward."""
Draft = Callable[[str, int, int, int], float]
"""(proposer, depth, children per node, B) -> seconds of drafting one round."""
Rest = Callable[[int], float]
"""B -> seconds of everything else in one round."""


@dataclass(frozen=True)
class CostGrid:
    """What to measure.

    Attributes:
        widths: N, 1 among them: plain decoding.
        contexts: P.
        batches: B.
        drafts: (proposer, depth, children per node). Where depth costs evenly its two ends do.
        buckets: as in `CostTable`.

    Raises:
        ValueError: nothing to measure.
    """

    widths: Sequence[int]
    contexts: Sequence[int]
    batches: Sequence[int] = (1,)
    drafts: Sequence[tuple[str, int, int]] = ()
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse grids without plain decoding, which everything is compared with."""
        if 1 not in self.widths:
            raise ValueError("costs: widths must hold 1, a plain step, to compare with")
        if not self.contexts or not self.batches:
            raise ValueError("costs: give one context and one batch at least")


def calibrate_costs(
    key: MachineKey,
    grid: CostGrid,
    seconds_of_verify: Verify,
    seconds_of_draft: Draft | None,
    budget_seconds: float,
    seconds_of_rest: Rest | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Measure a table.

    Every point is run once without being counted: memory is allocated and what compiles itself
    compiles. Then all points are come back to, at least `REPEATS` times and until the budget is
    spent.

    Args:
        key: of this process.
        grid: what to measure.
        seconds_of_verify: runs a target forward.
        seconds_of_draft: runs a round's drafting; None without drafts in the grid.
        budget_seconds: for all of it.
        seconds_of_rest: runs what else a round does; None leaves it at 0.
        clock: tells the time.

    Raises:
        ValueError: drafts to measure and nothing to measure them by.
    """
    if grid.drafts and seconds_of_draft is None:
        raise ValueError("costs: seconds_of_draft is needed to measure the grid's drafts")
    tasks: dict[tuple[str, tuple], Callable[[], float]] = {}
    for batch in grid.batches:
        for context in grid.contexts:
            for width in grid.widths:
                point = (width, context, batch)
                tasks["verify", point] = _bound(seconds_of_verify, point)
        for draft in grid.drafts:
            assert seconds_of_draft is not None
            tasks["draft", (*draft, batch)] = _bound(seconds_of_draft, (*draft, batch))
        if seconds_of_rest is not None:
            tasks["rest", (batch,)] = _bound(seconds_of_rest, (batch,))
    found = _repeat(tasks, budget_seconds, clock)
    parts: dict[str, dict] = {"verify": {}, "draft": {}, "rest": {}}
    for (part, point), seconds in found.items():
        parts[part][point] = median(seconds)
    return CostTable(
        key,
        smooth_contexts(parts["verify"]),
        parts["draft"],
        {batch: parts["rest"].get((batch,), 0.0) for batch in grid.batches},
        grid.buckets,
    )


def _bound(run: Callable[..., float], point: tuple) -> Callable[[], float]:
    return lambda: run(*point)


def _repeat(
    tasks: Mapping[tuple[str, tuple], Callable[[], float]],
    budget_seconds: float,
    clock: Callable[[], float],
) -> dict[tuple[str, tuple], list[float]]:
    """Seconds of every task, one number for each counted run."""
    end = clock() + budget_seconds
    for run in tasks.values():
        run()
    found: dict[tuple[str, tuple], list[float]] = {name: [] for name in tasks}
    order = list(tasks)
    for repeat in range(MOST_REPEATS):
        started = clock()
        for name in order:
            found[name] += _in_a_row(tasks[name])
        order.reverse()
        now = clock()
        if repeat + 1 >= REPEATS and now + (now - started) > end:
            break
    return found


def _in_a_row(run: Callable[[], float]) -> list[float]:
    """Seconds of a task behind itself."""
    found = [run(), run()]
    while len(found) < IN_A_ROW and min(found) < LONG:
        found.append(run())
    return found[1:]


def smooth_contexts(
    points: Mapping[tuple[int, int, int], float],
) -> dict[tuple[int, int, int], float]:
    """The nearest table, in squares, that does not fall with the context.

    Where noise makes a longer context cheaper both get their mean (pool adjacent violators).
    """
    found: dict[tuple[int, int, int], float] = {}
    for width, batch in {(width, batch) for width, _, batch in points}:
        contexts = sorted(p for n, p, b in points if (n, b) == (width, batch))
        pools: list[list[float]] = []
        for context in contexts:
            pools.append([points[width, context, batch]])
            while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
                last = pools.pop()
                pools[-1] += last
        level = [_mean(pool) for pool in pools for _ in pool]
        found |= {
            (width, context, batch): seconds
            for context, seconds in zip(contexts, level, strict=True)
        }
    return found


def _mean(pool: Sequence[float]) -> float:
    return sum(pool) / len(pool)
