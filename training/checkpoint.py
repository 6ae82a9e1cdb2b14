"""Checkpoints: save, rotate, resume. safetensors and JSON only, no pickled code; nothing
half-written is ever seen.

A checkpoint is the folder ``<out>/checkpoints/step-000200``:

    head/                  a native head, loadable by itself (the moving average, if one is kept)
    optimizer.safetensors  "<parameter name>.<what>", whole, whatever engine wrote it
    weights.safetensors    trained parameters by name, only where ``head/`` does not say them all
    trainer_state.json     everything else, and the SHA-256 of the files above

It is written beside its place, flushed and renamed, so a kill or a full disk leaves the earlier
ones as they were.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import Drafter

_PREFIX = "step-"
_STATE = "trainer_state.json"
HEAD = "drafter."
"""Prefix of a head's parameters among those of its objective."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        weights: tensors of the head in ``head/`` by name in the objective, whole.
        raw: trained parameters by name, which differ where ``head/`` is an average.
        optimizer: by parameter name, what the optimizer keeps of it.
        state: the JSON part.
    """

    weights: dict[str, Tensor]
    raw: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def save_checkpoint(
    out: Path,
    step: int,
    head: Drafter,
    optimizer: dict[str, dict[str, Tensor]],
    state: dict[str, Any],
    keep: int,
    weights: dict[str, Tensor] | None = None,
    protected: Collection[int] = (),
) -> Path:
    """Write the checkpoint of ``step`` and drop the oldest beyond ``keep``.

    Args:
        out: run folder.
        step: finished optimizer steps.
        head: as it would be exported now, whole.
        optimizer: by parameter name, whole.
        state: JSON-able trainer state.
        keep: newest checkpoints to keep.
        weights: trained parameters by name, where they are not those of ``head``.
        protected: steps whose checkpoints are kept besides.

    Raises:
        CheckpointError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    final = checkpoint_of(out, step)
    root = final.parent
    temporary = root / f".writing-{final.name}"
    tensors = {f"{name}.{key}": v for name, kept in optimizer.items() for key, v in kept.items()}
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        head.save_pretrained(temporary / "head")
        save_file(_contiguous(tensors), temporary / "optimizer.safetensors")
        if weights is not None:
            save_file(_contiguous(weights), temporary / "weights.safetensors")
        files = {
            str(path.relative_to(temporary)): _digest(path)
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        text = json.dumps({"step": step, "files": files, **state}, indent=1)
        (temporary / _STATE).write_text(text)
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)
        if final.exists():  # of a run that went on from an earlier one
            shutil.rmtree(final)
        os.replace(temporary, final)
        _sync(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"cannot write checkpoint {final}: {error}. Earlier checkpoints are untouched; free "
            "disk space or change run.out, then start the same command again to resume"
        ) from error
    for old in list_checkpoints(out)[:-keep]:
        if step_of(old) not in protected:
            shutil.rmtree(old)
    return final


def checkpoint_of(out: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return out / "checkpoints" / f"{_PREFIX}{step:06d}"


def step_of(checkpoint: Path) -> int:
    """The step a checkpoint folder is named after."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def list_checkpoints(out: Path) -> list[Path]:
    """Finished checkpoints in ``out``, oldest first by step."""
    found = (out / "checkpoints").glob(f"{_PREFIX}*")
    return sorted((path for path in found if (path / _STATE).exists()), key=step_of)


def find_checkpoint(out: Path, resume: str) -> Path | None:
    """The checkpoint to continue.

    Args:
        out: run folder.
        resume: "auto", "none" or a checkpoint folder.

    Raises:
        CheckpointError: "none" but there is one, or the named folder is not a checkpoint or older
            than others in ``out``.
    """
    found = list_checkpoints(out)
    if resume == "auto":
        return found[-1] if found else None
    if resume == "none":
        if found:
            raise CheckpointError(
                f"run.resume=none but {out} holds {found[-1].name}: choose another run.out"
            )
        return None
    named = Path(resume)
    if not (named / _STATE).exists():
        raise CheckpointError(f"run.resume: {resume} is not a checkpoint folder (no {_STATE})")
    step = read_state(named)["step"]
    if later := [path.name for path in found if step_of(path) > step]:
        raise CheckpointError(
            f"run.resume: {out} holds {', '.join(later)}, which a run from step {step} would be "
            "mixed with: delete or move them, or choose another run.out"
        )
    return named


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint.

    Raises:
        CheckpointError: damaged.
    """
    try:
        return json.loads((checkpoint / _STATE).read_text())
    except (OSError, ValueError) as error:
        raise _damaged(checkpoint, str(error)) from error


def check_files(checkpoint: Path) -> None:
    """Compare the files of a checkpoint with what was written.

    Raises:
        CheckpointError: damaged, or written by a version that kept no digests.
    """
    state = read_state(checkpoint)
    if "files" not in state:
        raise CheckpointError(
            f"{checkpoint} was written by an earlier version of Headway and cannot be resumed: "
            "start a new run.out with drafter.init_from naming its head/"
        )
    for name, digest in state["files"].items():
        if not (checkpoint / name).is_file():
            raise _damaged(checkpoint, f"{name} is missing")
        if _digest(checkpoint / name) != digest:
            raise _damaged(checkpoint, f"{name} is not what was written")


def load_checkpoint(checkpoint: Path) -> Checkpoint:
    """Read a checkpoint, of which :func:`check_files` was called before.

    Raises:
        CheckpointError: it cannot be read.
    """
    state = read_state(checkpoint)
    try:
        head = load_file(checkpoint / "head" / "model.safetensors")
        weights = {HEAD + name: value for name, value in head.items()}
        raw = dict(weights)
        if "weights.safetensors" in state["files"]:
            raw |= load_file(checkpoint / "weights.safetensors")
        optimizer: dict[str, dict[str, Tensor]] = {}
        for key, value in load_file(checkpoint / "optimizer.safetensors").items():
            name, what = key.rsplit(".", 1)
            optimizer.setdefault(name, {})[what] = value
    except (OSError, SafetensorError) as error:
        raise _damaged(checkpoint, str(error)) from error
    return Checkpoint(weights, raw, optimizer, state)


def _damaged(checkpoint: Path, cause: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint} is damaged ({cause}): delete it to resume from an earlier one"
    )


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.contiguous() for name, value in tensors.items()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
