"""Folders of tiny targets and heads, as the scripts take them on the command line."""

from pathlib import Path
from typing import Any

import torch

from drafters import Drafter, TargetModel, build_drafter
from tests.tiny import save_tiny_target

OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 60},
    "medusa": {"num_heads": 3},
}


def tiny_head(target: TargetModel, family: str = "eagle3") -> Drafter:
    """An untrained head, with noise in its weights so that its drafts are of its own making."""
    head = build_drafter(family, target, **OPTIONS[family])
    head.set_draft_vocab(torch.arange(target.vocab_size).flip(0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return head.to(target.dtype).eval()


def save_models(folder: Path, family: str = "eagle3") -> list[str]:
    """Write a target and a head; the options that name them."""
    target_folder = save_tiny_target(folder / "target")
    target = TargetModel.load(str(target_folder), torch.float64)
    tiny_head(target, family).save_pretrained(folder / "head")
    options = ["--target", str(target_folder), "--head", str(folder / "head")]
    return [*options, "--dtype", "float64", "--device", "cpu"]
