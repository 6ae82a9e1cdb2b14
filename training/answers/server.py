"""Answers from an OpenAI-compatible server of the target (vLLM, SGLang, llama.cpp, transformers).

Conversations are answered side by side, a bounded number at a time, and each is written as soon as
it is complete. A request that the server fails is repeated with growing pauses; a prompt that it
refuses for good is counted and named, and loses no other; where it is a later turn of its
conversation, that ends there and keeps the turns before.

    transformers serve HuggingFaceTB/SmolLM2-135M-Instruct --port 8000
    python -m scripts.generate_answers --server http://localhost:8000/v1 --prompts prompts.jsonl \\
        --out answers.jsonl

Where the server returns token ids they are kept and training is exact. Where it does not, the
messages are kept, and training masks them by rendering.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from training.answers.client import (
    PromptFailed,
    PromptRefused,
    ServerClient,
    ServerError,
    ServerOptions,
    Sleep,
)
from training.answers.conversations import Conversation
from training.answers.file import Answered, AnswerFile, AnswerOptions, plan
from training.data.chat import encode_prompt
from training.data.messages import MaskError

logger = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 20
"""So many prompts that fail one after the other stop the run: it is not the prompts."""


def answer_by_server(
    server: ServerOptions,
    rows: Sequence[dict[str, Any]],
    out: Path,
    options: AnswerOptions,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = True,
    transport: httpx2.AsyncBaseTransport | None = None,
    sleep: Sleep = asyncio.sleep,
) -> Answered:
    """Answer every row that ``out`` does not hold yet and append the results to it.

    Args:
        server: where the target is served.
        rows: as for :func:`~training.answers.local.generate_answers`.
        out: JSONL file; a line is written when its conversation is complete.
        options: ``batch_size`` is the number of requests in flight.
        tokenizer: the target's, where it is at hand: prompts of more than ``max_prompt_tokens`` are
            then left out, and a server whose chat template is another is warned of.
        progress: show a progress bar.
        transport: what carries the requests; None is the network.
        sleep: how pauses are made.

    Raises:
        ValueError: no prompts, a row without a prompt, ``out`` holds something else than answers,
            the server cannot be reached, refuses the key or does not know the model, no prompt
            could be answered, or too many failed one after the other.
    """

    async def work() -> Answered:
        async with ServerClient(server, options.batch_size, transport, sleep) as client:
            model = await client.choose_model()
            answered = Answered([f"served:{model}"])
            planned = plan(rows, options, answered.made_by)
            with AnswerFile(out) as file:
                waiting = [one for one in planned if one.key not in file.done]
                run = _Run(client, file, options, tokenizer, answered)
                await run.answer([one for one in waiting if run.fits(one)], progress)
            return answered

    answered = asyncio.run(work())
    answered.report(options.max_prompt_tokens)
    return answered


class _Run:
    """One call: workers that take conversations from one list until it is empty."""

    def __init__(
        self,
        client: ServerClient,
        file: AnswerFile,
        options: AnswerOptions,
        tokenizer: PreTrainedTokenizerBase | None,
        answered: Answered,
    ) -> None:
        self.client, self.file, self.options = client, file, options
        self.tokenizer, self.answered = tokenizer, answered
        self._in_a_row = 0
        self._warned = False

    async def answer(self, conversations: Sequence[Conversation], progress: bool) -> None:
        """Answer them all.

        Raises:
            ServerError: the run cannot go on.
            OSError: a line cannot be written.
        """
        bar: tqdm[Any] = tqdm(
            total=len(conversations),
            desc="answers",
            unit="answer",
            disable=None if progress else True,
        )
        left = iter(conversations)
        with bar:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self.options.batch_size, len(conversations))):
                        group.create_task(self._work(left, bar))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    def fits(self, one: Conversation) -> bool:
        """Whether its next prompt is short enough, as far as can be told here.

        Where not, it ends there; if nothing was answered before, it is counted.
        """
        if self.tokenizer is None:
            return True
        try:
            size = len(encode_prompt(self.tokenizer, one.messages, one.tools))
        except MaskError as error:
            one.stop()
            if not one.written:
                self.answered.fail(one, str(error))
            return False
        if size > self.options.max_prompt_tokens:
            one.stop()
            self.answered.left_out += not one.written
        return not one.done

    async def _work(self, left: Iterator[Conversation], bar: "tqdm[Any]") -> None:
        for one in left:
            try:
                await self._converse(one)
            except PromptFailed as error:
                self._failed(one, str(error))
            else:
                self._in_a_row = 0
                self.file.add([one])
                self.answered.written += 1
            bar.update(1)

    async def _converse(self, one: Conversation) -> None:
        """Fill the gaps of a conversation in order, up to a later one that does not fit or is
        refused.

        Raises:
            PromptFailed: nothing is answered, or another try may go further.
        """
        seed = (self.options.seed + int(one.key[:7], 16)) % 2**31
        while not one.done and (not one.written or self.fits(one)):
            try:
                reply = await self.client.complete(
                    one.messages, one.tools, one.temperature, self.options.max_new_tokens, seed
                )
            except PromptRefused as error:
                if not one.written:
                    raise
                one.stop()
                self.answered.endings.append(str(error))
                break
            self._compare_templates(one, reply.prompt_tokens)
            ids = (reply.prompt_ids, reply.answer_ids)
            one.add(reply.message, reply.finish, *ids, tokens=reply.answer_tokens)
        one.answered_by = self.client.model

    def _failed(self, one: Conversation, reason: str) -> None:
        self.answered.fail(one, reason)
        self._in_a_row += 1
        if self._in_a_row >= FAILURES_IN_A_ROW:
            raise ServerError(
                f"answers: {self._in_a_row} prompts failed one after the other, the last by: "
                f"{reason}. {self.answered.written} answers were written before; the same command "
                "goes on from there"
            )

    def _compare_templates(self, one: Conversation, prompt_tokens: int | None) -> None:
        """Warn, once, of a server that renders prompts otherwise than training will."""
        if self.tokenizer is None or prompt_tokens is None or self._warned or one.written:
            return
        own = len(encode_prompt(self.tokenizer, one.messages, one.tools))
        if own != prompt_tokens:
            self._warned = True
            logger.warning(
                "the server counts %d tokens in a prompt that the target's own chat template "
                "renders to %d: serve the target with the template it is trained with, or its "
                "answers are to other prompts",
                prompt_tokens,
                own,
            )
