"""The same damage in the folders of every dialect: each is refused, and the tensor named."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import TargetModel
from drafters.export import DIALECTS, dialect_named, write_as
from drafters.export.dialect import TensorSpec
from scripts.export import check
from tests.drafters.export.written import Written, make_head
from tests.tiny import tiny_target

FAMILIES: dict[str, dict[str, Any]] = {
    "eagle3": {"feature_layers": [1, 3, 4], "draft_vocab_size": 40},
    "peagle": {"num_layers": 2, "num_drafts": 3, "mask_token_id": 90},
    "dflash": {"num_layers": 1, "block_size": 4, "mask_token_id": 90},
    "dspark": {"num_layers": 1, "block_size": 4, "markov_rank": 8, "mask_token_id": 90},
    "medusa": {"num_heads": 2},
    "hydra": {"num_heads": 2},
    "mtp": {"qk_norm": True},
}
DIALECT_OPTIONS: dict[str, dict[str, Any]] = {
    "dflash-vllm": {"draft_vocab_size": 40},
    "vllm-medusa": {"draft_vocab_size": 40},
    "speculators-dflash": {"draft_vocab_size": 40},
    "dspark-modelopt": {"confidence_head": True},
}
"""What a dialect wants beyond its family's."""


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(torch.float32)


@pytest.fixture(scope="module")
def wholes(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole folder of each dialect, its tensors random."""
    folder, found = tmp_path_factory.mktemp("wholes"), {}
    for name, dialect in DIALECTS.items():
        family = dialect.families[0]
        options = {**FAMILIES.get(family, {}), **DIALECT_OPTIONS.get(name, {})}
        write_as(name, make_head(family, target, **options), folder / name)
        found[name] = folder / name
    return found


class Damaged:
    """A copy of a folder of a dialect."""

    def __init__(self, name: str, folder: Path) -> None:
        dialect = dialect_named(name)
        self.written = Written(folder, dialect.weights)
        self.file = folder / dialect.weights
        self.specs = [
            spec for spec in dialect.specs(self.written.config) if spec.name in self.tensors
        ]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.written.tensors

    def matrix(self, wanted: Callable[[TensorSpec], bool] = lambda spec: True) -> str:
        """The name of a matrix that is the head's own."""
        return next(
            spec.name
            for spec in self.specs
            if len(spec.shape) == 2
            and spec.kind == "float"
            and "embed" not in spec.name
            and wanted(spec)
        )

    def put(self, name: str, change: Callable[[Tensor], Tensor]) -> str:
        """Change a tensor; its name as a pattern."""
        self.tensors[name] = change(self.tensors[name].clone())
        self.written.save()
        return re.escape(name)


def renamed(folder: Damaged) -> str:
    name = folder.matrix(lambda spec: not spec.optional)
    folder.tensors[f"{name}_1"] = folder.tensors.pop(name)
    folder.written.save()
    return rf"unknown tensor {re.escape(name)}_1.*missing tensor {re.escape(name)}"


def turned(folder: Damaged) -> str:
    name = folder.matrix(lambda spec: spec.shape[0] != spec.shape[1])
    return rf"{folder.put(name, lambda t: t.T)} has shape .* \(that is its transpose\)"


def diverged(folder: Damaged) -> str:
    return rf"{folder.put(folder.matrix(), spoilt)} holds values that are not finite"


def spoilt(tensor: Tensor) -> Tensor:
    tensor[0, 0] = torch.inf
    return tensor


def untrained(folder: Damaged) -> str:
    name = folder.matrix(lambda spec: not spec.zero)
    return rf"{folder.put(name, torch.zeros_like)} is all zeros: it was never trained"


def random(folder: Damaged) -> str:
    folder.put(folder.matrix(lambda spec: not spec.zero), torch.randn_like)
    return "logits of this head differ"


def cut(folder: Damaged) -> str:
    whole = folder.file.read_bytes()
    folder.file.write_bytes(whole[: len(whole) // 2])
    return "damaged or cut short"


DAMAGE = (renamed, turned, diverged, untrained, random, cut)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_whole_folder_passes(
    name: str, wholes: dict[str, Path], target: TargetModel, capsys: pytest.CaptureFixture[str]
) -> None:
    check(wholes[name], None, target)
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["format"], record["golden"]) == (name, 0.0)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", DIALECTS)
def test_damage_is_named_in_every_dialect(
    name: str,
    damage: Callable[[Damaged], str],
    wholes: dict[str, Path],
    target: TargetModel,
    tmp_path: Path,
) -> None:
    shutil.copytree(wholes[name], tmp_path / "head")
    message = damage(Damaged(name, tmp_path / "head"))
    with pytest.raises(ValueError, match=message):
        check(tmp_path / "head", None, target)
