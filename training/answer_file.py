"""Answers in a file: how they are made, one JSON line each, and which of them are there already.

A line is written as soon as its conversation is answered, so a run stopped at any moment, also by a
kill, is continued by the same command: what is there is not answered again.
"""

import fcntl
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from training.conversations import Conversation, plan_conversation

logger = logging.getLogger(__name__)

NAMED_FAILURES = 10


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are made.

    Attributes:
        max_new_tokens: longest answer of a turn.
        temperatures: dealt over the prompts; 0 is greedy, any other plain sampling.
        batch_size: prompts answered together, or requests in flight at a server.
        max_prompt_tokens: longer prompts are left out and counted.
        seed: of sampling.
    """

    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0,)
    batch_size: int = 16
    max_prompt_tokens: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"temperature must be at least 0, got {list(self.temperatures)}")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures: name each once, got {list(self.temperatures)}")
        for name in ("max_new_tokens", "batch_size", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass
class Answered:
    """What one call did.

    Attributes:
        made_by: what of the target decided the answers; part of their identity.
        written: conversations answered by this call.
        left_out: prompts that were too long.
        failures: prompts that could not be answered: ``id``, the beginning of the ``prompt`` and
            the ``reason``.
    """

    made_by: list[str]
    written: int = 0
    left_out: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)

    def fail(self, conversation: Conversation, reason: str) -> None:
        """Note a prompt that could not be answered."""
        said = [m for m in conversation.script if m.get("role") == "user"] or conversation.script
        prompt = " ".join(str(said[-1].get("content")).split())[:60]
        self.failures.append({"id": conversation.key, "prompt": prompt, "reason": reason})

    def report(self, max_prompt_tokens: int) -> None:
        """Say what was left out, and name what failed.

        Raises:
            ValueError: prompts failed, and none was answered.
        """
        if self.left_out:
            logger.warning(
                "left out %d prompts of more than %d tokens", self.left_out, max_prompt_tokens
            )
        if not self.failures:
            return
        named = [
            f"{one['id']} ({one['prompt']!r}): {one['reason']}"
            for one in self.failures[:NAMED_FAILURES]
        ]
        text = "; ".join(named)
        if more := len(self.failures) - len(named):
            text += f"; and {more} more"
        if not self.written:
            raise ValueError(f"answers: none of {len(self.failures)} prompts was answered. {text}")
        logger.warning(
            "%d prompts were not answered, the same command tries them again: %s",
            len(self.failures),
            text,
        )


class AnswerFile:
    """The JSONL file of one run at a time, opened to be appended to.

    Entering reads the ids that are there; a last line cut short by a kill is removed.

    Args:
        path: made where it does not exist.

    Raises:
        ValueError: on entering, if another run has it open, or a line is not an answer written by
            Headway; nothing is then changed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[str] = set()
        self._file: TextIO | None = None

    def __enter__(self) -> "AnswerFile":
        """Open, claim and read the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        try:
            self._claim()
            self.done = _finished_ids(self.path)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file, which gives it free."""
        assert self._file is not None
        self._file.close()

    def add(self, conversations: Sequence[Conversation]) -> None:
        """Write these, answered, and hand them to the operating system at once."""
        assert self._file is not None and all(one.key not in self.done for one in conversations)
        lines = [json.dumps(one.record(), ensure_ascii=False) + "\n" for one in conversations]
        self._file.write("".join(lines))
        self._file.flush()
        self.done |= {one.key for one in conversations}

    def _claim(self) -> None:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"answers: another run is writing to {self.path}; wait for its end or name another "
                "file"
            ) from error


def plan(
    rows: Sequence[dict[str, Any]], options: AnswerOptions, made_by: list[str]
) -> list[Conversation]:
    """The conversations of these rows, each prompt once.

    Raises:
        ValueError: no rows, or a row without a prompt; the message names the row.
    """
    if not rows:
        raise ValueError("prompts: the dataset is empty")
    planned: dict[str, Conversation] = {}
    for number, row in enumerate(rows):
        try:
            one = plan_conversation(
                row, options.temperatures, options.max_new_tokens, options.seed, made_by
            )
        except ValueError as error:
            raise ValueError(f"prompts, row {number}: {error}") from error
        planned.setdefault(one.key, one)
    return list(planned.values())


def select_answers(
    rows: Sequence[dict[str, Any]], out: Path, options: AnswerOptions, made_by: list[str]
) -> list[dict[str, Any]]:
    """The answers in ``out`` to exactly these prompts, options and target.

    The file may hold more: other prompts, temperatures or targets answered into it earlier.

    Args:
        rows: the prompts.
        out: the file.
        options: how they were answered.
        made_by: of the :class:`Answered` that the call gave.

    Raises:
        ValueError: none of them is there.
    """
    wanted = {one.key for one in plan(rows, options, made_by)}
    with out.open(encoding="utf-8") as file:
        found = [record for record in map(json.loads, file) if record["id"] in wanted]
    if not found:
        raise ValueError(f"answers: {out} holds no answer to these prompts")
    return found


def answer_tokens(record: dict[str, Any]) -> int:
    """Tokens that the target wrote in a line of the file, as far as the server told."""
    if "written" in record:
        return sum(one.get("tokens") or 0 for one in record["written"])
    return len(record["answer_ids"])


def _finished_ids(out: Path) -> set[str]:
    """Ids already answered; a last line cut short by a kill is removed from the file.

    Raises:
        ValueError: any other line is not an answer written here; nothing is removed.
    """
    content = out.read_bytes()
    whole, _, cut = content.rpartition(b"\n")
    done = set()
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            record = json.loads(line)
            done.add(record["id"])
            if "written" not in record:
                record["answer_ids"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"answers: line {number} of {out} is not an answer written by Headway: name "
                "another file to write to"
            ) from error
    if cut:
        with out.open("r+b") as file:
            file.truncate(len(content) - len(cut))
    return done
