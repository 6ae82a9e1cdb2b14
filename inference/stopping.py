"""When a sequence ends: end-of-sequence tokens, stop strings, stopping criteria, length.

Letters: T tokens of prompt and new text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation import ConfidenceCriteria, StoppingCriteria, StopStringCriteria

from drafters import TargetModel


@dataclass(frozen=True)
class Stop:
    """What ends a sequence besides its length. Lists become tuples.

    Attributes:
        token_ids: tokens that end it and stay in it; None takes the target's end-of-sequence
            tokens, () none.
        strings: texts that end it as soon as its last token completes one of them. As in
            `generate`, one may begin in the prompt, and tokens are kept whole: behind the stop
            string there may be the rest of a token.
        criteria: transformers' `StoppingCriteria`, or anything called like one: (1, T) token ids
            and None, as no scores are kept, -> whether to stop. They are called once for each
            emitted token, in order.

    Raises:
        ValueError: naming the field.
    """

    token_ids: tuple[int, ...] | None = None
    strings: tuple[str, ...] = ()
    criteria: tuple[StoppingCriteria | Callable[[Any, Any], Any], ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot stop anything."""
        if self.token_ids is not None:
            object.__setattr__(self, "token_ids", tuple(self.token_ids))
        strings = (self.strings,) if isinstance(self.strings, str) else tuple(self.strings)
        object.__setattr__(self, "strings", strings)
        object.__setattr__(self, "criteria", tuple(self.criteria))
        if not all(isinstance(token, int) and token >= 0 for token in self.token_ids or ()):
            raise ValueError(f"token_ids must hold token ids >= 0, got {self.token_ids}")
        if not all(isinstance(string, str) and string for string in strings):
            raise ValueError(f"strings must hold texts that are not empty, got {strings}")
        for criterion in self.criteria:
            if not callable(criterion):
                raise ValueError(f"criteria must hold callables, got {criterion!r}")
            if isinstance(criterion, ConfidenceCriteria):
                raise ValueError(
                    "criteria: ConfidenceCriteria needs the scores of a drafting model; it ends "
                    "drafts, not texts: leave it out"
                )


class Stopper:
    """Tells whether one sequence has ended, in one decoding call.

    Args:
        stop: what ends it.
        prompt_length: tokens given.
        max_new_tokens: the most to emit.
        target: for its end-of-sequence tokens, and its tokenizer if there are stop strings.

    Raises:
        ValueError: stop strings without a tokenizer, or that no token can complete.
    """

    def __init__(
        self, stop: Stop, prompt_length: int, max_new_tokens: int, target: TargetModel
    ) -> None:
        ends = target.eos_token_ids if stop.token_ids is None else stop.token_ids
        self.eos_token_ids = frozenset(ends)
        self._limit = prompt_length + max_new_tokens
        self._strings = _stop_strings(target.tokenizer, stop.strings) if stop.strings else None
        self._criteria = stop.criteria
        self._device = target.device

    @property
    def only_tokens(self) -> bool:
        """Whether nothing but tokens and the length can end the sequence."""
        return self._strings is None and not self._criteria

    def ended(self, text: Sequence[int]) -> str | None:
        """Call once for every emitted token, in order.

        Args:
            text: prompt and new tokens; the last one was just emitted.

        Returns:
            "eos", "stop" (a string or a criterion) or "length", in this order if several hold;
            None if the text goes on.
        """
        stopped = self._strings is not None and self._completes(text)
        if self._criteria:
            ids = torch.tensor([list(text)], device=self._device)
            stopped |= any([bool(criterion(ids, None)) for criterion in self._criteria])
        if text[-1] in self.eos_token_ids:
            return "eos"
        if stopped:
            return "stop"
        return "length" if len(text) >= self._limit else None

    def _completes(self, text: Sequence[int]) -> bool:
        """Whether the last token completes a stop string; no token is empty, so few can matter."""
        assert self._strings is not None
        last = list(text[-self._strings.maximum_token_len :])
        return bool(self._strings(torch.tensor([last]), None))


@functools.lru_cache(maxsize=16)
def _stop_strings(
    tokenizer: PreTrainedTokenizerBase, strings: tuple[str, ...]
) -> StopStringCriteria:
    """The criterion, which looks through the whole vocabulary once and keeps no state."""
    return StopStringCriteria(tokenizer, list(strings))
