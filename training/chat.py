"""Conversations to token ids and the mask of supervised tokens. Fails closed.

Only what the target itself would have generated is supervised: the text of each assistant turn and
the token that ends it. Where the mask cannot be established exactly, the row is refused, never
guessed:

1. rows that carry ``prompt_ids`` and ``answer_ids`` (answers regenerated here) are exact by
construction;
2. templates with ``{% generation %}`` markers give the mask themselves;
3. otherwise each assistant turn is found by rendering the conversation up to it and comparing token
by token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
ROLES = ("system", "user", "assistant", "tool")


_ANSWER_IT = (
    "Have the target answer it first: data.regenerate=true, or python -m scripts.generate_answers"
)


class MaskError(ValueError):
    """The supervised mask of a row cannot be established."""


@dataclass(frozen=True)
class TokenizedRow:
    """One conversation.

    Attributes:
        ids: token ids, length T.
        supervised: length T; true where the token was, or would have been, produced by the target.
        number: its place among the encoded rows of the run, -1 where that does not matter.
    """

    ids: list[int]
    supervised: list[bool]
    number: int = -1


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's chat template.

    Raises:
        ValueError: there is none.
    """
    if not isinstance(tokenizer.chat_template, str):
        raise ValueError(
            "data: the target's tokenizer has no chat template, which 'messages' and 'prompt' "
            "rows need. Give one with data.chat_template (a .jinja file), or use 'text' rows for "
            "a base model"
        )
    return tokenizer.chat_template


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Ids of a conversation up to and including the header of the next assistant turn."""
    require_chat_template(tokenizer)
    return _render(tokenizer, messages, add_generation_prompt=True)


def encode_row(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> TokenizedRow:
    """Tokenise one data row.

    Args:
        tokenizer: the target's.
        row: with ``prompt_ids``/``answer_ids``, ``messages`` (ending in an assistant turn), or
            ``text``.

    Raises:
        MaskError: nothing, or everything, would be supervised, or the template does not allow an
            exact mask.
    """
    if row.get("prompt_ids") is not None and row.get("answer_ids") is not None:
        prompt, answer = list(row["prompt_ids"]), list(row["answer_ids"])
        encoded = TokenizedRow(prompt + answer, [False] * len(prompt) + [True] * len(answer))
    elif row.get("messages") is not None:
        encoded = encode_messages(tokenizer, row["messages"])
    elif row.get("text") is not None:
        ids = tokenizer(row["text"])["input_ids"]
        if len(ids) < 2:
            raise MaskError("the text of this row is too short: it needs at least two tokens")
        # A base model wrote, or would write, every token but the first.
        return TokenizedRow(ids, [False] + [True] * (len(ids) - 1))
    elif row.get("prompt") is not None or row.get("turns") is not None:
        raise MaskError(f"this row is a prompt without an answer. {_ANSWER_IT}")
    else:
        raise MaskError(
            f"row has none of the columns messages, prompt, text or answer_ids: {sorted(row)}"
        )
    if not any(encoded.supervised):
        raise MaskError(
            "no token of this row is supervised: it has no assistant turn, or an empty one. "
            + _ANSWER_IT
        )
    if all(encoded.supervised):
        raise MaskError("every token of this row is supervised: the prompt is missing")
    return encoded


def encode_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> TokenizedRow:
    """Ids and mask of a conversation, by generation markers or by render difference.

    Raises:
        MaskError: the template rewrites history, so no exact mask exists for the whole
            conversation.
    """
    check_messages(messages)
    template = require_chat_template(tokenizer)
    if "{% generation" in template or "{%- generation" in template:
        try:
            rendered: Any = tokenizer.apply_chat_template(
                list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception as error:  # jinja2 errors: the template's own refusals
            raise MaskError(f"the chat template refuses this conversation: {error}") from error
        return TokenizedRow(
            list(rendered["input_ids"]), [bool(flag) for flag in rendered["assistant_masks"]]
        )
    return _mask_by_rendering(tokenizer, messages)


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse what is not a list of {role, content} text messages.

    Raises:
        MaskError: naming the message.
    """
    if isinstance(messages, str) or not messages:
        raise MaskError("messages is empty, or not a list of {role, content}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise MaskError(f"message {number} must be {{role, content}}, got {message!r}")
        if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise MaskError(
                f"message {number} needs a role in {ROLES} and text content, got {message}"
            )


def _mask_by_rendering(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> TokenizedRow:
    ids = _render(tokenizer, messages, add_generation_prompt=False)
    supervised = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:turn], add_generation_prompt=True)
        after = _render(tokenizer, messages[: turn + 1], add_generation_prompt=False)
        if after[: len(before)] != before or ids[: len(after)] != after:
            raise MaskError(
                f"the chat template renders turn {turn} differently once later text follows (it "
                "rewrites history or "
                "merges tokens), so what the target produced cannot be told exactly. Split the "
                "conversation into one "
                "row per assistant turn, or use a template with {% generation %} markers"
            )
        for position in range(len(before), _end_of_turn(tokenizer, ids, len(before), len(after))):
            supervised[position] = True
    return TokenizedRow(ids, supervised)


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, ids: list[int], start: int, end: int) -> int:
    """One past the token that ends the turn: template text after it is not the target's doing."""
    names = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
    ends = {tokenizer.eos_token_id, *(tokenizer.convert_tokens_to_ids(name) for name in names)}
    known = ends - {None, tokenizer.unk_token_id}
    for position in range(end - 1, start - 1, -1):
        if ids[position] in known:
            return position + 1
    return end


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool
) -> list[int]:
    if not messages and not add_generation_prompt:
        return []
    try:
        ids: Any = tokenizer.apply_chat_template(
            list(messages),
            tokenize=True,
            return_dict=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # jinja2 errors: the template's own refusals
        raise MaskError(f"the chat template refuses this conversation: {error}") from error
    return ids
