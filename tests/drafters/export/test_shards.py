"""Heads in several files: read whole, by their index, or refused where the two contradict."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters import TargetModel
from drafters.export import ExportError, read_head, write_as
from drafters.export.tensors import INDEX, PICKLED_INDEX, folder_tensors
from tests.drafters.export.written import Written, assert_same, eagle3
from tests.tiny import tiny_target

KINDS = {INDEX: "model-{}-of-2.safetensors", PICKLED_INDEX: "pytorch_model-{}-of-2.bin"}
"""Names of two shards, by that of their index."""


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


class Shards:
    """Two shards of a folder and their index, to be contradicted."""

    def __init__(self, folder: Path, tensors: dict[str, Tensor], index: str) -> None:
        self.folder, self.index = folder, index
        self.files = [KINDS[index].format(number) for number in (1, 2)]
        names = sorted(tensors)
        self.held = {
            file: {name: tensors[name] for name in names[start::2]}
            for start, file in enumerate(self.files)
        }
        self.places = {name: file for file, held in self.held.items() for name in held}

    def write(self) -> Path:
        for file, held in self.held.items():
            save(held, self.folder / file)
        index = {"metadata": {"total_size": 1}, "weight_map": self.places}
        (self.folder / self.index).write_text(json.dumps(index))
        return self.folder

    def first(self, file: int) -> str:
        """The name of a tensor of a shard."""
        return min(self.held[self.files[file]])


def save(tensors: dict[str, Any], path: Path) -> None:
    if path.suffix == ".bin":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)


@pytest.fixture
def shards(target: TargetModel, tmp_path: Path, request: pytest.FixtureRequest) -> Shards:
    write_as("sglang", eagle3(target, draft_vocab_size=40), tmp_path / "head")
    whole = Written(tmp_path / "head")
    (whole.path / whole.weights).unlink()
    return Shards(whole.path, whole.tensors, request.param)


@pytest.mark.parametrize("shards", KINDS, indirect=True)
def test_a_head_in_shards_is_read(shards: Shards, target: TargetModel) -> None:
    head = eagle3(target, draft_vocab_size=40)
    assert_same(read_head(shards.write(), target), head)
    for name in ("export.json", "golden.logits"):
        (shards.folder / name).unlink()
    assert_same(read_head(shards.folder, target), head)


def absent(shards: Shards) -> None:
    shards.write()
    (shards.folder / shards.files[1]).unlink()


def cut(shards: Shards) -> None:
    shards.write()
    path = shards.folder / shards.files[0]
    path.write_bytes(path.read_bytes()[:200])


def not_held(shards: Shards) -> None:
    del shards.held[shards.files[0]][shards.first(0)]
    shards.write()


def not_listed(shards: Shards) -> None:
    del shards.places[shards.first(0)]
    shards.write()


def held_twice(shards: Shards) -> None:
    """An old copy in the other shard, which programs that read all of a file would take."""
    name = shards.first(0)
    shards.held[shards.files[1]][name] = torch.zeros_like(shards.held[shards.files[0]][name])
    shards.write()


def elsewhere(shards: Shards) -> None:
    shards.places[shards.first(0)] = f"../{shards.files[0]}"
    shards.write()


def of_another_kind(shards: Shards) -> None:
    shards.places[shards.first(0)] = "weights.npz"
    shards.write()


def no_map(shards: Shards) -> None:
    shards.write()
    (shards.folder / shards.index).write_text('{"weight_map": []}')


def half_an_index(shards: Shards) -> None:
    shards.write()
    (shards.folder / shards.index).write_text('{"weight_map": {')


def beside_a_whole_file(shards: Shards) -> None:
    shards.write()
    held = {name: t for each in shards.held.values() for name, t in each.items()}
    save(held, shards.folder / shards.index.removesuffix(".index.json"))


DAMAGE: dict[Callable[[Shards], None], str] = {
    absent: "{second}: cannot read it",
    cut: "{first}: cannot read it, it is .*damaged or cut short",
    not_held: "{name} is in the index and not in {first}: half a copy",
    not_listed: "{first} also holds {name}, which the index puts nowhere",
    held_twice: "{second} also holds {name}, which the index puts into {first}",
    elsewhere: "'../{first}' is not the name of a .* file in this folder",
    of_another_kind: "'weights.npz' is not the name of a .* file in this folder",
    no_map: "no weight_map of tensors to files",
    half_an_index: "{index}: cannot read it",
    beside_a_whole_file: "both .* and {index}, which does not name it",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("shards", KINDS, indirect=True)
def test_what_index_and_shards_contradict_is_named(
    shards: Shards, damage: Callable[[Shards], None]
) -> None:
    first, second = shards.files
    message = DAMAGE[damage].format(
        first=first, second=second, name=shards.first(0), index=shards.index
    )
    damage(shards)
    with pytest.raises(ExportError, match=message):
        folder_tensors(shards.folder)


class Code:
    """What an attacker puts into a shard."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


@pytest.mark.parametrize("shards", [PICKLED_INDEX], indirect=True)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"fc.weight": Code()}, "more than tensors and may run code"),
        ({"fc.weight": [1.0]}, "not a state dict"),
        ([torch.ones(1)], "not a state dict"),
    ],
)
def test_a_shard_that_holds_more_than_tensors(
    shards: Shards, content: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, shards.write() / shards.files[1])
    with pytest.raises(ExportError, match=message):
        folder_tensors(shards.folder)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("shards", [PICKLED_INDEX], indirect=True)
def test_safetensors_come_before_pickles(shards: Shards, target: TargetModel) -> None:
    """Whose index may be left of an older upload."""
    head = eagle3(target, draft_vocab_size=40)
    held = {name: t for each in shards.held.values() for name, t in each.items()}
    shards.held[shards.files[0]] = {"fc.weight": torch.zeros(1)}
    save_file(held, shards.write() / "model.safetensors")
    assert_same(read_head(shards.folder, target), head)
