"""Intervals cover the truth as often as they say, also of few requests."""

import math
import random

import pytest
import torch

from inference.measuring.intervals import (
    DRAWS,
    Estimate,
    expanded_tail,
    figure,
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
    plain = resampled((tokens, rounds), lambda sums: sums[:, 0] / sums[:, 1]).quantile(0.975)
    assert found.high > float(plain)


def test_what_has_no_interval() -> None:
    assert ratio([3.0], [2.0]) == Estimate(1.5) and ratio([3.0], [2.0]).holds(99.0)
    assert math.isnan(ratio([0.0, 0.0], [0.0, 0.0]).value)
    assert ratio([0.0], [0.0]).to_dict() == {"value": None, "low": None, "high": None}


def test_the_same_requests_leave_no_gap() -> None:
    pair = ([3.0, 9.0, 5.0], [2.0, 4.0, 4.0])
    found = gap(pair, pair)
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def test_equal_requests_leave_no_doubt() -> None:
    assert ratio([6.0] * 5, [4.0] * 5) == Estimate(1.5, 1.5, 1.5)
    assert ratio([6.0] * 5, [4.0] * 5).interval == [1.5, 1.5] and ratio([6.0], [4.0]).low is None


def test_resamples_are_the_same_for_every_figure() -> None:
    values, ones = [math.sqrt(n) for n in range(1, 31)], [1.0] * 30
    found, shifted = ratio(values, ones), ratio([value + 1 for value in values], ones)
    assert found == ratio(values, ones)
    assert shifted.interval == pytest.approx([end + 1 for end in found.interval or []])


def test_a_mean_has_its_normal_interval() -> None:
    """With many requests; the sample's own mean and deviation are known."""
    values = torch.linspace(0, 1, 200).tolist()
    half = 1.96 * math.sqrt(sum((value - 0.5) ** 2 for value in values)) / 200
    found = ratio(values, [1.0] * 200).interval
    assert found == pytest.approx([0.5 - half, 0.5 + half], abs=0.1 * half)


def test_requests_that_never_got_there_do_not_count() -> None:
    """Two of fifty reached a depth: what they say of it is as sure as of two, not of fifty."""
    above, below = [3.0, 1.0, *[0.0] * 48], [4.0, 2.0, *[0.0] * 48]
    assert ratio(above, below) == ratio(above[:2], below[:2])
    assert ratio([3.0, 0.0, 0.0], [4.0, 0.0, 0.0]) == Estimate(0.75)


def test_any_function_of_sums() -> None:
    """A quotient of quotients of known sums, and one that is nowhere finite."""
    columns = [[2.0, 4.0], [1.0, 1.0], [3.0, 3.0], [2.0, 4.0]]
    found = figure(columns, lambda s: s[:, 0] / s[:, 1] * s[:, 3] / s[:, 2])
    assert found.value == 3.0 and found.interval is not None
    assert found.interval[0] <= 3.0 <= found.interval[1]
    assert math.isnan(figure([[1.0, 2.0]], lambda s: s[:, 0] / 0.0).value)
    assert len(resampled(columns, lambda s: s[:, 0])) == DRAWS


def test_it_covers_the_truth_where_an_interval_over_rounds_does_not() -> None:
    """Texts differ in how predictable they are: 60 requests of 25 rounds, 300 experiments."""
    generator = torch.Generator().manual_seed(0)
    covered = by_rounds = 0
    for _ in range(300):
        chances = torch.rand(60, 1, generator=generator)  # of a text's drafts
        rounds = 1.0 + (torch.rand(60, 25, generator=generator) < chances)
        covered += ratio(rounds.sum(1).tolist(), [25.0] * 60).holds(1.5)
        half = 1.96 * float(rounds.std()) / math.sqrt(60 * 25)
        by_rounds += abs(float(rounds.mean()) - 1.5) <= half
    assert 0.90 <= covered / 300 <= 0.98
    assert by_rounds / 300 < 0.7
