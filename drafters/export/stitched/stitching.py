"""Native multi-token prediction modules stitched into their target's checkpoint, and read there.

Engines have no draft file for MTP: they look for the modules among the target's own tensors. So
this writes a whole copy of the target's folder. Files without modules are copied as they are, files
with some are rewritten without them (loaders of vLLM and SGLang read every tensor of every file, so
that an old module left there would come over the new one), and one new file and a new index follow.
The target's own model card stays; what is to be said of the modules is in ``HEADWAY.md``.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from drafters.base import Drafter
from drafters.export.card import BESIDE, CardFacts, CardForm, write_card
from drafters.export.dialect import TensorSpec, tensor_problems
from drafters.export.folder import (
    CONFIG,
    MANIFEST,
    WEIGHTS,
    Export,
    ExportError,
    folder_bytes,
    publish,
    read_json,
    write_json,
    write_tensors,
)
from drafters.export.golden import (
    GOLDEN,
    check_golden,
    check_same_logits,
    golden_difference,
    write_golden,
)
from drafters.export.stitched.checkpoint import (
    INDEX,
    Checkpoint,
    copy_without,
    dtype_of,
    index_problems,
    open_checkpoint,
    write_index,
)
from drafters.export.stitched.mtp_forms import (
    BORROWED,
    COUNTS,
    NEXTN,
    QWEN35,
    STITCHED,
    Form,
    module_tensors,
    own_names,
    refusals,
    served,
    serving_notes,
)
from drafters.export.writing import manifest
from drafters.mtp import MtpDrafter
from drafters.mtp_native import empty_native_mtp, load_native_mtp
from drafters.target import TargetModel

ADDED = "model-mtp.safetensors"
KEPT = "model-target.safetensors"
"""New name of a target's only file: beside an index, ``model.safetensors`` would hide the rest."""


def form_of(folder: Path) -> Form | None:
    """The form of the modules that a model's folder holds; None if it holds none.

    Args:
        folder: of a model, or anything else.
    """
    try:
        return _form_in(open_checkpoint(folder))
    except ExportError:
        return None


def _form_in(checkpoint: Checkpoint) -> Form | None:
    found = (form for form in STITCHED.values() if own_names(checkpoint, form))
    return next(found, None)


def stitch(
    head: Drafter,
    folder: str | Path,
    form: Form,
    provenance: Mapping[str, Any] | None = None,
    facts: CardFacts | None = None,
) -> Export:
    """Write a copy of the target's checkpoint with the head in it, and read the head back.

    Args:
        head: of modules that came with its target, attached to it.
        folder: where to; an export that is already there is replaced, anything else is refused.
        form: of the target's modules.
        provenance: versions, commit and command line, for the record.
        facts: for the card.

    Raises:
        ExportError: the head is not of that kind, the target's files cannot hold it, or the folder
            cannot be written.
    """
    if found := refusals(head, form):
        raise ExportError("; ".join(found))
    assert isinstance(head, MtpDrafter)
    checkpoint = target_checkpoint(head.target)
    if (there := _form_in(checkpoint)) not in (None, form):
        assert there is not None
        raise ExportError(f"the target keeps its modules in another form: use --to {there.name}")
    old, left_out = own_names(checkpoint, form), _left_out(head)
    notes = tuple(serving_notes(head, form, checkpoint))
    card = CardForm(form.name, served(head, form), {}, notes, left_out, inside=True)
    tensors = module_tensors(head.mtp.state_dict(), head.target.num_layers, checkpoint, form)
    with publish(Path(folder)) as temporary:
        places = _copy_target(checkpoint, set(old), temporary)
        write_tensors(tensors, temporary / ADDED, {"format": "pt"})
        write_index(temporary, {**places, **dict.fromkeys(tensors, ADDED)})
        write_json(_counted(checkpoint.config, head), temporary / CONFIG)
        record = manifest(head, form.name, tensors, left_out, provenance)
        write_json(record | {"norm_output": head.config.norm_output}, temporary / MANIFEST)
        write_card(head, temporary, Path(folder).name, card, facts)
        again = _read_back(head, form, temporary)
        size = folder_bytes(temporary)
    return Export(
        folder=Path(folder),
        format=form.name,
        served=served(head, form),
        num_tensors=len(tensors),
        bytes=size,
        difference=golden_difference(head, again),
        card=card.card,
        left_out=left_out,
        notes=notes,
    )


def target_checkpoint(target: TargetModel) -> Checkpoint:
    """The files that a target was loaded from.

    Raises:
        ExportError: they are not safetensors, are quantised, or the card's name is taken.
    """
    place = str(target.model.config.name_or_path)
    folder = Path(place) if Path(place).is_dir() else Path(snapshot_download(place))
    checkpoint = open_checkpoint(folder)
    if (folder / BESIDE).is_file() and not (folder / MANIFEST).is_file():
        raise ExportError(
            f"{place} holds a {BESIDE} that Headway did not write, and its own card has that name: "
            "rename it"
        )
    if "quantization_config" in checkpoint.config:
        raise ExportError(
            f"{place} is quantised, and engines would read the modules as quantised too: stitch "
            "them into the unquantised checkpoint"
        )
    return checkpoint


def _copy_target(checkpoint: Checkpoint, old: set[str], out: Path) -> dict[str, str]:
    """Copy everything but old modules; returns the file of every tensor."""
    shards = set(checkpoint.places.values())
    ours = {INDEX, CONFIG, MANIFEST, GOLDEN, ADDED, BESIDE}
    for entry in checkpoint.folder.iterdir():
        if entry.name in shards | ours or entry.name.startswith("."):
            continue
        copy = shutil.copytree if entry.is_dir() else shutil.copy
        copy(entry, out / entry.name)
    places: dict[str, str] = {}
    for shard in sorted(shards):
        names = [name for name, file in checkpoint.places.items() if file == shard]
        dropped = old.intersection(names)
        if len(dropped) == len(names):
            continue
        name = KEPT if shard == WEIGHTS else shard
        if dropped:
            copy_without(checkpoint.folder / shard, dropped, out / name)
        else:
            shutil.copy(checkpoint.folder / shard, out / name)
        places |= {tensor: name for tensor in names if tensor not in dropped}
    return places


