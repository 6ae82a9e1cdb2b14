"""Logits to scores along a text: what depends on the tokens so far, then the warpers.

The order is that of transformers' `generate`, whose own classes do the work where it has one, so
that scores equal its `output_scores`. A node of a tree is scored on its own path.

A processor may keep state between calls, as incremental grammar matchers do: it then counts on
being called once per token, in order. The rules that walk from the root down (`TOP_DOWN`) call it
exactly as plain decoding would, so the output stays lossless; whatever looks ahead is refused.

Letters: V target vocabulary, T tokens of prompt and new text.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Collection, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import (
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from inference.sampling import Processor, SamplingParams, law_of, score_dtype, token_ids, warp

TOP_DOWN = ("match", "coupled", "rejection")
"""Rules that ask for laws one token after the other, of emitted tokens only."""

PROBE_TOKENS = 4
"""How far `is_stateful` walks."""

_OTHER_ROWS = "it needs the scores of a second, unconditional row beside each sequence"
_CHANNELS = "its rows are the audio channels of one sequence"

REFUSED = {
    "ClassifierFreeGuidanceLogitsProcessor": _OTHER_ROWS
    + "; UnbatchedClassifierFreeGuidanceLogitsProcessor does not",
    "DiaClassifierFreeGuidanceLogitsProcessor": _OTHER_ROWS,
    "DiaEOSChannelFilterLogitsProcessor": _CHANNELS,
    "DiaEOSDelayPatternLogitsProcessor": _CHANNELS,
    "HammingDiversityLogitsProcessor": "it needs the tokens of the other groups of a beam search",
    "WhisperNoSpeechDetection": "it runs Whisper on audio that only `generate` hands to it",
}
"""transformers' processors that cannot work on one sequence alone, and why."""


