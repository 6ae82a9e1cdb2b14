"""The rows of a batch as `generate` prepared them, each as a sequence of its own.

Logits processors and stopping criteria are made for whole batches with their padding: they count
positions from the padded beginning, and some hold something for each row. So they are shown the
padding again, those of transformers are cut to their row, and where there are several rows each has
copies of its own.

Letters: B rows, T tokens with padding, P tokens of padding, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from inference.copies import copied
from inference.processors import check_processors
from inference.sampling import Processor, SamplingParams

_WARPERS = (
    (TemperatureLogitsWarper, "temperature", "temperature"),
    (TopKLogitsWarper, "top_k", "top_k"),
    (TopPLogitsWarper, "top_p", "top_p"),
    (MinPLogitsWarper, "min_p", "min_p"),
    (TypicalLogitsWarper, "mass", "typical_p"),
)
"""Warpers in the order of `generate`: class, its attribute, our field."""

_FOR_ROWS = (
    "`generate` gives what logits_processor= holds to all {} rows; call it once for each row, with "
    "an object of its own"
)


@dataclass(frozen=True)
class Row:
    """One sequence of the batch.

    Attributes:
        index: b.
        prompt_index: of the prompt it answers; several rows may answer one.
        prompt: its tokens.
        padding: (1, P), on the device of `generate`'s inputs.
    """

    index: int
    prompt_index: int
    prompt: list[int]
    padding: Tensor

    def text(self, ids: Tensor) -> Tensor:
        """(1, T - P) tokens -> (1, T), as `generate` holds them."""
        return torch.cat((self.padding, ids.to(self.padding.device)), dim=1)


def split_rows(
    input_ids: Tensor, mask: Tensor | None, positions: Tensor | None, copies: int
) -> list[Row]:
    """Take the padding off.

    Args:
        input_ids: (B, T).
        mask: (B, T), zeros for padding; None for no padding.
        positions: (B, T) position ids, None for the usual ones.
        copies: rows for each prompt.

    Raises:
        ValueError: padding that is not on the left, or positions that do not count tokens.
    """
    real = torch.ones_like(input_ids) if mask is None else mask
    if real.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask= has the shape {tuple(real.shape)}, input_ids {tuple(input_ids.shape)}"
        )
    real = real.to(input_ids.device) != 0
    pads = (~real).sum(dim=1, keepdim=True)
    place = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    if not torch.equal(real, place >= pads):
        raise ValueError(
            "attention_mask= must be zeros, for padding on the left, and then ones. Set the "
            "tokenizer's padding_side='left'; if the pad token also stands inside of a text, pass "
            "the attention_mask"
        )
    if positions is not None and (
        positions.shape[-1:] != place.shape[-1:]
        or not bool(((positions.to(place.device) == place - pads) | ~real).all())
    ):
        raise ValueError("position_ids= other than 0, 1, 2, ... are not offered with drafts")
    return [
        Row(index, index // copies, ids[pad:].tolist(), ids[None, :pad])
        for index, (ids, pad) in enumerate(zip(input_ids, pads[:, 0].tolist(), strict=True))
    ]


class RowEnd(StoppingCriteria):
    """The stopping criteria of `generate` for one row, which notes when they end it.

    Args:
        row: whose text is given without its padding.
        criteria: what may end it, beside end-of-sequence tokens and the length.
    """

    def __init__(self, row: Row, criteria: Sequence[StoppingCriteria]) -> None:
        self.row, self.criteria = row, criteria
        self.new_tokens: int | None = None
        """How many it has, once they have ended it."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """(1, T - P) text, after each token -> whether a criterion ends it."""
        text = self.row.text(input_ids)
        stop = any([self._ask(criterion, text) for criterion in self.criteria])
        if stop:
            self.new_tokens = input_ids.shape[1] - len(self.row.prompt)
        return stop

    def _ask(self, criterion: StoppingCriteria, text: Tensor) -> bool:
        found = torch.as_tensor(criterion(text, None))
        if found.numel() != 1:
            raise ValueError(
                f"stopping_criteria: {type(criterion).__name__} gave {found.numel()} answers for "
                "one row; with drafts, rows are decoded independently, and it is asked about one"
            )
        return bool(found)


# Processors -------------------------------------------------------------------------------------


class _RowProcessor(LogitsProcessor):
    """Shows a processor the padding, on the device where `generate` runs it."""

    def __init__(self, processor: Processor, row: Row) -> None:
        self.processor, self.row = processor, row

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(1, T - P) text and (1, V) scores -> (1, V)."""
        text = self.row.text(input_ids)
        return self.processor(text, scores.to(text.device)).to(scores.device)


