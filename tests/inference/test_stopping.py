"""Texts end where `generate` ends them, and for the reason given."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import (
    ConfidenceCriteria,
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from drafters import TargetModel
from inference.stopping import Stop, Stopper
from tests.grammar import EOS, tokens_of
from tests.tiny import tiny_target

PROMPT = tokens_of("tell me")
LENGTH = len(PROMPT)


def plain(target: TargetModel, steps: int = 30, prompt: list[int] = PROMPT) -> list[int]:
    """Greedy new tokens, whatever ends texts."""
    text = list(prompt)
    for _ in range(steps):
        logits = target.forward(torch.tensor([text]), logits_to_keep=1).logits[0, -1]
        text.append(int(logits.argmax()))
    return text[len(prompt) :]


def cut(
    stop: Stop, target: TargetModel, new: list[int], limit: int = 30, prompt: list[int] = PROMPT
) -> tuple[list[int], str | None]:
    """The part of `new` that is emitted, and why it ends."""
    stopper = Stopper(stop, len(prompt), limit, target)
    text = list(prompt)
    for token in new:
        text.append(token)
        if reason := stopper.ended(text):
            return text[len(prompt) :], reason
    return text[len(prompt) :], None


def theirs(target: TargetModel, prompt: list[int] = PROMPT, **options: Any) -> list[int]:
    """New tokens of greedy `generate`."""
    criteria = StoppingCriteriaList(options.pop("criteria", []))
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        pad_token_id=0,
        tokenizer=target.tokenizer,
        stopping_criteria=criteria,
        **{"max_new_tokens": 30, **options},
    )
    return out[0, len(prompt) :].tolist()


def text_of(target: TargetModel, tokens: list[int]) -> str:
    return target.tokenizer.decode(tokens)


# Tokens and length


def test_an_end_token_ends_the_text_and_stays_in_it() -> None:
    target = tiny_target()
    assert cut(Stop(), target, [7, 8, EOS, 9]) == ([7, 8, EOS], "eos")
    assert cut(Stop(token_ids=()), target, [7, EOS, 9]) == ([7, EOS, 9], None)
    assert cut(Stop(token_ids=(9, 8)), target, [7, EOS, 8, 9]) == ([7, EOS, 8], "eos")


@pytest.mark.parametrize("place", [0, 3, 11])
def test_stop_ids_end_as_the_end_tokens_of_generate(place: int) -> None:
    target = tiny_target()
    new = plain(target)
    ids = [new[place], 95]
    expected = theirs(target, eos_token_id=ids)
    assert expected[-1] == new[place] and len(expected) <= place + 1
    assert cut(Stop(token_ids=tuple(ids)), target, new) == (expected, "eos")


def test_length_counts_new_tokens_and_an_end_token_wins() -> None:
    target = tiny_target()
    assert cut(Stop(), target, [7, 8, 9, 10], limit=3) == ([7, 8, 9], "length")
    assert cut(Stop(), target, [7, 8, EOS], limit=3) == ([7, 8, EOS], "eos")
    assert cut(Stop(strings=("z",)), target, tokens_of("xyz"), limit=3)[1] == "stop"
    always = MaxLengthCriteria(0)
    assert cut(Stop(criteria=(always,)), target, [EOS])[1] == "eos"
    assert cut(Stop(criteria=(always,)), target, [7], limit=1)[1] == "stop"


# Strings


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("place", [0, 4, 17])
def test_stop_strings_end_where_generate_does(place: int, width: int) -> None:
    """Across several tokens; a second string that never comes changes nothing."""
    target = tiny_target()
    new = plain(target)
    string = text_of(target, new[place : place + width])
    expected = theirs(target, stop_strings=[string, "never, ever"])
    assert expected == new[: len(expected)] and len(expected) <= place + width
    assert text_of(target, expected).endswith(string)
    found = cut(Stop(strings=(string, "never, ever")), target, new)
    assert found == (expected, "stop")


def test_the_first_of_several_strings_to_come_ends_the_text() -> None:
    target = tiny_target()
    new = plain(target)
    strings = [text_of(target, new[12:14]), text_of(target, new[6:9])]
    expected = theirs(target, stop_strings=strings)
    assert len(expected) <= 9
    assert cut(Stop(strings=tuple(strings)), target, new) == (expected, "stop")


def test_a_string_that_begins_in_the_prompt_counts_as_in_generate() -> None:
    """One that is all in the prompt does not."""
    target = tiny_target()
    new = plain(target)
    begun = "l me" + text_of(target, new[:1])
    for strings, length in (([begun], 1), (["tell", "l me"], 30)):
        expected = theirs(target, stop_strings=strings)
        assert len(expected) == length
        found, reason = cut(Stop(strings=tuple(strings)), target, new)
        assert (found, reason) == (expected, "stop" if length == 1 else "length")


def test_a_string_may_end_within_a_token() -> None:
    """Tokens are kept whole: `<extra_90>` completes `z<ex`."""
    target = tiny_target()
    long = [*tokens_of("xyz"), 90, 5]
    assert cut(Stop(strings=("z<ex",)), target, long) == (long[:4], "stop")


def test_strings_need_a_tokenizer_and_tokens_that_can_spell_them() -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match="unable to identify tokens"):
        Stopper(Stop(strings=("\u00e9",)), LENGTH, 5, target)
    bare = TargetModel(target.model)
    Stopper(Stop(), LENGTH, 5, bare)
    with pytest.raises(ValueError, match="without a tokenizer"):
        Stopper(Stop(strings=("a",)), LENGTH, 5, bare)


# Criteria


class Count(StoppingCriteria):
    """Stops at its n-th call and notes the texts it saw."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        assert scores is None
        self.seen.append(input_ids[0].tolist())
        return torch.full((1,), len(self.seen) >= self.calls)


def test_criteria_are_called_once_per_token_in_order_as_in_generate() -> None:
    target = tiny_target()
    new = plain(target)
    mine, other, model = Count(5), Count(99), Count(5)
    expected = theirs(target, criteria=[model])
    assert cut(Stop(criteria=(mine, other)), target, new) == (expected, "stop")
    assert len(expected) == 5
    assert mine.seen == model.seen == other.seen


def test_any_criterion_of_transformers_and_any_callable_ends_a_text() -> None:
    target = tiny_target()
    new = [7, 8, 9, 10, 11]
    never = MaxTimeCriteria(3600)
    over = MaxTimeCriteria(1.0, time.time() - 5)
    for criterion, length in (
        (MaxLengthCriteria(LENGTH + 3), 3),
        (EosTokenCriteria(10), 4),
        (over, 1),
        (lambda ids, scores: int(ids[0, -1]) == 8, 2),
    ):
        found = cut(Stop(criteria=(never, criterion)), target, new)
        assert found == (new[:length], "stop")
    assert cut(Stop(criteria=(never,)), target, new) == (new, None)


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_ids": (-1,)}, "token_ids must hold"),
        ({"token_ids": ("a",)}, "token_ids must hold"),
        ({"strings": ("a", "")}, "strings must hold texts"),
        ({"strings": (3,)}, "strings must hold texts"),
        ({"criteria": (3,)}, "criteria must hold callables"),
        ({"criteria": (ConfidenceCriteria(0.4),)}, "ConfidenceCriteria needs the scores"),
    ],
)
def test_what_cannot_stop_a_text_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Stop(**options)


def test_lists_and_a_single_string_are_taken() -> None:
    stop = Stop(token_ids=[3, 4], strings="ab", criteria=[])  # type: ignore[arg-type]
    assert stop == Stop((3, 4), ("ab",)) and hash(stop) == hash(Stop((3, 4), ("ab",)))
