"""Weights along rounds against plain loops, float64.

Legend: K depths, m columns, R rounds.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from training.weighting import Survey, expected_length_slopes, reached, survival_weights

K, ROUNDS = 4, 6
Round = list[int | None]


def survey(seed: int = 0, missing: float = 0.0, layout: str = "shuffled") -> Survey:
    """Rounds whose drafts lie at other columns in every depth, with `missing` of them left out.

    Columns without a draft hold wrong numbers and the anchor of an existing round.
    """
    generator = torch.Generator().manual_seed(seed)
    m = ROUNDS + 2
    anchor = torch.zeros(K, m, dtype=torch.int64)
    valid = torch.zeros(K, m, dtype=torch.bool)
    for depth in range(K):
        order = torch.randperm(m, generator=generator) if layout == "shuffled" else torch.arange(m)
        anchor[depth, order[:ROUNDS]] = torch.arange(ROUNDS)
        kept = torch.rand(ROUNDS, generator=generator) >= missing
        valid[depth, order[:ROUNDS]] = kept
    overlap, own = torch.rand(2, K, m, generator=generator, dtype=torch.float64)
    hit = torch.rand(K, m, generator=generator) < 0.6
    return Survey(overlap, own, hit, anchor, valid)


def columns(found: Survey, number: int) -> Round:
    """Column of each depth's draft of one round, or None."""
    path: Round = []
    for depth in range(K):
        here = ((found.anchor[depth] == number) & found.valid[depth]).nonzero().flatten().tolist()
        assert len(here) <= 1
        path.append(here[0] if here else None)
    return path


def slow_reached(s: Survey) -> Tensor:
    found = torch.zeros_like(s.overlap)
    for number in range(ROUNDS):
        alive = True
        for depth, column in enumerate(columns(s, number)):
            if column is not None and alive:
                found[depth, column] = 1
            alive = alive and column is not None and bool(s.hit[depth, column])
    return found


def slow_survival(s: Survey, alpha: float) -> Tensor:
    found = torch.zeros_like(s.own)
    for number in range(ROUNDS):
        path = [(d, c) for d, c in enumerate(columns(s, number)) if c is not None]
        survival, product = [], 1.0
        for depth, column in path:
            product *= (1 - alpha) * s.own[depth, column].item() + alpha
            survival.append(product)
        raw = [sum(survival[k:]) for k in range(len(survival))]
        for (depth, column), weight in zip(path, raw, strict=True):
            found[depth, column] = weight * len(raw) / sum(raw)
    return found


def direct_losses(s: Survey, alpha: Tensor) -> list[Tensor]:
    """1 - E/K of every round that begins, from (K, m) overlaps."""
    found = []
    for number in range(ROUNDS):
        path = columns(s, number)
        length, product = torch.zeros((), dtype=alpha.dtype), torch.ones((), dtype=alpha.dtype)
        for depth, column in enumerate(path):
            if column is None:
                break
            product = product * alpha[depth, column]
            length = length + product
        if path[0] is not None:
            found.append(1 - length / K)
    return found


SURVEYS = [
    survey(0),
    survey(1, missing=0.3),
    survey(2, missing=0.3),
    survey(3, missing=0.6),
    survey(4, layout="aligned"),
]


@pytest.mark.parametrize("s", SURVEYS)
def test_reached_against_loops(s: Survey) -> None:
    found = reached(s)
    assert torch.equal(found, slow_reached(s))
    assert torch.equal(found[0], s.valid[0].double())
    assert found[1:].sum() < s.valid[1:].sum()


def test_some_deeper_drafts_are_reached_and_some_are_not() -> None:
    found = torch.stack([reached(s)[1:].sum() for s in SURVEYS])
    assert (found > 0).sum() >= 3


@pytest.mark.parametrize("alpha", [0.5, 0.0, 1.0])
@pytest.mark.parametrize("s", SURVEYS)
def test_survival_weights_against_loops(s: Survey, alpha: float) -> None:
    assert (survival_weights(s, alpha) - slow_survival(s, alpha)).abs().max() < 1e-12


@pytest.mark.parametrize("s", SURVEYS)
def test_survival_weights_are_one_on_average_and_fall_with_depth(s: Survey) -> None:
    weights = survival_weights(s)
    for number in range(ROUNDS):
        path = [weights[d, c].item() for d, c in enumerate(columns(s, number)) if c is not None]
        assert sum(path) == pytest.approx(len(path))
        assert path == sorted(path, reverse=True)


