"""Decoding without drafts, to compare with, and what explains a difference.

Where two texts differ, the target is run on what they have in common: if both tokens are the best
there within `NEAR_TIE`, the difference is rounding and is called a near tie; any other difference
is a failure. Rounding also decides whether a token at the edge of a truncation is kept
(`inference.measuring.doubt`).

Letters: V target vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import BaseStreamer, GenerationConfig, LogitsProcessorList

from drafters import TargetModel
from inference.engine import EagerEngine, Engine
from inference.generate import plain_generate
from inference.measuring.doubt import NEAR_TIE, gap_below_best
from inference.processors import Sampler, fresh, own_processors
from inference.sampling import Processor, SamplingParams

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
            plus noise otherwise, after all processors; the best is taken over the tokens that the
            warpers keep beyond doubt. None if a text has ended or a token is beyond doubt not kept.
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
    eos_token_ids: Collection[int] | None = None,
) -> Difference | None:
    """Where two continuations of a prompt first differ, and by how little the target preferred one.

    Args:
        target: run once, on the prompt and all that the two have in common.
        prompt: token ids.
        expected: new tokens of the reference.
        found: new tokens to judge.
        sampling: both were decoded with. Its own processors are copied where they can be; one that
            keeps state must be as it was before the texts.
        eos_token_ids: what ended the texts; None takes the target's.

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
    processed = _processed(
        target, [*prompt, *expected[:place]], len(prompt), sampling, eos_token_ids
    )
    pair = (expected[place], found[place])
    gap = gap_below_best(processed, pair, len(prompt) + place, sampling)
    return Difference(place, *pair, gap)


def _processed(
    target: TargetModel,
    text: list[int],
    prompt_length: int,
    sampling: SamplingParams,
    eos_token_ids: Collection[int] | None,
) -> Tensor:
    """(V,) float64 logits after `text` and the processors, which see every prefix in order."""
    ends = target.eos_token_ids if eos_token_ids is None else eos_token_ids
    sampler = Sampler(fresh(sampling), prompt_length, ends, target.device)
    steps = len(text) - prompt_length + 1 if sampling.processors else 1
    ids = torch.tensor([text], device=target.device)
    logits = target.forward(ids, logits_to_keep=steps).logits[0]
    for left, row in zip(reversed(range(steps)), logits, strict=True):
        processed = sampler.processed(row.double(), text[: len(text) - left])
    return processed


def reference_text(
    target: TargetModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: SamplingParams,
    kind: str = "plain",
    engine: Engine | None = None,
) -> Reference:
    """Decode without drafts.

    Args:
        target: the model.
        prompt: token ids.
        max_new_tokens: the most to decode.
        sampling: its processors are copied where they can be, so that none is used up.
        kind: one of `REFERENCES`; "generate" is transformers' own, greedy only, which is handed
            everything else that `sampling` asks for.
        engine: decodes for "plain"; None is transformers' own cache.

    Raises:
        ValueError: unknown kind, or one that cannot sample as asked.
    """
    check_reference(kind, sampling)
    sampling = fresh(sampling)
    if kind == "generate":
        return _transformers_generate(target, list(prompt), max_new_tokens, sampling)
    result = plain_generate(
        target, [prompt], max_new_tokens=max_new_tokens, sampling=sampling, engine=engine
    )
    return Reference(result.sequences[0], result.seconds["prefill"], result.seconds["total"])


def reference_texts(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    samplings: Sequence[SamplingParams],
    kind: str = "plain",
    engine: Engine | None = None,
) -> list[Reference]:
    """Decode several prompts without drafts: "plain" together, each with an equal share of the
    time; "generate" one after the other.

    Args:
        target: the model.
        prompts: B lists of token ids.
        max_new_tokens: the most to decode, per prompt.
        samplings: B; see `reference_text`.
        kind: one of `REFERENCES`.
        engine: decodes for "plain"; None is transformers' own cache for one prompt, and the eager
            engine for several.

    Raises:
        ValueError: see `reference_text`.
    """
    if kind == "generate" or len(prompts) == 1:
        return [
            reference_text(target, prompt, max_new_tokens, sampling, kind, engine)
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
    result = plain_generate(
        target,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=[fresh(sampling) for sampling in samplings],
        engine=engine or EagerEngine(target),
    )
    prefill, total = (result.seconds[name] / len(prompts) for name in ("prefill", "total"))
    return [Reference(tokens, prefill, total) for tokens in result.sequences]


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


def generation_options(
    params: SamplingParams, prompt_length: int
) -> tuple[dict[str, Any], list[Processor]]:
    """What makes greedy `generate` do as `params` ask.

    Args:
        params: warpers and seed are left out.
        prompt_length: tokens given.

    Returns:
        Fields of a `GenerationConfig`, and processors for what it has no field for.
    """
    bias = [[[token], float(value)] for token, value in params.logit_bias]
    fields = {
        "repetition_penalty": params.repetition_penalty,
        "no_repeat_ngram_size": params.no_repeat_ngram_size,
        "bad_words_ids": [list(word) for word in params.bad_words_ids] or None,
        "sequence_bias": bias or None,
        "suppress_tokens": list(params.suppress_tokens) or None,
        "begin_suppress_tokens": list(params.begin_suppress_tokens) or None,
        "min_new_tokens": params.min_new_tokens,
    }
    missing = SamplingParams(
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        forced_tokens=params.forced_tokens,
    )
    own = own_processors(missing, prompt_length, (), "cpu")
    return fields, [*own, *params.processors]


def _transformers_generate(
    target: TargetModel, ids: list[int], max_new_tokens: int, sampling: SamplingParams
) -> Reference:
    """Greedy `generate`, whatever else the model's generation config asks for."""
    clock = _Clock()
    prompt = torch.tensor([ids], device=target.device)
    model, own = target.model, target.model.generation_config
    fields, processors = generation_options(sampling, len(ids))
    model.generation_config = clean_generation_config(target, max_new_tokens, **fields)
    try:
        start = time.perf_counter()
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            streamer=clock,
            logits_processor=LogitsProcessorList(processors),
        )
    finally:
        model.generation_config = own
    _, first, *_ = clock.times
    return Reference(out[0, len(ids) :].tolist(), first - start, clock.times[-1] - first)
