"""How far rounding can reach: by how little a token lost, and which tokens a truncation may keep.

Two runs of the same model differ by rounding. A token that lost by less than their difference may
have won in the other run; and top-k, top-p, min-p or typical-p, which cut at an edge, may have kept
there what they dropped here.

Letters: V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from inference.sampling import SamplingParams, gumbel

NEAR_TIE = 1e-4
"""Gaps of scores below this are put down to rounding."""


def gap_below_best(
    processed: Tensor,
    tokens: Sequence[int],
    position: int,
    sampling: SamplingParams,
    tolerance: float = NEAR_TIE,
) -> float | None:
    """How far the worst of some tokens is below the best score.

    Args:
        processed: (V,) float64 logits after the processors, before the warpers.
        tokens: to judge.
        position: absolute position that they compete for.
        sampling: warpers and seed.
        tolerance: what two runs may differ by, in scores.

    Returns:
        At temperature 0 in logits; otherwise in log p plus noise, and the best is taken over the
        tokens that the warpers keep beyond doubt. None if a token is beyond doubt not kept, or the
        logits are NaN.
    """
    scores, sure = processed, torch.ones_like(processed, dtype=torch.bool)
    if sampling.temperature > 0:
        log_probs = (processed / sampling.temperature).log_softmax(-1)
        if not bool(
            tokens_kept(log_probs, sampling, doubtful=True, tolerance=tolerance)[list(tokens)].all()
        ):
            return None
        sure = tokens_kept(log_probs, sampling, doubtful=False, tolerance=tolerance)
        scores = log_probs + gumbel(sampling.seed, position, len(processed), processed.device)
    if bool(scores.isnan().any()):
        return None
    best = float(scores.masked_fill(~sure, -torch.inf).max())
    gap = best - min(float(scores[token]) for token in tokens)
    return max(gap, 0.0) if gap < math.inf else None


def tokens_kept(
    log_probs: Tensor, sampling: SamplingParams, doubtful: bool, tolerance: float = NEAR_TIE
) -> Tensor:
    """(V,) the tokens that the warpers keep, with or without those at an edge.

    Args:
        log_probs: (V,) after the temperature, normalised.
        sampling: top-k, top-p, min-p, typical-p.
        doubtful: keep a token if rounding could have kept it, rather than unless it could have
            dropped it.
        tolerance: what two runs may differ by: each is wrong by up to half of it.
    """
    slack, edge = (tolerance, tolerance / 4) if doubtful else (-tolerance, -tolerance / 4)
    found = torch.ones_like(log_probs, dtype=torch.bool)
    if sampling.top_k is not None:
        found = _weight_above(log_probs, torch.ones_like(log_probs), slack) < sampling.top_k
    if sampling.top_p is not None and sampling.top_p < 1.0:
        left = log_probs.masked_fill(~found, -torch.inf)
        found &= _weight_above(left, left.softmax(-1), slack) < sampling.top_p + edge
    if sampling.min_p:  # no other token may be better by more than this
        reach = slack - math.log(sampling.min_p)
        found &= _weight_above(log_probs, torch.ones_like(log_probs), reach) < 1
    if sampling.typical_p is not None and sampling.typical_p < 1.0:
        found &= _typical(log_probs, sampling, doubtful, tolerance)
    return found


def _typical(
    log_probs: Tensor, sampling: SamplingParams, doubtful: bool, tolerance: float
) -> Tensor:
    """(V,) what typical-p keeps of what the other warpers keep.

    Tokens are ranked by the distance of their surprise from the entropy, the centre, of what the
    others keep. Where that set is in doubt, its undecided tokens move the centre, and masses.
    """
    assert sampling.typical_p is not None
    others = SamplingParams(1.0, sampling.top_k, sampling.top_p, min_p=sampling.min_p)
    possible = tokens_kept(log_probs, others, True, tolerance)
    certain = tokens_kept(log_probs, others, False, tolerance)
    left = log_probs.masked_fill(~possible, -torch.inf).log_softmax(-1)
    probs = left.exp()
    sure = float(probs[certain].sum())
    if sure == 0.0:
        return possible if doubtful else certain
    distance = (left + (-left * probs).nansum()).abs()
    undecided = possible & ~certain
    open_mass = float(probs[undecided].sum())
    moved = float((distance * probs)[undecided].nansum()) / sure
    spread = float((distance * probs).nansum()) / sure + moved
    # Rounding moves a surprise by half a tolerance, the centre by up to (1 + spread) times that.
    moved = (moved + open_mass * tolerance * (2 + spread)) * math.exp(2 * tolerance)
    slack = tolerance * (2 + spread) + 2 * moved
    if doubtful:
        nearer = _weight_above(-distance, probs, slack) - open_mass
        return nearer < sampling.typical_p + tolerance / 2
    nearer = _weight_above(-distance, probs, -slack) / sure
    return nearer < sampling.typical_p - tolerance / 2


def _weight_above(values: Tensor, weights: Tensor, slack: float) -> Tensor:
    """(V,) for each token the summed weight of the others whose value is larger by over `slack`."""
    order = values.argsort(descending=True)
    summed = torch.cat([weights.new_zeros(1), weights[order].cumsum(0)])
    above = summed[torch.searchsorted(-values[order], -(values + slack))]
    return above - weights if slack < 0 else above  # a negative slack counts the token itself
