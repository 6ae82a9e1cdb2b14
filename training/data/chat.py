"""Conversations to token ids and the mask of supervised tokens. Fails closed.

Only what the target itself would have generated is supervised: the text of each assistant turn and
the token that ends it. Where the mask cannot be established exactly, the row is refused, never
guessed:

1. rows that carry token ids (``prompt_ids`` and ``answer_ids``, or ``token_rows``: answers
regenerated here) are exact by construction;
2. templates with ``{% generation %}`` markers give the mask themselves;
3. otherwise each assistant turn is found by rendering the conversation up to it and comparing token
by token.

A template that renders a turn differently once later turns follow (a thinking template that drops
earlier thoughts) makes one row per assistant turn out of a conversation, each as the target saw it.

Legend: T sequence length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from training.data.messages import MaskError, Message, check_media, clean_messages, clean_tools

_ANSWER_IT = (
    "Have the target answer it first: data.regenerate=true, or python -m scripts.generate_answers"
)
_SPLIT = (
    "the chat template rewrites history: it renders an earlier turn differently once later turns "
    "follow, so this conversation makes {} rows, one per assistant turn (encode_rows_of gives them)"
)


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


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """Ids of a conversation up to and including the header of the next assistant turn.

    Raises:
        ValueError: there is no chat template.
        MaskError: the template refuses the conversation.
    """
    require_chat_template(tokenizer)
    return _render(tokenizer, messages, tools, add_generation_prompt=True)


def encode_row(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> TokenizedRow:
    """Tokenise one data row that is one training row; see :func:`encode_rows_of`.

    Raises:
        MaskError: as there, or the row is several.
    """
    rows = encode_rows_of(tokenizer, row)
    if len(rows) > 1:
        raise MaskError(_SPLIT.format(len(rows)))
    return rows[0]


def encode_rows_of(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> list[TokenizedRow]:
    """Tokenise one data row.

    Args:
        tokenizer: the target's.
        row: with ``prompt_ids``/``answer_ids``, ``token_rows`` (each ``ids`` and the ``spans`` the
            target wrote), ``messages`` (and ``tools``, which the template is given), or ``text``.
            ``written`` names the messages that the target wrote, and how each ended; without it
            every assistant turn counts, each ended.

    Returns:
        One row, or, where the template rewrites history, one per assistant turn, which is the only
        supervised one in it.

    Raises:
        MaskError: nothing, or everything, would be supervised, the row is not text alone, or the
            template does not allow an exact mask.
    """
    check_media(row)
    if row.get("prompt_ids") is not None and row.get("answer_ids") is not None:
        prompt, answer = list(row["prompt_ids"]), list(row["answer_ids"])
        rows = [TokenizedRow(prompt + answer, [False] * len(prompt) + [True] * len(answer))]
    elif row.get("token_rows") is not None:
        rows = [_marked(one["ids"], one["spans"]) for one in row["token_rows"]]
    elif row.get("messages") is not None:
        tools = clean_tools(row.get("tools"))
        rows = _conversation_rows(tokenizer, row["messages"], tools, row.get("written"))
    elif row.get("text") is not None:
        ids = tokenizer(row["text"])["input_ids"]
        if len(ids) < 2:
            raise MaskError("the text of this row is too short: it needs at least two tokens")
        # A base model wrote, or would write, every token but the first.
        return [TokenizedRow(ids, [False] + [True] * (len(ids) - 1))]
    elif row.get("prompt") is not None or row.get("turns") is not None:
        raise MaskError(f"this row is a prompt without an answer. {_ANSWER_IT}")
    else:
        raise MaskError(
            f"row has none of the columns messages, prompt, text or answer_ids: {sorted(row)}"
        )
    if any(all(one.supervised) for one in rows):
        raise MaskError("every token of this row is supervised: the prompt is missing")
    usable = [one for one in rows if any(one.supervised)]
    if not usable:
        raise MaskError(
            "no token of this row is supervised: it has no assistant turn, or an empty one. "
            + _ANSWER_IT
        )
    return usable


def encode_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> TokenizedRow:
    """Ids and mask of a conversation, by generation markers or by render difference.

    Raises:
        MaskError: the template rewrites history, so no exact mask exists for the whole
            conversation.
    """
    rows = _conversation_rows(tokenizer, messages, [], None)
    if len(rows) > 1:
        raise MaskError(_SPLIT.format(len(rows)))
    return rows[0]


# Rows of messages -------------------------------------------------------------------------------


def _conversation_rows(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    written: Sequence[dict[str, Any]] | None,
) -> list[TokenizedRow]:
    """The whole conversation where its render continues that of every turn, or a row per turn."""
    cleaned = clean_messages(messages)
    finishes = _finishes(cleaned, written)
    marked = _has_markers(tokenizer)
    if marked:
        whole, marks = _render_marked(tokenizer, cleaned, tools)
    else:
        whole = _render(tokenizer, cleaned, tools, add_generation_prompt=False)
    rows = []
    for turn, finish in finishes.items():
        row = _turn_row(tokenizer, cleaned[: turn + 1], tools)
        if finish == "length":
            row = _without_end(tokenizer, row, cleaned[turn], turn)
        rows.append(row)
    if any(whole[: len(row.ids)] != row.ids for row in rows):
        return rows
    if marked and written is None:
        return [TokenizedRow(whole, marks)]
    supervised = [False] * len(whole)
    for row in rows:
        for position, flag in enumerate(row.supervised):
            supervised[position] |= flag
    return [TokenizedRow(whole, supervised)]


def _finishes(
    messages: Sequence[Message], written: Sequence[dict[str, Any]] | None
) -> dict[int, str]:
    """How each turn of the target ended, "stop" or "length", by the number of its message."""
    if written is None:
        roles = [message["role"] for message in messages]
        return {turn: "stop" for turn, role in enumerate(roles) if role == "assistant"}
    finishes = {int(one["turn"]): str(one["finish"]) for one in written}
    for turn, finish in finishes.items():
        if not 0 <= turn < len(messages) or messages[turn]["role"] != "assistant":
            raise MaskError(f"written names message {turn}, which is no assistant turn")
        if finish not in ("stop", "length"):
            raise MaskError(f"written: message {turn} ends by {finish!r}, not 'stop' or 'length'")
    return finishes


def _turn_row(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
) -> TokenizedRow:
    """A conversation with its last message alone supervised, as the target saw and wrote it."""
    turn = len(messages) - 1
    if _has_markers(tokenizer):
        ids, marks = _render_marked(tokenizer, messages, tools)
        if not any(message["role"] == "assistant" for message in messages[:-1]):
            return TokenizedRow(ids, marks)
        before = _render(tokenizer, messages[:-1], tools, add_generation_prompt=False)
        _check_prefix(before, ids, turn)
        return TokenizedRow(ids, [False] * len(before) + marks[len(before) :])
    before = _render(tokenizer, messages[:-1], tools, add_generation_prompt=True)
    ids = _render(tokenizer, messages, tools, add_generation_prompt=False)
    _check_prefix(before, ids, turn)
    return _marked(ids, [(len(before), _end_of_turn(tokenizer, ids, len(before), len(ids)))])


def _check_prefix(before: list[int], ids: list[int], turn: int) -> None:
    """Refuse a turn whose prompt is not the beginning of its own render."""
    if ids[: len(before)] != before:
        raise MaskError(
            f"the chat template renders turn {turn} so that its prompt is not the beginning of it "
            "(it rewrites history or merges tokens), so what the target produced cannot be told "
            "exactly. Use a template with {% generation %} markers, or answers with token ids"
        )


def _without_end(
    tokenizer: PreTrainedTokenizerBase, row: TokenizedRow, message: Message, turn: int
) -> TokenizedRow:
    """The row without the end of its last turn, which was cut short: the target did not write it.

    Raises:
        MaskError: what is left is not the text of the message, as where it was cut in a thought.
    """
    supervised = list(row.supervised)
    last = max((place for place, flag in enumerate(supervised) if flag), default=-1)
    if last >= 0 and row.ids[last] in _ends(tokenizer):
        supervised[last] = False
    kept = [token for token, flag in zip(row.ids, supervised, strict=True) if flag]
    content = str(message.get("content") or "")
    text = str(tokenizer.decode(kept, skip_special_tokens=False))
    exact = text.endswith((content, content.rstrip())) and not message.get("tool_calls")
    if not content.strip() or not exact:
        raise MaskError(
            f"turn {turn} was cut short where the chat template adds to its text, so what the "
            "target wrote cannot be told exactly. Allow longer answers, or have a server that "
            "returns token ids answer"
        )
    return replace(row, supervised=supervised)


def _marked(ids: Sequence[int], spans: Sequence[Sequence[int]]) -> TokenizedRow:
    """Ids with these spans, each from start to before end, supervised."""
    supervised = [False] * len(ids)
    for start, end in spans:
        if not 0 <= start <= end <= len(ids):
            raise MaskError(f"span {start}..{end} is outside the {len(ids)} tokens of its row")
        supervised[start:end] = [True] * (end - start)
    return TokenizedRow(list(ids), supervised)


def _ends(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    names = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
    ends = {tokenizer.eos_token_id, *(tokenizer.convert_tokens_to_ids(name) for name in names)}
    return ends - {None, tokenizer.unk_token_id}


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, ids: list[int], start: int, end: int) -> int:
    """One past the token that ends the turn: template text after it is not the target's doing."""
    known = _ends(tokenizer)
    for position in range(end - 1, start - 1, -1):
        if ids[position] in known:
            return position + 1
    return end


# Rendering --------------------------------------------------------------------------------------


def _has_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    template = require_chat_template(tokenizer)
    return "{% generation" in template or "{%- generation" in template


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    add_generation_prompt: bool,
) -> list[int]:
    if not messages and not add_generation_prompt:
        return []
    try:
        ids: Any = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # jinja2 errors: the template's own refusals
        raise MaskError(f"the chat template refuses this conversation: {error}") from error
    return ids


def _render_marked(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
) -> tuple[list[int], list[bool]]:
    """Ids, and where the template's generation markers stand."""
    try:
        rendered: Any = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except Exception as error:  # jinja2 errors: the template's own refusals
        raise MaskError(f"the chat template refuses this conversation: {error}") from error
    return list(rendered["input_ids"]), [bool(flag) for flag in rendered["assistant_masks"]]
