"""The quick start: commands that the called scripts understand, and how it ends."""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts import chat, evaluate, export, fetch_target, generate_answers, quickstart
from scripts.quickstart import Step, main, parse_args, run_step, steps
from training.config import parse_config

ROOT = Path(__file__).resolve().parents[2]
PARSERS: dict[str, Callable[[list[str]], Any]] = {
    "scripts.fetch_target": fetch_target.parse_args,
    "scripts.generate_answers": generate_answers.parse_args,
    "recipes.train": parse_config,
    "scripts.evaluate": evaluate.parse_args,
    "scripts.export": export.parse_args,
    "scripts.chat": chat.parse_args,
}
METHOD_STEPS = ["train", "measure", "export", "chat"]


def parsed(cuda: bool) -> dict[tuple[str, str], Any]:
    """What the called scripts make of all commands."""
    args = parse_args(["--out", "somewhere", "--threads", "3", "--heldout", "4", "--prompts", "9"])
    return {
        (step.name, step.method): PARSERS[step.command[0]](list(step.command[1:]))
        for step in steps(args, cuda)
    }


# The commands


@pytest.mark.parametrize("cuda", [False, True])
def test_every_command_line_is_understood(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = parsed(cuda)
    assert list(found) == [
        ("fetch", ""),
        ("answer", ""),
        *((name, "eagle3") for name in METHOD_STEPS),
        *((name, "medusa") for name in METHOD_STEPS),
    ]
    answer = found["answer", ""]
    assert (answer.limit, answer.threads, answer.out) == (9, 3, Path("somewhere/answers.jsonl"))
    for method in quickstart.METHODS:
        assert found["measure", method].limit == 4 and found["chat", method].trace


@pytest.mark.parametrize("cuda", [False, True])
def test_what_a_step_reads_an_earlier_one_has_written(
    cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    found = parsed(cuda)
    target = str(found["fetch", ""].out)
    for (name, method), args in found.items():
        if name == "train":
            assert args.target.name == target and args.drafter.family == method
            assert args.data.train == [str(found["answer", ""].out)]
            assert args.run.threads == 3
        elif name != "fetch":
            assert args.target == target
    for method in quickstart.METHODS:
        head = f"{found['train', method].run.out}/head"
        assert found["measure", method].head == found["export", method].head == head
        assert found["chat", method].head == found["export", method].out
    for name in ("prompts/train.jsonl", "prompts/heldout.jsonl"):
        assert (ROOT / "recipes" / name).is_file()
    assert found["answer", ""].prompts == "recipes/prompts/train.jsonl"
    assert found["measure", "eagle3"].prompts == "recipes/prompts/heldout.jsonl"


def test_all_steps_run_on_the_same_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU where there is no CUDA: accelerate would also take other devices."""
    monkeypatch.chdir(ROOT)
    for cuda, device in ((False, "cpu"), (True, "auto")):
        devices = [
            args.target.device if name == "train" else args.device or "auto"
            for (name, _), args in parsed(cuda).items()
            if name != "fetch"
        ]
        assert devices == [device] * 9


# Running them


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Step]:
    """A step that runs the given source."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(source: str) -> Step:
        (tmp_path / "some_step.py").write_text(source)
        return Step("measure", "eagle3", "do something", ("some_step",))

    return make


def test_a_step_is_shown_and_its_last_line_read(
    module: Callable[[str], Step], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_step(module('print("working"); print(\'{"speed": 2}\')')) == {"speed": 2}
    out = capsys.readouterr().out
    assert "== do something\n$ python -m some_step\nworking\n" in out
    assert run_step(module("print([1])")) == run_step(module("pass")) == {}


@pytest.mark.parametrize("source", ["raise SystemExit(2)", "print('{}'); raise SystemExit(1)"])
def test_a_failed_step_ends_the_run(module: Callable[[str], Step], source: str) -> None:
    with pytest.raises(ValueError, match="'do something' failed with exit code"):
        run_step(module(source))


def test_changed_output_is_a_result(module: Callable[[str], Step]) -> None:
    """The exit code is that of a failure, but there are figures to show."""
    changed = "print('{\"greedy_identical\": %s}'); raise SystemExit(%d)"
    assert run_step(module(changed % ("false", 1))) == {"greedy_identical": False}
    for identical, code in (("true", 1), ("false", 2)):
        with pytest.raises(ValueError, match=f"exit code {code}"):
            run_step(module(changed % (identical, code)))


STUBBORN = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
GRANDCHILD = (
    "import os, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print(os.getpid(), child.pid, flush=True)\n"
    "time.sleep(60)\n"
)


@pytest.mark.parametrize("source", [GRANDCHILD, STUBBORN + GRANDCHILD])
@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
def test_nothing_goes_on_running(
    module: Callable[[str], Step],
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    error: type[BaseException],
) -> None:
    """Neither the step nor what it started."""
    started: list[int] = []

    def interrupted_print(line: str, **_: Any) -> None:
        if line.strip().replace(" ", "").isdigit():
            started.extend(map(int, line.split()))
            raise error

    monkeypatch.setattr("builtins.print", interrupted_print)
    monkeypatch.setattr(quickstart, "PATIENCE", 1.0)
    with pytest.raises(error):
        run_step(module(source))
    assert len(started) == 2
    deadline = time.monotonic() + 10  # a killed process takes a moment to go
    while any(map(is_running, started)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, started))


def is_running(pid: int) -> bool:
    """A process that has ended may wait for its parent, which for an orphan is not ours."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    return state != "Z"


# From the first step to the table


def results(identical: bool) -> Callable[[Step], dict[str, Any]]:
    """Stands for `run_step`."""

    def run(step: Step) -> dict[str, Any]:
        if step.name == "train":
            return {"parameters": 12_300_000, "training_tokens": 45_678}
        figures = {"acceptance_length": 1.75, "tokens_per_second": 20.0, "speedup": 1.3}
        return {**figures, "greedy_identical": identical or step.method != "medusa"}

    return run


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(quickstart, "run_step", results(identical=True))
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    [eagle3] = [line.split() for line in lines if line.startswith("eagle3")]
    assert eagle3 == ["eagle3", "12.3M", "45,678", "1.75", "20.0", "1.30x", "yes"]
    assert [row["method"] for row in json.loads(lines[-1])["methods"]] == ["eagle3", "medusa"]


def test_changed_output_is_shown_before_the_run_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "run_step", results(identical=False))
    with pytest.raises(ValueError, match="greedy output differs"):
        main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if line.startswith(("eagle3", "medusa"))] == [
        "yes",
        "NO",
    ]


def test_ctrl_c_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(step: Step) -> dict[str, Any]:
        if step.name == "train":
            raise KeyboardInterrupt
        return {}

    monkeypatch.setattr(quickstart, "run_step", stopped)
    assert main([]) == 130
    error = capsys.readouterr().err.strip()
    assert error == "stopped: train eagle3; the same command continues there"


def test_the_options_have_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    assert "make quickstart" in capsys.readouterr().out
    assert vars(parse_args([])) == vars(
        argparse.Namespace(out=Path("outputs/quickstart"), prompts=200, heldout=16, threads=2)
    )
