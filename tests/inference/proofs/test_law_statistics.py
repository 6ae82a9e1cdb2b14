"""The two tests of counts: known tails, the power they claim, and laws that they must refute."""

import math

import pytest
import torch

from inference.proofs.law_statistics import (
    POWER,
    CountTests,
    chi_square_tail,
    compare_counts,
    found_by_chi_square,
    found_by_total_variation,
    noncentral_tail,
    resampled_distances,
)

ALPHA = 1e-4
LAW = torch.tensor([0.3, 0.2, 0.2, 0.1, 0.1, 0.06, 0.04], dtype=torch.float64)
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)


def draws(law: torch.Tensor, samples: int, repeats: int, seed: int = 0) -> torch.Tensor:
    """(repeats, k) counts."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(law.expand(repeats, -1), samples, True, generator=generator)
    return torch.nn.functional.one_hot(drawn, len(law)).sum(1).double()


@pytest.mark.parametrize(
    ("value", "degrees", "tail"),
    [(4.0, 1, 0.0455003), (12.5, 4, 0.0139959), (10.0, 2, math.exp(-5)), (0.0, 3, 1.0)],
)
def test_chi_square_has_the_known_tails(value: float, degrees: int, tail: float) -> None:
    assert chi_square_tail(value, degrees) == pytest.approx(tail, rel=1e-5)


@pytest.mark.parametrize(("value", "degrees", "moved"), [(10.0, 3, 5.0), (40.0, 10, 30.0)])
def test_the_noncentral_tail_is_that_of_moved_normals(
    value: float, degrees: int, moved: float
) -> None:
    normals = torch.randn(200_000, degrees, generator=torch.Generator().manual_seed(0))
    normals[:, 0] += math.sqrt(moved)
    share = float((normals.square().sum(1) > value).double().mean())
    assert noncentral_tail(value, degrees, moved) == pytest.approx(share, abs=0.005)


def test_a_large_noncentrality_stays_accurate() -> None:
    """Mean and variance are k + l and 2 (k + 2 l): at the mean, about one half."""
    assert noncentral_tail(5020.0, 20, 5000.0) == pytest.approx(0.5, abs=0.01)


def test_the_statistics_by_hand() -> None:
    found = compare_counts([60, 40], [50.0, 50.0], ALPHA)
    assert (found.chi_square, found.total_variation) == pytest.approx((4.0, 0.1))
    assert found.p_chi_square == pytest.approx(0.0455003, rel=1e-5)
    # 40 or fewer, or 60 or more, heads of 100
    exact = 2 * sum(math.comb(100, n) for n in range(41)) / 2**100
    assert found.p_total_variation == pytest.approx(exact, abs=0.003)
    assert found.p_value == pytest.approx(2 * min(found.p_chi_square, found.p_total_variation))


def test_the_same_seed_gives_the_same_p_value() -> None:
    first, again = (compare_counts([60, 40], [50.0, 50.0], ALPHA) for _ in range(2))
    assert first == again
    assert compare_counts([60, 40], [50.0, 50.0], ALPHA, seed=1) != first


def test_a_right_law_is_refuted_as_rarely_as_promised() -> None:
    """One p-value in twenty is below 0.05, or fewer as the two tests share what they see."""
    values = [
        compare_counts(counts.int().tolist(), (LAW * 200).tolist(), ALPHA).p_value
        for counts in draws(LAW, 200, 40)
    ]
    assert sum(p < 0.05 for p in values) <= 6
    assert min(values) > ALPHA


def test_the_chi_square_has_the_power_it_claims() -> None:
    """Against the law that is the hardest to find: every cell moved by the same share."""
    samples = 2000
    distance = found_by_chi_square(len(LAW) - 1, samples, ALPHA)
    wrong = LAW * (1 + 2 * distance * SIGNS)
    assert float(wrong.sum()) == pytest.approx(1.0)
    assert float((wrong - LAW).abs().sum() / 2) == pytest.approx(distance)
    counts = draws(wrong, samples, 1000)
    statistics = ((counts - LAW * samples) ** 2 / (LAW * samples)).sum(1)
    power = sum(chi_square_tail(float(s), len(LAW) - 1) < ALPHA for s in statistics) / 1000
    assert power == pytest.approx(POWER, abs=0.025)


def test_the_total_variation_test_has_at_least_the_power_it_claims() -> None:
    samples = 500
    drawn = resampled_distances(LAW, samples, 0, 20_000)
    distance = found_by_total_variation(drawn, samples, 1e-3)
    wrong = LAW * (1 + 2 * distance * SIGNS)
    counts = draws(wrong, samples, 1000)
    distances = (counts / samples - LAW).abs().sum(1) / 2
    p_values = (1 + (drawn[None] >= distances[:, None]).sum(1)) / (1 + len(drawn))
    assert float((p_values < 1e-3).double().mean()) >= POWER


def test_more_samples_find_smaller_distances() -> None:
    found = [found_by_chi_square(6, n, ALPHA) for n in (10, 100, 1000, 10_000)]
    assert found[0] == 1.0 and found == sorted(found, reverse=True)
    assert found[3] == pytest.approx(found[2] / math.sqrt(10))


def test_too_few_resamples_find_nothing() -> None:
    """With 100 draws no p-value is below 1e-4."""
    assert found_by_total_variation(resampled_distances(LAW, 50, 0, 100), 50, ALPHA) == 1.0


def test_resampled_distances_are_those_of_draws() -> None:
    counts = draws(LAW, 50, 4000, seed=1)
    drawn = (counts / 50 - LAW).abs().sum(1) / 2
    resampled = resampled_distances(LAW, 50, 0, 4000)
    assert bool((resampled.diff() <= 0).all())
    for share in (0.5, 0.9, 0.99):
        assert float(resampled.quantile(share)) == pytest.approx(
            float(drawn.quantile(share)), abs=0.012
        )


def test_the_better_of_both_tests_counts() -> None:
    tests = CountTests(1.0, 0.4, 0.1, 0.7, 0.3, 0.2)
    assert (tests.p_value, tests.finds) == (0.8, 0.2)
    assert CountTests(1.0, 0.9, 0.1, 0.7, 0.3, 0.2).p_value == 1.0
