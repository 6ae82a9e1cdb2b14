"""Chat completions of an OpenAI-compatible server: one request, repeated until it succeeds.

Answers must follow the plain law of the target, as a head will draft for it. Servers take defaults
from the model's generation config (top-k, penalties), so these are switched off in the way of each
kind of server; fields that a server refuses are left out from then on.
"""

import asyncio
import datetime
import email.utils
import json
import logging
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx2

from training.data.messages import MaskError, Message, clean_messages, to_server

logger = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[Any]]

RETRIED = (408, 409, 429)
"""Statuses below 500 that another try may mend."""
REFUSED = (400, 413, 422)
"""Statuses that say what is wrong with the prompt itself: it is too long, most often."""
FIRST_PAUSE, LONGEST_PAUSE, LONGEST_ASKED_PAUSE = 1.0, 60.0, 300.0
CONNECT_TIMEOUT = 10.0


class ServerError(ValueError):
    """The server cannot be used; the run ends."""


class PromptFailed(Exception):
    """One prompt cannot be answered; the others may."""


class PromptRefused(PromptFailed):
    """The server answered that it never will, or held the answer back."""


@dataclass(frozen=True)
class ServerOptions:
    """Where and how to ask.

    Attributes:
        url: of the server, as http://localhost:8000/v1; without a path, /v1 is meant.
        model: name under which the target is served; None where it serves a single one.
        key_env: environment variable that holds the key, where the server needs one.
        timeout: seconds that one answer may take.
        retries: how often a failed request is repeated.
    """

    url: str
    model: str | None = None
    key_env: str = "OPENAI_API_KEY"
    timeout: float = 600.0
    retries: int = 6

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"server must be an address as http://host:8000/v1, got {self.url!r}")
        if self.timeout <= 0:
            raise ValueError(f"timeout must be above 0 seconds, got {self.timeout}")
        if self.retries < 0:
            raise ValueError(f"retries must be at least 0, got {self.retries}")

    @property
    def base(self) -> str:
        """The address that paths are appended to."""
        url = httpx2.URL(self.url)
        return str(url.copy_with(path="/v1") if url.path in ("", "/") else url).rstrip("/")


@dataclass(frozen=True)
class Reply:
    """One answer.

    Attributes:
        message: the assistant's.
        finish: "stop", or "length" where it was cut short.
        prompt_ids: what the server says the target saw; None where it does not.
        answer_ids: what the target wrote; None where the server does not say.
        prompt_tokens: length of the prompt by the server's count, where it gives one.
        answer_tokens: length of the answer, likewise.
    """

    message: Message
    finish: str
    prompt_ids: list[int] | None
    answer_ids: list[int] | None
    prompt_tokens: int | None
    answer_tokens: int | None