def _counted(config: dict[str, Any], head: MtpDrafter) -> dict[str, Any]:
    """The target's config with the number of modules where engines look for it."""
    nested = config.get("text_config", config)
    kind = head.target.config.model_type
    keys = {key for key in COUNTS if key in nested}
    keys.add(QWEN35 if kind.startswith("qwen3_5") else NEXTN)
    counted = {**nested, **dict.fromkeys(sorted(keys), head.config.num_modules)}
    return {**config, "text_config": counted} if "text_config" in config else counted


def _left_out(head: MtpDrafter) -> tuple[str, ...]:
    return tuple(sorted(name for name in head.state_dict() if not name.startswith("mtp.")))


def _read_back(head: MtpDrafter, form: Form, folder: Path) -> MtpDrafter:
    """Write golden logits, and see that everything that was written comes back."""
    _check_index(open_checkpoint(folder), form)
    again = read_stitched(folder, head.target, form)
    mine, theirs = head.mtp.state_dict(), again.mtp.state_dict()
    if differing := [name for name in mine if not torch.equal(mine[name], theirs[name])]:
        raise ExportError(f"{differing[0]} reads back differently")
    write_golden(again, folder)
    check_golden(again, folder)
    if head.draft_vocab is None:
        check_same_logits(head, again)
    return again


def read_stitched(
    folder: str | Path, target: TargetModel, form: Form, dtype: torch.dtype | None = None
) -> MtpDrafter:
    """Load the modules of a checkpoint, ours or a released one, as a head.

    Args:
        folder: of the checkpoint.
        target: the model of the same checkpoint, or of the one that was stitched.
        form: of its modules.
        dtype: of the weights; None takes the file's.

    Raises:
        ValueError: no modules of this form, damaged, or of another target.
    """
    folder = Path(folder)
    checkpoint = open_checkpoint(folder)
    raw = _modules(checkpoint, target, form)
    recorded = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    options = {"norm_output": recorded["norm_output"]} if "norm_output" in recorded else {}
    head = load_native_mtp(target, folder, dtype or dtype_of(raw), **options)
    head.config.reference = recorded.get("reference")
    if print_ := recorded.get("target_fingerprint"):
        head.config.target_name = recorded.get("target_name") or head.config.target_name
        head.config.target_fingerprint = print_
        head.attach(target)
    if dtype is None and (folder / GOLDEN).is_file():
        check_golden(head, folder)
    return head


def check_stitched(folder: str | Path, target: TargetModel, form: Form) -> dict[str, Tensor]:
    """Read a checkpoint's modules as strictly as no engine does.

    Args:
        folder: of the checkpoint.
        target: its model.
        form: of its modules.

    Returns:
        Tensors of the modules.

    Raises:
        ExportError: naming everything that is wrong: files that contradict the index, a wrong
            number of modules, tensors that are unknown, missing, mis-shaped, never trained, not
            finite or not the target's.
    """
    folder = Path(folder)
    checkpoint = open_checkpoint(folder)
    _check_index(checkpoint, form)
    raw = _modules(checkpoint, target, form)
    read_stitched(folder, target, form)
    return raw


def _check_index(checkpoint: Checkpoint, form: Form) -> None:
    """Index and config.json against the files.

    Raises:
        ExportError: naming every contradiction.
    """
    if problems := index_problems(checkpoint) or _count_problems(checkpoint, form):
        raise ExportError(f"{checkpoint.folder}: " + "; ".join(problems))


def _modules(checkpoint: Checkpoint, target: TargetModel, form: Form) -> dict[str, Tensor]:
    """The tensors of a checkpoint's modules, which are all that there should be, and no more.

    Raises:
        ValueError: no modules of this form, or tensors that are unknown, missing, mis-shaped, never
            trained, not finite or not the target's.
    """
    names = own_names(checkpoint, form)
    if not names:
        raise ExportError(f"{checkpoint.folder}: it holds no MTP modules in the {form.name} form")
    raw = checkpoint.read(names)
    empty = empty_native_mtp(target, checkpoint.folder)
    expected = module_tensors(empty, target.num_layers, checkpoint, form)
    problems = [f"unknown tensor {name}" for name in sorted(set(raw) - set(expected))]
    for name, tensor in expected.items():
        if name not in raw:
            problems.append(f"missing tensor {name}")
        elif name.endswith(BORROWED):
            if not torch.equal(raw[name], tensor):
                problems.append(f"{name} is not the target's: engines use the one or the other")
        else:
            problems += tensor_problems(TensorSpec(name, tuple(tensor.shape)), raw[name], None)
    if problems:
        raise ExportError(f"{checkpoint.folder}: " + "; ".join(problems))
    return raw


def _count_problems(checkpoint: Checkpoint, form: Form) -> list[str]:
    """Where config.json does not say how many modules there are, or says something else."""
    found = own_names(checkpoint, form)
    modules = sum(name.endswith((".eh_proj.weight", "mtp.fc.weight")) for name in found)
    said = {key: checkpoint.text_config[key] for key in COUNTS if key in checkpoint.text_config}
    if not said:
        return [f"config.json: none of {', '.join(COUNTS)} says how many modules there are"]
    return [
        f"config.json: {key} is {value} and the file has {modules} modules"
        for key, value in said.items()
        if value != modules
    ]
