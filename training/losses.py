"""Losses between a draft law q and a target law p: pure functions, one value per draft row.

The caller masks, weighs and sums. Everywhere p is the target's *exact* law over the draft
vocabulary: what it gives to tokens the head cannot propose is missing from the row. Losses between
distributions renormalise it; losses about acceptance take it as it is, for missed mass is rejected.
Softmax and logarithms are in float32 or better, and gradients flow into the draft's logits only.

Legend: m draft rows, V / Vd target / draft vocabulary, D hidden.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

_TINY = 1e-30
_LEAST_OVERLAP = 1e-5


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype losses of ``x`` are computed in: float64 stays float64, all else is float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def log_softmax(logits: Tensor) -> Tensor:
    """log q: (m, Vd) -> (m, Vd), in the wide dtype."""
    return F.log_softmax(logits.to(wide_dtype(logits)), dim=-1)


def target_law(logits: Tensor, draft_vocab: Tensor | None, at: float = 1.0) -> Tensor:
    """The exact target law over the draft vocabulary, not renormalised.

    The temperature applies before tokens outside the draft vocabulary are left out, which cannot be
    made up for later: their share changes with it.

    Args:
        logits: (m, V) of the target.
        draft_vocab: (Vd,) absolute ids, or None for the whole vocabulary.
        at: temperature.

    Returns:
        (m, Vd).
    """
    wide = logits.to(wide_dtype(logits))
    scaled = wide if at == 1 else wide / at
    law = scaled.softmax(-1)
    return law if draft_vocab is None else law[:, draft_vocab]


def renormalised(p: Tensor) -> Tensor:
    """p scaled to sum 1 over the draft vocabulary: (m, Vd) -> (m, Vd); a row of zeros stays."""
    return p / p.sum(-1, keepdim=True).clamp_min(_TINY)


def overlap(q: Tensor, p: Tensor) -> Tensor:
    """Σ min(p, q) = 1 - ½‖p-q‖₁: (m, Vd), (m, Vd) -> (m,), the chance that a sampled draft is
    accepted.

    q is zero outside a reduced draft vocabulary, so the mass that p has there adds nothing and
    counts as missed: p must *not* be renormalised (arXiv:2211.17192, Cor. 3.6).
    """
    return torch.minimum(p, q).sum(-1)


def kl(logits: Tensor, p: Tensor) -> Tensor:
    """KL(p‖q) = Σ p (log p - log q): (m, Vd), (m, Vd) -> (m,). Zero at q = p.

    The gradient is that of the soft cross-entropy of EAGLE-1 and EAGLE-3, q - p.
    """
    p = renormalised(p)
    return (torch.xlogy(p, p) - p * log_softmax(logits)).sum(-1)


def cross_entropy_of_laws(logits: Tensor, p: Tensor) -> Tensor:
    """-Σ p log q of a renormalised p: (m, Vd), (m, Vd) -> (m,); :func:`kl` and the entropy of p."""
    return -(p * log_softmax(logits)).sum(-1)


def entropy(p: Tensor) -> Tensor:
    """-Σ p log p: (m, Vd) -> (m,)."""
    return -(p * p.clamp_min(_TINY).log()).sum(-1)


def reverse_kl(logits: Tensor, p: Tensor) -> Tensor:
    """KL(q‖p) = Σ q (log q - log p): (m, Vd), (m, Vd) -> (m,).

    Infinite where p is zero and q is not; there p counts as 1e-30, so that a draft wholly outside
    p's support costs about 69 and still has a gradient.
    """
    log_q = log_softmax(logits)
    return (log_q.exp() * (log_q - renormalised(p).clamp_min(_TINY).log())).sum(-1)


def jensen_shannon(logits: Tensor, p: Tensor) -> Tensor:
    """½ KL(p‖r) + ½ KL(q‖r) with r = ½(p+q): (m, Vd), (m, Vd) -> (m,) in [0, ln 2]."""
    log_q, p = log_softmax(logits), renormalised(p)
    log_p = p.clamp_min(_TINY).log()
    log_r = torch.logaddexp(log_p, log_q) - math.log(2)
    return 0.5 * (p * (log_p - log_r) + log_q.exp() * (log_q - log_r)).sum(-1)


def total_variation(logits: Tensor, p: Tensor) -> Tensor:
    """1 - Σ min(p, q), the chance of a rejection: (m, Vd), (m, Vd) -> (m,)."""
    return 1 - overlap(log_softmax(logits).exp(), p)


def l1(logits: Tensor, p: Tensor) -> Tensor:
    """‖p-q‖₁ over the whole vocabulary, not halved: (m, Vd), (m, Vd) -> (m,).

    DSpark's loss (arXiv:2607.05147, Eq. 10), twice :func:`total_variation`. What p has outside the
    draft vocabulary is a constant part of it.
    """
    inside = (p - log_softmax(logits).exp()).abs().sum(-1)
    return inside + (1 - p.sum(-1))


def neg_log_overlap(logits: Tensor, p: Tensor) -> Tensor:
    """-log Σ min(p, q) (arXiv:2602.23881): (m, Vd), (m, Vd) -> (m,).

    Below an overlap of 1e-5, usual for an untrained head on a large vocabulary, the logarithm goes
    on as its tangent: finite, and with a gradient that a plain clamp would lose.
    """
    alpha = overlap(log_softmax(logits).exp(), p)
    missing = (_LEAST_OVERLAP - alpha).clamp_min(0) / _LEAST_OVERLAP
    return missing - alpha.clamp_min(_LEAST_OVERLAP).log()


def lk_hybrid(logits: Tensor, p: Tensor, eta: float = 3.0) -> Tensor:
    """λ KL + (1-λ) TV with λ = exp(-η·overlap), the overlap held constant (arXiv:2602.23881):
    (m, Vd), (m, Vd) -> (m,).

    KL leads while the draft is poor, total variation (the acceptance rate itself) once it is good.
    """
    variation = total_variation(logits, p)
    weight = torch.exp(-eta * (1 - variation.detach()))
    return weight * kl(logits, p) + (1 - weight) * variation


def top_k(logits: Tensor, p: Tensor, top: int) -> Tensor:
    """-Σ p log q over the ``top`` most likely tokens of p (HASS, arXiv:2408.15766): (m, Vd),
    (m, Vd) -> (m,).

    p is not scaled up to the tokens kept, as in the paper.
    """
    mass, ids = renormalised(p).topk(min(top, p.shape[-1]), dim=-1)
    return -(mass * log_softmax(logits).gather(-1, ids)).sum(-1)


_BY_NAME: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": kl,
    "reverse_kl": reverse_kl,
    "js": jensen_shannon,
    "tv": total_variation,
    "l1": l1,
    "neg_log_overlap": neg_log_overlap,
    "lk_hybrid": lk_hybrid,
}

TERMS = frozenset({*_BY_NAME, "top_k", "ce", "smooth_l1", "expected_length"})
"""Every name that a mix of losses may use: those of :func:`distillation`, "ce"
(:func:`cross_entropy`), "smooth_l1" (:func:`feature_regression`) and "expected_length"
(``training.weighting.expected_length_slopes``).
"""


def distillation(name: str, logits: Tensor, p: Tensor, top: int | None) -> Tensor:
    """A loss between the two laws.

    Args:
        name: of ``TERMS``, but for the three that are no such loss.
        logits: (m, Vd) of the draft.
        p: (m, Vd) exact target law over the draft vocabulary.
        top: how many tokens "top_k" keeps; only that term needs it.

    Returns:
        (m,).
    """
    if name == "top_k":
        assert top is not None
        return top_k(logits, p, top)
    return _BY_NAME[name](logits, p)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log q(label): (m, Vd), (m,) draft ids -> (m,). For hard labels."""
    return F.nll_loss(log_softmax(logits), labels, reduction="none")


