"""The check with ModelOpt, its side played by our own forward pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters import TargetModel
from drafters.export import golden_inputs, write_as
from interop import modelopt_check
from interop.modelopt_check import as_trained, first_step
from interop.results import FAILED, LOADED, PASSED, READ, REFUSED, SKIPPED, Entry
from interop.setting import Setting
from interop.speculators_check import random_head
from tests.tiny import save_tiny_target


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), torch.float32)


def checked(
    place: Path, work: Path, heads: list[str], monkeypatch: pytest.MonkeyPatch, spoil: float = 0.0
) -> list[Entry]:
    """Entries with their side played; a head is named by its number of layers."""
    target, given = TargetModel.load(str(place)), {}
    for layers in heads:
        head = random_head("eagle3", target, num_layers=int(layers))
        head.save_pretrained(work / layers)
        given[layers] = work / layers

    def side(python: Path, what: str, *rest: Path) -> dict[str, Any]:
        head: Any = random_head("eagle3", target, num_layers=1)
        folder = rest[-1].parent if what == "load" else rest[-1]
        inputs = load_file(folder / "rows") if what == "load" else golden_inputs(head)
        if what == "train":
            write_as("modelopt", head, folder / "head")
        theirs = first_step(as_trained(head), inputs)
        theirs[0, 0] += spoil * theirs.abs().max()
        save_file({**inputs, "theirs": theirs.contiguous()}, folder / "rows")
        return {"class": "Theirs", "steps": 3, "versions": {"nvidia-modelopt": "0"}}

    monkeypatch.setattr(modelopt_check, "_side", side)
    setting = Setting(place, given, work, {"modelopt": Path("python")})
    return list(modelopt_check.check(setting))


def test_both_directions(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every EAGLE-3 head; one of two layers is refused."""
    one, two, read = checked(place, tmp_path, ["1", "2"], monkeypatch)
    assert (one.head, one.check, one.status, one.limit) == ("1", LOADED, PASSED, "as it trains")
    assert "with their double norm" in one.detail
    assert (two.head, two.check, two.status) == ("2", LOADED, REFUSED)
    assert "num_layers" in two.detail
    assert (read.head, read.check, read.status) == ("", READ, PASSED)


def test_other_logits_fail_and_no_head_is_a_gap(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = checked(place, tmp_path, ["1"], monkeypatch, spoil=0.01)
    assert [entry.status for entry in entries] == [FAILED, FAILED]
    assert "logits differ by 0.01" in entries[0].detail
    absent, _ = checked(place, tmp_path, [], monkeypatch)
    assert (absent.check, absent.status) == (LOADED, SKIPPED)
