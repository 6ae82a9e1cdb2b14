"""export: heads for serving engines, one file per dialect, and the checks that guard them.

Every writer reads its folder back through a simulation of the engines' loaders, and compares
logits, before the folder gets its name.
"""

import json
from pathlib import Path

import torch

from drafters.base import Drafter
from drafters.export.check import ARCHITECTURE, check_folder
from drafters.export.folder import CONFIG, Export, ExportError
from drafters.export.golden import check_golden, golden_inputs, golden_logits, write_golden
from drafters.export.native import read_native, write_native
from drafters.export.sglang import read_sglang, write_sglang
from drafters.target import TargetModel

FORMATS = ("native", "sglang")

__all__ = [
    "FORMATS",
    "Export",
    "ExportError",
    "check_folder",
    "check_golden",
    "golden_inputs",
    "golden_logits",
    "read_head",
    "read_native",
    "read_sglang",
    "write_golden",
    "write_native",
    "write_sglang",
]


def read_head(
    folder: str | Path, target: TargetModel, dtype: torch.dtype = torch.float32
) -> Drafter:
    """Load a head of any format and attach its target.

    Args:
        folder: an export or a trained head; a native head may also be a hub id.
        target: the model it was trained on.
        dtype: of the weights.

    Raises:
        ValueError: not a head, damaged, or trained on another target.
    """
    if _architectures(Path(folder)) != [ARCHITECTURE]:
        return read_native(folder, target, dtype)
    head = read_sglang(folder, target)
    torch.nn.Module.to(head, dtype=dtype)
    return head


def _architectures(folder: Path) -> object:
    try:
        return json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("architectures")
    except (OSError, ValueError, AttributeError):  # the native loader says what is wrong
        return None
