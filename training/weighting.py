"""Weights of drafts that depend on how well the head drafts now: pure functions.

A draft counts in decoding only if every shallower draft of its round was accepted. What that makes
each one worth is a product along the round, whose drafts lie in different columns at different
depths, so values move to a grid of rounds and back.

Legend: K depths, m draft columns, R rounds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Survey:
    """How good every draft is now; constants, without a graph.

    Attributes:
        overlap: (K, m) chance that a sampled draft is accepted.
        own: (K, m) draft probability of the token the target emitted.
        hit: (K, m) bool, whether that token is among the head's best ``on_policy`` many.
        anchor: (K, m) int64 number of each draft's round, at most one draft per round and depth;
            arbitrary where not valid.
        valid: (K, m) bool, whether there is such a draft.
    """

    overlap: Tensor
    own: Tensor
    hit: Tensor
    anchor: Tensor
    valid: Tensor


def reached(survey: Survey) -> Tensor:
    """Which drafts decoding would have come to: (K, m), 1.0 where every shallower draft of the
    round is a hit, else 0.0.

    A missing shallower draft is no hit. One is missing where its token is not supervised, that is,
    not the target's own: decoding starts no round before such a token and never passes over one.
    """
    hits = _to_rounds(survey, survey.hit.to(survey.overlap.dtype))
    return _to_drafts(survey, _before(hits))


def survival_weights(survey: Survey, alpha: float = 0.5) -> Tensor:
    """D-PACE (arXiv:2605.18810): w_k = Σ_{j≥k} P_j, with P the running product of the smoothed
    draft probabilities s_k = (1-α) own_k + α, scaled to a mean of 1 over the round's drafts.

    So the size of the loss depends neither on K nor on the head's quality. Missing drafts are left
    out: they are no factor of P and no term of w. The paper uses these weights in place of a decay.

    Returns:
        (K, m), 0 where there is no draft.
    """
    present = _to_rounds(survey, torch.ones_like(survey.own))
    smoothed = _to_rounds(survey, (1 - alpha) * survey.own + alpha)
    survival = torch.where(present > 0, smoothed, 1.0).cumprod(0) * present
    weights = survival.flip(0).cumsum(0).flip(0) * present
    total = weights.sum(0).clamp_min(torch.finfo(weights.dtype).tiny)
    return _to_drafts(survey, weights * present.sum(0) / total)


def expected_length_slopes(survey: Survey) -> tuple[Tensor, Tensor]:
    """The end-to-end loss of a round, 1 - E/K with E = Σ_j Π_{i≤j} a_i its expected accepted
    length, as slopes with respect to each overlap a_i.

    Held constant, the slopes give Σ slope·a the very gradient of the losses' sum, and that sum can
    be taken a few rows at a time. A round ends before its first missing depth.

    Returns:
        ``(slopes, lengths)``: (K, m) ∂loss/∂a_i, none above 0, and (R,) E of each round that has a
        draft at depth 0.
    """
    depths = len(survey.overlap)
    begun = _to_rounds(survey, survey.valid)[0]
    chances = _to_rounds(survey, survey.overlap)  # 0 where a draft is missing, which ends the round
    tails = torch.ones_like(chances)  # d(lengths from depth i on)/d a_i
    for depth in range(depths - 2, -1, -1):
        tails[depth] = 1 + chances[depth + 1] * tails[depth + 1]
    slopes = -_before(chances) * tails / depths
    return _to_drafts(survey, slopes), chances.cumprod(0).sum(0)[begun]


def _before(grid: Tensor) -> Tensor:
    """Product over the shallower depths: (K, R) -> (K, R), 1 at depth 0."""
    return torch.cat((torch.ones_like(grid[:1]), grid[:-1])).cumprod(0)


def _to_rounds(survey: Survey, values: Tensor) -> Tensor:
    """(K, m) values of drafts -> (K, R) by round, 0 where there is no draft."""
    grid = values.new_zeros(len(values), int(survey.anchor.max()) + 1)
    depth = torch.arange(len(values), device=values.device)[:, None].expand_as(survey.anchor)
    valid = survey.valid
    grid[depth[valid], survey.anchor[valid]] = values[valid]
    return grid


def _to_drafts(survey: Survey, grid: Tensor) -> Tensor:
    """(K, R) values by round -> (K, m), 0 where there is no draft."""
    return torch.where(survey.valid, grid.gather(1, survey.anchor.clamp_min(0)), 0.0)
