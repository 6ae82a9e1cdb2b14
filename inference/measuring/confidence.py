"""How good a confidence output is, and the calibration that makes products of it probabilities.

Pure: torch, the standard library and the sigmoid of `drafters.confidence`. c_k is the chance that
draft k is accepted, given that those before it were; what a decoder acts on is the product
c_0·...·c_k, the chance that draft k survives. Labels may be hard (accepted or not) or soft (the
exact chance of being accepted): a soft one counts as that part of an accepted draft and the rest of
a rejected one.

Letters: n rows (rounds of drafting), K draft positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafters.confidence import calibrated, survival
from inference.tree import Proposal, TokenTree

BINS = 15
"""Of equal width, as in arXiv:2607.05147."""
LOWEST, HIGHEST = 1 / 16, 16.0
"""Temperatures searched."""
GRID_POINTS = 33
"""Of each search, evenly in log temperature."""
ROUNDS = 3
"""Searches, each between the neighbours of the best temperature of the one before."""
LARGEST_BIAS, BISECTIONS = 16.0, 40
"""Of the search for a bias."""


def auc(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    """Chance that an accepted draft scores above a rejected one; ties count half.

    Args:
        scores: (n,) in any unit.
        labels: (n,) in [0, 1].
        weights: (n,) how much each row counts; None counts all alike.

    Returns:
        A number in [0, 1], 0.5 for scores that say nothing; NaN where all labels are 0 or all 1.
    """
    values, place = scores.double().unique(return_inverse=True)  # sorted
    labels = labels.double()
    weights = torch.ones_like(labels) if weights is None else weights.double()
    accepted = torch.zeros_like(values).index_add(0, place, weights * labels)
    rejected = torch.zeros_like(values).index_add(0, place, weights * (1 - labels))
    below = rejected.cumsum(0) - rejected
    pairs = accepted.sum() * rejected.sum()
    return float((accepted * (below + rejected / 2)).sum() / pairs) if pairs > 0 else math.nan


def expected_calibration_error(
    probabilities: Tensor,
    labels: Tensor,
    bins: int = BINS,
    equal_mass: bool = False,
    weights: Tensor | None = None,
) -> float:
    """Mean over rows of the gap, within bins, between what was predicted and what happened.

    Args:
        probabilities: (n,) in [0, 1].
        labels: (n,) in [0, 1].
        bins: how many.
        equal_mass: bins of equally many rows, else of equal width.
        weights: (n,) how much each row counts; None counts all alike.

    Returns:
        A number in [0, 1]; NaN without rows.
    """
    gaps = (probabilities - labels).double()
    weights = torch.ones_like(gaps) if weights is None else weights.double()
    total = float(weights.sum())
    if not total:
        return math.nan
    if equal_mass:
        place = torch.empty(len(gaps), dtype=torch.int64, device=gaps.device)
        ranks = torch.arange(len(gaps), device=gaps.device)
        place[probabilities.argsort(stable=True)] = ranks * bins // len(gaps)
    else:
        place = (probabilities.double() * bins).long().clamp(0, bins - 1)
    sums = torch.zeros(bins, dtype=torch.float64, device=gaps.device).index_add(
        0, place, weights * gaps
    )
    return float(sums.abs().sum()) / total


def predicted_survival(
    logits: Tensor, temperatures: Sequence[float] | None, biases: Sequence[float] | None = None
) -> Tensor:
    """(n, K) confidence logits -> (n, K) chance that draft k and all before it are accepted."""
    columns = [
        calibrated(column, position, temperatures, biases)
        for position, column in enumerate(logits.double().unbind(1))
    ]
    return survival(torch.stack(columns, 1))


def survival_error(
    logits: Tensor,
    labels: Tensor,
    valid: Tensor,
    temperatures: Sequence[float] | None = None,
    biases: Sequence[float] | None = None,
) -> list[float]:
    """Calibration error of the cumulative product, depth by depth.

    Args:
        logits: (n, K) of the confidence output.
        labels: (n, K) in [0, 1], of single positions; draft k survives if all up to it do.
        valid: (n, K) whether there is such a draft; true up to some depth of each row.
        temperatures, biases: one per position, or None.

    Returns:
        K numbers in [0, 1]; NaN at depths without rows.
    """
    predicted, happened = predicted_survival(logits, temperatures, biases), survival(labels)
    return [
        expected_calibration_error(predicted[rows, depth], happened[rows, depth])
        for depth, rows in enumerate(valid.unbind(1))
    ]


@dataclass(frozen=True)
class Threshold:
    """What is kept of the drafts if those below a predicted survival are not made.

    Attributes:
        threshold: on the cumulative product.
        kept: share of all drafts.
        acceptance: mean survival of those kept, the share of them that is accepted; None if none
            is kept.
    """

    threshold: float
    kept: float
    acceptance: float | None


def threshold_sweep(
    predicted: Tensor, labels: Tensor, valid: Tensor, thresholds: Sequence[float]
) -> list[Threshold]:
    """How acceptance rises as fewer drafts are made.

    Args:
        predicted: (n, K) chance of survival.
        labels, valid: as in `survival_error`.
        thresholds: to try.
    """
    happened, predicted = survival(labels.double())[valid], predicted[valid]
    found = []
    for threshold in thresholds:
        kept = predicted >= threshold
        rate = float(happened[kept].mean()) if bool(kept.any()) else None
        found.append(Threshold(threshold, float(kept.double().mean()), rate))
    return found


# Which label fits ---------------------------------------------------------------------------------


def fitting_label(rule: str, proposal: Proposal, temperature: float) -> tuple[str, bool]:
    """The ``confidence_rule`` that predicts what a decoder will do with drafts.

    Args:
        rule: of acceptance.
        proposal: how the drafts are made under it, see `inference.proposers.laws.proposal_kind`.
        temperature: of the sampling.

    Returns:
        "agreement", "overlap" or "draft_mass"; and whether it is the exact chance of acceptance of
        a single draft or the nearest there is. No label is exact for coupled drafts, which are
        accepted with a chance of at least (1-TV)/(1+TV) of the two laws' distance, where overlap is
        1-TV; nor for a draft drawn beside its likeliest siblings, or for a lossy rule. `block`
        accepts a drawn chain at least as often as `rejection`, whose label it is given.
    """
    if temperature == 0:
        return "agreement", True
    if proposal is Proposal.ONE_HOT:
        return "draft_mass", rule in ("match", "rejection", "block")
    return "overlap", proposal is Proposal.DENSE


def label_note(own: str, rule: str, proposal: Proposal, temperature: float) -> str | None:
    """One line where a head's confidence output was trained for something else; None if it fits.

    Args:
        own: the head's ``confidence_rule``.
        rule, proposal, temperature: as in `fitting_label`.
    """
    wanted, exact = fitting_label(rule, proposal, temperature)
    if own == wanted and exact:
        return None
    here = f"rule {rule} at temperature {temperature:g} with {proposal.value} drafts"
    if exact:
        return f"confidence predicts {own}, but acceptance under {here} is {wanted}"
    if own == wanted:
        return f"confidence predicts {own}, which is near acceptance under {here}, not equal to it"
    return f"confidence predicts {own}, but nearest to acceptance under {here} is {wanted}"


# What a decoder saw -----------------------------------------------------------------------------


@dataclass
class JudgedDrafts:
    """Predictions of a confidence output beside what the target did, round by round.

    Counted is the path of first children, which is the whole of a chain. Where it goes was decided
    before the target said anything, so nothing is selected by the outcome. (Following the accepted
    nodes of a tree instead would: a path that goes on is one that was lucky.) A first child is the
    draft whose chance the confidence output predicts; further children are beside it. In a merged
    tree the path counts as far as it is the head's: up to the first node without a prediction.

    Attributes:
        predicted: survival of each draft of such paths.
        survived: whether it was accepted.
        chances: c_k of the drafts that were tried, those behind accepted ones only.
        accepted: whether it was accepted.
    """

    predicted: list[float] = field(default_factory=list)
    survived: list[bool] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)

    def add_round(self, tree: TokenTree, accepted: Sequence[int], ended: bool) -> None:
        """Count one round; one of a tree without predictions counts nothing.

        Args:
            tree: drafted.
            accepted: the tokens accepted from it.
            ended: the text ended with them, so that what is behind them was not judged.
        """
        if tree.survival is None:
            return
        predicted = tree.survival.tolist()
        path = tree.first_path()
        alive = True
        for depth, node in enumerate(path[1:]):
            if (alive and depth == len(accepted) and ended) or math.isnan(predicted[node]):
                break
            tried, above = alive, predicted[path[depth]]
            alive = alive and depth < len(accepted) and accepted[depth] == tree.token(node)
            self.predicted.append(predicted[node])
            self.survived.append(alive)
            if tried and above > 0.0:
                self.chances.append(predicted[node] / above)
                self.accepted.append(alive)

    def merge(self, other: JudgedDrafts) -> JudgedDrafts:
        """The drafts of both, as a new object."""
        return JudgedDrafts(
            self.predicted + other.predicted,
            self.survived + other.survived,
            self.chances + other.chances,
            self.accepted + other.accepted,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for a JSON line; None where there is nothing to take them from.

        `confidence_auc` is of the drafts tried, by c_k; `confidence_error` the calibration error of
        the cumulative product. Outcomes are hard here, so that chance alone makes an error of about
        0.3·(15 / drafts)^½: it takes some thousand drafts to measure one of 2 %.
        """
        area = auc(torch.tensor(self.chances), torch.tensor(self.accepted))
        error = expected_calibration_error(
            torch.tensor(self.predicted), torch.tensor(self.survived).double()
        )
        return {
            "confidence_auc": None if math.isnan(area) else area,
            "confidence_error": None if math.isnan(error) else error,
            "confidence_drafts": len(self.predicted),
        }


