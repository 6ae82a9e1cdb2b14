"""Losses by closed forms and identities, float64."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from training import losses

V = 7
TOP = 3
NO_DISTILLATION = {"ce", "smooth_l1", "expected_length"}
NAMES = sorted(losses.TERMS - NO_DISTILLATION)
DISTRIBUTION = ["js", "kl", "reverse_kl"]  # zero where q is the renormalised p
ACCEPTANCE = ["l1", "neg_log_overlap", "tv"]  # zero where q is p, all of it inside


def loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    return partial(losses.distillation, name, top=TOP)


def draws(seed: int = 0, rows: int = 5, size: int = V, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Draft logits and target probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, size, generator=generator, dtype=torch.float64)
    p = (scale * torch.randn(rows, size, generator=generator, dtype=torch.float64)).softmax(-1)
    return logits, p


def reduced(seed: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft logits and p over 5 of 12 tokens, and both laws over all 12."""
    _, whole_p = draws(seed, size=12)
    vocab = torch.tensor([1, 4, 5, 8, 11])
    logits, _ = draws(seed + 1, size=5)
    whole_q = torch.zeros_like(whole_p)
    whole_q[:, vocab] = logits.softmax(-1)
    return logits, whole_p[:, vocab], whole_q, whole_p


def gradient(value: Tensor, of: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(value.sum(), of)
    return found


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> bool:
    assert a.shape == b.shape
    return bool(((a - b).abs() <= tolerance).all())


def test_the_menu() -> None:
    assert set(NAMES) == {*DISTRIBUTION, *ACCEPTANCE, "lk_hybrid", "top_k"}
    assert losses.TERMS >= NO_DISTILLATION


def test_a_hand_made_case() -> None:
    q = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    p = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64)
    kl = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.25)
    r = [0.375, 0.5, 0.125]
    js = 0.5 * sum(
        (a * math.log(a / m) if a else 0.0)
        for law in (q[0].tolist(), p[0].tolist())
        for a, m in zip(law, r, strict=True)
    )
    assert losses.overlap(q, p).item() == pytest.approx(0.5)
    reverse = 0.5 * math.log(2) + 0.25 * math.log(1 / 3) + 0.25 * math.log(0.25 / 1e-30)
    wanted = {
        "kl": kl,
        "reverse_kl": reverse,
        "js": js,
        "tv": 0.5,
        "l1": 1.0,
        "neg_log_overlap": math.log(2),
        "lk_hybrid": math.exp(-1.5) * kl + (1 - math.exp(-1.5)) * 0.5,
    }
    for name, value in wanted.items():
        assert loss(name)(q.log(), p).item() == pytest.approx(value, abs=1e-12), name
    for top, value in [(1, 0.75 * math.log(4)), (2, 0.75 * math.log(4) + 0.25 * math.log(2))]:
        assert losses.distillation("top_k", q.log(), p, top).item() == pytest.approx(value)
    label = torch.tensor([1])
    assert losses.cross_entropy(q.log(), label).item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("name", DISTRIBUTION + ACCEPTANCE + ["lk_hybrid"])
def test_divergences_are_not_negative_and_zero_at_the_target(name: str) -> None:
    for seed in range(20):
        logits, p = draws(seed)
        found = loss(name)(logits, p)
        assert (found >= 0).all() and found.max() > 0.05
        logits = (p.log() + 3.0).requires_grad_()
        found = loss(name)(logits, p)
        assert found.abs().max() < 1e-12
        if name in DISTRIBUTION:  # the others have a kink there
            assert gradient(found, logits).abs().max() < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_mass_outside_the_draft_vocabulary(name: str) -> None:
    """Distances between laws do not see it; acceptance losses are those of the whole laws."""
    logits, p, q, whole = reduced()
    found = loss(name)(logits, p)
    if name in DISTRIBUTION or name == "top_k":
        assert close(found, loss(name)(logits, losses.renormalised(p)))
        return
    variation = 0.5 * (q - whole).abs().sum(-1)
    weight = (-3 * (1 - variation)).exp()
    wanted = {
        "tv": variation,
        "l1": 2 * variation,
        "neg_log_overlap": -(1 - variation).log(),
        "lk_hybrid": weight * loss("kl")(logits, p) + (1 - weight) * variation,
    }[name]
    assert close(found, wanted)
    wrong = loss(name)(logits, losses.renormalised(p))  # negative control
    assert (wrong - wanted).abs().min() > 1e-3


