"""Many prompts through a server: side by side, each once, none lost by another's failure."""

import json
import logging
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.tiny import tiny_tokenizer
from tests.training.fake_server import FakeServer, completion, last_said
from training.answers import server as answer_server
from training.answers.client import ServerOptions
from training.answers.file import Answered, AnswerOptions, select_answers
from training.answers.server import answer_by_server
from training.data.chat import encode_prompt, encode_rows_of

PROMPTS = ["hi", "one two three", "a", "what is 2+2?", "tell me more", "x y", "last"]
ROWS = [{"prompt": text, "category": f"c{i}"} for i, text in enumerate(PROMPTS)]
TURNS = [{"turns": ["one", "two", "three"]}]


def options(**changes: Any) -> AnswerOptions:
    return AnswerOptions(**{"max_new_tokens": 12, "batch_size": 3} | changes)


def answer(
    server: FakeServer,
    out: Path,
    rows: list[dict] = ROWS,
    tokenizer: Any = None,
    retries: int = 2,
    **changes: Any,
) -> Answered:
    where = ServerOptions("http://fake", retries=retries)
    given = {"transport": server.transport, "sleep": server.sleep, "progress": False}
    return answer_by_server(where, rows, out, options(**changes), tokenizer, **given)


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def by_prompt(out: Path) -> dict[str, str]:
    return {row["messages"][0]["content"]: row["messages"][1]["content"] for row in read(out)}


# --- what is written


def test_every_prompt_is_answered_once(tmp_path: Path) -> None:
    server, out = FakeServer(), tmp_path / "deep" / "out.jsonl"
    answered = answer(server, out)
    assert (answered.written, answered.failures) == (7, [])
    assert by_prompt(out) == {text: f"to {text}" for text in PROMPTS}
    row = next(row for row in read(out) if row["messages"][0]["content"] == "a")
    assert row == {
        "category": "c2",
        "answered_by": "tiny",
        "id": row["id"],
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "to a"}],
        "temperature": 0.0,
        "written": [{"turn": 1, "finish": "stop"}],
    }
    again = answer(server, out)
    assert again.written == 0 and len(server.bodies) == 7
    assert select_answers(ROWS, out, options(), again.made_by) == read(out)


def test_requests_in_flight_are_bounded_and_kept_up(tmp_path: Path) -> None:
    for size in (1, 3, 50):
        server = FakeServer()
        answer(server, tmp_path / f"{size}.jsonl", batch_size=size)
        assert server.most == min(size, 7)


def test_lines_are_written_as_answers_come(tmp_path: Path) -> None:
    """Not at the end: each answer is in the file before its worker asks again."""
    out, seen = tmp_path / "out.jsonl", []

    def respond(body: dict) -> httpx2.Response:
        seen.append(len(read(out)))
        return completion()

    answer(FakeServer(respond), out, batch_size=1)
    assert seen == [0, 1, 2, 3, 4, 5, 6]


def test_exact_ids_make_training_rows(tmp_path: Path) -> None:
    tokenizer, out = tiny_tokenizer(), tmp_path / "out.jsonl"

    def respond(body: dict) -> httpx2.Response:
        prompt = encode_prompt(tokenizer, body["messages"])
        ids = tokenizer("so")["input_ids"] + [tokenizer.eos_token_id]
        return completion("so", prompt_token_ids=prompt, token_ids=ids)

    answer(FakeServer(respond), out)
    for row in read(out):
        (encoded,) = encode_rows_of(tokenizer, row)
        assert encoded.ids == row["prompt_ids"] + row["answer_ids"]
        rendered = encode_rows_of(tokenizer, {"messages": row["messages"]})[0]
        assert encoded.ids == rendered.ids[:-1], "the template ends with a line break"


def test_turns_are_answered_in_order_with_the_new_history(tmp_path: Path) -> None:
    server, out = FakeServer(), tmp_path / "out.jsonl"
    answer(server, out, TURNS)
    assert [len(body["messages"]) for body in server.bodies] == [1, 3, 5]
    assert server.bodies[2]["messages"][:4] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "to one"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "to two"},
    ]
    (row,) = read(out)
    assert [m["content"] for m in row["messages"][::2]] == ["one", "two", "three"]
    assert [one["turn"] for one in row["written"]] == [1, 3, 5]


