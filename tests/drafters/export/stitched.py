"""Checkpoints with modules of their own, tuned, and stitched ones read byte by byte."""

import json
from pathlib import Path
from typing import Any

import torch

from drafters import TargetModel
from drafters.export.stitched.checkpoint import read_header
from drafters.mtp import MtpDrafter
from drafters.mtp_native import load_native_mtp
from tests.native_mtp import LAYERS, load_checkpoint, save_checkpoint

FORMS = {"deepseek_v3": "mtp-deepseek", "glm4_moe": "mtp-deepseek"}


def saved(folder: Path, kind: str, modules: int = 1) -> TargetModel:
    """A target in float32, from files."""
    return opened(save_checkpoint(folder, kind, modules, dtype=torch.float32))


def opened(folder: Path) -> TargetModel:
    return load_checkpoint(folder, torch.float32)


def tuned(target: TargetModel, **options: Any) -> MtpDrafter:
    """The target's modules, moved away from where they were."""
    head = load_native_mtp(target, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return head


def form(kind: str) -> str:
    return FORMS.get(kind, "mtp-qwen")


def raw(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Dtype, shape and bytes of every tensor of a folder, whatever file it is in."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in folder.glob("model*.safetensors"):
        header, start = read_header(path)
        content = path.read_bytes()
        for name, entry in header.items():
            assert name not in found, f"{name} is there twice"
            first, last = entry["data_offsets"]
            found[name] = (entry["dtype"], entry["shape"], content[start + first : start + last])
    return found


def is_module(name: str) -> bool:
    return name.startswith("mtp.") or any(f"layers.{LAYERS + k}." in name for k in range(3))


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
