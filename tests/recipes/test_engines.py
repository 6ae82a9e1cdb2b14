"""The same recipe under every engine: the same losses, heads that are equal, and checkpoints that
any other engine goes on from. The engines are the real ones: torch's FSDP2 on two CPU processes,
DeepSpeed on one.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import save_tiny_target

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVED = 6, 3
DEEPSPEED = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: {stage}
  zero3_init_flag: false
num_machines: 1
num_processes: 1
use_cpu: true
mixed_precision: "no"
"""
ENGINES = [
    "fsdp2",
    *(
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                find_spec("deepspeed") is None, reason="needs deepspeed: pip install headway[train]"
            ),
        )
        for name in ("zero2", "zero3")
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("engines")
    save_tiny_target(found / "target", dtype=torch.float32)
    rows = [
        {"prompt_ids": [5, 6, 7], "answer_ids": [(3 * i + 7 * j) % 90 for j in range(4 + i % 9)]}
        for i in range(24)
    ]
    (found / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


def arguments(folder: Path, out: Path, **more: Any) -> list[str]:
    options = {
        "target.name": folder / "target",
        "drafter.type": "eagle3",
        "drafter.draft_vocab_size": 60,
        "data.train": f"[{folder / 'rows.jsonl'}]",
        "data.max_length": 32,
        "optim.lr": "1e-2",
        "optim.clip": 0.5,
        "run.batch_size": 4,
        "run.steps": STEPS,
        "run.save_every": SAVED,
        "run.log_every": 1,
        "run.threads": 1,
        "run.parity": "false",
        "run.out": out,
        **more,
    }
    return [f"--{name}={value}" for name, value in options.items()]


def train(engine: str, folder: Path, out: Path, **more: Any) -> None:
    """A run to its end, in processes of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = []
    if engine == "fsdp2":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment["ACCELERATE_USE_FSDP"] = "true"
        more["target.device"] = "cpu"
    elif engine.startswith("zero"):
        settings = folder / f"{engine}.yaml"
        settings.write_text(DEEPSPEED.format(stage=engine[-1]))
        launcher = ["-m", "accelerate.commands.launch", "--config_file", str(settings)]
        environment["DS_ACCELERATOR"] = "cpu"
        # a build of its own: one killed elsewhere leaves a lock that is waited for for ever
        environment["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"  # ninja
    else:
        more["target.device"] = "cpu"
    run = subprocess.run(
        [sys.executable, *launcher, "-m", "recipes.train", *arguments(folder, out, **more)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert json.loads(run.stdout.splitlines()[-1])["steps"] == STEPS


def curve(out: Path, name: str = "train/loss") -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def assert_same_run(one: Path, other: Path) -> None:
    """Losses, gradient norms and heads, up to the order of sums in float32."""
    for name in ("train/loss", "train/grad_norm"):
        assert len(curve(one, name)) == STEPS
        assert curve(other, name) == pytest.approx(curve(one, name), rel=2e-4), name
    heads = [load_file(out / "head" / "model.safetensors") for out in (one, other)]
    assert heads[0].keys() == heads[1].keys()
    for name, tensor in heads[0].items():
        assert torch.allclose(tensor, heads[1][name], rtol=1e-3, atol=1e-5), name


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    train("one", folder, folder / "one")
    found = curve(folder / "one")
    assert found[0] != pytest.approx(found[-1], rel=1e-2), "nothing was trained"
    return folder / "one"


def beginning_of(run: Path, out: Path) -> None:
    """A run folder as a stop at the first checkpoint leaves it."""
    shutil.copytree(run, out)
    shutil.rmtree(out / "checkpoints" / f"step-{STEPS:06d}")
    shutil.rmtree(out / "head")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_trains_what_one_process_does(folder: Path, plain: Path, engine: str) -> None:
    """And each goes on from the other's checkpoint: step counts and moments of the optimizer,
    weights, learning rate, place in the data.
    """
    own = folder / engine
    train(engine, folder, own)
    assert_same_run(plain, own)
    for first, second, name in ((engine, "one", "back"), ("one", engine, "on")):
        out = folder / f"{engine}-{name}"
        beginning_of(own if first == engine else plain, out)
        train(second, folder, out)
        assert_same_run(plain, out)


def test_muon_average_and_bf16_are_the_same_when_sharded(folder: Path) -> None:
    more = {
        "optim.name": "muon",
        "optim.ema": 0.5,
        "optim.schedule": "wsd",
        "optim.min_lr": 0.1,
        "run.mixed_precision": "bf16",
    }
    for engine in ("one", "fsdp2"):
        train(engine, folder, folder / f"muon-{engine}", **more)
    found = [curve(folder / f"muon-{engine}") for engine in ("one", "fsdp2")]
    assert found[1] == pytest.approx(found[0], rel=2e-2)
    heads = [
        load_file(folder / f"muon-{e}" / "head" / "model.safetensors") for e in ("one", "fsdp2")
    ]
    raw = load_file(
        folder / "muon-one" / "checkpoints" / f"step-{STEPS:06d}" / "weights.safetensors"
    )
    moved = 0.0
    for name, tensor in heads[0].items():
        if tensor.is_floating_point():
            scale = tensor.abs().max()
            assert (tensor - heads[1][name]).abs().max() <= 0.05 * scale, name
            moved = max(moved, float((tensor - raw[f"drafter.{name}"]).abs().max()))
    assert moved > 1e-4, "the exported head is the average"
