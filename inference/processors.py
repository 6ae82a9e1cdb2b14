"""Logits to scores along a text: what depends on the tokens so far, then the warpers.

The order is that of transformers' `generate`, whose own classes do the work where it has one, so
that scores equal its `output_scores`. A node of a tree is scored on its own path.

A processor of the user may keep state between calls, as incremental grammar matchers do: it then
counts on being called once per token of one text, in order, and that is how every rule calls it.
Any processor is taken to do so. One that several sequences are given is copied for each before the
first call (`inference.copies.apart`), and rules that ask about tokens that may never be emitted ask
copies (`inference.laws.LookAhead`). What cannot be copied is refused there.

Letters: V target vocabulary, T tokens of prompt and new text.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
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

from inference.copies import copied, name_of
from inference.sampling import (
    Processor,
    SamplingParams,
    law_of,
    lowest_argmax,
    sample,
    score_dtype,
    token_ids,
    warp,
)

TOP_DOWN = ("match", "coupled", "rejection")
"""Rules that ask for laws one token after the other, of emitted tokens only."""

_FOR_LOOK_AHEAD = (
    "rules 'block' and 'lossy_typical' ask a copy about tokens that may never be emitted; use "
    + ", ".join(map(repr, TOP_DOWN))
)

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
        self._own: list[Processor] = [*own]
        self._given = params.processors

    @property
    def may_keep_state(self) -> bool:
        """Whether the user gave processors; those that fields ask for are functions of the text."""
        return bool(self._given)

    def ahead(self) -> Sampler:
        """Another one that goes on from the state of this one and leaves it as it is.

        Raises:
            ValueError: a processor that cannot be copied.
        """
        other = copy.copy(self)
        other._given = copied(self._given, _FOR_LOOK_AHEAD)
        return other

    def processed(self, logits: Tensor, text: Sequence[int]) -> Tensor:
        """Logits after the processors, before the warpers.

        Args:
            logits: (V,) of the target, which are not changed.
            text: prompt, committed tokens, and those of the path.

        Returns:
            (V,) in float32, or in float64 if the logits are.
        """
        dtype = score_dtype(logits)
        processors = [*self._own, *self._given]
        if not processors:
            return logits.to(dtype)
        ids = torch.tensor(list(text), device=logits.device)[None]
        scores = logits.to(dtype, copy=True)[None]  # some processors write into what they are given
        for processor in processors:
            result = processor(ids, scores)
            if not isinstance(result, Tensor) or result.shape != scores.shape:
                raise ValueError(
                    f"processors: {name_of(processor)} must return scores of shape "
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

    def draw(self, scores: Tensor, position: int) -> int:
        """The token at an absolute position: `sample(law(scores), seed, position)`. A greedy one is
        found without its law, whose V numbers would take longer to write down than to look at.

        Args:
            scores: (V,) as `scores` gives them.
            position: of the token.
        """
        if self.params.temperature == 0.0:
            return int(lowest_argmax(scores))
        return sample(self.law(scores), self.params.seed, position)


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


def check_processors(samplings: Sequence[SamplingParams], rule: str, vocab_size: int) -> None:
    """Refuse what would not be lossless, before any token is produced.

    Args:
        samplings: one for each sequence.
        rule: of acceptance.
        vocab_size: V.

    Raises:
        ValueError: naming the field, the processor's class and the way out.
    """
    for params in samplings:
        for name, ids in token_ids(params).items():
            if wrong := [token for token in ids if token >= vocab_size]:
                raise ValueError(f"{name}: the target has {vocab_size} tokens, but not {wrong[0]}")
        _refuse(params)
        if rule not in TOP_DOWN:
            copied(params.processors, _FOR_LOOK_AHEAD)


def fresh(params: SamplingParams) -> SamplingParams:
    """The same with copies of the processors, so that a call does not use the given ones up.

    What cannot be copied is kept itself.
    """
    memo: dict[int, Any] = {}
    found: list[Processor] = []
    for processor in params.processors:
        try:
            found += copied([processor], "", memo)
        except ValueError:
            found.append(processor)
    return replace(params, processors=tuple(found))


def _refuse(params: SamplingParams) -> None:
    """Refuse processors that need more than one sequence, its text and its scores."""
    for processor in params.processors:
        for kind in type(processor).__mro__:
            if kind.__name__ in REFUSED:
                raise ValueError(
                    f"processors: {name_of(processor)} cannot be used: {REFUSED[kind.__name__]}"
                )
        try:
            inspect.signature(processor).bind(None, None)
        except TypeError as error:
            name = name_of(processor)
            raise ValueError(
                f"processors: {name} must be callable with (input_ids, scores): {error}"
            ) from error
