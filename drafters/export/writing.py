"""Writing a head in a dialect: whole or not at all, read back before the folder gets its name."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.base import Drafter
from drafters.export.card import CardFacts, CardForm, write_card
from drafters.export.dialect import DTYPES, EMBEDDING, Dialect
from drafters.export.folder import (
    CONFIG,
    MANIFEST,
    Export,
    ExportError,
    folder_bytes,
    publish,
    read_json,
    write_json,
    write_tensors,
)
from drafters.export.golden import check_same_logits, golden_difference, write_golden
from drafters.export.reading import check_folder, read_folder
from drafters.hub import split_revision

logger = logging.getLogger(__name__)


def write_folder(
    drafter: Drafter,
    folder: str | Path,
    dialect: Dialect,
    with_embeddings: bool = False,
    provenance: Mapping[str, Any] | None = None,
    facts: CardFacts | None = None,
) -> Export:
    """Write a head for serving, and read it back before it gets its name.

    Args:
        drafter: the head, with its target attached.
        folder: where to; an export that is already there is replaced, anything else is refused.
        dialect: to write.
        with_embeddings: also write a copy of the target's embedding, for engines that do not share
            it.
        provenance: versions, commit and command line, for the record.
        facts: for the card.

    Returns:
        What was written, with the tensors left out and notes for the user.

    Raises:
        ExportError: the dialect has no place for this head, or the folder cannot be written.
    """
    _refuse(drafter, dialect, with_embeddings)
    left_out, head = dialect.left_out(drafter), dialect.servable(drafter)
    config, tensors = dialect.config(head), dialect.tensors(head)
    if with_embeddings and EMBEDDING not in tensors:  # a head may have its own
        dtype = next(head.parameters()).dtype
        tensors[EMBEDDING] = head.target.embedding.get_parameter("weight").to(dtype)
    if left_out:
        logger.warning(
            "left out, the %s dialect has no place for it: %s", dialect.name, list(left_out)
        )
    served, notes = dialect.served(config), _notes(drafter, dialect, config)
    with publish(Path(folder)) as temporary:
        write_json(config, temporary / CONFIG)
        write_tensors(tensors, temporary / dialect.weights, {"format": "pt"})
        write_golden(head, temporary)
        record = manifest(head, dialect.name, tensors, left_out, provenance)
        write_json(record, temporary / MANIFEST)
        form = CardForm(dialect.name, served, config, notes, left_out)
        write_card(head, temporary, Path(folder).name, form, facts)
        again = _read_back(head, dialect, config, temporary)
        size = folder_bytes(temporary)
    return Export(
        folder=Path(folder),
        format=dialect.name,
        served=served,
        num_tensors=len(tensors),
        bytes=size,
        difference=golden_difference(drafter, again),
        card=form.card,
        left_out=left_out,
        notes=notes,
    )


def refusals(drafter: Drafter, dialect: Dialect) -> list[str]:
    """Why a dialect cannot hold a head; nothing if it can.

    Args:
        drafter: the head, with its target attached.
        dialect: in question.
    """
    if drafter.family not in dialect.families:
        families = " and ".join(dialect.families)
        return [
            f"the {dialect.name} dialect is for {families} heads and this is a {drafter.family} "
            "head"
        ]
    found = dialect.refusals(drafter)
    if (dtype := next(drafter.parameters()).dtype) not in DTYPES:
        found.append(f"engines do not load {dtype} heads: use .float() first")
    return found


def _refuse(drafter: Drafter, dialect: Dialect, with_embeddings: bool) -> None:
    if found := refusals(drafter, dialect):
        raise ExportError("; ".join(found) + "; format native holds every head")
    if with_embeddings and dialect.embeddings != "optional":
        raise ExportError(
            f"with_embeddings has no effect: {dialect.name} files {dialect.embeddings} hold the "
            "target's embedding"
        )


def _read_back(head: Drafter, dialect: Dialect, config: dict[str, Any], folder: Path) -> Drafter:
    """Everything that is written must come back: keys, tensors, and the very same logits."""
    found = read_json(folder / CONFIG)
    if differing := sorted(k for k in {*config, *found} if config.get(k) != found.get(k)):
        raise ExportError(f"config.json reads back differently: {', '.join(differing)}")
    check_folder(folder, head.target, dialect)
    again = read_folder(folder, head.target, dialect)
    check_same_logits(head, again)
    return again


def manifest(
    head: Drafter,
    name: str,
    tensors: Mapping[str, Tensor],
    left_out: tuple[str, ...] = (),
    provenance: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The record of an export: what was written, and for which target.

    Args:
        head: that was written.
        name: of the format.
        tensors: of the file.
        left_out: names of the head's tensors that are not in it.
        provenance: versions, commit and command line.
    """
    return {
        "format": name,
        "family": head.family,
        "target_name": head.config.target_name,
        "target_fingerprint": head.config.target_fingerprint,
        "reference": head.config.reference,
        "tensors": {name: list(tensor.shape) for name, tensor in sorted(tensors.items())},
        "left_out": list(left_out),
        "provenance": dict(provenance or {}),
    }


def _notes(head: Drafter, dialect: Dialect, config: Mapping[str, Any]) -> tuple[str, ...]:
    return (*dialect.notes(head, config), *common_notes(head))


def common_notes(head: Drafter) -> list[str]:
    """What no dialect has a place for, as far as a head has it."""
    notes = []
    name, revision = split_revision(head.config.target_name or "")
    if revision is not None:
        notes.append(f"it was trained on revision {revision} of {name}: serve that one")
    if reference := head.config.reference:
        notes.append(
            "serve it with the merged target that its training wrote (target/), not with "
            f"{reference['base']}, for whose law it was not trained"
        )
    if head.config.tree is not None:
        notes.append(
            "its fitted tree is not in the file: these engines draft chains or trees of their own"
        )
    if head.config.draft_temperature != 1.0:
        notes.append(
            f"its draft temperature {head.config.draft_temperature:g} is not in the file: engines "
            "draw drafts at the request's temperature or take the likeliest"
        )
    return notes
