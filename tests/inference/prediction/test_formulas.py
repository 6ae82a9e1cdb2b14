"""The formulas of arXiv:2211.17192 against sums, tables and simulation."""

import random

import pytest

from inference.prediction.formulas import (
    ALPHAS,
    Point,
    alpha_of,
    best_gamma,
    curves,
    expected_tokens,
    path_tokens,
    speedup,
)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.99, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_expected_tokens_are_the_sum_of_survivals(alpha: float, gamma: int) -> None:
    assert expected_tokens(alpha, gamma) == pytest.approx(sum(alpha**n for n in range(gamma + 1)))
    assert path_tokens([alpha] * gamma) == pytest.approx(expected_tokens(alpha, gamma))


def test_expected_tokens_are_those_of_coins() -> None:
    chance, alpha, gamma, rounds = random.Random(3), 0.7, 4, 20_000
    total = 0
    for _ in range(rounds):
        accepted = 0
        while accepted < gamma and chance.random() < alpha:
            accepted += 1
        total += accepted + 1
    assert total / rounds == pytest.approx(expected_tokens(alpha, gamma), abs=0.04)


@pytest.mark.parametrize(
    ("cost", "alpha", "gamma", "gain"),
    [(0.02, 0.5, 4, 1.79), (0.05, 0.8, 8, 3.09), (0.1, 0.7, 4, 1.98), (0.2, 0.9, 7, 2.37)],
)
def test_best_gamma_of_known_cases(cost: float, alpha: float, gamma: int, gain: float) -> None:
    found = best_gamma(alpha, cost)
    assert found == (gamma, pytest.approx(gain, abs=0.006))


def test_speculation_pays_only_if_drafts_are_better_than_they_cost() -> None:
    assert best_gamma(0.3, 0.31) == (0, 1.0)
    assert best_gamma(0.3, 0.29)[0] == 1


def test_drafts_of_one_pass_cost_the_same_whatever_their_number() -> None:
    assert speedup(3.0, 4, 0.5, one_pass=True) == pytest.approx(2.0)
    assert speedup(3.0, 4, 0.125) == pytest.approx(2.0)
    assert speedup(3.0, 0, 0.5, one_pass=True) == pytest.approx(3.0)
    assert best_gamma(0.8, 0.05, one_pass=True, row_cost=0.03) == (
        10,
        pytest.approx(3.39, abs=0.01),
    )


def test_alpha_of_is_the_inverse() -> None:
    for alpha in (0.05, 0.5, 0.93):
        assert alpha_of(expected_tokens(alpha, 5), 5) == pytest.approx(alpha, abs=1e-9)
    assert alpha_of(9.0, 5) == pytest.approx(1.0) and alpha_of(0.9, 5) == pytest.approx(0.0)


def test_what_cannot_be_is_refused() -> None:
    for alpha, gamma in ((1.1, 2), (-0.1, 2), (0.5, -1)):
        with pytest.raises(ValueError, match="alpha must lie"):
            expected_tokens(alpha, gamma)


def test_curves_and_the_point_on_them() -> None:
    found = curves(6)
    assert [len(row) for row in found["tokens"]] == [7] * len(ALPHAS)
    place, cost = found["alphas"].index(0.8), found["costs"].index(0.1)
    assert found["tokens"][place][3] == pytest.approx(expected_tokens(0.8, 3))
    assert found["best_gamma"][place][cost] == best_gamma(0.8, 0.1)[0]
    point = Point(0.8, 5, 2.5, 2.4, 0.1).to_dict()
    assert point["best_gamma"] == 6 and point["measured"] == 2.4
    assert point["equivalent_alpha"] == pytest.approx(alpha_of(2.5, 5))
    assert Point(0.8, 5, 2.5).to_dict()["speedup"] is None
