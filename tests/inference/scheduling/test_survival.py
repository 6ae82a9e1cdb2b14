"""Online rates of acceptance: counts by hand, forgetting, and what is hoped for."""

import random

import pytest

from inference.scheduling.survival import (
    MEASURED,
    PRIOR,
    TRUSTED,
    Outcome,
    Prior,
    SurvivalEstimator,
)


def chain(accepted: int, drafts: int) -> Outcome:
    return Outcome([0] * accepted, [1] * min(drafts, accepted + 1), accepted + 1, drafts + 1)


def test_without_counts_the_prior_is_the_estimate() -> None:
    found = SurvivalEstimator(3, 2).table()
    assert found == [[PRIOR, PRIOR / 4]] * 3
    measured = [[0.6, 0.1], [0.4, 0.2]]
    found = SurvivalEstimator(2, 2, Prior.measured(measured)).table()
    for row, rates in zip(found, measured, strict=True):
        assert row == pytest.approx(rates, abs=2 / MEASURED)
    exact = SurvivalEstimator(2, 2, Prior.measured(measured), prior_strength=0.0)
    assert exact.table() == measured


def test_what_a_prior_does_not_reach_is_as_without_it() -> None:
    """Fewer depths and ranks than an arm has, and cells that nobody tried."""
    prior = Prior.counted([[90.0, 0.0], [0.0, 0.0]], [[100.0, 0.0], [0.0, 0.0]])
    found = SurvivalEstimator(3, 3, prior).table()
    assert found[0][0] == pytest.approx(0.9, abs=0.02)
    assert found[0][1:] == pytest.approx([1.0 - found[0][0], 0.0])  # a row sums to 1
    assert found[2][0] == pytest.approx(found[0][0])  # as the depth before
    assert SurvivalEstimator(1, 1, prior).table()[0][0] == pytest.approx(0.9, abs=0.02)


def test_a_prior_is_worth_what_it_was_counted_in() -> None:
    def after(rounds: float) -> float:
        prior = Prior.counted([[rounds]], [[rounds]])
        found = SurvivalEstimator(1, 1, prior, strength=1e9)  # the slow counts alone
        for _ in range(100):
            found.observe(chain(0, 1))
        return found.table()[0][0]

    assert after(1.0) < after(20.0) < after(TRUSTED) == after(10 * TRUSTED)
    assert after(TRUSTED) == pytest.approx(0.5, abs=0.03)


def test_what_was_counted_goes_on_in_the_next_run() -> None:
    """Two runs with a prior between them know as much as one."""
    prior, whole = Prior.counted([[0.0, 0.0]], [[0.0, 0.0]]), SurvivalEstimator(1, 2)
    for _ in range(3):
        part = SurvivalEstimator(1, 2, prior)
        for one in (Outcome([1], [2], 2), Outcome([], [1], 1)):
            part.observe(one)
            whole.observe(one)
        prior = Prior.counted(*part.counts())
    assert prior.rounds[0] == pytest.approx([6.0, 3.0], abs=0.05)
    assert prior.rates[0] == pytest.approx([0.0, 1.0])
    again = SurvivalEstimator(1, 2, prior, strength=1e9).table()
    alone = SurvivalEstimator(1, 2, Prior.counted(*whole.counts()), strength=1e9).table()
    assert again[0] == pytest.approx(alone[0], abs=1e-3)


def test_counts_do_not_grow_without_end() -> None:
    found = SurvivalEstimator(1, 1, Prior.counted([[500_000.0]], [[1_000_000.0]]))
    found.observe(chain(1, 1))
    accepted, tried = found.counts()
    assert tried[0][0] == pytest.approx(1500.0)
    assert accepted[0][0] == pytest.approx(750.0, abs=1.0)


def test_counts_are_of_those_who_got_there() -> None:
    """Rejected at depth 2 after one accepted: nothing is learnt about depth 3."""
    found = SurvivalEstimator(3, strength=0.0, prior_strength=1e-9)
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


def test_what_was_seen_of_other_texts_counts_for_some_rounds() -> None:
    whole = SurvivalEstimator(2)
    assert whole.of_others(6.0) == Prior([[0.5], [0.5]], [[2.0], [2.0]])
    for _ in range(100):
        whole.observe(Outcome([0], [1, 1], 2))
    known = whole.of_others(6.0)
    assert known.rounds == [[6.0], [6.0]]
    assert known.rates[0][0] > 0.95 and known.rates[1][0] < 0.05
    text = SurvivalEstimator(2, prior=known, prior_strength=0.0)
    assert text.table() == known.rates
    for _ in range(6):
        text.observe(Outcome([], [1], 1))
    assert text.table()[0][0] < 0.25


def test_what_is_remembered_of_a_passage_fades_by_half_a_half_life() -> None:
    """Through a thousand rounds, most without drafts: counts are written anew meanwhile."""
    source, found, seen = random.Random(0), SurvivalEstimator(1, half_life=4.0, strength=0.0), []
    for now in range(1000):
        found.tick()
        if now % 7 == 3:
            seen.append((now, int(source.random() < 0.6)))
            found.observe(chain(seen[-1][1], 1))
        if seen:
            weights = [0.5 ** ((now - then) / 4.0) for then, _ in seen]
            hits = sum(weight * hit for weight, (_, hit) in zip(weights, seen, strict=True))
            assert found.table()[0][0] == pytest.approx(hits / sum(weights), rel=1e-9, abs=1e-12)
