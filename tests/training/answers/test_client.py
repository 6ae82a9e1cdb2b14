"""One request to a server: repeated where that helps, refused in words where it does not."""

import asyncio
import datetime
import email.utils
import json
from typing import Any

import httpx2
import pytest

from tests.training.fake_server import FakeServer, completion
from training.answers import client as server_client
from training.answers.client import (
    PromptFailed,
    Reply,
    ServerClient,
    ServerError,
    ServerOptions,
    plain_law,
    retry_after,
)

ASK = [{"role": "user", "content": "hi"}]


def ask(server: FakeServer, temperature: float = 0.0, tools: Any = (), **options: Any) -> Reply:
    """One answer, after the model was chosen."""
    given = ServerOptions(**{"url": "http://fake/v1", "retries": 4} | options)

    async def work() -> Reply:
        async with ServerClient(given, 4, server.transport, server.sleep) as client:
            await client.choose_model()
            return await client.complete(ASK, tools, temperature, 7, 5)

    return asyncio.run(work())


def failing(*statuses: int | Exception, headers: dict | None = None) -> FakeServer:
    """Fails so often, then answers."""
    left = list(statuses)

    def respond(body: dict) -> Any:
        if not left:
            return completion()
        status = left.pop(0)
        return status if isinstance(status, Exception) else httpx2.Response(status, headers=headers)

    return FakeServer(respond)


# --- what is asked, what is read


