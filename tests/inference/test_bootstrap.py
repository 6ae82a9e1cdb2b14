"""Intervals over requests: known cases, coverage, and what an interval over rounds would miss."""

import math

import pytest
import torch

from inference.bootstrap import Bootstrap


def test_equal_requests_leave_no_doubt() -> None:
    assert Bootstrap(5).ratio([6.0] * 5, [4.0] * 5) == [1.5, 1.5]


def test_one_request_tells_nothing_of_others() -> None:
    assert Bootstrap(1).ratio([6.0], [4.0]) is None
    assert Bootstrap(0).ratio([], []) is None
    assert Bootstrap(3).ratio([0.0] * 3, [0.0] * 3) is None


def test_resamples_are_the_same_for_every_figure_and_run() -> None:
    values, ones = [math.sqrt(n) for n in range(30)], [1.0] * 30
    one, two = Bootstrap(30), Bootstrap(30)
    assert one.ratio(values, ones) == two.ratio(values, ones)
    assert one.ratio(values, ones) != Bootstrap(30, seed=1).ratio(values, ones)
    shifted = one.ratio([value + 1 for value in values], ones)
    assert shifted == pytest.approx([end + 1 for end in one.ratio(values, ones) or []])


def test_a_mean_has_its_normal_interval() -> None:
    """With many requests; the sample's own mean and deviation are known."""
    values = torch.linspace(0, 1, 200).tolist()
    low, high = Bootstrap(200, resamples=20000).ratio(values, [1.0] * 200) or [0, 0]
    half = 1.96 * math.sqrt(sum((value - 0.5) ** 2 for value in values)) / 200
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.05 * half)


def test_it_covers_the_truth_where_an_interval_over_rounds_does_not() -> None:
    """Texts differ in how predictable they are: 60 requests of 25 rounds, 300 experiments."""
    generator = torch.Generator().manual_seed(0)
    covered = by_rounds = 0
    for seed in range(300):
        chances = torch.rand(60, 1, generator=generator)  # of a text's drafts
        rounds = 1.0 + (torch.rand(60, 25, generator=generator) < chances)
        interval = Bootstrap(60, seed, 1000).ratio(rounds.sum(1).tolist(), [25.0] * 60)
        assert interval is not None
        covered += interval[0] <= 1.5 <= interval[1]
        half = 1.96 * float(rounds.std()) / math.sqrt(60 * 25)
        by_rounds += abs(float(rounds.mean()) - 1.5) <= half
    assert 0.90 <= covered / 300 <= 0.98
    assert by_rounds / 300 < 0.7
