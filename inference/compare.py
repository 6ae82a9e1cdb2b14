"""Decoding without drafts, to compare with, and what explains a difference.

Where two texts differ, the target is run on what they have in common: if both tokens are the best
there within `NEAR_TIE`, the difference is rounding and is called a near tie; any other difference
is a failure.

Letters: V target vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.generation import BaseStreamer

from drafters import TargetModel
from inference.generate import plain_generate
from inference.sampling import SamplingParams, gumbel, probabilities

NEAR_TIE = 1e-4
"""Gaps of scores below this are put down to rounding."""

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
            plus noise otherwise. None if a text has ended or a token has probability 0.
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
    scores = _scores(target, [*prompt, *expected[:place]], sampling)
    worse = min(float(scores[expected[place]]), float(scores[found[place]]))
    gap = float(scores.max()) - worse
    return Difference(place, expected[place], found[place], gap if math.isfinite(gap) else None)


def _scores(target: TargetModel, ids: list[int], sampling: SamplingParams) -> Tensor:
    """(V,) what the token after `ids` is the argmax of."""
    logits = target.forward(torch.tensor([ids], device=target.device), logits_to_keep=1).logits[
        0, -1
    ]
    if sampling.temperature == 0:
        return logits.double()
    noise = gumbel(sampling.seed, len(ids), len(logits), logits.device)
    return probabilities(logits, sampling).double().log() + noise


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


def _transformers_generate(target: TargetModel, ids: list[int], max_new_tokens: int) -> Reference:
    """Greedy `generate`, without the penalties that a generation config may ask for."""
    clock = _Clock()
    prompt = torch.tensor([ids], device=target.device)
    start = time.perf_counter()
    out = target.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        repetition_penalty=1.0,
        pad_token_id=target.eos_token_ids[0] if target.eos_token_ids else 0,
        streamer=clock,
    )
    _, first, *_ = clock.times
    return Reference(out[0, len(ids) :].tolist(), first - start, clock.times[-1] - first)
