"""The curves of arXiv:2211.17192: what speculation gives if every draft is accepted alike.

Pure: the standard library. Draft after draft is accepted with the same chance, whatever came
before. Real drafts are not like that: those far from the root are accepted less often, and good
places of a text follow each other. What is measured stands beside these curves, not on them.

Letters: α chance that a draft is accepted, γ drafts per round, c seconds of a draft in units of a
plain step of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
COSTS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
MOST = 64
"""Longest chain that `best_gamma` tries."""


def expected_tokens(alpha: float, gamma: int) -> float:
    """Expected tokens per round, the target's own included: (1 - α^(γ+1)) / (1 - α).

    Args:
        alpha: α in [0, 1].
        gamma: γ, at least 0.

    Raises:
        ValueError: out of range.
    """
    if not 0.0 <= alpha <= 1.0 or gamma < 0:
        raise ValueError(f"alpha must lie in [0, 1] and gamma be at least 0; got {alpha}, {gamma}")
    return gamma + 1.0 if alpha == 1.0 else (1.0 - alpha ** (gamma + 1)) / (1.0 - alpha)


def speedup(
    tokens: float, gamma: int, cost: float, one_pass: bool = False, row_cost: float = 0.0
) -> float:
    """Over plain decoding: tokens per round / seconds per round in plain steps.

    Args:
        tokens: expected per round.
        gamma: γ.
        cost: c of one draft; of all together if they come from one pass.
        one_pass: whether they do.
        row_cost: what each further verified row adds; 0 as in the paper.
    """
    drafting = cost if one_pass and gamma else gamma * cost
    return tokens / (1.0 + drafting + gamma * row_cost)


def best_gamma(
    alpha: float, cost: float, one_pass: bool = False, row_cost: float = 0.0, most: int = MOST
) -> tuple[int, float]:
    """The fastest γ and its speed-up; of equal ones the shortest. 0 where speculation does not pay.

    Args:
        alpha: α.
        cost: c, as in `speedup`, as are the next two.
        one_pass: drafts cost the same however many there are.
        row_cost: of each further verified row.
        most: longest chain to try.
    """
    found = [
        speedup(expected_tokens(alpha, gamma), gamma, cost, one_pass, row_cost)
        for gamma in range(most + 1)
    ]
    best = max(found)
    return found.index(best), best


def alpha_of(tokens: float, gamma: int) -> float:
    """The α whose formula gives these expected tokens: the inverse of `expected_tokens`.

    Args:
        tokens: per round, the target's own included.
        gamma: γ, at least 1.

    Returns:
        In [0, 1]; the nearest end if no α gives so many.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < tokens else (low, middle)
    return (low + high) / 2


def path_tokens(conditional: Sequence[float]) -> float:
    """1 + c1 + c1·c2 + ...: expected tokens per round of a chain whose depths differ.

    Args:
        conditional: per depth the chance that a draft is accepted if those before it are.
    """
    tokens, survival = 1.0, 1.0
    for chance in conditional:
        survival *= chance
        tokens += survival
    return tokens


@dataclass(frozen=True)
class Point:
    """Where a head is among the curves.

    Attributes:
        alpha: mean acceptance of first drafts.
        gamma: longest path.
        predicted: tokens per round, the target's own included.
        measured: the same by decoding; None if it was not.
        cost: c; None if unknown.
        one_pass: whether drafts come from one pass.
    """

    alpha: float
    gamma: int
    predicted: float
    measured: float | None = None
    cost: float | None = None
    one_pass: bool = False

    def to_dict(self) -> dict[str, float | int | None]:
        """Plain numbers: the fields, the α that the formula would need for the predicted tokens,
        and the best γ with its speed-up at this α and c.
        """
        best: tuple[int | None, float | None] = (None, None)
        if self.cost is not None:
            best = best_gamma(self.alpha, self.cost, self.one_pass)
        return {
            "alpha": self.alpha,
            "gamma": self.gamma,
            "predicted": self.predicted,
            "measured": self.measured,
            "equivalent_alpha": alpha_of(self.predicted, self.gamma),
            "formula": expected_tokens(self.alpha, self.gamma),
            "cost": self.cost,
            "best_gamma": best[0],
            "speedup": best[1],
        }


def curves(longest: int, one_pass: bool = False) -> dict[str, list]:
    """The arrays that are drawn: E[tokens] over α and γ, best γ and its speed-up over α and c.

    Args:
        longest: largest γ of the first.
        one_pass: drafts cost the same however many there are.
    """
    gammas = list(range(longest + 1))
    best = [[best_gamma(alpha, cost, one_pass) for cost in COSTS] for alpha in ALPHAS]
    return {
        "alphas": list(ALPHAS),
        "gammas": gammas,
        "tokens": [[expected_tokens(alpha, gamma) for gamma in gammas] for alpha in ALPHAS],
        "costs": list(COSTS),
        "best_gamma": [[gamma for gamma, _ in row] for row in best],
        "best_speedup": [[gain for _, gain in row] for row in best],
    }
