"""Losses between a draft law q and a target law p: pure functions, one value per position.

The caller masks, weighs and sums. Teacher probabilities are p over the draft vocabulary; softmax
and logarithms are in float32 or better.

Legend: n positions, Vd draft vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

_TINY = 1e-30


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _log_softmax(logits: Tensor) -> Tensor:
    return F.log_softmax(_wide(logits), dim=-1)


def soft_cross_entropy(logits: Tensor, p: Tensor) -> Tensor:
    """-Σ p log q: (n, Vd), (n, Vd) -> (n,). EAGLE-3's loss; same gradient as :func:`kl`."""
    return -(p * _log_softmax(logits)).sum(-1)


def kl(logits: Tensor, p: Tensor) -> Tensor:
    """KL(p‖q) = Σ p (log p - log q): (n, Vd), (n, Vd) -> (n,). Zero exactly at q = p."""
    return (torch.xlogy(p, p) - p * _log_softmax(logits)).sum(-1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log q(label): (n, Vd), (n,) draft ids -> (n,). For hard labels."""
    return F.nll_loss(_log_softmax(logits), labels, reduction="none")


def overlap(q: Tensor, p: Tensor) -> Tensor:
    """Σ min(p, q) = 1 - ½‖p-q‖₁: (n, Vd), (n, Vd) -> (n,), the chance that a sampled draft is
    accepted.

    With a reduced draft vocabulary pass p as it is, *not* renormalised: q is zero elsewhere, so the
    mass of p outside adds nothing to the sum and counts as missed (arXiv:2211.17192, Cor. 3.6).
    """
    return torch.minimum(p, q).sum(-1)


def total_variation(logits: Tensor, p: Tensor) -> Tensor:
    """1 - Σ min(p, q): (n, Vd), (n, Vd) -> (n,)."""
    return 1 - overlap(_log_softmax(logits).exp(), p)


def lk_hybrid(logits: Tensor, p: Tensor, eta: float = 3.0) -> Tensor:
    """λ KL + (1-λ) TV with λ = exp(-η·overlap), the overlap held constant (arXiv:2602.23881): ->
    (n,).

    KL leads while the draft is poor, total variation (the acceptance rate itself) once it is good.
    """
    variation = total_variation(logits, p)
    weight = torch.exp(-eta * (1 - variation.detach()))
    return weight * kl(logits, p) + (1 - weight) * variation


def confidence_bce(confidence_logits: Tensor, label: Tensor) -> Tensor:
    """Binary cross-entropy against a soft acceptance label in [0, 1]: (n,), (n,) -> (n,)."""
    logits = _wide(confidence_logits)
    return F.binary_cross_entropy_with_logits(
        logits, label.to(logits.dtype).clamp(0, 1), reduction="none"
    )


def head_weights(steps: int, decay: float) -> list[float]:
    """decay^i for i < steps, scaled to sum 1, so that the size of the loss does not depend on the
    unroll length.
    """
    raw = [decay**i for i in range(steps)]
    return [value / sum(raw) for value in raw]


DISTILLATION = {
    "kl": kl,
    "soft_cross_entropy": soft_cross_entropy,
    "tv": total_variation,
    "lk_hybrid": lk_hybrid,
}


def renormalised(p: Tensor) -> Tensor:
    """p restricted to the draft vocabulary, scaled to sum 1: (n, Vd) -> (n, Vd)."""
    return p / p.sum(-1, keepdim=True).clamp_min(_TINY)
