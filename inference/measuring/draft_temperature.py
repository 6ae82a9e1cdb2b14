"""A temperature of its own for a draft law, fitted to the target (arXiv:2211.17192's overlap).

A drafter that is too sure of itself, or not sure enough, loses drafts under `rejection` and `block`
although it ranks tokens well. Scaling its logits cannot make the output wrong: a draft law is
verified whatever it is. The factor that maximises the mean overlap of the two laws is found on
held-out positions, once per head and sampling setting.

Letters: M positions, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inference.sampling import SamplingParams, probabilities

LOWEST, HIGHEST = 1 / 8, 8.0
"""Factors searched."""
GRID_POINTS = 49
"""Of the coarse search, evenly in log factor; truncating warpers make several maxima possible."""
TOLERANCE = 1e-4
"""Of the fine search, in log factor."""
ENTRIES_AT_ONCE = 1 << 24
"""Probabilities held at a time."""


@dataclass(frozen=True)
class DraftTemperatureFit:
    """Outcome of `fit_draft_temperature`.

    Attributes:
        factor: the draft law's temperature over the target's.
        overlap_before: mean sum_x min(p(x), q(x)) at factor 1; the rate at which one draft is
            accepted.
        overlap_after: the same at `factor`; never less.
    """

    factor: float
    overlap_before: float
    overlap_after: float


def fit_draft_temperature(
    target_probs: Tensor,
    draft_logits: Tensor,
    draft_vocab: Tensor | None,
    sampling: SamplingParams,
) -> DraftTemperatureFit:
    """Find the draft temperature with which the most single drafts are accepted.

    Args:
        target_probs: (M, V) the target's laws after warpers, as `probabilities(logits, sampling)`
            gives them.
        draft_logits: (M, Vd) of the drafter at the same positions.
        draft_vocab: (Vd,) absolute ids of its columns, or None if Vd = V.
        sampling: the target's; the draft law has the same warpers.

    Raises:
        ValueError: temperature 0, or shapes that do not fit.
    """
    _check(target_probs, draft_logits, draft_vocab, sampling)
    if draft_vocab is not None:
        target_probs = target_probs[:, draft_vocab.to(target_probs.device)]
    seen: dict[float, float] = {}  # log factor -> overlap

    def overlap(log_factor: float) -> float:
        if log_factor not in seen:
            temperature = sampling.temperature * math.exp(log_factor)
            law = replace(sampling, temperature=temperature)
            seen[log_factor] = mean_overlap(target_probs, draft_logits, law)
        return seen[log_factor]

    low, high = math.log(LOWEST), math.log(HIGHEST)
    step = (high - low) / (GRID_POINTS - 1)
    best = max((low + step * place for place in range(GRID_POINTS)), key=overlap)
    _golden_section(overlap, max(low, best - step), min(high, best + step))
    before = overlap(0.0)
    best = max(seen, key=lambda log_factor: (seen[log_factor], -abs(log_factor)))
    return DraftTemperatureFit(math.exp(best), before, seen[best])


def mean_overlap(target_probs: Tensor, draft_logits: Tensor, law: SamplingParams) -> float:
    """Mean over rows of sum_x min(p(x), q(x)), a number in [0, 1].

    Args:
        target_probs: (M, Vd) target laws at the draft's columns.
        draft_logits: (M, Vd).
        law: temperature and warpers of q.
    """
    rows = max(1, ENTRIES_AT_ONCE // draft_logits.shape[1])
    total = 0.0
    for p, logits in zip(target_probs.split(rows), draft_logits.split(rows), strict=True):
        q = probabilities(logits, law)
        total += float(torch.minimum(p.to(q), q).sum(dtype=torch.float64))
    return total / len(draft_logits)


def _golden_section(function: Callable[[float], float], low: float, high: float) -> None:
    """Evaluate `function` ever closer to a maximum between two points."""
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    while high - low > TOLERANCE:
        if function(left) >= function(right):
            high, right = right, left
            left = high - ratio * (high - low)
        else:
            low, left = left, right
            right = low + ratio * (high - low)


def _check(
    target_probs: Tensor,
    draft_logits: Tensor,
    draft_vocab: Tensor | None,
    sampling: SamplingParams,
) -> None:
    if sampling.temperature == 0.0:
        raise ValueError(
            "sampling.temperature is 0: drafts are not drawn then, and their temperature does not "
            "matter; fit at the temperature you decode with"
        )
    if target_probs.ndim != 2 or draft_logits.ndim != 2 or not len(target_probs):
        raise ValueError(
            "target_probs (M, V) and draft_logits (M, Vd) must be 2-D with at least one row; got "
            f"{tuple(target_probs.shape)} and {tuple(draft_logits.shape)}"
        )
    if len(target_probs) != len(draft_logits):
        raise ValueError(
            f"draft_logits has {len(draft_logits)} rows but target_probs has {len(target_probs)}: "
            "give both at the same positions"
        )
    columns = target_probs.shape[1] if draft_vocab is None else len(draft_vocab)
    if draft_logits.shape[1] != columns:
        raise ValueError(
            f"draft_logits has {draft_logits.shape[1]} columns but {columns} tokens are drafted: "
            "give draft_vocab, the absolute id of each column"
        )
