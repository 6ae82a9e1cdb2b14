"""Answers from a real server on loopback: `transformers serve` with a tiny random model."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from drafters import TargetModel
from tests.tiny import CHARACTERS, SPECIALS, save_tiny_target
from training.answers.client import ServerError, ServerOptions
from training.answers.file import AnswerOptions
from training.answers.local import answer_rows, generate_answers
from training.data.chat import encode_rows_of

MISSING = [name for name in ("fastapi", "uvicorn", "openai") if not importlib.util.find_spec(name)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"no {MISSING}: pip install 'transformers[serving]'"),
]
ROOT = Path(__file__).resolve().parents[3]
ROWS: list[dict[str, Any]] = [{"prompt": text} for text in ("hi", "one two three", "say 4")]
ROWS += [{"turns": ["name a colour", "and another", "why"]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All it writes is characters that its tokenizer reads again as they are."""
    size = len(SPECIALS) + len(CHARACTERS)
    target = tmp_path_factory.mktemp("served") / "target"
    return save_tiny_target(target, torch.float32, layers=3, vocab=size)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """Its address, once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder)]
    log = folder.parent / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            wait_for(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.kill()
            process.wait()


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    for _ in range(1200):
        try:
            if httpx2.get(f"{url}/health").is_success:
                return
        except httpx2.TransportError:
            time.sleep(0.2)
        assert process.poll() is None, log.read_text()
    raise AssertionError(f"the server does not answer: {log.read_text()}")


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_server_answers_as_the_target_does(server: str, folder: Path, tmp_path: Path) -> None:
    """Greedy, turn by turn, with its model found by its list; and what it wrote can be trained."""
    target = TargetModel.load(str(folder))
    options = AnswerOptions(max_new_tokens=12, batch_size=3)
    answered = answer_rows(target, ROWS, tmp_path / "served.jsonl", options, ServerOptions(server))
    assert (answered.written, answered.failures) == (4, [])
    assert answered.made_by == [f"served:{folder}"]
    generate_answers(target, ROWS, tmp_path / "own.jsonl", options, progress=False)

    def texts(name: str) -> dict[str, list[str]]:
        found = [row["messages"] for row in read(tmp_path / name)]
        return {talk[0]["content"]: [message["content"] for message in talk] for talk in found}

    assert texts("served.jsonl") == texts("own.jsonl")
    for row in read(tmp_path / "served.jsonl"):
        (encoded,) = encode_rows_of(target.tokenizer, row)
        assert any(encoded.supervised) and row["answered_by"] == str(folder)
        cut = sum(one["finish"] == "length" for one in row["written"])
        marked = [i for i, flag in zip(encoded.ids, encoded.supervised, strict=True) if flag]
        assert marked.count(target.tokenizer.eos_token_id) == len(row["written"]) - cut


def test_a_temperature_has_an_effect(server: str, folder: Path, tmp_path: Path) -> None:
    """Although the target is greedy by its own generation config, which the server follows."""
    target = TargetModel.load(str(folder))
    found = []
    for temperature in (0.0, 2.0):
        options = AnswerOptions(max_new_tokens=12, temperatures=(temperature,))
        out = tmp_path / f"{temperature}.jsonl"
        answer_rows(target, ROWS[:3], out, options, ServerOptions(server), progress=False)
        found.append({row["messages"][0]["content"]: row["messages"][1] for row in read(out)})
    assert all(found[0][prompt] != found[1][prompt] for prompt in found[0])


def test_an_unknown_model_is_named(server: str, folder: Path, tmp_path: Path) -> None:
    wrong = ServerOptions(server, model="other")
    with pytest.raises(ServerError, match=f"does not offer 'other': it offers {folder}"):
        answer_rows(TargetModel.load(str(folder)), ROWS, tmp_path / "x", AnswerOptions(), wrong)


def test_killed_twice_every_prompt_is_answered_once(server: str, tmp_path: Path) -> None:
    """SIGKILL in the middle, twice, with answers in flight; the same command goes on."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    asked = [f"say {number}" for number in range(60)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    command = [sys.executable, "-m", "scripts.generate_answers", "--server", server]
    command += ["--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "32"]
    command += ["--batch-size", "4", "--temperatures", "0", "1"]

    def lines() -> int:
        return out.read_bytes().count(b"\n") if out.exists() else 0

    for stop_at in (10, 30):
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        while lines() < stop_at:
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert lines() < 60
    before = lines()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    record = json.loads(done.stdout.splitlines()[-1])
    assert (record["written"], record["answers"], record["failed"]) == (60 - before, 60, 0)
    found = read(out)
    assert sorted(row["messages"][0]["content"] for row in found) == sorted(asked)
    assert len({row["id"] for row in found}) == 60
    assert {row["temperature"] for row in found} == {0.0, 1.0}
