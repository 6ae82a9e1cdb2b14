"""export: heads for serving engines, one file per dialect, and the checks that guard them.

Every writer reads its folder back through a simulation of the engines' loaders, and compares
logits, before the folder gets its name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafters.base import Drafter
from drafters.config import DrafterConfig
from drafters.export import writing
from drafters.export.card import CardFacts
from drafters.export.dialect import Dialect
from drafters.export.dialects.native import read_native, write_native
from drafters.export.folder import CONFIG, Export, ExportError
from drafters.export.golden import (
    check_golden,
    golden_difference,
    golden_inputs,
    golden_logits,
    write_golden,
)
from drafters.export.reading import check_folder, folder_config, read_folder
from drafters.export.registry import DIALECTS, dialect_named, dialect_of
from drafters.export.stitched.mtp_forms import STITCHED
from drafters.export.stitched.stitching import check_stitched, form_of, read_stitched, stitch
from drafters.hub import head_folder
from drafters.loading import FAMILIES, saved_config
from drafters.target import TargetModel

NATIVE = "native"
FORMATS = (NATIVE, *DIALECTS, *STITCHED)

__all__ = [
    "DIALECTS",
    "FORMATS",
    "NATIVE",
    "CardFacts",
    "Dialect",
    "Export",
    "ExportError",
    "check_as",
    "check_folder",
    "check_golden",
    "dialect_named",
    "dialect_of",
    "format_of",
    "golden_difference",
    "golden_inputs",
    "golden_logits",
    "head_config",
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
    facts: CardFacts | None = None,
) -> Export:
    """Write a head in a format by name.

    Args:
        name: one of ``FORMATS``.
        drafter: the head, with its target attached.
        folder: where to; an export that is already there is replaced, anything else is refused.
        with_embeddings: see ``drafters.export.writing.write_folder``.
        provenance: versions, commit and command line, for the record.
        facts: for the model card.

    Raises:
        ExportError: unknown, no place for this head, or the folder cannot be written.
    """
    if with_embeddings and name in (NATIVE, *STITCHED):
        raise ExportError("with_embeddings has no effect: in this format heads borrow the target's")
    if name in STITCHED:
        return stitch(drafter, folder, STITCHED[name], provenance, facts)
    if name != NATIVE:
        return writing.write_folder(
            drafter, folder, dialect_named(name), with_embeddings, provenance, facts
        )
    return write_native(drafter, folder, provenance, facts)


def read_as(
    name: str, folder: str | Path, target: TargetModel, dtype: torch.dtype | None = None
) -> Drafter:
    """Load a head of a format by name, in the dtype of its file unless another is given.

    Args:
        name: one of ``FORMATS``.
        folder: of the head, or its hub id, also at a revision (``user/name@revision``).
        target: the model it was trained on.
        dtype: of the weights.

    Raises:
        ValueError: not found, damaged, of another format, or trained on another target.
    """
    folder = head_folder(folder)
    if name == NATIVE:
        return read_native(folder, target, dtype or torch.float32)
    if name in STITCHED:
        return read_stitched(folder, target, STITCHED[name], dtype)
    head = read_folder(folder, target, dialect_named(name))
    if dtype is not None:
        nn.Module.to(head, dtype=dtype)
    return head


def read_head(
    folder: str | Path, target: TargetModel, dtype: torch.dtype = torch.float32
) -> Drafter:
    """Load a head of any format and attach its target.

    Args:
        folder: an export or a trained head, or its hub id, also at a revision
            (``user/name@revision``).
        target: the model it was trained on.
        dtype: of the weights.

    Raises:
        ValueError: not found, not a head, damaged, or trained on another target.
    """
    folder = head_folder(folder)
    return read_as(format_of(folder), folder, target, dtype)


def check_as(name: str, folder: Path, target: TargetModel) -> dict[str, Tensor]:
    """Read an export strictly, as no engine does.

    Args:
        name: one of ``FORMATS`` but the native one.
        folder: of the export.
        target: it is to be served with.

    Returns:
        The head's tensors.

    Raises:
        ExportError: naming everything that is wrong.
    """
    if name in STITCHED:
        return check_stitched(folder, target, STITCHED[name])
    return check_folder(folder, target, dialect_named(name))


def format_of(folder: Path) -> str:
    """Which of ``FORMATS`` a folder is in.

    Raises:
        ExportError: in none.
    """
    if is_native(folder):
        return NATIVE
    stitched = form_of(folder)
    return dialect_of(folder).name if stitched is None else stitched.name


def head_config(folder: str | Path, target: TargetModel) -> DrafterConfig:
    """The configuration of a head of any format, for planning: the target's weights are not read.

    Args:
        folder: as :func:`read_head` takes it.
        target: the model it was trained on; its weights may be on the meta device.

    Raises:
        ValueError: not found, not a head, or damaged.
    """
    folder = head_folder(folder)
    name = format_of(folder)
    if name in STITCHED:
        raise ExportError(
            f"{folder}: a target with its own modules: a plan cannot be made without reading them"
        )
    if name == NATIVE:
        return saved_config(folder)
    return folder_config(folder, target, dialect_named(name))


def is_native(folder: Path) -> bool:
    """Whether a folder is Headway's own, or damaged: the native loader says what is wrong."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind = found.get("model_type")
    except (OSError, ValueError, AttributeError):
        return True
    own: set[type[DrafterConfig]] = {drafter.config_class for drafter in FAMILIES.values()}
    return kind in {config.model_type for config in own}