def feature_regression(rows: Tensor, hidden: Tensor) -> Tensor:
    """Smooth L1 between predicted and true features, averaged over D (EAGLE-1, arXiv:2401.15077):
    (m, D), (m, D) -> (m,).
    """
    dtype = wide_dtype(rows)
    return F.smooth_l1_loss(rows.to(dtype), hidden.to(dtype), reduction="none").mean(-1)


def acceptance_labels(logits: Tensor, p: Tensor, agree: Tensor, at: float) -> dict[str, Tensor]:
    """What a confidence output is trained on, by the rule that will verify the drafts.

    Args:
        logits: (m, Vd) of the draft.
        p: (m, Vd) exact target law at temperature ``at``, see :func:`target_law`.
        agree: (m,) bool, whether the draft's best token is the target's.
        at: temperature.

    Returns:
        (m,) each: "overlap", the chance that a draft sampled at that temperature is accepted;
        "draft_mass", that the draft's best token is, with the target sampled; "agreement", 1.0
        where the two best tokens are one.
    """
    wide = logits.to(wide_dtype(logits))
    best = logits.argmax(-1, keepdim=True)
    return {
        "overlap": overlap((wide / at).softmax(-1), p),
        "draft_mass": p.gather(-1, best).squeeze(-1),
        "agreement": agree.to(p.dtype),
    }


def confidence_bce(confidence_logits: Tensor, label: Tensor) -> Tensor:
    """Binary cross-entropy against a soft acceptance label in [0, 1]: (m,), (m,) -> (m,)."""
    logits = confidence_logits.to(wide_dtype(confidence_logits))
    return F.binary_cross_entropy_with_logits(
        logits, label.to(logits.dtype).clamp(0, 1), reduction="none"
    )


def head_weights(steps: int, decay: float) -> list[float]:
    """decay^i for i < steps, scaled to sum 1, so that the size of the loss does not depend on the
    unroll length.
    """
    raw = [decay**i for i in range(steps)]
    return [value / sum(raw) for value in raw]
