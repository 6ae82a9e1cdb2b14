"""Headway's own format: the ``save_pretrained`` folder, with golden logits and a manifest in it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from drafters.base import Drafter
from drafters.export.card import HEADWAY, CardFacts, CardForm, write_card
from drafters.export.folder import (
    MANIFEST,
    WEIGHTS,
    Export,
    folder_bytes,
    publish,
    read_tensors,
    share,
    write_json,
)
from drafters.export.golden import check_same_logits, write_golden
from drafters.export.writing import manifest
from drafters.loading import load_drafter
from drafters.mtp import MtpDrafter
from drafters.target import TargetModel

FORMAT = "native"
SERVED = (HEADWAY,)


def write_native(
    drafter: Drafter,
    folder: str | Path,
    provenance: Mapping[str, Any] | None = None,
    facts: CardFacts | None = None,
) -> Export:
    """Write any head in the native format, and read it back before it gets its name.

    Args:
        drafter: the head, with its target attached.
        folder: where to; an export that is already there is replaced, anything else is refused.
        provenance: versions, commit and command line, for the record.
        facts: for the card.

    Raises:
        ExportError: the folder cannot be written, or reads back differently.
    """
    with publish(Path(folder)) as temporary:
        drafter.save_pretrained(temporary)
        share(temporary / WEIGHTS)
        write_golden(drafter, temporary)
        form = CardForm()
        write_card(drafter, temporary, Path(folder).name, form, facts)
        tensors = read_tensors(temporary / WEIGHTS)
        record = manifest(drafter, FORMAT, tensors, provenance=provenance)
        write_json(record, temporary / MANIFEST)
        again = read_native(temporary, drafter.target, next(drafter.parameters()).dtype)
        check_same_logits(drafter, again)
        size = folder_bytes(temporary)
    return Export(
        folder=Path(folder),
        format=FORMAT,
        served=SERVED,
        num_tensors=len(tensors),
        bytes=size,
        difference=0.0,
        card=form.card,
        notes=_notes(drafter),
    )


def _notes(drafter: Drafter) -> tuple[str, ...]:
    """What the user should know before looking for an engine."""
    if not isinstance(drafter, MtpDrafter):
        return ()
    if drafter.config.native_config is None:
        return (
            "no engine serves MTP modules that were trained from scratch: they decode with Headway "
            "alone",
        )
    return (
        "engines look for these modules among the target's own tensors: export them with --to "
        "mtp-deepseek or mtp-qwen",
    )


def read_native(
    folder: str | Path, target: TargetModel, dtype: torch.dtype = torch.float32
) -> Drafter:
    """Load a native head of any family and attach its target.

    Raises:
        ValueError: damaged, incomplete, or trained on another target.
    """
    return load_drafter(folder, target, dtype=dtype)
