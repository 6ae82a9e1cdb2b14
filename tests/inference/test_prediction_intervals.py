"""Intervals cover the truth as often as they say, also of few requests."""

import math
import random

import pytest

from inference.prediction_intervals import (
    Estimate,
    expanded_tail,
    gap,
    gap_by_t,
    ratio,
    resampled,
    t_quantile,
)


@pytest.mark.parametrize(
    ("share", "degrees", "value"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.975, 9, 2.2622), (0.995, 5, 4.0321)],
)
def test_quantiles_of_t(share: float, degrees: int, value: float) -> None:
    assert t_quantile(share, degrees) == pytest.approx(value, abs=2e-4)


def test_tails_shrink_towards_those_of_the_normal_law() -> None:
    tails = [expanded_tail(0.025, count) for count in (3, 10, 100, 2001)]
    assert tails == sorted(tails) and tails[1] == pytest.approx(0.0085, abs=5e-4)
    assert tails[-1] == pytest.approx(0.025, abs=1e-3)


def requests(chance: random.Random, count: int) -> tuple[list[float], list[float], float]:
    """Tokens and rounds of requests that differ: 1 + rate tokens per round, rate of its own."""
    tokens, rounds = [], []
    for _ in range(count):
        rate, number = chance.choice((0.5, 1.0, 2.5)), chance.choice((8, 12, 16))
        tokens.append(float(sum(1 + (chance.random() < rate / 3) * 3 for _ in range(number))))
        rounds.append(float(number))
    return tokens, rounds, 1.0 + 4.0 / 3.0


@pytest.mark.parametrize(("count", "least"), [(6, 0.91), (10, 0.91), (40, 0.92)])
def test_coverage(count: int, least: float) -> None:
    chance, runs, held = random.Random(11), 400, 0
    for _ in range(runs):
        tokens, rounds, truth = requests(chance, count)
        held += ratio(tokens, rounds).holds(truth)
    assert least <= held / runs <= 0.99


@pytest.mark.parametrize("count", [3, 6, 10, 30])
def test_alarms_are_rare(count: int) -> None:
    """One in a hundred, and not many more of few requests."""
    chance, runs, held = random.Random(5), 600, 0
    for _ in range(runs):
        one, other = requests(chance, count), requests(chance, count)
        held += gap_by_t(one[:2], other[:2]).holds(0.0)
    assert held / runs >= 0.975


def test_alarms_are_raised() -> None:
    """Of a difference of two standard errors and more, most of the time."""
    chance, runs, held = random.Random(5), 100, 0
    for _ in range(runs):
        tokens, rounds, _ = requests(chance, 30)
        held += gap_by_t((tokens, rounds), ([1.35 * t for t in tokens], rounds)).holds(0.0)
    assert held <= 5


def test_both_gaps_agree_on_many_requests() -> None:
    chance = random.Random(7)
    one, other = requests(chance, 300), requests(chance, 300)
    found, by_t = gap(one[:2], other[:2]), gap_by_t(one[:2], other[:2], 0.95)
    assert found.value == by_t.value and None not in (found.low, by_t.low)
    assert found.low == pytest.approx(by_t.low, abs=0.03)
    assert found.high == pytest.approx(by_t.high, abs=0.03)


def test_a_percentile_interval_would_be_too_narrow() -> None:
    tokens, rounds, _ = requests(random.Random(2), 6)
    found = ratio(tokens, rounds)
    assert found.low is not None and found.high is not None
    plain = resampled((tokens, rounds)).quantile(0.975)
    assert found.high > float(plain)


def test_what_has_no_interval() -> None:
    assert ratio([3.0], [2.0]) == Estimate(1.5) and ratio([3.0], [2.0]).holds(99.0)
    assert math.isnan(ratio([0.0, 0.0], [0.0, 0.0]).value)
    assert ratio([0.0], [0.0]).to_dict() == {"value": None, "low": None, "high": None}


def test_the_same_requests_leave_no_gap() -> None:
    pair = ([3.0, 9.0, 5.0], [2.0, 4.0, 4.0])
    found = gap(pair, pair)
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)
