"""An OpenAI-compatible server in this process: what it answers is decided by the test."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2

Respond = Callable[[dict[str, Any]], Any]


def completion(text: str | None = "fine", finish: str = "stop", **fields: Any) -> httpx2.Response:
    """A chat completion; ``prompt_token_ids``, ``usage`` and ``token_ids`` may be given."""
    choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
    choice |= {"index": 0, "finish_reason": finish}
    for name in ("token_ids",):
        if name in fields:
            choice[name] = fields.pop(name)
    choice["message"] |= fields.pop("message", {})
    return httpx2.Response(200, json={"choices": [choice], **fields})


def last_said(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"]


class FakeServer:
    """Counts, and hands every chat request to ``respond``.

    Attributes:
        bodies: chat requests, as they came.
        keys: Authorization headers.
        most: requests in flight at most.
        pauses: what the client slept.
        models: names offered; None answers 404.
    """

    def __init__(self, respond: Respond | None = None, models: Any = ("tiny",)) -> None:
        self.respond = respond or (lambda body: completion(f"to {last_said(body)}"))
        self.models = models
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.pauses: list[float] = []
        self.most = self._now = 0

    @property
    def transport(self) -> httpx2.MockTransport:
        return httpx2.MockTransport(self._handle)

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)

    async def _handle(self, request: httpx2.Request) -> httpx2.Response:
        self.paths.append(request.url.path)
        self.keys.append(request.headers.get("authorization"))
        if request.url.path.endswith("/models"):
            if self.models is None:
                return httpx2.Response(404)
            return httpx2.Response(200, json={"data": [{"id": name} for name in self.models]})
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(0)
        try:
            body = json.loads(request.content)
            self.bodies.append(body)
            answer = self.respond(body)
            if isinstance(answer, Exception):
                raise answer
            return answer
        finally:
            self._now -= 1