def plain_law(kind: int, temperature: float) -> dict[str, Any]:
    """Fields beyond the standard that ask for token ids and switch a server's own defaults off.

    Args:
        kind: 0 for serving engines (vLLM, SGLang, llama.cpp), 1 for ``transformers serve``, whose
            temperature has no effect on a target that is greedy by default, 2 for none.
        temperature: of this request.
    """
    if kind == 0:
        return {"return_token_ids": True, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    if kind == 1:
        law = {"do_sample": temperature > 0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
        return {"generation_config": json.dumps(law)}
    return {}


class ServerClient:
    """A connection to the server, to be entered and left.

    Args:
        options: see :class:`ServerOptions`.
        concurrency: requests in flight at most.
        transport: what carries the requests; None is the network.
        sleep: how pauses are made.
    """

    def __init__(
        self,
        options: ServerOptions,
        concurrency: int,
        transport: httpx2.AsyncBaseTransport | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.options = options
        self.model = options.model or ""
        key = os.environ.get(options.key_env)
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(options.timeout, connect=CONNECT_TIMEOUT, pool=None),
            limits=httpx2.Limits(max_connections=concurrency),
            transport=transport,
        )
        self._sleep = sleep
        self._random = random.Random()
        self._kind = 0
        self._settled = False

    async def __aenter__(self) -> "ServerClient":
        """Nothing is asked yet."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def choose_model(self) -> str:
        """The name to ask for: the given one, or the single one that the server offers.

        Raises:
            ServerError: the server cannot be reached, or offers no such model; it lists those.
        """
        try:
            offered = await self._offered()
        except PromptFailed as error:
            raise ServerError(
                f"server {self.options.base}: {error}. Is it running, and is the address right?"
            ) from error
        if offered is None and not self.model:
            raise ServerError(
                f"server {self.options.base} does not list its models: name one with --model"
            )
        if offered is not None and self.model not in offered:
            if self.model or len(offered) != 1:
                asked = f"does not offer {self.model!r}" if self.model else "needs --model"
                raise ServerError(
                    f"server {self.options.base} {asked}: it offers {', '.join(offered) or 'none'}"
                )
            self.model = offered[0]
        return self.model

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        temperature: float,
        max_new_tokens: int,
        seed: int,
    ) -> Reply:
        """The next assistant turn.

        Raises:
            PromptRefused: the server refuses this prompt.
            PromptFailed: it fails it however often it is asked.
            ServerError: it refuses the key, or knows the model no longer.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": to_server(messages),
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": 1.0,
        }
        if temperature > 0:
            body["seed"] = seed
        if tools:
            body["tools"] = list(tools)
        while True:
            kind = self._kind
            extra = plain_law(kind, temperature)
            response = await self._send("POST", "/chat/completions", {**body, **extra})
            self._settled |= response.is_success
            named = any(name in response.text for name in extra)
            # Errors may repeat the whole request: what worked once is not what is wrong with it.
            if self._settled or response.status_code not in (400, 422) or not named:
                break
            if self._kind != kind:  # another request in flight has found out before
                continue
            self._kind += 1
            if self._kind == 2:
                logger.warning(
                    "the server takes no fields that switch off its own sampling defaults: answers "
                    "follow the target's generation config"
                )
        if response.status_code == 404:
            offered = await self._offered()
            raise ServerError(
                f"server {self.options.base} has no model {self.model!r} for chat completions "
                f"({_text(response)}): it offers {', '.join(offered or ()) or 'none'}"
            )
        if not response.is_success:
            failure = PromptRefused if response.status_code in REFUSED else PromptFailed
            raise failure(f"status {response.status_code}: {_text(response)}")
        return read_reply(response)

    async def _offered(self) -> list[str] | None:
        """Names of the models; None where the server does not list them."""
        response = await self._send("GET", "/models", retries=min(2, self.options.retries))
        if response.status_code in (404, 405, 501):
            return None
        try:
            return [str(entry["id"]) for entry in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise PromptFailed(
                f"status {response.status_code}, and no list of models: {_text(response)}"
            ) from error

    async def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        retries: int | None = None,
    ) -> httpx2.Response:
        """A response that another try would not change.

        Raises:
            PromptFailed: all tries failed.
            ServerError: the server refuses the key.
        """
        tries = 1 + (self.options.retries if retries is None else retries)
        for attempt in range(tries):
            asked = None
            try:
                response = await self._http.request(method, self.options.base + path, json=body)
            except httpx2.TransportError as error:
                reason = f"{type(error).__name__} {error}".strip()
            else:
                status = response.status_code
                if status in (401, 403):
                    raise ServerError(
                        f"server {self.options.base} refuses the request ({status}): put its key "
                        f"into the environment variable {self.options.key_env}"
                    )
                if status not in RETRIED and status < 500:
                    return response
                reason, asked = f"status {status}: {_text(response)}", retry_after(response)
            if attempt + 1 < tries:
                await self._sleep(self._pause(attempt) if asked is None else asked)
        raise PromptFailed(f"{reason} (tried {tries} times)")

    def _pause(self, attempt: int) -> float:
        """Seconds before another try: doubled each time, and spread over those in flight."""
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * self._random.uniform(0.5, 1.0)


def read_reply(response: httpx2.Response) -> Reply:
    """The answer in a successful response.

    Raises:
        PromptFailed: there is none; PromptRefused: it was held back, or nothing of it is text.
    """
    try:
        data = response.json()
        choice = data["choices"][0]
        said, reason = choice["message"], choice.get("finish_reason")
        usage = data.get("usage") or {}
        prompt_ids, answer_ids = data.get("prompt_token_ids"), choice.get("token_ids")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise PromptFailed(f"the reply is no chat completion: {_text(response)}") from error
    if reason not in ("stop", "length", "tool_calls"):
        failure = PromptRefused if reason == "content_filter" else PromptFailed
        raise failure(f"the answer ended by {reason!r}")
    finish = "length" if reason == "length" else "stop"
    message = {
        "role": "assistant",
        "content": said.get("content") or "",
        "reasoning_content": said.get("reasoning_content") or said.get("reasoning"),
        "tool_calls": said.get("tool_calls") or None,
    }
    exact = bool(prompt_ids and answer_ids)
    if finish == "length":
        # The last character may have been cut within; what is left of it is not the target's.
        message["content"] = message["content"].rstrip("\ufffd")
    if finish == "length" and not exact and not message["content"].strip():
        raise PromptRefused("the answer was cut short before its text began: allow longer ones")
    try:
        (cleaned,) = clean_messages([message])
    except MaskError as error:
        raise PromptRefused(str(error)) from error
    return Reply(
        cleaned,
        finish,
        list(prompt_ids) if exact else None,
        list(answer_ids) if exact else None,
        usage.get("prompt_tokens"),
        len(answer_ids) if exact else usage.get("completion_tokens"),
    )


def retry_after(response: httpx2.Response) -> float | None:
    """Seconds that the server asks to wait, by number or by date, up to a bound."""
    text = response.headers.get("retry-after", "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            until = email.utils.parsedate_to_datetime(text)
        except ValueError:
            return None
        seconds = (until - datetime.datetime.now(datetime.UTC)).total_seconds()
    return min(max(seconds, 0.0), LONGEST_ASKED_PAUSE)


def _text(response: httpx2.Response) -> str:
    return " ".join(response.text.split())[:300]
