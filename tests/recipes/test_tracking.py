"""Trackers of accelerate, by name, without a network."""

import json
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from recipes.train import main, tracker_options
from tests.tiny import save_tiny_target

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def train(tmp_path: Path, tracker: str) -> Path:
    """A few steps with one tracker; the run folder."""
    rows = [{"prompt_ids": [5, 6, 7], "answer_ids": [8, 9, 10 + i, 11, 12]} for i in range(6)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(
        [
            f"--target.name={save_tiny_target(tmp_path / 'target', dtype=torch.float32)}",
            "--target.device=cpu",
            "--drafter.type=eagle1",
            f"--data.train=[{data}]",
            "--data.max_length=16",
            f"--run.out={tmp_path / 'out'}",
            "--run.steps=3",
            "--run.log_every=1",
            "--run.parity=false",
            f"--run.trackers=[{tracker}]",
            "--run.project=tests",
        ]
    )
    return tmp_path / "out"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb: pip install headway[train]")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    out = train(tmp_path, "wandb")
    identity = (out / "tracker_id").read_text()
    (run,) = (tmp_path / "wandb").glob(f"offline-run-*{identity}")
    record, deadline = run / f"run-{identity}.wandb", time.time() + 60
    while b"train/loss" not in record.read_bytes() and time.time() < deadline:
        time.sleep(0.1)  # wandb's own process writes it
    content = record.read_bytes()
    for name in (b"train/loss", b"optim.lr", b"drafter."):
        assert name in content, name


def test_a_resumed_run_goes_on_in_the_tracker(tmp_path: Path) -> None:
    first = tracker_options(tmp_path, ["wandb", "tensorboard"], resumed=False)
    assert first["wandb"]["resume"] == "allow"
    assert tracker_options(tmp_path, ["wandb"], resumed=True) == first
    assert tracker_options(tmp_path, ["wandb"], resumed=False) != first, "a new run"
    assert tracker_options(tmp_path, ["tensorboard"], resumed=True) == {}


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = train(tmp_path, "tensorboard")
    events = EventAccumulator(str(out / "tests")).Reload()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = events.Scalars("train/loss")
    assert [event.step for event in found] == [1, 2, 3]
    assert [event.value for event in found] == pytest.approx([line["train/loss"] for line in lines])