def test_a_cut_answer_trains_without_an_end(tmp_path: Path) -> None:
    tokenizer, out = tiny_tokenizer(), tmp_path / "out.jsonl"
    answer(FakeServer(lambda body: completion("so it", "length")), out, ROWS[:1])
    (row,) = read(out)
    (encoded,) = encode_rows_of(tokenizer, row)
    marked = [i for i, flag in zip(encoded.ids, encoded.supervised, strict=True) if flag]
    assert tokenizer.decode(marked) == "so it"


def test_temperatures_are_dealt(tmp_path: Path) -> None:
    rows = [{"prompt": f"say {i}"} for i in range(60)]
    server, out = FakeServer(), tmp_path / "out.jsonl"
    answer(server, out, rows, temperatures=(0.0, 0.7, 1.0))
    counts = [sum(row["temperature"] == t for row in read(out)) for t in (0.0, 0.7, 1.0)]
    assert sum(counts) == 60 and min(counts) > 8
    asked = {last_said(body): body["temperature"] for body in server.bodies}
    assert asked == {row["messages"][0]["content"]: row["temperature"] for row in read(out)}
    seeds = [body["seed"] for body in server.bodies if body["temperature"] > 0]
    assert len(set(seeds)) == len(seeds) and not any(
        "seed" in body for body in server.bodies if body["temperature"] == 0
    )


# --- failures


def test_a_failing_prompt_loses_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def respond(body: dict) -> httpx2.Response:
        if last_said(body) == "a":
            return httpx2.Response(400, text="not this one")
        return completion()

    out = tmp_path / "out.jsonl"
    answered = answer(FakeServer(respond), out)
    assert answered.written == 6
    (failure,) = answered.failures
    assert (failure["prompt"], failure["reason"]) == ("a", "status 400: not this one")
    assert "1 prompts were not answered" in caplog.text and failure["id"] in caplog.text
    assert answer(FakeServer(), out).written == 1, "tried again"
    assert len(read(out)) == 7


def refusing(said: str, status: int = 400) -> FakeServer:
    def respond(body: dict) -> httpx2.Response:
        if last_said(body) == said:
            return httpx2.Response(status, text="context length exceeded")
        return completion(f"to {last_said(body)}")

    return FakeServer(respond)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_later_turn_that_is_refused_ends_its_conversation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """What was answered before is kept, as where the target answers in process."""
    out = tmp_path / "out.jsonl"
    answered = answer(refusing("three", status), out, [*TURNS, *ROWS])
    assert (answered.written, answered.failures) == (8, [])
    row = next(row for row in read(out) if row["messages"][0]["content"] == "one")
    assert [m["content"] for m in row["messages"]] == ["one", "to one", "two", "to two"]
    assert [one["turn"] for one in row["written"]] == [1, 3] and row["answered_by"] == "tiny"
    assert "1 conversations end before a turn" in caplog.text
    assert "context length exceeded" in caplog.text
    assert answer(FakeServer(), out, [*TURNS, *ROWS]).written == 0


def test_a_first_turn_that_is_refused_fails(tmp_path: Path) -> None:
    answered = answer(refusing("one"), tmp_path / "out.jsonl", [*TURNS, *ROWS])
    assert (answered.written, len(answered.failures), answered.endings) == (7, 1, [])


@pytest.mark.parametrize("status", [402, 500])
def test_a_later_turn_that_another_try_may_answer_leaves_its_conversation_for_later(
    tmp_path: Path, status: int
) -> None:
    out = tmp_path / "out.jsonl"
    assert len(answer(refusing("three", status), out, [*TURNS, *ROWS]).failures) == 1
    assert len(read(out)) == 7
    assert answer(FakeServer(), out, [*TURNS, *ROWS]).written == 1


def test_many_failures_in_a_row_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_server, "FAILURES_IN_A_ROW", 3)
    out = tmp_path / "out.jsonl"

    def respond(body: dict) -> httpx2.Response:
        return completion() if len(server.bodies) <= 2 else httpx2.Response(500, text="dead")

    server = FakeServer(respond)
    with pytest.raises(ValueError, match=r"3 prompts failed.*dead.*2 answers were written"):
        answer(server, out, batch_size=1)
    assert len(read(out)) == 2
    assert answer(FakeServer(), out).written == 5


