"""Losses by their identities, float64."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from training import losses

V = 7
LOSSES = list(losses.DISTILLATION)


def draws(seed: int = 0, rows: int = 5, size: int = V, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Draft logits and target probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, size, generator=generator, dtype=torch.float64)
    p = (scale * torch.randn(rows, size, generator=generator, dtype=torch.float64)).softmax(-1)
    return logits, p


def test_cross_entropies_of_a_hand_made_case() -> None:
    q = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    p = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64)
    cross = 0.25 * math.log(2) + 0.75 * math.log(4)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert losses.soft_cross_entropy(q.log(), p).item() == pytest.approx(cross)
    assert losses.kl(q.log(), p).item() == pytest.approx(cross - entropy)
    assert losses.overlap(q, p).item() == pytest.approx(0.5)
    assert losses.total_variation(q.log(), p).item() == pytest.approx(0.5)
    label = torch.tensor([1])
    assert losses.cross_entropy(q.log(), label).item() == pytest.approx(math.log(4))


def test_kl_is_cross_entropy_minus_entropy() -> None:
    logits, p = draws()
    entropy = -(p * p.log()).sum(-1)
    difference = losses.soft_cross_entropy(logits, p) - entropy - losses.kl(logits, p)
    assert difference.abs().max() < 1e-12


@pytest.mark.parametrize("name", LOSSES)
def test_divergences_are_not_negative_and_zero_at_the_target(name: str) -> None:
    loss = losses.DISTILLATION[name]
    floor = 0.0
    for seed in range(20):
        logits, p = draws(seed)
        if name == "soft_cross_entropy":
            floor = -(p * p.log()).sum(-1)
        assert (loss(logits, p) >= floor).all()
        assert (loss(logits, p) - floor).max() > 0.05
        assert (loss(p.log() + 3.0, p) - floor).abs().max() < 1e-12


def test_kl_accepts_probabilities_of_zero() -> None:
    """Also its gradient: 0 log 0 is 0, not NaN."""
    logits = draws()[0].requires_grad_()
    p = torch.zeros(5, V, dtype=torch.float64)
    p[:, 2] = 1
    value = losses.kl(logits, p)
    labels = torch.full((5,), 2)
    assert (value - losses.cross_entropy(logits, labels)).abs().max() < 1e-12
    value.sum().backward()
    assert logits.grad.isfinite().all()


def test_total_variation_is_half_the_l1_distance() -> None:
    for seed in range(5):
        logits, p = draws(seed)
        q = logits.softmax(-1)
        half = 0.5 * (p - q).abs().sum(-1)
        assert (losses.total_variation(logits, p) - half).abs().max() < 1e-12
        assert (1 - losses.overlap(q, p) - half).abs().max() < 1e-12


def test_overlap_is_the_acceptance_rate() -> None:
    """Σ q min(1, p/q): a token drawn from q is kept with min(1, p/q)."""
    logits, p = draws()
    q = logits.softmax(-1)
    rate = (q * (p / q).clamp_max(1)).sum(-1)
    assert (losses.overlap(q, p) - rate).abs().max() < 1e-12


def test_mass_outside_a_reduced_vocabulary_is_missed() -> None:
    """1 - ½‖p-q‖₁ over the whole vocabulary, where q is zero outside."""
    _, p = draws(3, size=12)
    vocab = torch.tensor([1, 4, 5, 8, 11])
    q = draws(4, size=5)[0].softmax(-1)
    whole = torch.zeros_like(p)
    whole[:, vocab] = q
    exact = 1 - 0.5 * (p - whole).abs().sum(-1)
    assert (losses.overlap(q, p[:, vocab]) - exact).abs().max() < 1e-12
    assert (losses.overlap(q, p[:, vocab]) <= p[:, vocab].sum(-1)).all()
    wrong = losses.overlap(q, losses.renormalised(p[:, vocab]))  # negative control
    assert (wrong - exact).max() > 1e-2


def test_renormalised() -> None:
    _, p = draws(5, size=12)
    inside = p[:, :4]
    found = losses.renormalised(inside)
    assert (found.sum(-1) - 1).abs().max() < 1e-12
    assert (found * inside.sum(-1, keepdim=True) - inside).abs().max() < 1e-12
    assert losses.renormalised(torch.zeros(1, 3)).tolist() == [[0, 0, 0]]


def test_lk_hybrid_moves_from_kl_to_total_variation() -> None:
    logits, p = draws()
    overlap = losses.overlap(logits.softmax(-1), p)
    weight = (-3.0 * overlap).exp()
    wanted = weight * losses.kl(logits, p) + (1 - weight) * losses.total_variation(logits, p)
    assert (losses.lk_hybrid(logits, p) - wanted).abs().max() < 1e-12
    assert (losses.lk_hybrid(logits, p, eta=0.0) - losses.kl(logits, p)).abs().max() < 1e-12
    sure = losses.lk_hybrid(logits, p, eta=1e6)
    assert (sure - losses.total_variation(logits, p)).abs().max() < 1e-12


def test_lk_hybrid_holds_its_weight_constant() -> None:
    """The gradient is the weighted sum of both gradients, with none through the weight."""
    logits, p = draws()
    logits.requires_grad_()
    weight = (-3.0 * losses.overlap(logits.detach().softmax(-1), p)).exp()
    (found,) = torch.autograd.grad(losses.lk_hybrid(logits, p).sum(), logits)
    (kl,) = torch.autograd.grad(losses.kl(logits, p).sum(), logits)
    (tv,) = torch.autograd.grad(losses.total_variation(logits, p).sum(), logits)
    wanted = weight[:, None] * kl + (1 - weight[:, None]) * tv
    assert (found - wanted).abs().max() < 1e-12


def finite_difference(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    step, found = 1e-6, torch.zeros_like(at)
    for index in range(at.numel()):
        shift = torch.zeros(at.numel(), dtype=at.dtype)
        shift[index] = step
        shift = shift.view_as(at)
        found.view(-1)[index] = (function(at + shift) - function(at - shift)) / (2 * step)
    return found


@pytest.mark.parametrize("name", ["kl", "soft_cross_entropy", "tv"])
def test_gradients_by_finite_differences(name: str) -> None:
    loss = losses.DISTILLATION[name]
    logits, p = draws(2, rows=2)
    logits.requires_grad_()
    (found,) = torch.autograd.grad(loss(logits, p).sum(), logits)
    wanted = finite_difference(lambda x: loss(x, p).sum(), logits.detach())
    assert (found - wanted).abs().max() < 1e-7
    assert found.abs().max() > 0.05


def test_gradient_of_kl_is_q_minus_p() -> None:
    """And that of cross-entropy is the same."""
    logits, p = draws()
    logits.requires_grad_()
    for name in ("kl", "soft_cross_entropy"):
        (found,) = torch.autograd.grad(losses.DISTILLATION[name](logits, p).sum(), logits)
        assert (found - (logits.softmax(-1) - p)).abs().max() < 1e-12


def test_confidence_loss_is_cross_entropy_with_a_soft_label() -> None:
    logits = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64)
    label = torch.tensor([0.25, 1.0, 0.0], dtype=torch.float64)
    c = logits.sigmoid()
    wanted = -(label * c.log() + (1 - label) * (1 - c).log())
    assert (losses.confidence_bce(logits, label) - wanted).abs().max() < 1e-12
    above = losses.confidence_bce(logits, label + 1e-9)  # rounding must not leave [0, 1]
    assert (above - wanted).abs().max() < 1e-7
    best = torch.tensor([0.3], dtype=torch.float64)
    minimum = losses.confidence_bce(best.logit(), best)
    for other in (0.29, 0.31):
        assert losses.confidence_bce(torch.tensor([other]).double().logit(), best) > minimum


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_widened(name: str, dtype: torch.dtype) -> None:
    logits, p = draws(scale=4.0)
    rounded = logits.to(dtype)
    found = losses.DISTILLATION[name](rounded, p.float())
    assert found.dtype == torch.float32
    wanted = losses.DISTILLATION[name](rounded.double(), p)
    assert (found.double() - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_logits_stay_finite(name: str) -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    p = torch.tensor([[0.0, 0.0, 1.0]])
    value = losses.DISTILLATION[name](logits, p)
    value.sum().backward()
    assert value.isfinite().all() and logits.grad.isfinite().all()


@pytest.mark.parametrize(("steps", "decay"), [(1, 0.5), (4, 0.8), (5, 1.0)])
def test_depth_weights(steps: int, decay: float) -> None:
    weights = losses.head_weights(steps, decay)
    assert len(weights) == steps
    assert sum(weights) == pytest.approx(1)
    for one, following in pairwise(weights):
        assert following / one == pytest.approx(decay)