def test_a_request_asks_for_the_plain_law() -> None:
    server = FakeServer()
    assert ask(server).message == {"role": "assistant", "content": "to hi"}
    assert server.bodies == [
        {
            "model": "tiny",
            "messages": ASK,
            "max_tokens": 7,
            "temperature": 0.0,
            "top_p": 1.0,
            "return_token_ids": True,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    ask(server, 0.7, tools)
    assert (server.bodies[-1]["seed"], server.bodies[-1]["tools"]) == (5, tools)


def test_ids_are_taken_where_the_server_gives_both() -> None:
    both = FakeServer(lambda body: completion(prompt_token_ids=[1, 2], token_ids=[3, 4, 5]))
    reply = ask(both)
    assert (reply.prompt_ids, reply.answer_ids, reply.answer_tokens) == ([1, 2], [3, 4, 5], 3)
    usage = {"prompt_tokens": 9, "completion_tokens": 4}
    for ids in ({"prompt_token_ids": [1, 2]}, {"token_ids": [3]}):
        some = FakeServer(lambda body, ids=ids: completion(usage=usage, **ids))
        reply = ask(some)
        assert (reply.prompt_ids, reply.answer_ids) == (None, None)
        assert (reply.prompt_tokens, reply.answer_tokens) == (9, 4)


def test_thoughts_and_calls_of_tools_are_kept() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = {"content": None, "tool_calls": [call], "reasoning_content": "hm"}
    reply = ask(FakeServer(lambda body: completion(message=said, finish="tool_calls")))
    assert reply.finish == "stop"
    assert reply.message["content"] == ""
    assert reply.message["reasoning_content"] == "hm"
    assert reply.message["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_an_answer_cut_in_a_character_loses_what_is_left_of_it() -> None:
    reply = ask(FakeServer(lambda body: completion("caf\ufffd", "length")))
    assert (reply.message["content"], reply.finish) == ("caf", "length")
    whole = ask(FakeServer(lambda body: completion("a \ufffd", "stop")))
    assert whole.message["content"] == "a \ufffd", "the target wrote it"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (completion("x", "content_filter"), "ended by 'content_filter'"),
        (completion("", "length"), "cut short before its text began"),
        (completion(None, "length", message={"reasoning": "so"}), "cut short before its text"),
        (httpx2.Response(200, text="<html>"), "no chat completion: <html>"),
        (httpx2.Response(200, json={"choices": []}), "no chat completion"),
        (httpx2.Response(400, text="prompt too long"), "status 400: prompt too long"),
    ],
)
def test_a_refused_prompt_is_not_asked_again(reply: httpx2.Response, reason: str) -> None:
    server = FakeServer(lambda body: reply)
    with pytest.raises(PromptFailed, match=reason):
        ask(server)
    assert len(server.bodies) == 1 and server.pauses == []


# --- servers that know other fields


def test_fields_that_a_server_refuses_are_dropped() -> None:
    """As `transformers serve`, which takes a generation config instead, and as a strict server."""

    def transformers(body: dict) -> httpx2.Response:
        if unknown := {*body} & {*plain_law(0, 0.0)}:
            return httpx2.Response(422, json={"detail": f"Unexpected fields: {unknown}"})
        return completion()

    server = FakeServer(transformers)
    ask(server, temperature=0.5)
    first, second = server.bodies
    assert "top_k" in first and json.loads(second["generation_config"])["do_sample"] is True

    def strict(body: dict) -> httpx2.Response:
        for name in ("return_token_ids", "generation_config"):
            if name in body:
                return httpx2.Response(400, text=f"unknown argument {name}")
        return completion()

    server = FakeServer(strict)
    ask(server)
    assert {*server.bodies[-1]} == {"model", "messages", "max_tokens", "temperature", "top_p"}


def test_what_was_refused_once_is_not_tried_again() -> None:
    server = FakeServer(
        lambda body: httpx2.Response(422, text="top_k") if "top_k" in body else completion()
    )

    async def work() -> None:
        options = ServerOptions("http://fake", "tiny")
        async with ServerClient(options, 4, server.transport, server.sleep) as client:
            await asyncio.gather(*(client.complete(ASK, [], 0.0, 7, 5) for _ in range(4)))
            await client.complete(ASK, [], 0.0, 7, 5)

    asyncio.run(work())
    refused = [body for body in server.bodies if "top_k" in body]
    assert len(refused) == 4 and len(server.bodies) == 9
    assert all("generation_config" in body for body in server.bodies if body not in refused)


def test_an_error_that_repeats_the_request_refuses_no_field() -> None:
    """Once a request with them succeeded, it is the prompt that is wrong."""

    def respond(body: dict) -> httpx2.Response:
        if len(server.bodies) == 2:
            return httpx2.Response(400, json={"error": "too long", "input": body})
        return completion()

    server = FakeServer(respond)

    async def work() -> None:
        options = ServerOptions("http://fake", "tiny")
        async with ServerClient(options, 1, server.transport, server.sleep) as client:
            await client.complete(ASK, [], 0.0, 7, 5)
            with pytest.raises(PromptFailed, match="too long"):
                await client.complete(ASK, [], 0.0, 7, 5)
            await client.complete(ASK, [], 0.0, 7, 5)

    asyncio.run(work())
    assert len(server.bodies) == 3 and all("top_k" in body for body in server.bodies)


# --- tries


@pytest.mark.parametrize(
    "fault",
    [408, 409, 429, 500, 502, 503, 504, httpx2.ConnectError("down"), httpx2.ReadTimeout("late")],
    ids=str,
)
def test_passing_faults_are_tried_again(fault: int | Exception) -> None:
    server = failing(fault, fault)
    assert ask(server).message["content"] == "fine"
    assert len(server.bodies) == 3 and len(server.pauses) == 2


def test_pauses_grow_and_are_spread() -> None:
    server = failing(*[500] * 12)
    ask(server, retries=12)
    bounds = [min(60.0, 2.0**attempt) for attempt in range(12)]
    assert all(b / 2 <= p <= b for p, b in zip(server.pauses, bounds, strict=True))
    assert len({p / b for p, b in zip(server.pauses, bounds, strict=True)}) == 12


def test_the_server_says_how_long_to_wait() -> None:
    server = failing(429, 503, headers={"Retry-After": "17"})
    ask(server)
    assert server.pauses == [17.0, 17.0]


def test_retry_after_is_read_in_every_form() -> None:
    def of(text: str) -> float | None:
        return retry_after(httpx2.Response(429, headers={"Retry-After": text}))

    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=40)
    assert 30 < (of(email.utils.format_datetime(later, usegmt=True)) or 0) <= 40
    assert of("2.5") == 2.5 and of("86400") == server_client.LONGEST_ASKED_PAUSE
    assert of("-3") == 0 and of("soon") is None and of("") is None
    assert of(email.utils.format_datetime(later - datetime.timedelta(days=1))) == 0


