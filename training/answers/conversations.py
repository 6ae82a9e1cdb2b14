"""Conversations that the target answers turn by turn.

A row of data gives a script: the messages of the user, of the system and of tools as they are, and
gaps where the target writes. An assistant turn that a tool answered stays as it is, because the
tool's result belongs to it; every other one is a gap, each answered with the regenerated history
before it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from training.data.messages import Message, check_media, clean_messages, clean_tools

GAP: Message = {"role": "assistant"}
OWN_COLUMNS = (
    "messages",
    "prompt",
    "turns",
    "prompt_ids",
    "answer_ids",
    "token_rows",
    "written",
    "answered_by",
)
"""Columns of a row that its answer replaces; the others are carried along."""


def prompt_messages(row: dict[str, Any]) -> list[Message]:
    """The conversation up to its last answer: a row's ``messages`` without trailing assistant
    turns, ``prompt`` or ``turns[0]``.

    Raises:
        ValueError: the row has no prompt.
    """
    if row.get("messages"):
        messages = [dict(message) for message in row["messages"]]
        while messages and messages[-1].get("role") == "assistant":
            messages.pop()
        if messages:
            return messages
    if row.get("prompt"):
        return [{"role": "user", "content": row["prompt"]}]
    if row.get("turns"):
        return [{"role": "user", "content": row["turns"][0]}]
    raise ValueError(
        f"row has no prompt: it needs messages, prompt or turns, and has {sorted(row)}"
    )


def script_of(row: dict[str, Any]) -> list[Message]:
    """The messages of a row, with :data:`GAP` wherever the target is to write.

    Args:
        row: with ``messages``, ``prompt``, or ``turns`` (what the user says in each turn).

    Raises:
        ValueError: the row has no prompt, or is not text
        (:class:`~training.data.messages.MaskError`).
    """
    check_media(row)
    if row.get("turns") and not row.get("messages") and not row.get("prompt"):
        said = clean_messages([{"role": "user", "content": text} for text in row["turns"]])
        return [one for message in said for one in (message, GAP)]
    messages = clean_messages(prompt_messages(row))
    script: list[Message] = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant" or not script or _feeds_tool(messages, place):
            script.append(message)
        elif script[-1]["role"] in ("user", "tool"):
            script.append(GAP)
        elif script[-1] is not GAP:
            script.append(message)
    return [*script, GAP]


def _feeds_tool(messages: Sequence[Message], place: int) -> bool:
    """Whether the run of assistant messages around ``place`` is answered by a tool."""
    after = (message["role"] for message in messages[place:])
    return next((role for role in after if role != "assistant"), None) == "tool"


@dataclass(eq=False)
class Conversation:
    """A row while it is answered.

    Attributes:
        key: names the prompt, the options and the target; the ``id`` of the record.
        row: the data it came from.
        script: see :func:`script_of`.
        tools: what the chat template is given as tools.
        temperature: all turns are answered at this one.
        messages: the conversation so far, up to the next gap.
        written: which messages the target wrote: the ``turn`` is the number of the message, its
            ``finish`` "stop" or "length", and ``tokens`` its length where that is known.
        token_rows: exact ids: a turn whose prompt continues the ids so far is appended to them, any
            other begins a new row. ``spans`` are what the target wrote.
        exact: whether ids of all turns so far are known.
        answered_by: name of the served model; None where the target answered in process.
        done: no gap is left, or :meth:`stop` was called.
    """

    key: str
    row: dict[str, Any]
    script: list[Message]
    tools: list[dict[str, Any]]
    temperature: float
    messages: list[Message] = field(default_factory=list)
    written: list[dict[str, Any]] = field(default_factory=list)
    token_rows: list[dict[str, Any]] = field(default_factory=list)
    exact: bool = True
    answered_by: str | None = None
    done: bool = False
    _place: int = 0

    def __post_init__(self) -> None:
        """Take the messages before the first gap."""
        self._advance()

    def add(
        self,
        message: Message,
        finish: str,
        prompt_ids: list[int] | None = None,
        answer_ids: list[int] | None = None,
        tokens: int | None = None,
    ) -> None:
        """Fill the next gap.

        Args:
            message: what the target wrote.
            finish: "stop" where it ended its turn itself, "length" where it was cut short.
            prompt_ids: everything it saw, where that is known.
            answer_ids: what it wrote, with the end of its turn where it wrote one.
            tokens: length of that, where it alone is known.
        """
        assert not self.done and finish in ("stop", "length")
        tokens = tokens if answer_ids is None else len(answer_ids)
        known = {} if tokens is None else {"tokens": tokens}
        self.written.append({"turn": len(self.messages), "finish": finish, **known})
        self.messages.append(message)
        if prompt_ids is None or answer_ids is None:
            self.exact = False
        else:
            self._add_ids(list(prompt_ids), list(answer_ids))
        self._place += 1
        if message.get("tool_calls"):
            self.stop()  # nothing in the script answers a tool that the target chose to call
        else:
            self._advance()

    def stop(self) -> None:
        """Leave the gaps that are left unanswered."""
        self.done = True
        if self.written:
            del self.messages[self.written[-1]["turn"] + 1 :]

    def record(self) -> dict[str, Any]:
        """The line of the answer file: the row's other columns, and what ``encode_rows_of`` reads.

        Exact ids of a single answer are ``prompt_ids`` and ``answer_ids``, of several
        ``token_rows``; without either, training masks the messages by rendering them.
        """
        ids: dict[str, Any] = {}
        if self.exact and len(self.written) == 1:
            (one,) = self.token_rows
            ((start, _),) = one["spans"]
            ids = {"prompt_ids": one["ids"][:start], "answer_ids": one["ids"][start:]}
        elif self.exact:
            ids = {"token_rows": self.token_rows}
        served = {} if self.answered_by is None else {"answered_by": self.answered_by}
        return {
            **{key: value for key, value in self.row.items() if key not in OWN_COLUMNS},
            **served,
            "id": self.key,
            "messages": self.messages,
            **ids,
            "temperature": self.temperature,
            "written": self.written,
        }

    def _add_ids(self, prompt: list[int], answer: list[int]) -> None:
        ids = prompt + answer
        span = [len(prompt), len(ids)]
        last = self.token_rows[-1] if self.token_rows else None
        if last is not None and prompt[: len(last["ids"])] == last["ids"]:
            last["ids"] = ids
            last["spans"].append(span)
        else:
            self.token_rows.append({"ids": ids, "spans": [span]})

    def _advance(self) -> None:
        """Append what the script gives up to the next gap."""
        while self._place < len(self.script) and self.script[self._place] is not GAP:
            self.messages.append(self.script[self._place])
            self._place += 1
        self.done = self._place == len(self.script)


def plan_conversation(
    row: dict[str, Any],
    temperatures: Sequence[float],
    max_new_tokens: int,
    seed: int,
    made_by: list[str],
) -> Conversation:
    """A row ready to be answered.

    Its temperature is dealt by the identity of its prompt and the seed, so that neither order nor a
    resumed run changes it, and that consecutive seeds take one temperature after the other.

    Args:
        row: see :func:`script_of`.
        temperatures: dealt over the prompts.
        max_new_tokens: longest answer of a turn.
        seed: of sampling.
        made_by: what of the target decides its answers.

    Raises:
        ValueError: see :func:`script_of`.
    """
    script = script_of(row)
    tools = clean_tools(row.get("tools"))
    prompt: list[Any] = [script[:-1]]
    place = int(_digest(prompt + tools)[:8], 16) + seed
    temperature = float(temperatures[place % len(temperatures)])
    identity = [*prompt, temperature, max_new_tokens, seed, made_by, *tools]
    return Conversation(_digest(identity)[:16], row, script, tools, temperature)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