@pytest.mark.parametrize("name", DISTRIBUTION)
def test_distances_between_laws_are_zero_at_the_renormalised_law(name: str) -> None:
    _, p, _, _ = reduced()
    assert loss(name)(p.log(), p).abs().max() < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str) -> None:
    """Against finite differences, with and without missing mass; none into p."""
    check = loss(name)
    if name == "lk_hybrid":  # its weight is a constant, which a finite difference cannot know
        logits, p = draws(2, rows=2)
        fixed = (-3 * losses.overlap(logits.softmax(-1), p)).exp()
        check = lambda x, p: fixed * losses.kl(x, p) + (1 - fixed) * losses.total_variation(x, p)  # noqa: E731
        x = logits.clone().requires_grad_()
        assert close(gradient(loss(name)(x, p), x), gradient(check(x, p), x))
    for logits, p in (draws(2, rows=2), reduced(6)[:2]):
        logits, p = logits[:2].requires_grad_(), p[:2]
        assert torch.autograd.gradcheck(lambda x, p=p: check(x, p), (logits,))
        assert gradient(check(logits, p), logits).abs().max() > 0.01


def test_gradient_of_kl_is_q_minus_p() -> None:
    logits, p, _, _ = reduced()
    logits.requires_grad_()
    found = gradient(losses.kl(logits, p), logits)
    assert close(found, logits.softmax(-1) - losses.renormalised(p))


def test_kl_of_a_sure_target_is_cross_entropy() -> None:
    """Also its gradient: 0 log 0 is 0, not NaN."""
    logits = draws()[0].requires_grad_()
    p = torch.zeros(5, V, dtype=torch.float64)
    p[:, 2] = 1
    labels = torch.full((5,), 2)
    value, hard = losses.kl(logits, p), losses.cross_entropy(logits, labels)
    assert close(value, hard)
    assert close(gradient(value, logits), gradient(hard, logits))


def test_reverse_kl_is_kl_the_other_way_round() -> None:
    logits, p = draws()
    assert close(losses.reverse_kl(logits, p), losses.kl(p.log(), logits.softmax(-1)))


def test_jensen_shannon_is_symmetric_and_bounded() -> None:
    for scale in (0.1, 2.0, 40.0):
        logits, p = draws(scale=scale)
        found = losses.jensen_shannon(logits, p)
        assert close(found, losses.jensen_shannon(p.log(), logits.softmax(-1)))
        assert (found <= math.log(2) + 1e-12).all()
    apart = torch.tensor([[0.0, 100.0]], dtype=torch.float64)
    p = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert losses.jensen_shannon(apart, p).item() == pytest.approx(math.log(2), abs=1e-12)


