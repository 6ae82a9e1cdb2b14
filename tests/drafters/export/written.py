"""Heads with random tensors, and written folders of any dialect, to be changed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import Drafter, Eagle3Drafter, TargetModel, build_drafter
from drafters.export import Dialect, golden_inputs, golden_logits
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


def eagle3(target: TargetModel, **options: Any) -> Eagle3Drafter:
    """A random EAGLE-3 head."""
    head = make_head("eagle3", target, **{"feature_layers": [1, 3, 5], **options})
    assert isinstance(head, Eagle3Drafter)
    return head


def logits(head: Drafter) -> Tensor:
    return golden_logits(head, golden_inputs(head))


def engine_parameters(
    dialect: Dialect, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Parameters as an engine holds them, fused, with its own names.

    Args:
        dialect: that declares them.
        config, tensors: of a checked file.
    """
    shards: dict[str, list[Tensor]] = {}
    for spec in dialect.specs(config):
        if spec.name in tensors and spec.kind == "float":
            shards.setdefault(spec.parameter or spec.name, []).append(tensors[spec.name])
    return {name: torch.cat(parts) for name, parts in shards.items()}


def assert_same(again: Drafter, head: Drafter) -> None:
    """Equal tensors, configuration and logits; where a target is recorded is up to the folder."""
    assert again.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    recorded = {"target_name": None, "target_fingerprint": None}
    assert {**again.config.own_fields(), **recorded} == {**head.config.own_fields(), **recorded}
    assert torch.equal(logits(again), logits(head))


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


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
