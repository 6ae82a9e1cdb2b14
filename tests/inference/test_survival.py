"""Online rates of acceptance: counts by hand, forgetting, and what is hoped for."""

import random

import pytest

from inference.survival import PRIOR, Outcome, SurvivalEstimator


def chain(accepted: int, drafts: int) -> Outcome:
    return Outcome([0] * accepted, [1] * min(drafts, accepted + 1), accepted + 1, drafts + 1)


def test_without_counts_the_prior_is_the_estimate() -> None:
    found = SurvivalEstimator(3, 2).table()
    assert found == [[PRIOR, PRIOR / 4]] * 3
    measured = [[0.6, 0.1], [0.4, 0.2]]
    assert SurvivalEstimator(2, 2, measured).table() == measured
    with pytest.raises(ValueError, match="prior must be"):
        SurvivalEstimator(3, 2, measured)


def test_counts_are_of_those_who_got_there() -> None:
    """Rejected at depth 2 after one accepted: nothing is learnt about depth 3."""
    found = SurvivalEstimator(3, strength=0.0, prior_strength=1e-9, prior=[[0.3]] * 3)
    for accepted in (1, 1, 2, 0):
        found.observe(chain(accepted, 3))
    assert [rate for [rate] in found.table()] == pytest.approx([0.75, 1 / 3, 0.0], abs=1e-6)


def test_a_depth_nobody_saw_is_taken_to_be_like_the_one_before() -> None:
    found = SurvivalEstimator(3)
    for _ in range(300):
        found.observe(chain(1, 1))
    assert found.table()[0][0] > 0.98
    assert found.table()[2][0] > 0.9


def test_ranks_are_counted_where_there_was_a_child() -> None:
    found = SurvivalEstimator(1, 3, strength=0.0, prior_strength=1e-9)
    found.observe(Outcome([1], [2], 2))
    found.observe(Outcome([0], [1], 2))
    found.observe(Outcome([], [3], 1))
    assert found.table()[0] == pytest.approx([1 / 3, 1 / 2, 0.0], abs=1e-6)


def test_a_row_sums_to_one_at_most() -> None:
    found = SurvivalEstimator(1, 3, strength=0.0, prior_strength=1e-9)
    found.observe(Outcome([2], [3], 2))
    found.observe(Outcome([0], [1], 2))
    found.observe(Outcome([0], [1], 2))
    for table in (found.table(), found.optimistic()):
        assert sum(table[0]) <= 1.0 + 1e-9
    assert found.optimistic()[0] == pytest.approx([1.0, 0.0, 0.0])


def test_estimates_converge_and_follow_a_change() -> None:
    source, found = random.Random(0), SurvivalEstimator(1)

    def run(rate: float, rounds: int) -> None:
        for _ in range(rounds):
            found.tick()
            found.observe(chain(int(source.random() < rate), 1))

    run(0.8, 1000)
    assert found.table()[0][0] == pytest.approx(0.8, abs=0.1)
    run(0.1, 320)  # five half-lives
    assert found.table()[0][0] == pytest.approx(0.1, abs=0.12)


def test_what_is_not_looked_at_becomes_uncertain_but_not_better() -> None:
    found = SurvivalEstimator(1)
    for _ in range(200):
        found.tick()
        found.observe(chain(0, 1))
    sure = found.optimistic()[0][0]
    for _ in range(1000):
        found.tick()
    assert sure < 0.2
    assert found.optimistic()[0][0] > 0.9
    assert found.table()[0][0] < 0.02
