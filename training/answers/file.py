"""Answers in a file: how they are made, one JSON line each, and which of them are there already.

A line is written as soon as its conversation is answered, so a run stopped at any moment, also by a
kill, is continued by the same command: what is there is not answered again. Processes that answer
together write a share each, ``answers.0-of-2.jsonl`` beside ``answers.jsonl``, which is merged into
the file at the end, or where the run was stopped, by the next that opens it.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from training import locks
from training.answers.conversations import Conversation, plan_conversation

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
        endings: why conversations end before a later turn that a server refused; the turns before
            are kept.
    """

    made_by: list[str]
    written: int = 0
    left_out: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)

    def add(self, other: "Answered") -> None:
        """Count what another process did."""
        self.written += other.written
        self.left_out += other.left_out
        self.failures += other.failures
        self.endings += other.endings

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
        if self.endings:
            logger.warning(
                "%d conversations end before a turn that the server refused, the last by: %s",
                len(self.endings),
                self.endings[-1],
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

    Entering reads the ids that are there; a last line cut short by a kill is removed, and shares
    that a stopped run left are merged into the file.

    Args:
        path: made where it does not exist.

    Raises:
        ValueError: on entering, if another run has it open, or a line is not an answer written by
            Headway; nothing is then changed.
        OSError: the file cannot be read or written.
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
            self._claim(self._file)
            self.done = _finished_ids(self.path)
            self.take_in(shares_of(self.path))
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

    def take_in(self, paths: Sequence[Path]) -> None:
        """Merge other answer files into this one, each answer once, and remove them.

        The file is exchanged for the merged one as a whole, and the others are removed after that:
        a kill at any moment loses nothing, and entering the file again goes on.

        Args:
            paths: of the others, which no other run may be writing.

        Raises:
            ValueError: see the class; or the merged file cannot be written. All are then kept.
        """
        if not paths:
            return
        assert self._file is not None
        with ExitStack() as stack:
            for path in paths:
                stack.enter_context(AnswerFile(path))  # claims it, and mends its last line
            try:
                merged, done = self._write_merged(paths)
            except OSError as error:
                raise ValueError(
                    f"answers: cannot merge {', '.join(map(str, paths))} into {self.path} "
                    f"({error}): all of them are kept; make room, then start the same command again"
                ) from error
            self._file.close()
            self._file, self.done = merged, done
            for path in paths:
                path.unlink()

    def _write_merged(self, paths: Sequence[Path]) -> tuple[TextIO, set[str]]:
        """The merged file, claimed and in the place of this one, and what it holds."""
        final = self.path.resolve()
        temporary = final.with_name(final.name + ".tmp")
        merged = temporary.open("w", encoding="utf-8")
        try:
            self._claim(merged, temporary)  # before it gets its name, so that no other run has it
            done = _merge([final, *paths], self.done, merged)
            os.replace(temporary, final)
        except BaseException:
            with suppress(OSError):
                merged.close()
            temporary.unlink(missing_ok=True)
            raise
        return merged, done

    def _claim(self, file: TextIO, path: Path | None = None) -> None:
        """Lock it, and see that the locked file still has its name: a merge exchanges it."""
        same = locks.lock(file) and os.path.samestat(
            os.fstat(file.fileno()), (path or self.path).stat()
        )
        if not same:
            raise ValueError(
                f"answers: another run is writing to {self.path}; wait for its end or name another "
                "file"
            )


def share_path(out: Path, rank: int, world: int) -> Path:
    """Where one of several processes that answer into ``out`` together writes."""
    return out.with_name(f"{out.stem}.{rank}-of-{world}{out.suffix}")


def shares_of(out: Path) -> list[Path]:
    """The shares beside ``out``, whatever the number of processes that wrote them."""
    form = re.compile(rf"{re.escape(out.stem)}\.\d+-of-\d+{re.escape(out.suffix)}")
    return sorted(
        path for path in out.parent.iterdir() if form.fullmatch(path.name) and path.is_file()
    )


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


def _merge(paths: Sequence[Path], done: set[str], merged: TextIO) -> set[str]:
    """Write the first file, and of each other what is not ``done`` yet; gives what then is."""
    done = set(done)
    with paths[0].open("rb") as file:
        shutil.copyfileobj(file, merged.buffer)
    for path in paths[1:]:
        with path.open("rb") as file:
            for line in file:
                key = json.loads(line)["id"]
                if key not in done:
                    merged.buffer.write(line)
                    done.add(key)
    merged.flush()
    os.fsync(merged.fileno())
    return done


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