def test_survival_weights_of_a_hand_made_round() -> None:
    """s = 1, 0.75, 0.5: P = 1, 0.75, 0.375 and w = 2.125, 1.125, 0.375."""
    own = torch.tensor([[1.0], [0.5], [0.0]], dtype=torch.float64)
    ones = torch.ones(3, 1, dtype=torch.bool)
    s = Survey(own, own, ones, torch.zeros(3, 1, dtype=torch.int64), ones)
    wanted = torch.tensor([[2.125], [1.125], [0.375]], dtype=torch.float64) * 3 / 3.625
    assert (survival_weights(s) - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("s", SURVEYS)
def test_expected_length_slopes_are_the_gradient_of_the_direct_formula(s: Survey) -> None:
    alpha = s.overlap.clone().requires_grad_()
    losses = direct_losses(s, alpha)
    (wanted,) = torch.autograd.grad(torch.stack(losses).sum(), alpha)
    slopes, lengths = expected_length_slopes(s)
    assert (slopes - wanted).abs().max() < 1e-12
    assert (slopes <= 0).all() and slopes.min() < -1 / K
    again = s.overlap.clone().requires_grad_()
    (found,) = torch.autograd.grad((slopes * again).sum(), again)
    assert (found - wanted).abs().max() < 1e-12
    direct = K * (1 - torch.stack(losses))
    assert lengths.shape == direct.shape
    assert (lengths - direct).abs().max() < 1e-12


def test_expected_length_of_hand_made_rounds() -> None:
    """Overlaps of exactly 0 and 1 included: slopes are no quotients."""
    overlap = torch.tensor([[1.0, 0.0, 0.5], [1.0, 0.5, 0.5]], dtype=torch.float64)
    valid = torch.ones(2, 3, dtype=torch.bool)
    anchor = torch.arange(3).expand(2, 3)
    slopes, lengths = expected_length_slopes(Survey(overlap, overlap, valid, anchor, valid))
    assert lengths.tolist() == [2.0, 0.0, 0.75]
    assert slopes.tolist() == [[-1.0, -0.75, -0.75], [-0.5, 0.0, -0.25]]


def test_a_missing_depth_ends_the_round() -> None:
    """For the expected length and for what decoding reaches; survival weights step over it."""
    s = survey(5)
    valid = s.valid.clone()
    column = columns(s, 2)
    assert None not in column
    valid[1, column[1]] = False
    s = replace(s, valid=valid, hit=torch.ones_like(s.hit))
    for values in (expected_length_slopes(s)[0], reached(s)):
        assert [values[d, column[d]].item() != 0 for d in range(K)] == [True, False, False, False]
    weights = survival_weights(s)
    assert [weights[d, column[d]].item() > 0 for d in range(K)] == [True, False, True, True]


def test_what_is_not_valid_is_never_read() -> None:
    s = survey(6, missing=0.4)
    wrong = torch.where(s.valid, s.overlap, torch.nan)
    own = torch.where(s.valid, s.own, torch.nan)
    hit = s.hit & s.valid
    anchor = torch.where(s.valid, s.anchor, -1)
    other = Survey(wrong, own, hit, anchor, s.valid)
    assert torch.equal(reached(other), reached(s))
    assert torch.equal(survival_weights(other), survival_weights(s))
    for found, wanted in zip(expected_length_slopes(other), expected_length_slopes(s), strict=True):
        assert torch.equal(found, wanted)


def test_nothing_valid() -> None:
    s = survey()
    s = replace(s, valid=torch.zeros_like(s.valid))
    slopes, lengths = expected_length_slopes(s)
    assert not slopes.any() and not lengths.numel()
    assert not reached(s).any() and not survival_weights(s).any()


def test_the_scale_does_not_depend_on_the_number_of_depths() -> None:
    s = survey()
    short = Survey(s.overlap[:2], s.own[:2], s.hit[:2], s.anchor[:2], s.valid[:2])
    for part, depths in ((s, K), (short, 2)):
        assert survival_weights(part).sum().item() == pytest.approx(depths * ROUNDS)
        whole = replace(part, overlap=torch.ones_like(part.overlap))
        slopes, lengths = expected_length_slopes(whole)
        assert lengths.tolist() == [depths] * ROUNDS
        assert slopes[0][part.valid[0]].tolist() == [-1.0] * ROUNDS
