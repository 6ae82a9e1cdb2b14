"""Draft laws: how a drafter with logits proposes under each rule.

Legend: F nodes of one depth, Vd draft vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from inference.sampling import SamplingParams, gumbel_at, warp
from inference.tree import Proposal
from inference.verify import ALL_RULES

OUTSIDE = 5.0
"""Nats that a coupled draft loses where the warpers of its own law drop it. The target's warpers
may keep it, so it is not ruled out. On synthetic laws this costs nothing with wide nuclei and has
nearly all of what ruling out gains with narrow ones."""


def proposal_kind(rule: str, sampling: SamplingParams, draws: str = "all") -> Proposal:
    """How a drafter with logits proposes under ``rule``.

    Args:
        rule: of acceptance.
        sampling: of the sequence.
        draws: "all", "one" or "none", see `TreeOptions`.

    Raises:
        ValueError: unknown rule.
    """
    if rule not in ALL_RULES:
        raise ValueError(f"rule must be one of {', '.join(ALL_RULES)}; got {rule!r}")
    if rule == "coupled":
        return Proposal.COUPLED
    if rule in ("rejection", "block") and sampling.temperature > 0 and draws != "none":
        return Proposal.DENSE if draws == "all" else Proposal.MIXED
    return Proposal.ONE_HOT


def draft_law(sampling: SamplingParams, draft_temperature: float) -> SamplingParams:
    """The warpers of a draft law: the target's, at a temperature of its own.

    Args:
        sampling: of the sequence.
        draft_temperature: factor on its temperature.
    """
    temperature = sampling.temperature * draft_temperature
    return (
        sampling
        if temperature == sampling.temperature
        else replace(sampling, temperature=temperature)
    )


def node_scores(
    logits: Tensor,
    draft_vocab: Tensor | None,
    sampling: SamplingParams,
    kind: Proposal,
    position: int,
    sharpness: float,
) -> Tensor:
    """Log-score of every draft token as a child, for deterministic and coupled proposals.

    Args:
        logits: (F, Vd) of nodes at one depth.
        draft_vocab: (Vd,) absolute ids, or None for the whole vocabulary.
        sampling: its temperature scales the draft law, its warpers say what the target is likely to
            drop, its seed is that of the noise.
        kind: ONE_HOT scores by log q; COUPLED by how likely log q + noise is to be the target's
            argmax too.
        position: absolute position the children would take.
        sharpness: s of softmax((log q + g) / s); models the error of the head's log-ratios.

    Returns:
        (F, Vd) log-scores, at most 0.
    """
    scaled = logits.float() / (sampling.temperature or 1.0)
    log_q = scaled.log_softmax(-1)
    if kind is Proposal.COUPLED and sampling.temperature > 0:
        ids = (
            draft_vocab
            if draft_vocab is not None
            else torch.arange(logits.shape[-1], device=logits.device)
        )
        noise = gumbel_at(sampling.seed, position, ids)  # (Vd,), the target's own
        dropped = torch.isneginf(warp(logits, sampling))
        scores = log_q.double() + noise - OUTSIDE * dropped
        return (scores / sharpness).log_softmax(-1).float()
    return log_q