def test_neg_log_overlap_has_the_gradient_of_total_variation_over_the_overlap() -> None:
    """Also below the floor, where the draft is hopeless: there a clamp would teach nothing."""
    logits, p, _, _ = reduced()
    logits.requires_grad_()
    overlap = losses.overlap(logits.softmax(-1), p)
    wanted = gradient(losses.total_variation(logits, p), logits) / overlap[:, None]
    assert close(gradient(losses.neg_log_overlap(logits, p), logits), wanted)
    poor = torch.tensor([[20.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    p = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    value = losses.neg_log_overlap(poor, p)
    assert -math.log(1e-5) < value.item() < -math.log(1e-5) + 1
    wanted = gradient(losses.total_variation(poor, p), poor) / 1e-5
    assert close(gradient(value, poor), wanted)
    assert wanted.abs().max() > 1e-5


def test_overlap_is_the_acceptance_rate() -> None:
    """Σ q min(1, p/q): a token drawn from q is kept with min(1, p/q)."""
    logits, p, _, _ = reduced()
    q = logits.softmax(-1)
    assert close(losses.overlap(q, p), (q * (p / q).clamp_max(1)).sum(-1))
    assert (losses.overlap(q, p) <= p.sum(-1)).all()


def test_lk_hybrid_moves_from_kl_to_total_variation() -> None:
    logits, p = draws()
    assert close(losses.lk_hybrid(logits, p, eta=0.0), losses.kl(logits, p))
    assert close(losses.lk_hybrid(logits, p, eta=1e6), losses.total_variation(logits, p))
    apart = torch.tensor([[0.0, 60.0]], dtype=torch.float64)  # no overlap: all KL
    p = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert close(losses.lk_hybrid(apart, p), losses.kl(apart, p))


def test_top_k_keeps_the_most_likely_tokens_of_the_target() -> None:
    logits, p, _, _ = reduced()
    sure = losses.renormalised(p)
    entropy = -(sure * sure.log()).sum(-1)
    for top in (5, 50):  # all of them: KL plus a constant
        assert close(losses.top_k(logits, p, top) - entropy, losses.kl(logits, p))
    log_q = logits.log_softmax(-1)
    for row in range(len(p)):
        best = sorted(range(5), key=lambda v, row=row: -p[row, v].item())[:TOP]
        wanted = -sum(sure[row, v].item() * log_q[row, v].item() for v in best)
        assert losses.top_k(logits, p, TOP)[row].item() == pytest.approx(wanted)


def test_renormalised() -> None:
    _, p, _, _ = reduced()
    found = losses.renormalised(p)
    assert close(found.sum(-1), torch.ones(5, dtype=torch.float64))
    assert close(found * p.sum(-1, keepdim=True), p)
    assert losses.renormalised(torch.zeros(1, 3)).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("at", [1.0, 0.6, 2.0])
def test_the_target_law_is_tempered_before_it_is_cut(at: float) -> None:
    logits, _ = draws(size=12)
    vocab = torch.tensor([1, 4, 5, 8, 11])
    whole = (logits / at).softmax(-1)
    assert close(losses.target_law(logits, None, at), whole)
    cut = losses.target_law(logits, vocab, at)
    assert close(cut, whole[:, vocab])
    late = losses.target_law(logits, vocab) ** (1 / at)  # negative control
    mass = losses.target_law(logits, vocab).sum(-1, keepdim=True)
    assert close(late / late.sum(-1, keepdim=True) * mass, cut) == (at == 1)
    assert losses.target_law(logits.bfloat16(), vocab).dtype == torch.float32


def test_feature_regression() -> None:
    rows = torch.tensor([[0.0, 0.0], [3.0, -0.5]], dtype=torch.float64)
    hidden = torch.tensor([[0.5, 2.0], [3.0, 0.5]], dtype=torch.float64)
    wanted = torch.tensor([(0.125 + 1.5) / 2, (0.0 + 0.5) / 2], dtype=torch.float64)
    assert close(losses.feature_regression(rows, hidden), wanted)
    shifted = (rows + 0.01).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: losses.feature_regression(x, hidden), (shifted,))
    assert losses.feature_regression(rows.bfloat16(), hidden.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("at", [1.0, 0.5])
def test_acceptance_labels_are_chances_of_acceptance(at: float) -> None:
    """Of the laws at that temperature, by their definitions over the whole vocabulary."""
    logits, _ = draws(1, size=5)
    target, _ = draws(2, size=12)
    vocab = torch.tensor([1, 4, 5, 8, 11])
    agree = torch.tensor([True, False, True, False, False])
    found = losses.acceptance_labels(logits, losses.target_law(target, vocab, at), agree, at)
    p, q = (target / at).softmax(-1), torch.zeros(5, 12, dtype=torch.float64)
    q[:, vocab] = (logits / at).softmax(-1)
    assert set(found) == {"overlap", "draft_mass", "agreement"}
    assert close(found["overlap"], 1 - 0.5 * (p - q).abs().sum(-1))
    assert close(found["draft_mass"], p[torch.arange(5), vocab[logits.argmax(-1)]])
    assert found["agreement"].tolist() == [1, 0, 1, 0, 0]


def test_confidence_loss_is_cross_entropy_with_a_soft_label() -> None:
    logits = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64)
    label = torch.tensor([0.25, 1.0, 0.0], dtype=torch.float64)
    c = logits.sigmoid()
    wanted = -(label * c.log() + (1 - label) * (1 - c).log())
    assert close(losses.confidence_bce(logits, label), wanted)
    above = losses.confidence_bce(logits, label + 1e-9)  # rounding must not leave [0, 1]
    assert close(above, wanted, 1e-7)
    best = torch.tensor([0.3], dtype=torch.float64)
    minimum = losses.confidence_bce(best.logit(), best)
    for other in (0.29, 0.31):
        assert losses.confidence_bce(torch.tensor([other]).double().logit(), best) > minimum


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_widened(name: str, dtype: torch.dtype) -> None:
    """Also inside autocast."""
    logits, p = draws(scale=4.0)
    rounded = logits.to(dtype)
    wanted = loss(name)(rounded.double(), p)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            found = loss(name)(rounded, p.float())
        assert found.dtype == torch.float32
        assert close(found.double(), wanted, 2e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [[0.0, 0.0, 1.0], [0.0, 1e-3, 1e-3], [0.0, 0.0, 0.0]])
def test_extreme_rows_stay_finite(name: str, p: list[float]) -> None:
    """A row whose target has nothing inside is masked, but its NaN would not be."""
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    value = loss(name)(logits, torch.tensor([p]))
    value.sum().backward()
    assert value.isfinite().all() and logits.grad.isfinite().all()


@pytest.mark.parametrize(("steps", "decay"), [(1, 0.5), (4, 0.8), (5, 1.0)])
def test_depth_weights(steps: int, decay: float) -> None:
    weights = losses.head_weights(steps, decay)
    assert len(weights) == steps
    assert sum(weights) == pytest.approx(1)
    for one, following in pairwise(weights):
        assert following / one == pytest.approx(decay)
