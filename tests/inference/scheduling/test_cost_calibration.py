"""Measuring costs: warm-up, interleaved medians, a budget, and no cost that falls with context."""

from collections import Counter
from itertools import groupby

import pytest

from inference.scheduling.cost_calibration import (
    IN_A_ROW,
    LONG,
    MOST_REPEATS,
    REPEATS,
    CostGrid,
    calibrate_costs,
    smooth_contexts,
)
from tests.inference.scheduling.costs import KEY


class Machine:
    """Costs that are known, on a clock of its own; the first run of each is slow, and so is one
    behind another's.
    """

    def __init__(self, noise: float = 0.0, scale: float = 0.01) -> None:
        self.now, self.noise, self.scale = 0.0, noise, scale
        self.runs: Counter[tuple] = Counter()
        self.order: list[tuple] = []

    def run(self, point: tuple, seconds: float) -> float:
        self.runs[point] += 1
        behind = self.order[-1:] == [point]
        self.order.append(point)
        if self.runs[point] == 1:
            seconds *= 100
        elif not behind:
            seconds *= 2
        elif self.runs[point] % 3 == 0:
            seconds += self.noise  # a hiccup in every third
        self.now += seconds
        return seconds

    def verify(self, width: int, context: int, batch: int) -> float:
        return self.run(("verify", width, context, batch), self.scale * (width + 0.01 * context))

    def draft(self, name: str, depth: int, width: int, batch: int) -> float:
        return self.run((name, depth, width, batch), 0.01 * depth)

    def rest(self, batch: int) -> float:
        return self.run(("rest", batch), 0.002)


GRID = CostGrid((1, 4), (0, 100), (1, 2), (("head", 1, 1), ("head", 5, 1)))


def test_medians_do_not_see_first_runs_or_hiccups() -> None:
    machine = Machine(noise=5.0)
    found = calibrate_costs(
        KEY, GRID, machine.verify, machine.draft, 0.0, machine.rest, lambda: machine.now
    )
    assert found.verify(4, 100) == pytest.approx(0.05)
    assert found.verify(1, 0, 2) == pytest.approx(0.01)
    assert found.draft("head", 5) == pytest.approx(0.05)
    assert found.rest(2) == pytest.approx(0.002)


def test_points_are_run_in_a_row_unless_that_takes_long() -> None:
    machine = Machine()
    calibrate_costs(KEY, GRID, machine.verify, machine.draft, 0.0, None, lambda: machine.now)
    assert machine.runs["verify", 1, 0, 1] >= 1 + REPEATS * IN_A_ROW
    slow = Machine(scale=LONG)
    found = calibrate_costs(KEY, GRID, slow.verify, slow.draft, 0.0, None, lambda: slow.now)
    assert slow.runs["verify", 4, 0, 1] == 1 + 2 * REPEATS
    assert found.verify(4, 0) == pytest.approx(4 * LONG)


def test_repeats_are_interleaved_and_go_back_and_forth() -> None:
    machine = Machine()
    calibrate_costs(KEY, GRID, machine.verify, machine.draft, 0.0, None, lambda: machine.now)
    order = [point for point, _ in groupby(machine.order)]
    assert len(order) == len(machine.runs) * (1 + REPEATS) - (REPEATS - 1)
    first = order[: len(machine.runs)]
    assert set(first) == set(machine.runs)
    # A point that ends one pass begins the next.
    assert order == [*first, *first, *first[-2::-1], *first[1:]]


def test_the_budget_is_used_and_kept() -> None:
    machine = Machine()
    calibrate_costs(KEY, GRID, machine.verify, machine.draft, 60.0, None, lambda: machine.now)
    one = sum(0.01 * (n + 0.01 * p) for n in (1, 4) for p in (0, 100)) * 2 * 5 + 0.06 * 2 * 5
    assert 60.0 - one <= machine.now <= 60.0
    machine = Machine(scale=LONG)
    calibrate_costs(KEY, GRID, machine.verify, machine.draft, 1e9, None, lambda: machine.now)
    assert machine.runs["verify", 4, 100, 1] == 1 + 2 * MOST_REPEATS


def test_costs_that_fall_with_the_context_are_pooled() -> None:
    found = smooth_contexts(
        {(1, 0, 1): 1.0, (1, 1, 1): 3.0, (1, 2, 1): 2.0, (1, 3, 1): 1.9, (1, 4, 1): 5.0}
    )
    assert [found[1, context, 1] for context in range(5)] == pytest.approx([1.0, 2.3, 2.3, 2.3, 5])
    rising = {(2, 0, 1): 1.0, (2, 9, 1): 1.5, (3, 0, 1): 0.7, (3, 9, 1): 0.8}
    assert smooth_contexts(rising) == rising


def test_grids_without_a_plain_step_are_refused() -> None:
    with pytest.raises(ValueError, match="widths must hold 1"):
        CostGrid((2, 4), (0,))
    with pytest.raises(ValueError, match="one context"):
        CostGrid((1,), ())
    with pytest.raises(ValueError, match="seconds_of_draft is needed"):
        calibrate_costs(KEY, GRID, Machine().verify, None, 0.0)
