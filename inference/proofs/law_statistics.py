"""Two tests of counts against a known law, and how far off a law must be for each to find it.

n texts are counted in k cells of known probability p_i; o_i is a count.

Pearson's chi-square
    X = sum_i (o_i - n p_i)^2 / (n p_i) has k - 1 degrees of freedom under p. Under another law p'
    it is close to a noncentral chi-square variable with

        lambda = n sum_i (p'_i - p_i)^2 / p_i  >=  4 n d^2,    d = 1/2 sum_i |p'_i - p_i|

    by Cauchy-Schwarz: d is the total variation, and of all laws at distance d the hardest to find
    moves every cell by the same share. A noncentral variable is a Poisson(lambda / 2) mixture of
    central ones with k - 1 + 2j degrees, so its tail is a sum of incomplete gamma functions. The
    smallest d found with probability `POWER` follows by bisection; it is as good as the
    approximation by a normal law is, for which every cell should expect five texts.

Total variation
    T = 1/2 sum_i |o_i / n - p_i|. Its law under p is sampled: `RESAMPLES` seeded draws of n texts
    (a parametric bootstrap), p-value (1 + draws as large as T) / (1 + draws). Under p' the mean of
    T is at least d (Jensen), and one text moves T by at most 1 / n, so by McDiarmid's inequality T
    stays below d - e with probability at most exp(-2 n e^2). With c the value that T must exceed,
    every d >= c + sqrt(log(1 / (1 - POWER)) / (2 n)) is found with probability `POWER`, whatever
    n is.

Both look at the cells alone: laws that differ within a cell look equal. Two tests are made, so each
p-value is doubled (Bonferroni).

Pure: torch and the standard library. Letters: k cells, n texts, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

POWER = 0.95
"""Probability with which the stated distance is found."""
RESAMPLES = 40_000
"""Draws of the bootstrap: enough that a p-value can get below 1e-4 after it was doubled."""


@dataclass(frozen=True)
class CountTests:
    """Both tests of the same counts.

    Attributes:
        chi_square: Pearson's statistic.
        p_chi_square: its tail probability.
        total_variation: between the observed shares of the cells and their probabilities.
        p_total_variation: its tail probability, from the bootstrap.
        finds_chi_square: the smallest total variation, of laws over the cells, that the first test
            finds with probability `POWER`; 1 if it finds none.
        finds_total_variation: the same of the second test.
    """

    chi_square: float
    p_chi_square: float
    total_variation: float
    p_total_variation: float
    finds_chi_square: float
    finds_total_variation: float

    @property
    def p_value(self) -> float:
        """Of both tests together."""
        return min(1.0, 2.0 * min(self.p_chi_square, self.p_total_variation))

    @property
    def finds(self) -> float:
        """The smallest total variation that is found with probability `POWER`."""
        return min(self.finds_chi_square, self.finds_total_variation)


def compare_counts(
    observed: Sequence[int], expected: Sequence[float], alpha: float, seed: int = 0
) -> CountTests:
    """Make both tests.

    Args:
        observed: k counts, at least two.
        expected: k expected counts, with the same sum.
        alpha: the p-value of both together that refutes.
        seed: of the bootstrap.
    """
    counts = torch.tensor(observed, dtype=torch.float64)
    means = torch.tensor(expected, dtype=torch.float64)
    samples, degrees = int(counts.sum()), len(means) - 1
    statistic = float(((counts - means) ** 2 / means).sum())
    drawn = resampled_distances(means / means.sum(), samples, seed)  # (R,) largest first
    distance = float((counts - means).abs().sum()) / (2 * samples)
    as_large = int((drawn >= distance - 1e-12).sum())
    return CountTests(
        chi_square=statistic,
        p_chi_square=chi_square_tail(statistic, degrees),
        total_variation=distance,
        p_total_variation=(1 + as_large) / (1 + len(drawn)),
        finds_chi_square=found_by_chi_square(degrees, samples, alpha / 2),
        finds_total_variation=found_by_total_variation(drawn, samples, alpha / 2),
    )


# Chi-square -------------------------------------------------------------------------------------


def chi_square_tail(value: float, degrees: int) -> float:
    """Probability that a chi-square variable exceeds a value."""
    return noncentral_tail(value, degrees, 0.0)


def noncentral_tail(value: float, degrees: int, noncentrality: float) -> float:
    """Probability that a noncentral chi-square variable exceeds a value.

    Args:
        value: x.
        degrees: of freedom.
        noncentrality: lambda, the sum of squared means.
    """
    mean = noncentrality / 2  # of the Poisson variable
    terms = torch.arange(1 + math.ceil(mean + 12 * math.sqrt(mean) + 40), dtype=torch.float64)
    log_weights = torch.special.xlogy(terms, torch.tensor(mean)) - mean - torch.lgamma(terms + 1)
    half = torch.full_like(terms, value / 2)
    tails = torch.special.gammaincc(degrees / 2 + terms, half)
    return float((log_weights.exp() * tails).sum())


def found_by_chi_square(degrees: int, samples: int, alpha: float, power: float = POWER) -> float:
    """The smallest total variation that is found with probability `power`, at most 1.

    Args:
        degrees: of freedom, k - 1.
        samples: n.
        alpha: p-value that refutes.
        power: wanted.
    """
    critical = _crossing(lambda x: chi_square_tail(x, degrees) < alpha)
    needed = _crossing(lambda value: noncentral_tail(critical, degrees, value) >= power)
    return min(1.0, math.sqrt(needed / (4 * samples)))


def _crossing(reached: Callable[[float], bool]) -> float:
    """The smallest positive number from which on a condition holds, by bisection."""
    low, high = 0.0, 1.0
    while not reached(high):
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


# Total variation --------------------------------------------------------------------------------


def resampled_distances(
    probabilities: Tensor, samples: int, seed: int, resamples: int = RESAMPLES
) -> Tensor:
    """Total variation between a law and the shares of `samples` draws from it.

    Args:
        probabilities: (k,) float64.
        samples: n.
        seed: of the draws.
        resamples: R.

    Returns:
        (R,) float64, largest first.
    """
    generator = torch.Generator().manual_seed(seed)
    left = torch.full((resamples,), float(samples), dtype=torch.float64)
    distance = torch.zeros_like(left)
    behind = probabilities.flip(0).cumsum(0).flip(0)  # of this cell and all behind it
    for share, rest in zip(probabilities.tolist(), behind.tolist(), strict=True):
        chance = torch.full_like(left, min(1.0, share / rest)) if rest > 0 else left * 0
        counts = torch.binomial(left, chance, generator=generator)
        distance += (counts / samples - share).abs()
        left -= counts
    return (distance / 2).sort(descending=True).values


def found_by_total_variation(
    drawn: Tensor, samples: int, alpha: float, power: float = POWER
) -> float:
    """The smallest total variation that is found with probability `power`, at most 1.

    Args:
        drawn: (R,) the bootstrap, largest first.
        samples: n.
        alpha: p-value that refutes.
        power: wanted.
    """
    # p < alpha while 1 + (draws as large) < alpha (1 + R)
    allowed = math.ceil(alpha * (1 + len(drawn))) - 2
    if allowed < 0:
        return 1.0
    critical = float(drawn[allowed])
    return min(1.0, critical + math.sqrt(math.log(1 / (1 - power)) / (2 * samples)))