def test_tries_end() -> None:
    server = failing(*[503] * 9)
    with pytest.raises(PromptFailed, match=r"status 503.*tried 3 times"):
        ask(server, retries=2)
    assert len(server.bodies) == 3 and len(server.pauses) == 2
    with pytest.raises(PromptFailed, match="ConnectError gone"):
        ask(failing(*[httpx2.ConnectError("gone")] * 9), retries=0)


# --- which model, which key


def test_the_single_model_is_taken() -> None:
    server = FakeServer(models=["org/only"])
    ask(server)
    assert server.bodies[0]["model"] == "org/only"
    server = FakeServer(models=["a", "b"])
    ask(server, model="b")
    assert server.bodies[0]["model"] == "b"


@pytest.mark.parametrize(
    ("models", "model", "message"),
    [
        (["a", "b"], None, "needs --model: it offers a, b"),
        ([], None, "needs --model: it offers none"),
        (["a", "b"], "c", "does not offer 'c': it offers a, b"),
        (["a"], "c", "does not offer 'c': it offers a"),
        (None, None, "does not list its models"),
    ],
)
def test_an_unknown_model_is_refused_with_those_there_are(
    models: list[str] | None, model: str | None, message: str
) -> None:
    with pytest.raises(ServerError, match=message):
        ask(FakeServer(models=models), model=model)


def test_a_server_without_a_list_takes_a_name() -> None:
    server = FakeServer(models=None)
    ask(server, model="mine")
    assert server.bodies[0]["model"] == "mine"


def test_a_model_that_is_gone_ends_the_run() -> None:
    server = FakeServer(lambda body: httpx2.Response(404, text="no such model"), ["tiny", "other"])
    with pytest.raises(ServerError, match=r"no model 'tiny'.*no such model.*tiny, other"):
        ask(server, model="tiny")


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("MY_KEY", "secret")
    server = FakeServer()
    ask(server)
    assert set(server.keys) == {None}
    server = FakeServer()
    ask(server, key_env="MY_KEY")
    assert set(server.keys) == {"Bearer secret"}


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_ends_the_run(status: int) -> None:
    with pytest.raises(ServerError, match=rf"\({status}\).*variable MY_KEY"):
        ask(FakeServer(lambda body: httpx2.Response(status)), key_env="MY_KEY")


def test_a_server_that_is_not_there_is_said_soon() -> None:
    def down(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused")

    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def work() -> None:
        options = ServerOptions("http://fake:1", retries=9)
        async with ServerClient(options, 1, httpx2.MockTransport(down), sleep) as client:
            await client.choose_model()

    with pytest.raises(ServerError, match=r"http://fake:1/v1: ConnectError refused.*Is it running"):
        asyncio.run(work())
    assert len(pauses) == 2


# --- options


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("http://h:1/v1", "http://h:1/v1"),
        ("https://h/api/v3/", "https://h/api/v3"),
    ],
)
def test_addresses(url: str, base: str) -> None:
    assert ServerOptions(url).base == base


@pytest.mark.parametrize(
    "changes", [{"url": "localhost:8000"}, {"timeout": 0.0}, {"retries": -1}], ids=str
)
def test_options_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=name.replace("url", "server")):
        ServerOptions(**{"url": "http://h"} | changes)
