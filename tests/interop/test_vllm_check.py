"""The checks with vLLM, its worker played by a copy of what it should hold and compute."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters import TargetModel
from drafters.export import read_as
from drafters.export.engines import engine_tensors, loaders_for
from drafters.export.engines.loader import load
from drafters.export.golden import GOLDEN
from interop import vllm_check
from interop.results import FAILED, LOADED, PASSED, REFUSED, SKIPPED, Entry
from interop.setting import CannotRun, Setting
from interop.speculators_check import random_head
from tests.tiny import save_tiny_target

HEADS = {
    "one": ("eagle3", {"num_layers": 1}),
    "two": ("eagle3", {"num_layers": 2, "norm_before_residual": True}),
    "gated": ("dspark", {"num_layers": 1, "markov_rank": 16, "markov_type": "gated"}),
    "block": ("dflash", {"num_layers": 1}),
    "medusa": ("medusa", {}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), torch.float32)


@pytest.fixture(scope="module")
def heads(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    target = TargetModel.load(str(place))
    for label, (family, options) in HEADS.items():
        random_head(family, target, **options).save_pretrained(folder / label)
    return {label: folder / label for label in HEADS}


def worker(target: TargetModel, spoil: float = 0.0) -> Callable[..., str]:
    """vLLM's side: every parameter as its loader is declared, golden logits, ``spoil`` added to
    the first; another line is an engine's log.
    """

    def done(job: dict[str, Any]) -> dict[str, Any]:
        folder = Path(job["export"])
        written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        dialect = json.loads((folder / "export.json").read_text(encoding="utf-8"))["format"]
        family = read_as(dialect, folder, target).family
        loader = [x for x in loaders_for(written, family) if x.engine == "vllm"][-1]
        held = load(loader, loader.flat(written), engine_tensors(folder), target).parameters
        found = {name: tensor.clone().contiguous() for name, tensor in held.items()}
        if job["forward"]:
            found["logits"] = load_file(folder / GOLDEN)["logits"].clone()
            found["logits"][0, 0] += spoil * found["logits"].abs().max()
        save_file(found, job["result"])
        return {"name": job["name"], "versions": {"vllm": "0"}, "model": "Theirs"}

    def output(command: list[str], timeout: float) -> str:
        asked = json.loads(Path(command[2]).read_text(encoding="utf-8"))
        return "\n".join(["INFO", *(json.dumps(done(job)) for job in asked["jobs"])])

    return output


def checked(
    place: Path,
    work: Path,
    heads: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    spoil: float = 0.0,
) -> dict[tuple[str, str], Entry]:
    """Entries by dialect and head, with both environments there."""
    monkeypatch.setattr(vllm_check, "output", worker(TargetModel.load(str(place)), spoil))
    pythons = dict.fromkeys(vllm_check.ENVIRONMENTS, Path("python"))
    entries = list(vllm_check.check(Setting(place, heads, work, pythons)))
    assert {entry.check for entry in entries} == {LOADED}
    return {(entry.dialect, entry.head): entry for entry in entries}


def test_every_head_of_a_family_is_tried(
    place: Path, heads: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused says why, what is missing which head; what was not computed is told apart."""
    found = checked(place, tmp_path, heads, monkeypatch)
    assert [entry for entry in found.values() if entry.status == FAILED] == []
    assert found["vllm", "one"].status == found["vllm", "two"].status == PASSED
    assert "logits differ by 0.0e+00" in found["vllm", "two"].detail
    assert found["sglang", "one"].status == PASSED
    assert found["sglang", "two"].status == REFUSED
    assert "num_layers" in found["sglang", "two"].detail
    assert found["dspark", "gated"].status == REFUSED
    assert found["dspark", "gated"].detail == "the export names what serves this head: sglang"
    assert found["medusa", "medusa"].status == PASSED
    assert found["eagle1", ""].status == SKIPPED
    assert found["dflash", "block"].limit == "tensors only"
    assert found["vllm", "one"].limit == ""
    assert found["vllm", "one"].versions == {"vllm": "0"}


def test_other_logits_fail(
    place: Path, heads: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = checked(place, tmp_path, {"one": heads["one"]}, monkeypatch, spoil=0.01)
    assert found["vllm", "one"].status == FAILED
    assert "logits differ by 0.01" in found["vllm", "one"].detail


def test_an_environment_is_made_for_what_needs_it(
    place: Path, heads: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be made is a gap of its jobs alone; refusals are known without."""
    made = []

    def python(self: Setting, name: str, *requirements: str, bare: tuple[str, ...]) -> Path:
        made.append((name, bare[0]))
        raise CannotRun("no disk")

    monkeypatch.setattr(Setting, "python", python)
    chosen = {label: heads[label] for label in ("one", "gated")}
    entries = list(vllm_check.check(Setting(place, chosen, tmp_path)))
    assert made == [("vllm", "vllm==0.33.0")]
    found = {(entry.dialect, entry.head): entry for entry in entries}
    assert (found["vllm", "one"].status, found["vllm", "one"].detail) == (SKIPPED, "no disk")
    assert found["dspark", "gated"].status == REFUSED
