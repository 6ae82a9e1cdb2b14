"""Checkpoints: save, rotate, resume. safetensors and JSON only, no pickled code; nothing
half-written is ever seen.

A checkpoint is the folder ``<out>/checkpoints/step-000200`` with ``head/`` (a native head, loadable
by itself), ``optimizer.safetensors`` and ``trainer_state.json``. It is written beside its place and
renamed, so a kill or a full disk leaves the earlier ones as they were.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import Drafter

_PREFIX = "step-"


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read."""


def save_checkpoint(
    out: Path,
    step: int,
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of ``step`` and drop the oldest beyond ``keep``.

    Args:
        out: run folder.
        step: finished optimizer steps.
        drafter: the head, unwrapped.
        optimizer: its optimizer.
        state: JSON-able trainer state.
        keep: checkpoints to keep.

    Raises:
        CheckpointError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    root = out / "checkpoints"
    final = root / f"{_PREFIX}{step:06d}"
    temporary = root / f".writing-{final.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        drafter.save_pretrained(temporary / "head")
        tensors, scalars = _flatten(optimizer.state_dict())
        save_file(tensors, temporary / "optimizer.safetensors")
        text = json.dumps({"step": step, "optimizer": scalars, **state}, indent=1)
        (temporary / "trainer_state.json").write_text(text)
        for path in temporary.rglob("*"):
            if path.is_file():
                _sync(path)
        if final.exists():
            shutil.rmtree(final)
        os.replace(temporary, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"cannot write checkpoint {final}: {error}. Earlier checkpoints are untouched; free "
            "disk space or change run.out, then start the same command again to resume"
        ) from error
    for old in list_checkpoints(out)[:-keep]:
        shutil.rmtree(old)
    return final


def list_checkpoints(out: Path) -> list[Path]:
    """Finished checkpoints in ``out``, oldest first by step."""
    found = (out / "checkpoints").glob(f"{_PREFIX}*")
    finished = [path for path in found if (path / "trainer_state.json").exists()]
    return sorted(finished, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def find_checkpoint(out: Path, resume: str) -> Path | None:
    """The checkpoint to continue.

    Args:
        out: run folder.
        resume: "auto", "none" or a checkpoint folder.

    Raises:
        CheckpointError: "none" but there is one, or the named folder is not a checkpoint.
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
    if not (Path(resume) / "trainer_state.json").exists():
        raise CheckpointError(
            f"run.resume: {resume} is not a checkpoint folder (no trainer_state.json)"
        )
    return Path(resume)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint.

    Raises:
        CheckpointError: damaged.
    """
    try:
        return json.loads((checkpoint / "trainer_state.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint} is damaged ({error}): delete it to resume from an earlier one"
        ) from error


def load_checkpoint(
    checkpoint: Path, drafter: Drafter, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Restore head and optimizer in place.

    Returns:
        The trainer state given to :func:`save_checkpoint`, with ``step``.

    Raises:
        CheckpointError: damaged, or of another head.
    """
    state = read_state(checkpoint)
    try:
        weights = load_file(checkpoint / "head" / "model.safetensors")
        drafter.load_state_dict(weights)
        tensors = load_file(checkpoint / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{checkpoint} is damaged ({error}): delete it to resume from an earlier one"
        ) from error
    except RuntimeError as error:
        raise CheckpointError(
            f"{checkpoint} holds a different head than drafter.* describes: {error}"
        ) from error
    optimizer.load_state_dict(_unflatten(tensors, state["optimizer"]))
    return state


def _flatten(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Optimizer state to tensors by "<parameter>.<name>" and JSON-able scalars."""
    tensors, scalars = {}, {}
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value.contiguous()
            else:
                scalars[f"{index}.{name}"] = value
    return tensors, {"param_groups": state["param_groups"], "scalars": scalars}


def _unflatten(tensors: dict[str, Tensor], scalars: dict[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **scalars["scalars"]}.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    return {"state": state, "param_groups": scalars["param_groups"]}


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
