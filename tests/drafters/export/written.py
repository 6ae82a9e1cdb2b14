"""Heads with random tensors, and written folders of any dialect, to be changed."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import Drafter, TargetModel, build_drafter
from drafters.export import golden_inputs, golden_logits
from drafters.export.folder import MANIFEST
from drafters.export.golden import GOLDEN


def make_head(family: str, target: TargetModel, **options: Any) -> Drafter:
    """A head whose every tensor, norms and biases included, is random."""
    head = build_drafter(family, target, **options)
    generator = torch.Generator().manual_seed(1)
    head.set_draft_vocab(torch.randint(100, (target.vocab_size,), generator=generator))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return head


def logits(head: Drafter) -> Tensor:
    return golden_logits(head, golden_inputs(head))


def assert_same(again: Drafter, head: Drafter) -> None:
    """Equal tensors, configuration and logits; where a target is recorded is up to the folder."""
    assert again.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    recorded = {"target_name": None, "target_fingerprint": None}
    assert {**again.config.own_fields(), **recorded} == {**head.config.own_fields(), **recorded}
    assert torch.equal(logits(again), logits(head))


class Written:
    """A folder on the disk: config and tensors, whatever its file of tensors is called."""

    def __init__(self, path: Path, weights: str = "model.safetensors") -> None:
        self.path, self.weights = path, weights
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        file = path / weights
        pickled = file.suffix == ".pt"
        self.tensors: dict[str, Tensor] = (
            torch.load(file, weights_only=True) if pickled else load_file(file)  # noqa: TID251
        )

    @property
    def shapes(self) -> dict[str, list[int]]:
        return {name: list(tensor.shape) for name, tensor in self.tensors.items()}

    def save(self, weights: str | None = None, foreign: bool = False) -> Path:
        """As ours, or under another name, or without what only our own folders have."""
        (self.path / self.weights).unlink()
        file = self.path / (weights or self.weights)
        copies = {name: tensor.contiguous().clone() for name, tensor in self.tensors.items()}
        if file.suffix in (".pt", ".bin"):
            torch.save(copies, file)
        else:
            save_file(copies, file)
        (self.path / "config.json").write_text(json.dumps(self.config))
        for name in (MANIFEST, GOLDEN) if foreign else ():
            (self.path / name).unlink()
        return self.path
