"""Processes that decode on request, for `scripts.benchmark`: JSON lines over their pipes.

The parent starts a worker, says what it is to be, and asks: {"do": "warm_up", ...} before the
first measurement of a kind, {"do": "decode", "prompts": [[ids], ...]} for each batch. A worker
answers each line with one line. It waits in a read between them, so that only one computes at a
time. What it prints otherwise goes to its standard error, which is kept for the message of its
death. Anything wrong with it - it dies, says nothing in time, or says what cannot be - is a
`WorkerError`, and costs no other worker.

Standard library only: the other side may be the interpreter of another environment.
"""

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

SLACK_SECONDS = 1.0
SLACK_SHARE = 0.5
"""We may wait so much longer than a worker says it took: a busy machine delays its message."""


class WorkerError(RuntimeError):
    """A worker is of no use any more: it died, hung, or gave an impossible answer."""


class RefusalError(RuntimeError):
    """A worker says that it cannot do this; it may do others."""


@dataclass(frozen=True)
class Answer:
    """What a worker did with a batch.

    Attributes:
        tokens: new tokens of each prompt.
        seconds: of the whole call.
        prefill: until the first tokens were known.
        first: how many they were, in all sequences.
        parts: seconds by part of the step; empty if they are not told apart.
        rounds: of each target forward after the prefill [sequences, nodes of the largest tree, its
            depth, tokens emitted], with 0 for a shape that is not known; None without drafts.
        drafted: of each of them the sequences whose drafts a network made, where that is decided
            in every round; None where all drafts come from one place.
        expected: what the decoder itself expected of its rounds: tokens, seconds, and seconds of
            plain decoding for as many; None where it expects nothing.
    """

    tokens: list[list[int]]
    seconds: float
    prefill: float
    first: int
    parts: dict[str, float] = field(default_factory=dict)
    rounds: list[list[int]] | None = None
    drafted: list[int] | None = None
    expected: list[float] | None = None


class Handler(Protocol):
    """What a worker is, once it is built."""

    def warm_up(self, prompts: list[list[int]], longest: int, new_tokens: int) -> None:
        """Compile and run what the decoding of such prompts needs, none longer than `longest`."""

    def decode(self, prompts: list[list[int]], new_tokens: int) -> Answer:
        """Decode one batch."""


class Crew(ABC):
    """Several handlers in one process."""

    @abstractmethod
    def join(self, who: str, contender: dict[str, Any]) -> None:
        """One more.

        Args:
            who: its name.
            contender: what it is.
        """

    @abstractmethod
    def member(self, who: str) -> Handler:
        """One of them.

        Args:
            who: its name.
        """


# The parent's side ------------------------------------------------------------------------------


