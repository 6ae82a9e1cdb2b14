"""Two processes train what one does: the same batches, the same gradients, the same metrics."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import save_tiny_target

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ["one plus one", "tell me a joke", "who are you"]
"""Shared out unequally."""
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("two")
    target = save_tiny_target(folder / "target", dtype=torch.float32)
    rows = [
        {"prompt_ids": [5, 6, 7], "answer_ids": [(3 * i + 7 * j) % 90 for j in range(4 + i % 9)]}
        for i in range(24)
    ]
    data, held = folder / "rows.jsonl", folder / "held.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    return [
        "-m",
        "recipes.train",
        f"--target.name={target}",
        "--target.device=cpu",
        "--drafter.type=eagle3",
        f"--data.train=[{data}]",
        "--data.max_length=32",
        "--run.batch_size=4",
        "--run.log_every=1",
        "--run.parity=false",
        "--run.threads=1",
        f"--evaluate.prompts={held}",
        "--evaluate.max_new_tokens=12",
        "--evaluate.size=6",
    ]


def launch(arguments: list[str], launcher: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher, *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_two_processes_answer_a_share_each(tmp_path: Path, arguments: list[str]) -> None:
    """One that cannot write stops both with one reason; what the other wrote is kept."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    rows = [{"prompt": f"{'so ' * (i % 3)}{i}"} for i in range(10)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [one for one in arguments if not one.startswith("--data.train")]
    given += [f"--data.train=[{prompts}]", "--data.regenerate=true", "--data.answer_tokens=8"]
    given += ["--data.answer_batch=2", f"--run.out={out}", "--run.steps=2"]
    blocked = out / "answers.1-of-2.jsonl"
    blocked.mkdir(parents=True)
    run = launch(given, TWO)
    _, stderr = run.communicate(timeout=240)
    assert run.returncode != 0
    assert "error: answers: process 1 of 2: " in stderr and blocked.name in stderr
    kept = (out / "answers.0-of-2.jsonl").read_text().splitlines()
    assert 0 < len(kept) <= 5
    blocked.rmdir()
    run = launch(given, TWO)
    stdout, stderr = run.communicate(timeout=240)
    assert run.returncode == 0, stderr
    assert json.loads(stdout.splitlines()[-1])["steps"] == 2
    lines = (out / "answers.jsonl").read_text().splitlines()
    assert lines[: len(kept)] == kept, "not answered again"
    said = sorted(json.loads(line)["messages"][0]["content"] for line in lines)
    assert said == sorted(row["prompt"] for row in rows)
    assert not [path for path in out.iterdir() if "-of-" in path.name or ".failed" in path.name]


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def evaluations(out: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "eval/acceptance_length" in line]


def test_two_processes_equal_one(tmp_path: Path, arguments: list[str]) -> None:
    heads, curves = [], []
    for name, launcher in (("one", []), ("two", TWO)):
        run = launch([*arguments, f"--run.out={tmp_path / name}", "--run.steps=5"], launcher)
        stdout, stderr = run.communicate(timeout=240)
        assert run.returncode == 0, stderr
        assert json.loads(stdout.splitlines()[-1])["steps"] == 5
        assert sum(line.startswith("{") for line in stdout.splitlines()) == 1
        curves.append(losses(tmp_path / name))
        heads.append(load_file(tmp_path / name / "head" / "model.safetensors"))
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    (one,), (two,) = (evaluations(tmp_path / name) for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-6), "each process decodes some of the prompts"
    assert {"eval/acceptance_length", "eval/acceptance_0"} <= one.keys()
    assert curves[0][0] != pytest.approx(curves[0][-1], rel=1e-3), "nothing was trained"
    for name, tensor in heads[0].items():
        assert torch.allclose(tensor, heads[1][name], rtol=1e-3, atol=1e-5), name


def test_a_signal_to_one_process_stops_both(tmp_path: Path, arguments: list[str]) -> None:
    """The other would wait in a collective forever if each decided for itself."""
    out = tmp_path / "out"
    run = launch([*arguments, f"--run.out={out}", "--run.steps=100000"], TWO)
    deadline = time.time() + 120
    while time.time() < deadline and not (out / "metrics.jsonl").exists():
        time.sleep(0.2)
    found = subprocess.run(
        ["pgrep", "-f", f"recipes.train.*{out}"], capture_output=True, text=True, check=True
    )
    workers = [int(pid) for pid in found.stdout.split() if int(pid) != run.pid]
    os.kill(max(workers), signal.SIGINT)
    run.communicate(timeout=120)
    assert run.returncode != 0
    assert len(list((out / "checkpoints").glob("step-*"))) == 1