def row_samplings(
    processors: Sequence[Processor],
    rows: Sequence[Row],
    seeds: Sequence[int] | None,
    device: torch.device,
) -> list[SamplingParams]:
    """How each row is decoded.

    Args:
        processors: the whole list, warpers included.
        rows: B of them.
        seeds: one each; None decodes greedily, for which warpers are like any other processors.
        device: of the logits.

    Raises:
        ValueError: several rows, and a processor that cannot be copied for each.
    """
    rest: Sequence[Processor] = processors
    fields: dict[str, Any] = {}
    if seeds is not None:
        rest, fields = split_warpers(processors)
        fields = {"temperature": 1.0, **fields}
    samplings = []
    for row in rows:
        own = of_row(rest, row, len(rows))
        if row.padding.shape[1] or row.padding.device != device:
            own = [_RowProcessor(processor, row) for processor in own]
        seed = 0 if seeds is None else seeds[row.index]
        samplings.append(SamplingParams(seed=seed, processors=tuple(own), **fields))
    return samplings


def split_warpers(processors: Sequence[Processor]) -> tuple[list[Processor], dict[str, Any]]:
    """Split the last processors off that our own warpers stand for, so that drafts follow them.

    Returns:
        The others, and fields of `SamplingParams`. In other orders than `generate`'s, or with
        options that our warpers do not have, they stay processors: as exact, but not for drafts.
    """
    rest, after = list(processors), len(_WARPERS)
    fields: dict[str, Any] = {}
    while rest:
        places = [place for place in range(after) if type(rest[-1]) is _WARPERS[place][0]]
        if not places or not _is_plain(rest[-1]):
            break
        after = places[0]
        _, attribute, field = _WARPERS[after]
        fields[field] = vars(rest.pop())[attribute]
    return rest, fields


def _is_plain(warper: Processor) -> bool:
    """Whether it rules tokens out altogether, and keeps at least one and no more."""
    settings = vars(warper)
    return (
        settings.get("filter_value", -torch.inf) == -torch.inf
        and settings.get("min_tokens_to_keep", 1) == 1
        and settings.get("top_p", 1.0) > 0.0
    )


def of_row(processors: Sequence[Processor], row: Row, count: int) -> list[Processor]:
    """The processors for one row.

    Those of transformers that hold something for each row are cut to this one. All rows share a
    prefix function, which is told the prompt that it is asked for.

    Args:
        processors: of the batch.
        row: which.
        count: B. One row uses the processors themselves; of several, each uses copies.

    Raises:
        ValueError: a processor that cannot be copied.
    """
    memo: dict[int, Any] = {}
    found = []
    for processor in processors:
        own, held = processor, _held_for(processor, row)
        if held:
            own = copy.copy(processor)
            vars(own).update(dict.fromkeys(held))  # what is replaced need not be copied
        if count > 1:
            [own] = copied([own], _FOR_ROWS.format(count), memo)
        if held:
            vars(own).update(held)
        found.append(own)
    return found


def _held_for(processor: Processor, row: Row) -> dict[str, Any]:
    """Attributes that hold something for each row, as they are for one row alone."""
    index = row.prompt_index
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        if isinstance(processor.prompt_ignore_length, Tensor):
            return {"prompt_ignore_length": int(processor.prompt_ignore_length[row.index])}
    elif isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        return {"encoder_input_ids": processor.encoder_input_ids[index : index + 1]}
    elif isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        return {"batch_size": 1, "generated_ngrams": [processor.generated_ngrams[index]]}
    elif isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = functools.partial(_allowed, processor._prefix_allowed_tokens_fn, index)
        return {"_prefix_allowed_tokens_fn": allowed, "_num_beams": 1}
    return {}


def _allowed(
    function: Callable[[int, Tensor], list[int]], index: int, _: int, text: Tensor
) -> list[int]:
    """The `prefix_allowed_tokens_fn` of one prompt."""
    return function(index, text)


def check_rule(processors: Sequence[Processor], row: Row, rule: str, vocab_size: int) -> None:
    """Refuse by its name what `row_samplings` may hide behind padding.

    Raises:
        ValueError: a processor that cannot work on rows one by one, or not under the rule.
    """
    own = tuple(of_row(processors, row, 1))
    check_processors([SamplingParams(processors=own)], rule, vocab_size)
