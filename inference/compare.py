"""Decoding without drafts, to compare with, and what explains a difference.

Where two texts differ, the target is run on what they have in common: if both tokens are the best
there within `NEAR_TIE`, the difference is rounding and is called a near tie; any other difference
is a failure. Rounding also decides whether a token at the edge of top-k or top-p is kept.

Letters: V target vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import BaseStreamer, GenerationConfig

from drafters import TargetModel
from inference.generate import plain_generate
from inference.sampling import SamplingParams, gumbel

NEAR_TIE = 1e-4
"""Gaps of scores below this are put down to rounding."""

EDGE = NEAR_TIE / 4
"""The same for masses: log-probabilities wrong by NEAR_TIE / 2 move a mass m by at most
m (1 - m) NEAR_TIE."""

REFERENCES = ("plain", "generate")


@dataclass(frozen=True)
class Difference:
    """The first place where two texts differ.

    Attributes:
        position: index among the new tokens.
        expected: the reference's token; None where its text has ended.
        found: the other's; None where its text has ended.
        gap: how far the worse of the two tokens is below the target's best score, which for the two
            leading tokens is the gap between them. Scores are logits at temperature 0, and log p
            plus noise otherwise; the best is taken over the tokens that top-k and top-p keep beyond
            doubt. None if a text has ended or a token is beyond doubt not kept.
    """

    position: int
    expected: int | None
    found: int | None
    gap: float | None

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap is not None and self.gap < NEAR_TIE


@dataclass(frozen=True)
class Reference:
    """A text decoded without drafts.

    Attributes:
        tokens: new tokens.
        prefill: seconds until the first of them.
        decoding: seconds for the others.
    """

    tokens: list[int]
    prefill: float
    decoding: float


def explain_difference(
    target: TargetModel,
    prompt: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    sampling: SamplingParams,
) -> Difference | None:
    """Where two continuations of a prompt first differ, and by how little the target preferred one.

    Args:
        target: run once, on the prompt and all that the two have in common.
        prompt: token ids.
        expected: new tokens of the reference.
        found: new tokens to judge.
        sampling: both were decoded with.

    Returns:
        None if they are equal.
    """
    if list(expected) == list(found):
        return None
    pairs = zip(expected, found, strict=False)
    shorter = min(len(expected), len(found))
    place = next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)
    if place == shorter:
        ends = [text[place] if place < len(text) else None for text in (expected, found)]
        return Difference(place, ends[0], ends[1], None)
    ids = torch.tensor([[*prompt, *expected[:place]]], device=target.device)
    logits = target.forward(ids, logits_to_keep=1).logits[0, -1].double()
    pair = (expected[place], found[place])
    return Difference(place, *pair, _gap(logits, pair, ids.shape[1], sampling))


def _gap(
    logits: Tensor, pair: tuple[int, int], position: int, sampling: SamplingParams
) -> float | None:
    """See `Difference.gap`.

    Args:
        logits: (V,) float64.
        pair: the two tokens.
        position: absolute position that they compete for.
        sampling: of both texts.
    """
    scores, kept = logits, torch.ones_like(logits, dtype=torch.bool)
    if sampling.temperature > 0:
        log_probs = (logits / sampling.temperature).log_softmax(-1)
        if not bool(_kept(log_probs, sampling, doubtful=True)[list(pair)].all()):
            return None
        kept = _kept(log_probs, sampling, doubtful=False)
        scores = log_probs + gumbel(sampling.seed, position, len(logits), logits.device)
    best = float(scores.masked_fill(~kept, -torch.inf).max())
    gap = best - min(float(scores[token]) for token in pair)
    return max(gap, 0.0) if gap < math.inf else None  # None for NaN, too


def _kept(log_probs: Tensor, sampling: SamplingParams, doubtful: bool) -> Tensor:
    """(V,) the tokens that top-k and top-p keep, with or without those at an edge.

    Args:
        log_probs: (V,) after the temperature.
        sampling: top-k and top-p.
        doubtful: keep a token if rounding could have kept it, rather than unless it could have
            dropped it.
    """
    sign = 1.0 if doubtful else -1.0
    kept = torch.ones_like(log_probs, dtype=torch.bool)
    if sampling.top_k is not None:
        above = _weight_above(log_probs, torch.ones_like(log_probs), sign * NEAR_TIE)
        kept = above < sampling.top_k
    if sampling.top_p is not None and sampling.top_p < 1.0:
        log_probs = log_probs.masked_fill(~kept, -torch.inf)
        above = _weight_above(log_probs, log_probs.softmax(-1), sign * NEAR_TIE)
        kept &= above < sampling.top_p + sign * EDGE
    return kept


def _weight_above(values: Tensor, weights: Tensor, slack: float) -> Tensor:
    """(V,) for each token the summed weight of the others whose value is larger by over `slack`."""
    order = values.argsort(descending=True)
    summed = torch.cat([weights.new_zeros(1), weights[order].cumsum(0)])
    above = summed[torch.searchsorted(-values[order], -(values + slack))]
    return above - weights if slack < 0 else above  # a negative slack counts the token itself


def reference_text(
    target: TargetModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: SamplingParams,
    kind: str = "plain",
) -> Reference:
    """Decode without drafts.

    Args:
        target: the model.
        prompt: token ids.
        max_new_tokens: the most to decode.
        sampling: temperature, top-k, top-p, seed.
        kind: one of `REFERENCES`; "generate" is transformers' own, greedy only.

    Raises:
        ValueError: unknown kind, or one that cannot sample as asked.
    """
    check_reference(kind, sampling)
    if kind == "generate":
        return _transformers_generate(target, list(prompt), max_new_tokens)
    result = plain_generate(target, [prompt], max_new_tokens=max_new_tokens, sampling=sampling)
    return Reference(result.sequences[0], result.seconds["prefill"], result.seconds["total"])


def check_reference(kind: str, sampling: SamplingParams) -> None:
    """Refuse a reference that is unknown, or that other random numbers would make different."""
    if kind not in REFERENCES:
        raise ValueError(f"compare must be one of {', '.join(REFERENCES)}, or None; got {kind!r}")
    if kind == "generate" and sampling.temperature > 0:
        raise ValueError(
            "compare='generate' needs temperature 0, for transformers draws with other random "
            "numbers; use compare='plain'"
        )


class _Clock(BaseStreamer):
    """Notes when `generate` hands out tokens: the prompt first, then each as it is chosen."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def clean_generation_config(
    target: TargetModel, max_new_tokens: int, **sampling: Any
) -> GenerationConfig:
    """Plain decoding up to a length or an end of text: no penalties, nothing suppressed or forced.

    Put it in the place of the model's own: `generate` fills what is None in a config that it is
    given from the model's, so that penalties would come back.

    Args:
        target: whose end-of-sequence tokens hold.
        max_new_tokens: the most to decode.
        **sampling: other fields; greedy without any.
    """
    ends = list(target.eos_token_ids)
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        **{"do_sample": False, **sampling},
    )


def _transformers_generate(target: TargetModel, ids: list[int], max_new_tokens: int) -> Reference:
    """Greedy `generate`, whatever else the model's generation config asks for."""
    clock = _Clock()
    prompt = torch.tensor([ids], device=target.device)
    model, own = target.model, target.model.generation_config
    model.generation_config = clean_generation_config(target, max_new_tokens)
    try:
        start = time.perf_counter()
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=clock)
    finally:
        model.generation_config = own
    _, first, *_ = clock.times
    return Reference(out[0, len(ids) :].tolist(), first - start, clock.times[-1] - first)
