"""The sequences of a decoding call, with everything checked before any token.

Letters: B sequences.
"""

from collections.abc import Sequence
from typing import TypeVar

from drafters import TargetModel
from inference.copies import apart
from inference.decoding import Keep, Text
from inference.processors import Sampler, check_processors
from inference.sampling import SamplingParams
from inference.stopping import Stop, Stopper

T = TypeVar("T")


def new_texts(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    stop: Stop | Sequence[Stop] | None,
    keep: Keep,
    rule: str,
) -> list[Text]:
    """The sequences to decode.

    Args:
        target: the model.
        prompts: B lists of token ids.
        max_new_tokens: for all, or B.
        sampling: for all, or B; None is greedy.
        stop: for all, or B; None is the target's end-of-sequence tokens.
        keep: what is kept of every token.
        rule: of acceptance.

    Raises:
        ValueError: naming the argument that cannot be decoded.
    """
    count = len(prompts)
    new = per_sequence("max_new_tokens", max_new_tokens, count)
    check_lengths(target, prompts, new)
    samplings = per_sequence("sampling", sampling or SamplingParams(), count)
    stops = per_sequence("stop", stop or Stop(), count)
    check_processors(samplings, rule, target.vocab_size)
    texts = []
    for prompt, number, params, ends in zip(prompts, new, apart(samplings), stops, strict=True):
        length = len(prompt)
        stopper = Stopper(ends, length, number, target)
        sampler = Sampler(params, length, stopper.eos_token_ids, target.device)
        texts.append(Text(list(prompt), length, length + number, sampler, stopper, keep))
    return texts


def check_lengths(
    target: TargetModel, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]
) -> None:
    """Refuse what cannot be decoded before any token is produced.

    Args:
        target: the model.
        prompts: B lists of token ids.
        max_new_tokens: B numbers.

    Raises:
        ValueError: naming the argument.
    """
    if not prompts or not all(isinstance(prompt, list | tuple) and prompt for prompt in prompts):
        raise ValueError(
            "prompts must be lists of token ids, one for each sequence and none of them empty"
        )
    for new in max_new_tokens:
        if not isinstance(new, int) or new < 1:
            raise ValueError(f"max_new_tokens must be a whole number of at least 1, got {new!r}")
    limit = target.length_limit(min(map(len, prompts)))
    for row, (prompt, new) in enumerate(zip(prompts, max_new_tokens, strict=True)):
        if len(prompt) + new > limit:
            name = "max_position_embeddings"
            if limit < target.max_length:
                name = "original_max_position_embeddings, where its rotary frequencies change (a "
                name += "batch must lie on one side: decode longer prompts in a call of their own),"
            raise ValueError(
                f"prompt {row} plus max_new_tokens is {len(prompt) + new} tokens but the target's "
                f"{name} is {limit}: shorten the prompt or lower max_new_tokens"
            )
        if not all(0 <= token < target.vocab_size for token in prompt):
            raise ValueError(
                f"prompt {row} holds a token id outside 0..{target.vocab_size - 1}, the "
                "target's vocabulary: was it made with another tokenizer?"
            )


def per_sequence(name: str, given: T | Sequence[T], count: int) -> list[T]:
    """One value for each sequence, from one for all or one for each.

    Args:
        name: of the argument, for the message.
        given: the value, or a list or tuple of them.
        count: B.

    Raises:
        ValueError: as many values as sequences are needed.
    """
    if not isinstance(given, list | tuple):
        return [given] * count  # type: ignore[list-item]
    if len(given) != count:
        raise ValueError(f"{name}: {len(given)} values for {count} prompts; give one, or one each")
    return list(given)
