"""Estimate first, extract, continue: one process, two, and one that was killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from scripts import extract_features as script
from scripts.common import run
from tests.tiny import save_tiny_target
from tests.training.store.stores import contents
from training.store import FeatureStore, Manifest

ROOT = Path(__file__).resolve().parents[2]
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, rows, and a recipe."""
    folder = tmp_path_factory.mktemp("extract")
    save_tiny_target(folder / "target", dtype=torch.float32)
    rows = [
        {"prompt_ids": [5, 6, 7], "answer_ids": [(3 * i + 7 * j) % 90 for j in range(4 + i % 9)]}
        for i in range(40)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text)
    (folder / "recipe.yaml").write_text(
        f"target: {{name: {folder / 'target'}, device: cpu}}\n"
        "drafter: {type: eagle3, feature_layers: [1, 3, 4]}\n"
        f"data: {{train: [{folder / 'rows.jsonl'}], max_length: 32}}\n"
        f"run: {{out: {folder / 'run'}}}\n"
    )
    return folder


def arguments(folder: Path, out: Path, *rest: object) -> list[str]:
    paths = ["--target", folder / "target", "--data", folder / "rows.jsonl", "--out", out]
    fixed = ["--layers", 1, 3, "--device", "cpu", "--store-dtype", "float32", "--shard-mb", 0.05]
    return [str(a) for a in [*paths, *fixed, *rest]]


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_sizes_are_told_before_and_right(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "store"
    script.main(arguments(folder, out, "--estimate"))
    estimate = last_json(capsys)
    assert not out.exists()
    assert (estimate["added_tokens"], estimate["tokens"]) == (430, 0)
    assert estimate["predicted_seconds"] > 0

    script.main(arguments(folder, out))
    done = last_json(capsys)
    assert (done["documents"], done["tokens"], done["supervised"]) == (40, 430, 310)
    assert done["predicted_bytes"] == estimate["predicted_bytes"]
    assert done["bytes"] == sum(p.stat().st_size for p in out.glob("*.safetensors"))
    assert done["bytes"] == pytest.approx(done["predicted_bytes"], rel=0.02)
    assert done["tokens_per_second"] > 0

    before = contents(out)
    script.main(arguments(folder, out))
    again = last_json(capsys)
    assert (again["added_tokens"], again["bytes"]) == (0, done["bytes"])
    assert contents(out) == before


def test_a_recipe_names_everything(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With overrides; the folder may come from it too."""
    out = tmp_path / "store"
    recipe = ["--recipe", str(folder / "recipe.yaml"), "--data.limit", "7"]
    script.main([*recipe, "--store-dtype", "fp8", f"--data.features={out}"])
    assert last_json(capsys)["documents"] == 7
    manifest = Manifest.read(out)
    assert (manifest.layers, manifest.dtype) == ([1, 3, 4], "fp8")
    target = script.TargetModel.load(str(folder / "target"))
    assert FeatureStore(out, target, 32).documents == 7


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (["--quota-gb", "0.0001"], "exceed the quota of 0.000 GB"),
        (["--layers", "9"], "layers must rise and lie in 0..5"),
        (["--shard-mb", "0"], "--shard-mb must be positive"),
        (["--target.parallel=tensor"], "target.parallel has no meaning here"),
        (["--max-length", "1"], "max_length must be at least 2"),
    ],
)
def test_errors_write_nothing(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rest: list[str],
    message: str,
) -> None:
    out = tmp_path / "store"
    monkeypatch.setattr(sys, "argv", ["extract_features", *arguments(folder, out, *rest)])
    with pytest.raises(SystemExit) as caught:
        run(script.main)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(out.glob("[!.]*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "r.yaml", "--target", "t"], "--target is the recipe's"),
        (["--target", "t", "--layers", "1"], "--data is missing"),
        (["--target", "t", "--data", "d", "--layers", "1"], "--out is missing"),
        (["--target", "t", "--data", "d", "--layers", "1", "--out", "o", "--frob"], "--frob is no"),
    ],
)
def test_the_command_line_is_checked(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        script.parse_args(arguments)


def test_a_store_of_something_else_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "store"
    script.main(arguments(folder, out, "--data.limit=3"))
    before = contents(out)
    with pytest.raises(ValueError, match=r"its layers is \[1, 3\], now it would be \[1, 2\]"):
        script.main(arguments(folder, out, "--layers", 1, 2))
    assert contents(out) == before


def launch(arguments: list[str], launcher: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "scripts.extract_features", *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_two_processes_write_what_one_does(folder: Path, tmp_path: Path) -> None:
    """Also when they take over from one that was killed with kill -9 in the middle."""
    one, two, cut = (tmp_path / name for name in ("one", "two", "cut"))
    script.main(arguments(folder, one))
    run = launch(arguments(folder, two), TWO)
    stdout, stderr = run.communicate(timeout=600)
    assert run.returncode == 0, stderr
    assert sum(line.startswith("{") for line in stdout.splitlines()) == 1
    assert json.loads(stdout.splitlines()[-1])["documents"] == 40
    assert contents(two) == contents(one)

    slow = [*arguments(folder, cut), "--batch-tokens", "1"]
    run = launch(slow, [])
    deadline = time.time() + 600
    while time.time() < deadline and not list(cut.glob("shard-*.safetensors")):
        time.sleep(0.01)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate(timeout=60)
    assert len(Manifest.read(cut).shards) < 4, "it was finished before it could be killed"
    run = launch(arguments(folder, cut), TWO)
    _, stderr = run.communicate(timeout=600)
    assert run.returncode == 0, stderr
    assert Manifest.read(cut).counts() == Manifest.read(one).counts()
    assert contents(cut).keys() == contents(one).keys()