def test_failures_between_successes_do_not_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_server, "FAILURES_IN_A_ROW", 2)

    def respond(body: dict) -> httpx2.Response:
        return completion() if PROMPTS.index(last_said(body)) % 2 else httpx2.Response(400)

    answered = answer(FakeServer(respond), tmp_path / "out.jsonl", batch_size=1)
    assert (answered.written, len(answered.failures)) == (3, 4)


def test_nothing_answered_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none of 7 prompts.*status 400: never"):
        answer(FakeServer(lambda body: httpx2.Response(400, text="never")), tmp_path / "out.jsonl")


def test_a_full_disk_is_not_taken_for_a_failed_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, conversations: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(answer_server.AnswerFile, "add", full)
    with pytest.raises(OSError, match="No space left"):
        answer(FakeServer(), tmp_path / "out.jsonl")


# --- stopped and continued


def test_a_stopped_run_continues(tmp_path: Path) -> None:
    """Every prompt is answered once, whatever was in flight, and after a line cut by a kill."""
    out = tmp_path / "out.jsonl"

    def respond(body: dict) -> httpx2.Response:
        if len(server.bodies) == 5:
            raise KeyboardInterrupt
        return completion()

    server = FakeServer(respond)
    with pytest.raises(KeyboardInterrupt):
        answer(server, out)
    had = len(read(out))
    assert 0 < had < 7
    out.write_bytes(out.read_bytes()[:-30])
    assert answer(FakeServer(), out).written == 8 - had
    assert set(by_prompt(out)) == set(PROMPTS) and len(read(out)) == 7


def test_another_model_is_another_answer(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    answer(FakeServer(), out)
    assert answer(FakeServer(models=["bigger"]), out).written == 7
    assert len({row["id"] for row in read(out)}) == 14


# --- with the tokenizer at hand


def test_long_prompts_are_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": "short"}, {"prompt": "long " * 20}]
    out = tmp_path / "out.jsonl"
    answered = answer(FakeServer(), out, rows, tiny_tokenizer(), max_prompt_tokens=40)
    assert (answered.written, answered.left_out) == (1, 1)
    assert set(by_prompt(out)) == {"short"}


def test_a_later_turn_that_is_too_long_is_not_asked(tmp_path: Path) -> None:
    rows = [{"turns": ["hi", "long " * 30, "never asked"]}, {"turns": ["hi", "and you"]}]
    server, out = FakeServer(), tmp_path / "out.jsonl"
    answered = answer(server, out, rows, tiny_tokenizer(), max_prompt_tokens=60)
    assert (answered.written, answered.left_out, answered.failures) == (2, 0, [])
    assert sorted(len(row["messages"]) for row in read(out)) == [2, 4]
    assert len(server.bodies) == 3


def test_a_later_turn_that_the_template_refuses_is_not_asked(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    refuses = "{% if messages[-1].content == 'two' %}{{ raise_exception('not two') }}{% endif %}"
    tokenizer.chat_template = refuses + tokenizer.chat_template
    out = tmp_path / "out.jsonl"
    answered = answer(FakeServer(), out, TURNS, tokenizer)
    assert (answered.written, answered.failures) == (1, [])
    (row,) = read(out)
    assert [m["content"] for m in row["messages"]] == ["one", "to one"]


def test_another_chat_template_at_the_server_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tiny_tokenizer()

    def counted(more: int) -> FakeServer:
        def respond(body: dict) -> httpx2.Response:
            size = len(encode_prompt(tokenizer, body["messages"])) + more
            return completion(usage={"prompt_tokens": size, "completion_tokens": 2})

        return FakeServer(respond)

    with caplog.at_level(logging.WARNING):
        answer(counted(0), tmp_path / "same.jsonl", tokenizer=tokenizer)
        assert caplog.text == ""
        answer(counted(5), tmp_path / "other.jsonl", tokenizer=tokenizer)
    assert caplog.text.count("the server counts") == 1
