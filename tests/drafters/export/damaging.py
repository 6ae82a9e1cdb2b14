"""An export of an EAGLE-3 head in SGLang's dialect, to be damaged, and commands that must fail."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import TargetModel
from drafters.export import write_as
from drafters.export.golden import GOLDEN
from scripts.common import run
from tests.drafters.export.written import make_head
from tests.tiny import save_tiny_target

IDS = "eagle_aux_hidden_state_layer_ids"


class Folder:
    """An export of an EAGLE-3 head in SGLang's dialect, to be damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights = path / "model.safetensors"

    def config(self, **changes: Any) -> None:
        path = self.path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def ids(self, by: int) -> None:
        """Both lists of layer ids, consistently off."""
        found = json.loads((self.path / "config.json").read_text())
        nested = {**found["eagle_config"], IDS: [k + by for k in found["eagle_config"][IDS]]}
        self.config(**{IDS: [k + by for k in found[IDS]], "eagle_config": nested})

    def tensor(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        self.edit(lambda tensors: tensors.update({name: change(tensors[name].clone())}))

    def edit(self, change: Callable[[dict[str, Tensor]], object]) -> None:
        tensors = load_file(self.weights)
        change(tensors)
        save_file({name: t.contiguous().clone() for name, t in tensors.items()}, self.weights)

    def forget(self, *names: str) -> None:
        """Without the records that another trainer's folder does not have."""
        for name in (GOLDEN, "export.json", *names):
            (self.path / name).unlink()


Damage = Callable[[Folder], object]


def save_whole(folder: Path) -> Path:
    """A target, and a whole export whose every tensor is random; the folder of both."""
    save_tiny_target(folder / "target", dtype=torch.float32)
    target = TargetModel.load(str(folder / "target"))
    options = {"feature_layers": [1, 3, 4], "draft_vocab_size": 40, "intermediate_size": 40}
    head = make_head("eagle3", target, **options)
    write_as("sglang", head, folder / "whole", with_embeddings=True)
    return folder


def copy_of(places: Path, to: Path) -> Folder:
    """Of the whole export."""
    shutil.copytree(places / "whole", to)
    return Folder(to)


def refused(
    capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], None], *arguments: object
) -> str:
    """What a command says on stderr when it must fail: one line."""
    words = [str(argument) for argument in arguments]
    with pytest.raises(SystemExit) as left:
        run(lambda: main([*words, "--device", "cpu", "--dtype", "float32"]))
    assert left.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def swap_halves(tensor: Tensor) -> Tensor:
    return tensor.roll(tensor.shape[1] // 2, 1)


def swapped_inputs(folder: Folder) -> None:
    """[feature, embedding] in place of [embedding, feature]."""
    for part in "qkv":
        folder.tensor(f"midlayer.self_attn.{part}_proj.weight", swap_halves)
