"""Answers by the target itself: exact ids, continued after a cut or Ctrl-C."""

import json
import shutil
from pathlib import Path

import httpx2
import pytest
import torch
from transformers import LlamaForCausalLM

from drafters import TargetModel
from scripts import generate_answers as script
from scripts.common import run
from tests.tiny import save_tiny_target
from tests.training.fake_server import FakeServer
from training.answers.server import answer_by_server

PROMPTS = ["Name a colour.", "two plus two?", "Say hello", "why", "Count to five, please."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and a file of prompts, one row of each kind that is taken."""
    folder = tmp_path_factory.mktemp("answers")
    save_tiny_target(folder / "target", dtype=torch.float32)
    rows: list[dict] = [{"prompt": text, "category": "qa"} for text in PROMPTS[:3]]
    rows.append({"turns": [PROMPTS[3], "really?"]})
    rows.append(
        {
            "messages": [
                {"role": "user", "content": PROMPTS[4]},
                {"role": "assistant", "content": "an old answer"},
            ]
        }
    )
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "prompts.jsonl").write_text(text)
    return folder


def arguments(folder: Path, out: Path, *rest: object) -> list[str]:
    paths = ["--target", folder / "target", "--prompts", folder / "prompts.jsonl", "--out", out]
    return [str(a) for a in [*paths, "--max-new-tokens", 12, "--batch-size", 2, *rest]]


def records(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def parts_written(row: dict) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of every turn, by the exact ids."""
    if "answer_ids" in row:
        return [(row["prompt_ids"], row["answer_ids"])]
    return [
        (one["ids"][:start], one["ids"][start:end])
        for one in row["token_rows"]
        for start, end in one["spans"]
    ]


def tokens_written(row: dict) -> int:
    return sum(len(written) for _, written in parts_written(row))


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_prompt_is_answered_by_the_target(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    script.main(arguments(folder, out))
    record = last_json(capsys)
    assert (record["prompts"], record["written"], record["answers"]) == (5, 5, 5)

    target = TargetModel.load(str(folder / "target"))
    rows = {row["messages"][0]["content"]: row for row in records(out)}
    assert rows.keys() == set(PROMPTS)
    assert rows[PROMPTS[0]]["category"] == "qa"
    for prompt, row in rows.items():
        said = [message["content"] for message in row["messages"] if message["role"] == "user"]
        assert said == ([prompt, "really?"] if prompt == PROMPTS[3] else [prompt])
        answers = parts_written(row)
        assert len(answers) == len(said)
        for number, (before, written) in enumerate(answers):
            history = row["messages"][: 2 * number + 1]
            ids = target.tokenizer.apply_chat_template(
                history, add_generation_prompt=True, return_dict=False
            )
            alone = target.model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                max_new_tokens=12,
                do_sample=False,
            )[0, len(ids) :].tolist()
            assert (before, written) == (ids, alone)
            text = target.tokenizer.decode(alone, skip_special_tokens=True)
            assert row["messages"][2 * number + 1] == {"role": "assistant", "content": text}


def test_a_cut_last_line_is_answered_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    script.main(arguments(folder, whole))
    lines = whole.read_bytes().splitlines(keepends=True)
    cut.write_bytes(b"".join(lines[:2]) + lines[2][:40])
    capsys.readouterr()

    script.main(arguments(folder, cut))
    record = last_json(capsys)
    assert (record["written"], record["answers"]) == (3, 5)
    assert {row["id"]: row for row in records(cut)} == {row["id"]: row for row in records(whole)}


def test_a_finished_file_is_left_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    script.main(arguments(folder, out))
    before = out.read_bytes()
    script.main(arguments(folder, out))
    assert last_json(capsys)["written"] == 0
    assert out.read_bytes() == before


def test_limit_takes_the_first(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(arguments(folder, tmp_path / "out.jsonl", "--limit", 2))
    assert last_json(capsys)["prompts"] == 2
    found = {row["messages"][0]["content"] for row in records(tmp_path / "out.jsonl")}
    assert found == set(PROMPTS[:2])


def test_sampling_depends_on_the_seed_alone(folder: Path, tmp_path: Path) -> None:
    answers = []
    for number, seed in enumerate((1, 1, 2)):
        out = tmp_path / f"{number}.jsonl"
        script.main(arguments(folder, out, "--temperature", 2.0, "--seed", seed))
        answers.append([parts_written(row) for row in records(out)])
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (("--limit", 0), "--limit must be at least 1"),
        (("--temperature", -1), "temperature must be at least 0"),
        (("--prompts", "nowhere.jsonl"), "cannot read 'nowhere.jsonl'"),
        (("--target", "no/such/target"), "target 'no/such/target'"),
    ],
)
def test_errors_are_one_line(
    folder: Path,
    tmp_path: Path,
    rest: tuple[object, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run(lambda: script.main(arguments(folder, tmp_path / "out.jsonl", *rest)))
    assert exit_info.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]


def test_an_interrupt_keeps_what_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    generate = LlamaForCausalLM.generate
    calls = []

    def stop_at_the_second(self: object, *args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "generate", stop_at_the_second)
        with pytest.raises(SystemExit) as exit_info:
            run(lambda: script.main(arguments(folder, out)))
    assert exit_info.value.code == 130
    assert len(records(out)) == 1, "the other of the first batch has a turn to go"
    script.main(arguments(folder, out))
    assert len(records(out)) == 5


def test_a_base_model_is_given_a_template(folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(folder / "target", base)
    template = tmp_path / "chat.jinja"
    (base / "chat_template.jinja").rename(template)
    ask = [*arguments(folder, tmp_path / "answers.jsonl"), "--target", str(base), "--limit", "1"]
    with pytest.raises(ValueError, match="--chat-template FILE"):
        script.main(ask)
    script.main([*ask, "--chat-template", str(template)])
    assert len(records(tmp_path / "answers.jsonl")) == 1


def test_several_answers_per_prompt(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sample s of seed n is the answer of seed n + s."""
    out, alone = tmp_path / "answers.jsonl", tmp_path / "alone.jsonl"
    script.main(arguments(folder, out, "--temperature", 1, "--samples", 2, "--seed", 3))
    record = last_json(capsys)
    assert (record["prompts"], record["written"], record["answers"]) == (5, 10, 10)
    assert record["answer_tokens"] == sum(tokens_written(row) for row in records(out))
    script.main(arguments(folder, alone, "--temperature", 1, "--seed", 4))
    assert records(alone) == records(out)[5:]
    assert len({row["id"] for row in records(out)}) == 10


def test_enough_tokens_stop_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    more = ("--temperature", 1, "--samples", 1000, "--min-tokens", 150)
    script.main(arguments(folder, out, *more))
    found = last_json(capsys)["answer_tokens"]
    assert 150 <= found < 150 + 5 * 12 + 1
    script.main(arguments(folder, out, *more))
    assert last_json(capsys)["written"] == 0


@pytest.mark.parametrize(
    "more",
    [
        ("--samples", 0),
        ("--samples", 2),
        ("--samples", 3, "--temperatures", 0, 1),
    ],
)
def test_samples_need_a_temperature(folder: Path, tmp_path: Path, more: tuple) -> None:
    with pytest.raises(ValueError, match=r"--samples must be at least 1.*--temperature above 0"):
        script.main(arguments(folder, tmp_path / "answers.jsonl", *more))


# --- temperatures, and a server


def ask_server(folder: Path, out: Path, *rest: object, target: bool = False) -> list[str]:
    paths = ["--server", "http://fake", "--prompts", folder / "prompts.jsonl", "--out", out]
    paths += ["--target", folder / "target"] if target else []
    return [str(a) for a in [*paths, "--max-new-tokens", 12, *rest]]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """What `--server` reaches; the weights of a target may not be loaded."""
    server = FakeServer()

    def through_fake(*args: object) -> object:
        return answer_by_server(
            *args, progress=False, transport=server.transport, sleep=server.sleep
        )

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the target's weights were loaded")

    monkeypatch.setattr(script, "answer_by_server", through_fake)
    monkeypatch.setattr(TargetModel, "load", refuse)
    return server


@pytest.mark.parametrize("target", [False, True], ids=["no target", "its tokenizer"])
def test_a_server_answers(
    folder: Path,
    tmp_path: Path,
    server: FakeServer,
    target: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "answers.jsonl"
    script.main(ask_server(folder, out, "--batch-size", 2, target=target))
    record = last_json(capsys)
    assert (record["written"], record["answers"], record["failed"]) == (5, 5, 0)
    assert server.most == 2
    assert {row["messages"][0]["content"] for row in records(out)} == set(PROMPTS)
    assert sum(len(row["written"]) for row in records(out)) == 6
    script.main(ask_server(folder, out, target=target))
    assert last_json(capsys)["written"] == 0


def test_samples_take_the_temperatures_in_turn(
    folder: Path, tmp_path: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    script.main(ask_server(folder, out, "--samples", 3, "--temperatures", 0, 0.5, 1))
    record = last_json(capsys)
    assert (record["written"], record["temperatures"]) == (15, [0.0, 0.5, 1.0])
    for prompt in PROMPTS:
        used = [r["temperature"] for r in records(out) if r["messages"][0]["content"] == prompt]
        assert sorted(used) == [0.0, 0.5, 1.0]


def test_failures_are_in_the_summary(
    folder: Path, tmp_path: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = server.respond
    server.respond = lambda body: (
        httpx2.Response(400, text="no") if "hello" in str(body) else answer(body)
    )
    script.main(ask_server(folder, tmp_path / "answers.jsonl"))
    record = last_json(capsys)
    assert (record["written"], record["failed"]) == (4, 1)
    assert record["failures"][0]["prompt"] == "Say hello"


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (("--dtype", "float32"), "--dtype has no effect with --server"),
        (("--threads", 1), "--threads has no effect with --server"),
        (("--max-prompt-tokens", 9), "--max-prompt-tokens needs the tokenizer"),
        (("--chat-template", "x.jinja"), "--chat-template needs the tokenizer"),
        (("--temperature", 1, "--temperatures", 1), "--temperature has no effect beside"),
        (("--temperatures", 1, 1), "name each once"),
        (("--retries", -1), "retries must be at least 0"),
        (("--server", "localhost"), "must be an address"),
    ],
)
def test_options_without_effect_are_refused_with_a_server(
    folder: Path, tmp_path: Path, server: FakeServer, rest: tuple, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        script.main(ask_server(folder, tmp_path / "answers.jsonl", *rest))


@pytest.mark.parametrize("name", ["--model", "--key-env", "--timeout", "--retries"])
def test_options_of_a_server_need_one(folder: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has no effect without --server"):
        script.main(arguments(folder, tmp_path / "answers.jsonl", name, 1))
    with pytest.raises(ValueError, match="--target, or where it is served with --server"):
        script.main(["--prompts", "x", "--out", "y"])
