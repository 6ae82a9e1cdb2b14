"""The checks with ``speculators``, their side played by a copy of its forward passes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters import TargetModel
from drafters.export import golden_inputs, golden_logits, write_as
from interop import speculators_check
from interop.results import FAILED, LOADED, PASSED, READ, REFUSED, Entry
from interop.setting import Setting
from tests.drafters.export.speculators_engine import Network, block, chain, parallel
from tests.tiny import save_tiny_target

FORWARD = {"eagle3": chain, "peagle": parallel, "dflash": block, "dspark": block}
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), torch.float32)


@pytest.fixture
def setting(folder: Path, tmp_path: Path) -> Setting:
    return Setting(folder, {}, tmp_path, {"speculators": Path("python")})


def checked(setting: Setting, kind: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """The entries of one kind, with their side played by ``run``."""
    monkeypatch.setattr(speculators_check, "KINDS", (kind,))
    monkeypatch.setattr(speculators_check.Side, "run", run)
    return list(speculators_check.check(setting))


def their_side(target: TargetModel, spoil: float = 0.0) -> Run:
    """Answers as their class would give them, ``spoil`` added to the first logit."""

    def load(folder: Path) -> None:
        config = json.loads((folder / "head" / "config.json").read_text())
        tensors = load_file(folder / "head" / "model.safetensors")
        inputs = load_file(folder / "rows")
        network = Network(config, tensors, target.embedding.weight, target.lm_head.weight)
        drafts = len(inputs["token_ids"]) - len(inputs["features"]) + 1
        run = FORWARD[config["speculators_model_type"]]
        theirs = run(network, inputs["features"], inputs["token_ids"], drafts)
        theirs[0, 0] += spoil * theirs.abs().max()
        save_file({**inputs, "theirs": theirs.contiguous()}, folder / "rows")

    def train(folder: Path, kind: str) -> None:
        head = speculators_check.random_head(kind, target, num_layers=1)
        write_as(f"speculators-{kind}", head, folder / "head")
        inputs = golden_inputs(head)
        save_file({**inputs, "theirs": golden_logits(head, inputs) * (1 + spoil)}, folder / "rows")

    def run(side: Any, what: str, target: Path, *rest: Any) -> dict[str, Any]:
        with torch.no_grad():
            if what == "train":
                train(*rest)
            else:
                for folder in rest:
                    load(folder)
        side.versions = {"speculators": "0"}
        return {"class": "Theirs", "steps": 4}

    return run


@pytest.mark.parametrize("kind", FORWARD)
def test_equal_logits_pass(
    kind: str, setting: Setting, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = their_side(TargetModel.load(str(folder)))
    loaded, read = checked(setting, kind, run, monkeypatch)
    assert (loaded.dialect, loaded.check, loaded.status) == (f"speculators-{kind}", LOADED, PASSED)
    assert loaded.head == speculators_check.RANDOM
    assert "logits differ, of the largest, by: " in loaded.detail
    assert loaded.versions == {"speculators": "0"}
    assert (read.check, read.status) == (READ, PASSED)
    assert "4 steps of their trainer" in read.detail


def test_other_logits_fail(setting: Setting, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = their_side(TargetModel.load(str(folder)), spoil=0.01)
    entries = checked(setting, "dflash", run, monkeypatch)
    assert [entry.status for entry in entries] == [FAILED, FAILED]
    assert "logits differ by 1.0e-02 of the largest" in entries[0].detail


def test_their_side_fails_a_check(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment is there: what ends it is what was found."""

    def run(side: Any, *rest: Any) -> dict[str, Any]:
        raise ValueError("their side failed: no such tensor")

    entries = checked(setting, "mtp", run, monkeypatch)
    assert [(entry.status, entry.check) for entry in entries] == [(FAILED, LOADED), (FAILED, READ)]
    assert {entry.detail for entry in entries} == {"their side failed: no such tensor"}


def test_every_trained_head_has_an_entry(
    setting: Setting, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the dialect cannot hold is refused, and the others go on."""
    target = TargetModel.load(str(folder))
    heads = {"wide": {"num_layers": 1}, "biased": {"num_layers": 1, "attention_bias": True}}
    for label, options in heads.items():
        head = speculators_check.random_head("eagle3", target, **options)
        head.save_pretrained(tmp_path / label)
    given = Setting(folder, {x: tmp_path / x for x in heads}, tmp_path, setting.pythons)
    entries = checked(given, "eagle3", their_side(target), monkeypatch)
    found = {entry.head: entry.status for entry in entries if entry.check == LOADED}
    assert found == {"wide": PASSED, "biased": REFUSED, speculators_check.RANDOM: PASSED}
