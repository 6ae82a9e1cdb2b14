"""A target that is spread over devices or processes says what the whole one says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from drafters import TargetModel, placement
from drafters.placement import PlacementError, held_bytes, spread
from tests.drafters.placement_worker import describe, make_head, observe
from tests.tiny import save_tiny_target
from tests.zoo import zoo_target

ROOT = Path(__file__).resolve().parents[2]
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
HELD = ["llama:tensor", "llama:shard", "qwen3:tensor", "tied:tensor", "tied:shard", "gpt_oss:shard"]
REFUSED = {"gpt_oss:tensor": "cuts none of its layers", "odd:tensor": "num_key_value_heads=1"}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of tiny targets, layers not all alike in how they are divided."""
    folder = tmp_path_factory.mktemp("targets")
    save_tiny_target(folder / "llama", torch.float32)
    for name, kind, options in (
        ("qwen3", "qwen3", {}),
        ("tied", "llama", {"tie_word_embeddings": True}),
        ("gpt_oss", "gpt_oss", {"layer_types": ["sliding_attention", "full_attention"] * 3}),
        ("odd", "llama", {"num_key_value_heads": 1}),
    ):
        target = zoo_target(kind, torch.float32, num_hidden_layers=6, **options)
        target.model.save_pretrained(folder / name)
        target.tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def parallel(targets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes wrote about each target."""
    out = tmp_path_factory.mktemp("parallel")
    run = subprocess.run(
        [sys.executable, *TWO, "-m", "tests.drafters.placement_worker", str(out)]
        + [f"{targets}/{case}" for case in [*HELD, *REFUSED]],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return out


def whole(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    target = TargetModel.load(str(folder), torch.float32)
    drafter = make_head(target)
    return observe(target, drafter), describe(target, drafter)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        error = (found[name].double() - value.double()).abs().max().item()
        assert error <= tolerance * value.double().abs().max().item(), (name, error)


@pytest.mark.slow
@pytest.mark.parametrize("case", HELD)
def test_two_processes_hold_what_one_holds(targets: Path, parallel: Path, case: str) -> None:
    name, how = case.split(":")
    wanted, facts = whole(targets / name)
    for rank in (0, 1):
        stem = parallel / f"{name}-{how}-{rank}"
        found = load_file(stem.with_suffix(".safetensors"))
        # Slices of a sum are added in another order; gathered layers compute the same numbers.
        assert_same(found, wanted, 1e-5 if how == "tensor" else 0.0)
        seen = json.loads(stem.with_suffix(".json").read_text())
        assert seen["fingerprint"] == facts["fingerprint"]
        assert seen["generated"] == facts["generated"]
        assert seen["tied"] == facts["tied"] == (name == "tied")
        assert 0.45 < seen["layer_bytes"] / facts["layer_bytes"] < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_plan_cannot_cut_is_refused(parallel: Path, case: str) -> None:
    for rank in (0, 1):
        text = (parallel / f"{case.replace(':', '-')}-{rank}.refused").read_text()
        assert REFUSED[case] in text and "target.parallel=shard" in text


def device_map(folder: Path, disk: range) -> dict[str, str]:
    """All on the CPU, but some layers on disk: with hooks that fetch them for each pass."""
    target = TargetModel.load(str(folder), torch.float32)
    outer = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    layers = {f"model.layers.{i}": "disk" if i in disk else "cpu" for i in range(target.num_layers)}
    return dict.fromkeys(outer, "cpu") | layers


@pytest.mark.parametrize("name", ["llama", "tied", "gpt_oss"])
def test_layers_that_are_fetched_by_hooks(targets: Path, name: str) -> None:
    folder = targets / name
    wanted, facts = whole(folder)
    places = device_map(folder, disk=range(1, 6, 2))
    target = TargetModel.load(str(folder), torch.float32, device_map=places)
    layers = target.decoder_layers()
    assert [held_bytes(layer) == 0 for layer in layers] == [False, True] * 3
    drafter = make_head(target)
    assert_same(observe(target, drafter), wanted, 0.0)
    seen = describe(target, drafter)
    assert seen.pop("layer_bytes") * 2 == facts.pop("layer_bytes")
    assert seen == facts
    assert not held_bytes(layers[1]), "it goes back to disk after a pass"


def test_the_borrowed_matrices_stay_on_a_device(targets: Path) -> None:
    places = device_map(targets / "llama", disk=range(2)) | {"lm_head": "disk"}
    with pytest.raises(PlacementError, match="borrows the embedding"):
        TargetModel.load(str(targets / "llama"), torch.float32, device_map=places)


LAYER = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32  # weights of a tiny Llama's layer
OUTER = 2 * 96 * 32 + 32


@pytest.mark.parametrize(
    ("how", "free", "wanted", "slow"),
    [
        ("sequential", {0: 3, 1: 9, "cpu": 99}, [0, 0, 0, 1, 1, 1], 0),
        ("balanced", {0: 9, 1: 9, "cpu": 99}, [0, 0, 0, 1, 1, 1], 0),
        ("auto", {0: 9, 1: 9, 2: 9, "cpu": 99}, [0, 0, 1, 1, 1, 2], 0),
        ("balanced_low_0", {0: 9, 1: 9, "cpu": 99}, [1, 1, 1, 1, 1, 1], 0),
        ("sequential", {0: 2, 1: 2, "cpu": 99}, [0, 0, 1, 1, "cpu", "cpu"], 1),
        ("auto", {"cpu": 99}, ["cpu"] * 6, 0),
    ],
)
def test_layers_are_spread_and_the_head_s_device_has_the_rest(
    targets: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
    free: dict[Any, int],
    wanted: list[Any],
    slow: int,
) -> None:
    """Room is counted in layers; the first device has more, for the rest and one layer to fetch."""
    memory = {key: 4 * int((room + 0.5) * LAYER) for key, room in free.items()}
    memory[next(iter(memory))] += 4 * (OUTER + LAYER)
    monkeypatch.setattr(placement, "get_max_memory", lambda: dict(memory))
    found = spread(AutoConfig.from_pretrained(targets / "llama"), torch.float32, how)
    assert [found[f"model.layers.{i}"] for i in range(6)] == wanted
    rest = {key: device for key, device in found.items() if ".layers." not in key}
    first = next(iter(free))
    assert rest == dict.fromkeys(
        ["lm_head", "model.embed_tokens", "model.norm", "model.rotary_emb"], first
    )
    ours = [record.message for record in caplog.records if record.name == "drafters.placement"]
    assert ["2 of 6 layers" in message for message in ours] == [True] * slow


def test_one_process_cannot_hold_a_target_together(targets: Path) -> None:
    for parallel in ("tensor", "shard"):
        with pytest.raises(PlacementError, match=f"target.parallel={parallel} needs several"):
            TargetModel.load(str(targets / "llama"), torch.float32, parallel=parallel)


def test_several_processes_refuse_a_device_map(
    targets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_num_processes", lambda: 2)
    with pytest.raises(PlacementError, match=r"target\.device_map is for one process"):
        TargetModel.load(str(targets / "llama"), torch.float32, device_map="auto")
