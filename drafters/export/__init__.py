"""export: heads for serving engines, one file per dialect, and the checks that guard them.

Every writer reads its folder back through a simulation of the engines' loaders, and compares
logits, before the folder gets its name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drafters.base import Drafter
from drafters.config import DrafterConfig
from drafters.export import writing
from drafters.export.dialect import Dialect
from drafters.export.folder import CONFIG, Export, ExportError
from drafters.export.golden import check_golden, golden_inputs, golden_logits, write_golden
from drafters.export.native import read_native, write_native
from drafters.export.reading import check_folder, read_folder
from drafters.export.registry import DIALECTS, dialect_named, dialect_of
from drafters.loading import FAMILIES
from drafters.target import TargetModel

NATIVE = "native"
FORMATS = (NATIVE, *DIALECTS)

__all__ = [
    "DIALECTS",
    "FORMATS",
    "NATIVE",
    "Dialect",
    "Export",
    "ExportError",
    "check_folder",
    "check_golden",
    "dialect_named",
    "dialect_of",
    "golden_inputs",
    "golden_logits",
    "is_native",
    "read_as",
    "read_folder",
    "read_head",
    "read_native",
    "write_as",
    "write_golden",
    "write_native",
]


def write_as(
    name: str,
    drafter: Drafter,
    folder: str | Path,
    with_embeddings: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> Export:
    """Write a head in a format by name.

    Args:
        name: one of ``FORMATS``.
        drafter: the head, with its target attached.
        folder: where to; an export that is already there is replaced, anything else is refused.
        with_embeddings: see ``drafters.export.writing.write_folder``.
        provenance: versions, commit and command line, for the record.

    Raises:
        ExportError: unknown, no place for this head, or the folder cannot be written.
    """
    if name != NATIVE:
        return writing.write_folder(
            drafter, folder, dialect_named(name), with_embeddings, provenance
        )
    if with_embeddings:
        raise ExportError("with_embeddings has no effect: native heads borrow the target's")
    return write_native(drafter, folder, provenance)


def read_as(
    name: str, folder: str | Path, target: TargetModel, dtype: torch.dtype | None = None
) -> Drafter:
    """Load a head of a format by name, in the dtype of its file unless another is given.

    Args:
        name: one of ``FORMATS``.
        folder: of the head; of a native one it may also be a hub id.
        target: the model it was trained on.
        dtype: of the weights.

    Raises:
        ValueError: damaged, of another format, or trained on another target.
    """
    if name == NATIVE:
        return read_native(folder, target, dtype or torch.float32)
    head = read_folder(folder, target, dialect_named(name))
    if dtype is not None:
        nn.Module.to(head, dtype=dtype)
    return head


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
    folder = Path(folder)
    native = not folder.is_dir() or is_native(folder)
    return read_as(NATIVE if native else dialect_of(folder).name, folder, target, dtype)


def is_native(folder: Path) -> bool:
    """Whether a folder is Headway's own, or damaged: the native loader says what is wrong."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind = found.get("model_type")
    except (OSError, ValueError, AttributeError):
        return True
    own: set[type[DrafterConfig]] = {drafter.config_class for drafter in FAMILIES.values()}
    return kind in {config.model_type for config in own}