# Calibration ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """sigmoid(logit / temperature + bias), one of each per draft position.

    Attributes:
        temperatures: K, all positive.
        biases: K.
    """

    temperatures: list[float]
    biases: list[float]

    def apply(self, logit: Tensor, position: int) -> Tensor:
        """Logits of draft position ``position``, any shape -> probabilities."""
        return calibrated(logit, position, self.temperatures, self.biases)


def fit_calibration(logits: Tensor, labels: Tensor, valid: Tensor) -> Calibration:
    """Sequential temperature scaling (arXiv:2607.05147), with a bias.

    Position by position, the earlier ones fixed, the temperature and the bias are found that make
    the cumulative product the best probability: of every temperature on a grid the bias with which
    the product is right on average is taken, and of these pairs the one with the least squared
    error. The paper searches the temperature of least calibration error. That has two weaknesses:
    no temperature mends an output that is wrong about the average, which one trained for another
    rule or on other text is, and the error vanishes where one number is predicted for all rows.
    The squared error, which is proper, does not reward that.

    Args:
        logits: (n, K) of the confidence output.
        labels, valid: as in `survival_error`.

    Raises:
        ValueError: no rows at all; positions without rows take over those of the one before.
    """
    if not bool(valid.any()):
        raise ValueError("no draft to calibrate the confidence output on")
    happened = survival(labels.double())
    before = torch.ones(len(logits), dtype=torch.float64, device=logits.device)
    temperatures: list[float] = []
    biases: list[float] = []
    for position, column in enumerate(logits.double().unbind(1)):
        rows = valid[:, position]
        if bool(rows.any()):
            pair = _fit_position(column[rows], before[rows], happened[rows, position])
        else:
            pair = temperatures[-1], biases[-1]
        temperatures.append(pair[0])
        biases.append(pair[1])
        before = before * calibrated(column, position, temperatures, biases)
    return Calibration(temperatures, biases)


def _fit_position(logits: Tensor, before: Tensor, happened: Tensor) -> tuple[float, float]:
    """Temperature and bias of one position.

    Args:
        logits: (m,).
        before: (m,) predicted survival of the positions before.
        happened: (m,) labels of the survival of this one.
    """

    def tried(log_temperature: float) -> tuple[float, float, float]:
        scaled = logits / math.exp(log_temperature)
        bias = _mean_bias(scaled, before, happened)
        error = (before * (scaled + bias).sigmoid() - happened).square().mean()
        return float(error), log_temperature, bias

    low, high = math.log(LOWEST), math.log(HIGHEST)
    for _ in range(ROUNDS):
        step = (high - low) / (GRID_POINTS - 1)
        _, best, bias = min(tried(low + step * place) for place in range(GRID_POINTS))
        low, high = max(low, best - step), min(high, best + step)
    return math.exp(best), bias


def _mean_bias(scaled: Tensor, before: Tensor, happened: Tensor) -> float:
    """The bias with which predicted survival is right on average, by bisection."""
    wanted, low, high = float(happened.mean()), -LARGEST_BIAS, LARGEST_BIAS
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if float((before * (scaled + middle).sigmoid()).mean()) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2