class Worker:
    """A process that decodes.

    Args:
        name: for messages.
        command: the program.
        settings: its first line; says what it is to be.
        environment: of the process.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        settings: dict[str, Any],
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self._settings = settings
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._read = b""
        self._closed = False
        self.started = False
        self.broken: str | None = None
        """Whether it has loaded its models or tried to, and why it could not."""
        self.threads: int | None = None
        """That it computes with, once it has started."""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=quiet_environment() if environment is None else environment,
            start_new_session=True,  # Ctrl-C comes to the parent alone, which ends them all
        )

    def start(self, timeout: float) -> float:
        """Let it load its models; seconds that it took.

        Raises:
            WorkerError: it cannot.
        """
        start, self.started = time.perf_counter(), True
        try:
            self.threads = self.ask(self._settings, timeout).get("threads")
        except RefusalError as error:
            self.broken = str(error)
            raise WorkerError(str(error)) from error
        return time.perf_counter() - start

    def warm_up(
        self,
        prompts: list[list[int]],
        longest: int,
        new_tokens: int,
        timeout: float,
        who: str | None = None,
    ) -> float:
        """Let it compile and run what such prompts need; seconds that it took.

        Args:
            prompts: of a batch.
            longest: of all that will come.
            new_tokens: to decode.
            timeout: seconds to wait.
            who: of several that share the process.

        Raises:
            RefusalError: it cannot do this.
            WorkerError: it cannot do anything any more.
        """
        start = time.perf_counter()
        request = {"prompts": prompts, "longest": longest, "new_tokens": new_tokens}
        self.ask({"do": "warm_up", "who": who, **request}, timeout)
        return time.perf_counter() - start

    def decode(
        self, prompts: list[list[int]], new_tokens: int, timeout: float, who: str | None = None
    ) -> Answer:
        """Let it decode one batch.

        Args:
            prompts: of the batch.
            new_tokens: to decode.
            timeout: seconds to wait.
            who: of several that share the process.

        Raises:
            RefusalError: it cannot do this.
            WorkerError: it cannot do anything any more, or what it says cannot be.
        """
        start = time.perf_counter()
        request = {"do": "decode", "who": who, "prompts": prompts, "new_tokens": new_tokens}
        said = self.ask(request, timeout)
        wall = time.perf_counter() - start
        try:
            return checked_answer(said, len(prompts), new_tokens, wall)
        except (KeyError, TypeError, ValueError) as error:
            self.close()
            raise WorkerError(f"impossible answer: {error}") from error

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """One line there, one line back.

        Raises:
            RefusalError: it answers with an error.
            WorkerError: it is dead, or silent, or speaks something else.
        """
        assert self._process.stdin is not None
        if self._closed:
            raise WorkerError("its process has ended")
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._died() from error
        line = self._line(time.monotonic() + timeout, timeout)
        try:
            answer = json.loads(line)
        except ValueError as error:
            self.close()
            raise WorkerError(f"no JSON: {line[:80]!r}") from error
        if not isinstance(answer, dict):
            self.close()
            raise WorkerError(f"no JSON object: {line[:80]!r}")
        if "error" in answer:
            raise RefusalError(str(answer["error"]))
        return answer

    def _line(self, deadline: float, timeout: float) -> bytes:
        """The next line of its output."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._read:
                if not waiting.select(max(deadline - time.monotonic(), 0)):
                    self.close()
                    raise WorkerError(f"no answer within {timeout:g} s")
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                if not part:
                    raise self._died()
                self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _died(self) -> WorkerError:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:  # it lives, but has closed its output
            self._process.kill()
            code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        words = [line.strip() for line in lines if line.strip()]
        self.close()
        how = f"ended with code {code}" if code >= 0 else f"was ended by signal {-code}"
        return WorkerError(f"{how}: {words[-1][:300] if words else 'without a word'}")

    def close(self) -> None:
        """End it, and what it has started; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError):  # compilers that it started are in its group
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # nobody reads what was left to be written
                pipe.close()


class Seat:
    """One of several contenders that share a process, and with it the target and the engine.

    Args:
        name: of the contender.
        worker: the process, which several seats have.
        contender: what it is, as the process is told.
        taken: names of the seats that are in use; the last one ends the process.
    """

    def __init__(
        self, name: str, worker: Worker, contender: dict[str, Any], taken: set[str]
    ) -> None:
        self.name, self._worker, self._contender, self._taken = name, worker, contender, taken
        taken.add(name)

    @property
    def threads(self) -> int | None:
        """That the process computes with."""
        return self._worker.threads

    def start(self, timeout: float) -> float:
        """Let the process load the target, if it has not, and what this contender needs beside it;
        seconds that it took.

        Raises:
            WorkerError: it cannot.
        """
        start = time.perf_counter()
        if not self._worker.started:
            self._worker.start(timeout)
        if self._worker.broken is not None:
            raise WorkerError(self._worker.broken)
        try:
            self._worker.ask(
                {"do": "join", "who": self.name, "contender": self._contender}, timeout
            )
        except RefusalError as error:
            raise WorkerError(str(error)) from error
        return time.perf_counter() - start

    def warm_up(
        self, prompts: list[list[int]], longest: int, new_tokens: int, timeout: float
    ) -> float:
        """See `Worker.warm_up`."""
        return self._worker.warm_up(prompts, longest, new_tokens, timeout, self.name)

    def decode(self, prompts: list[list[int]], new_tokens: int, timeout: float) -> Answer:
        """See `Worker.decode`."""
        return self._worker.decode(prompts, new_tokens, timeout, self.name)

    def close(self) -> None:
        """Leave; the last one ends the process."""
        self._taken.discard(self.name)
        if not self._taken:
            self._worker.close()


def quiet_environment() -> dict[str, str]:
    """Ours, but for settings that let the threads of a waiting process keep a core busy."""
    kept = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    return {**kept, "KMP_BLOCKTIME": "1", "TOKENIZERS_PARALLELISM": "false"}


def checked_answer(said: dict[str, Any], prompts: int, new_tokens: int, wall: float) -> Answer:
    """An answer, if it can be true.

    Args:
        said: the worker's line.
        prompts: of the batch.
        new_tokens: the most for each.
        wall: seconds that we waited.

    Raises:
        KeyError, TypeError, ValueError: it cannot.
    """
    answer = Answer(**said)
    if len(answer.tokens) != prompts:
        raise ValueError(f"{len(answer.tokens)} texts for {prompts} prompts")
    for text in answer.tokens:
        if not 1 <= len(text) <= new_tokens:
            raise ValueError(f"a text of {len(text)} tokens where 1 to {new_tokens} were asked for")
        if not all(type(token) is int and token >= 0 for token in text):
            raise ValueError("token ids are whole numbers from 0")
    if not (math.isfinite(answer.seconds) and 0 < answer.seconds <= wall):
        raise ValueError(f"took {answer.seconds:.3f} s of the {wall:.3f} s that we waited")
    if wall - answer.seconds > SLACK_SECONDS + SLACK_SHARE * wall:
        raise ValueError(f"claims {answer.seconds:.3f} s, but we waited {wall:.3f} s")
    if not 0 <= answer.prefill <= answer.seconds:
        raise ValueError(f"a prefill of {answer.prefill:.3f} s in {answer.seconds:.3f} s")
    if not prompts <= answer.first <= sum(map(len, answer.tokens)):
        raise ValueError(f"{answer.first} tokens of the prefill in {prompts} texts")
    return answer


# The worker's side ------------------------------------------------------------------------------


class Builder(Protocol):
    """Makes a handler from the first line."""

    def __call__(self, settings: dict[str, Any]) -> Handler | Crew:
        """Load what it needs."""


def serve(build: Builder, threads: Callable[[], int]) -> None:
    """Answer the lines of standard input until it ends.

    Args:
        build: called with the first line.
        threads: that it computes with; asked after that.
    """
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handler: Handler | Crew | None = None
    answer: dict[str, Any]
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if handler is None:
                handler = build(request)
                answer = {"ready": True, "threads": threads()}
            else:
                answer = respond(handler, request)
        except Exception as error:  # whatever it is, the parent reports it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        print(json.dumps(answer), file=channel, flush=True)


def respond(handler: Handler | Crew, request: dict[str, Any]) -> dict[str, Any]:
    """Do what a line asks for."""
    if request.get("who") is not None:  # of several that share this process
        assert isinstance(handler, Crew), "one contender alone has no names"
        if request["do"] == "join":
            handler.join(request["who"], request["contender"])
            return {"ready": True}
        handler = handler.member(request["who"])
    assert not isinstance(handler, Crew), "a crew is asked by name"
    prompts, new_tokens = request["prompts"], request["new_tokens"]
    if request["do"] == "warm_up":
        handler.warm_up(prompts, request["longest"], new_tokens)
        return {"ready": True}
    return vars(handler.decode(prompts, new_tokens))
