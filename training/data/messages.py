"""What a conversation may hold: text messages, tool calls, thoughts. Anything else is refused.

Messages are dicts as chat templates and OpenAI-compatible servers take them: ``role``, ``content``
(text), and where they occur ``tool_calls``, ``tool_call_id``, ``name`` and ``reasoning_content``.
"""

import json
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
MEDIA = ("image", "images", "audio", "audios", "video", "videos")


class MaskError(ValueError):
    """The supervised mask of a row cannot be established."""


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse what is not a list of text messages.

    Raises:
        MaskError: naming the message.
    """
    if isinstance(messages, str) or not messages:
        raise MaskError("messages is empty, or not a list of {role, content}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise MaskError(f"message {number} must be {{role, content}}, got {message!r}")
        content = message.get("content")
        if isinstance(content, list):
            kinds = sorted({str(part.get("type")) for part in content if isinstance(part, dict)})
            raise MaskError(
                f"message {number} has content in parts ({', '.join(kinds)}): heads are trained "
                "on text, so content must be one text without images or sound"
            )
        silent = message.get("role") == "assistant" and any(
            message.get(key) for key in ("tool_calls", "reasoning_content")
        )
        if message.get("role") not in ROLES or not (
            isinstance(content, str) or (content is None and silent)
        ):
            raise MaskError(
                f"message {number} needs a role in {ROLES} and text content, got {message}"
            )


def check_media(row: dict[str, Any]) -> None:
    """Refuse a row that is not text alone.

    Raises:
        MaskError: naming the column.
    """
    for name in MEDIA:
        if row.get(name) is not None and row[name] != []:
            raise MaskError(
                f"this row has the column {name!r}: heads are trained on text alone, leave such "
                "rows out"
            )


def clean_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages as templates expect them.

    What tables add is taken away (keys without a value), and arguments of tool calls are mappings,
    also where the data keep them as JSON text, as OpenAI's format does.

    Raises:
        MaskError: a message that is not text, or arguments that are not JSON.
    """
    check_messages(messages)
    return [_clean_message(number, message) for number, message in enumerate(messages)]


def clean_tools(tools: str | Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The column ``tools`` as a list of mappings; data sets also keep it as JSON text.

    Raises:
        MaskError: it is neither.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise MaskError(f"the column 'tools' is not JSON: {error}") from error
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise MaskError("the column 'tools' must be a list of JSON schemas of functions")
    return [_without_none(tool) for tool in tools]


def to_server(messages: Sequence[Message]) -> list[Message]:
    """Messages as OpenAI-compatible servers take them: arguments of tool calls are JSON text."""
    return [
        {**message, "tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _clean_message(number: int, message: Message) -> Message:
    kept = {key: _without_none(value) for key, value in message.items() if value is not None}
    kept.setdefault("content", "")
    if "tool_calls" in kept and not kept["tool_calls"]:
        del kept["tool_calls"]
    for call in kept.get("tool_calls", ()):
        function = call.get("function", call)
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError as error:
                raise MaskError(
                    f"message {number} calls a tool with arguments that are not JSON: {error}"
                ) from error
    return kept


def _without_none(value: Any) -> Any:
    """A copy of nested JSON without the empty entries that tables fill in."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    text = json.dumps(function.get("arguments", {}), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