class OutputPenaltyLogitsProcessor(LogitsProcessor):
    """Presence and frequency penalties, over new tokens only, as OpenAI's API and vLLM have them.

    Args:
        presence: subtracted from the scores of tokens that the new text holds.
        frequency: the same, times how often.
        prompt_length: tokens that do not count.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, T) texts and (B, V) scores -> (B, V) scores."""
        new = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(
            1, new, torch.ones_like(new, dtype=scores.dtype)
        )
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Sampler:
    """What one sequence is sampled with, in one decoding call.

    Args:
        params: of the sequence. Without anything that looks at the text, a sampler costs no more
            than `probabilities`.
        prompt_length: tokens given.
        eos_token_ids: tokens that end the sequence.
        device: of the logits.

    Raises:
        ValueError: a processor that cannot work on one sequence, or fields that do not go together.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_length: int,
        eos_token_ids: Collection[int],
        device: torch.device | str,
    ) -> None:
        self.params = params
        _refuse(params)
        own = own_processors(params, prompt_length, eos_token_ids, device)
        for name in {type(processor) for processor in params.processors} & set(map(type, own)):
            raise ValueError(
                f"processors: {name.__name__} is also what a field of the sampling parameters asks "
                "for; give one of the two"
            )
        self._processors: list[Processor] = [*own, *params.processors]

    def processed(self, logits: Tensor, text: Sequence[int]) -> Tensor:
        """Logits after the processors, before the warpers.

        Args:
            logits: (V,) of the target, which are not changed.
            text: prompt, committed tokens, and those of the path.

        Returns:
            (V,) in float32, or in float64 if the logits are.
        """
        dtype = score_dtype(logits)
        if not self._processors:
            return logits.to(dtype)
        ids = torch.tensor(list(text), device=logits.device)[None]
        scores = logits.to(dtype, copy=True)[None]  # some processors write into what they are given
        for processor in self._processors:
            result = processor(ids, scores)
            if not isinstance(result, Tensor) or result.shape != scores.shape:
                raise ValueError(
                    f"processors: {_name(processor)} must return scores of shape "
                    f"{tuple(scores.shape)}, got {getattr(result, 'shape', type(result))}"
                )
            scores = result.to(dtype)
        return scores[0]

    def scores(self, logits: Tensor, text: Sequence[int]) -> Tensor:
        """What `generate(output_scores=True)` would give after `text`.

        Args:
            logits: (V,) of the target.
            text: prompt, committed tokens, and those of the path.

        Returns:
            (V,) in float32, or in float64 if the logits are; -inf where a token cannot come.
        """
        return warp(self.processed(logits, text), self.params)

    def law(self, scores: Tensor) -> Tensor:
        """(V,) `scores` -> (V,) probabilities: one-hot, the lowest index on ties, if greedy."""
        return law_of(scores, self.params)


def own_processors(
    params: SamplingParams,
    prompt_length: int,
    eos_token_ids: Collection[int],
    device: torch.device | str,
) -> list[LogitsProcessor]:
    """What the fields of `params` ask for, in the order of `generate`."""
    found: list[LogitsProcessor] = []
    ends, where = list(eos_token_ids), str(device)
    if params.logit_bias:
        bias: list[list[list[int] | float]]
        bias = [[[token], float(value)] for token, value in params.logit_bias]
        found.append(SequenceBiasLogitsProcessor(bias))
    if params.repetition_penalty is not None:
        found.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    presence, frequency = params.presence_penalty or 0.0, params.frequency_penalty or 0.0
    if presence or frequency:
        found.append(OutputPenaltyLogitsProcessor(presence, frequency, prompt_length))
    if params.no_repeat_ngram_size is not None:
        found.append(NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
    if params.bad_words_ids:
        words = [list(word) for word in params.bad_words_ids]
        if all(len(word) == 1 and word[0] in ends for word in words):
            raise ValueError(
                "bad_words_ids holds end-of-sequence tokens only, which it lets through: put them "
                "into suppress_tokens"
            )
        found.append(NoBadWordsLogitsProcessor(words, ends))
    if params.min_new_tokens is not None and ends:
        minimum = params.min_new_tokens
        found.append(MinNewTokensLengthLogitsProcessor(prompt_length, minimum, ends, where))
    for place, token in params.forced_tokens:  # forces at one length, whatever the token means
        found.append(ForcedEOSTokenLogitsProcessor(prompt_length + place + 1, token, where))
    if params.suppress_tokens:
        found.append(SuppressTokensLogitsProcessor(params.suppress_tokens, where))
    if params.begin_suppress_tokens:
        tokens = params.begin_suppress_tokens
        found.append(SuppressTokensAtBeginLogitsProcessor(tokens, prompt_length, where))
    return found


def check_processors(
    samplings: Sequence[SamplingParams],
    rule: str,
    prompts: Sequence[Sequence[int]],
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> None:
    """Refuse what would not be lossless, before any token is produced.

    Args:
        samplings: one for each sequence.
        rule: of acceptance.
        prompts: of the sequences.
        vocab_size: V.
        device: of the logits.

    Raises:
        ValueError: naming the field, the processor's class and the way out.
    """
    for params in samplings:
        for name, ids in token_ids(params).items():
            if wrong := [token for token in ids if token >= vocab_size]:
                raise ValueError(f"{name}: the target has {vocab_size} tokens, but not {wrong[0]}")
        _refuse(params)
    rows: dict[int, list[int]] = {}
    known = {id(one): one for params in samplings for one in params.processors}
    for row, params in enumerate(samplings):
        for processor in params.processors:
            rows.setdefault(id(processor), []).append(row)
    for key, processor in known.items():
        ahead, shared = rule not in TOP_DOWN, len(rows[key]) > 1
        if not (ahead or shared):
            continue
        if is_stateful(processor, prompts[rows[key][0]], vocab_size, device):
            raise ValueError(
                f"processors: {_name(processor)} keeps state between calls, or cannot be copied to "
                "find out. "
                + (
                    f"Rule {rule!r} asks it about tokens that may never be emitted; use "
                    f"{', '.join(map(repr, TOP_DOWN))}"
                    if ahead
                    else f"It cannot serve {len(rows[key])} sequences; give each its own "
                    "SamplingParams with an object of its own"
                )
            )


def is_stateful(
    processor: Processor, prompt: Sequence[int], vocab_size: int, device: torch.device | str = "cpu"
) -> bool:
    """Whether a processor is anything but a function of text and scores, as far as can be seen.

    One copy is called along a text, another on the same prefixes in the opposite order: they must
    agree, and calls after the first must leave no trace in the object. So a processor that merely
    remembers results counts as stateful, and so does one that cannot be copied.
    """
    first, second = _copy(processor), _copy(processor)
    if first is None or second is None:
        return True
    noise = torch.Generator().manual_seed(0)
    texts, scores = [list(prompt)], []
    try:
        for step in range(PROBE_TOKENS):
            logits = torch.randn(1, vocab_size, generator=noise).to(device)
            scores.append((logits, _call(first, texts[step], logits)))
            texts.append([*texts[step], int(scores[step][1].argmax())])
            if step == 0:
                before = _state(first)
        changed = _state(first) != before
        again = [
            _call(second, texts[step], scores[step][0]) for step in reversed(range(PROBE_TOKENS))
        ]
    except Exception:  # whatever a processor throws when it is called out of order
        return True
    agree = all(
        torch.equal(one, other) for (_, one), other in zip(scores, reversed(again), strict=True)
    )
    return changed or not agree


def fresh(params: SamplingParams) -> SamplingParams:
    """The same with copies of the processors, so that a call does not use the given ones up.

    What cannot be copied (see `is_stateful`) is kept itself.
    """
    if not params.processors:
        return params
    copies = [(one, _copy(one)) for one in params.processors]
    kept = tuple(one if copied is None else copied for one, copied in copies)
    return replace(params, processors=kept)


def _copy(processor: Processor) -> Processor | None:
    """A copy that shares no state; None where that cannot be had, or would copy a model."""

    def bound(item: Any) -> bool:
        return isinstance(item, nn.Module) or (
            isinstance(item, FunctionType) and item.__closure__ is not None
        )

    try:
        if bound(processor) or any(map(bound, vars(processor).values())):
            return None
        return copy.deepcopy(processor)
    except Exception:  # no __dict__, or not to be copied: every library has its own error
        return None


def _state(processor: Processor) -> bytes:
    return pickle.dumps(vars(processor))


def _call(processor: Processor, text: list[int], logits: Tensor) -> Tensor:
    return processor(torch.tensor([text], device=logits.device), logits.clone())


def _refuse(params: SamplingParams) -> None:
    """Refuse processors that need more than one sequence, its text and its scores."""
    for processor in params.processors:
        for kind in type(processor).__mro__:
            if kind.__name__ in REFUSED:
                raise ValueError(
                    f"processors: {_name(processor)} cannot be used: {REFUSED[kind.__name__]}"
                )
        try:
            inspect.signature(processor).bind(None, None)
        except TypeError as error:
            raise ValueError(
                f"processors: {_name(processor)} must be callable with (input_ids, scores): {error}"
            ) from error


def _name(processor: Processor) -> str:
    """Its class; for a function, its own name."""
    if isinstance(processor, FunctionType):
        return processor.__qualname__
    return type(processor).__name__
