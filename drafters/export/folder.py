"""Writing an export folder: whole or not at all, and never over something that is not an export.

The files are written to a sibling folder, which gets the final name only after its contents have
been read back. A full disk, an error or Ctrl-C leaves the former export as it was.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

MANIFEST = "export.json"  # tells an export from any other folder
CONFIG = "config.json"
WEIGHTS = "model.safetensors"


class ExportError(ValueError):
    """An export cannot be written or read."""


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes:
        folder: where.
        format: the dialect.
        served: engines the dialect is for.
        num_tensors: in model.safetensors.
        bytes: of all files together.
        difference: between golden logits of the head that was given and of the one read back, for
            the tokens that both can propose.
        card: name of the file that says how to serve it.
        left_out: tensors of the head that the dialect has no place for.
        notes: what the user should know before serving.
    """

    folder: Path
    format: str
    served: tuple[str, ...]
    num_tensors: int
    bytes: int
    difference: float
    card: str
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@contextmanager
def publish(folder: Path) -> Iterator[Path]:
    """Yield an empty sibling folder that becomes ``folder`` if the body succeeds.

    Raises:
        ExportError: ``folder`` holds something else than an export, or cannot be written.
    """
    folder = folder.absolute()
    temporary = folder.with_name(f".{folder.name}.writing")
    former = folder.with_name(f".{folder.name}.former")
    try:
        if former.exists() and not folder.exists():  # killed between the two renames of _swap
            os.replace(former, folder)
        _refuse_foreign(folder)
        _remove(temporary)
        temporary.mkdir(parents=True)
        yield temporary
        _sync(temporary)
        _swap(temporary, folder, former)
    except (OSError, SafetensorError) as error:
        raise ExportError(_explain(folder, error)) from error
    finally:
        _remove(temporary)


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Save copies on the CPU, readable for whom the folder is readable; as a pickled state dict
    where the name ends in ``.pt``, for programs that read nothing else.
    """
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if path.suffix == ".pt":
        torch.save(copies, path)
        return
    save_file(copies, path, metadata)
    share(path)


def share(path: Path) -> None:
    """Give a file, which safetensors makes private, the permissions of its folder."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file.

    Raises:
        ExportError: missing, damaged or cut short.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ExportError(
            f"{path}: cannot read it, it is missing, damaged or cut short ({error}); export again"
        ) from error


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """Indented, with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ExportError: missing or not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{path}: cannot read it: {error}") from error
    if not isinstance(content, dict):
        raise ExportError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def folder_bytes(folder: Path) -> int:
    """Size of all files in ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _refuse_foreign(folder: Path) -> None:
    if not folder.exists() or (folder / MANIFEST).is_file():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise ExportError(
            f"{folder} exists and is not an export ({MANIFEST} is not in it): remove it or choose "
            "another folder"
        )


def _swap(temporary: Path, folder: Path, former: Path) -> None:
    """Give ``temporary`` the name ``folder``; the former content goes last."""
    _remove(former)
    if not folder.exists():
        os.replace(temporary, folder)
        return
    os.replace(folder, former)
    try:
        os.replace(temporary, folder)
    except BaseException:
        os.replace(former, folder)
        raise
    _remove(former)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _explain(folder: Path, error: Exception) -> str:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or "os error 28" in str(error):  # safetensors gives the text alone
        cause = f"no space left on the disk of {folder}: free some, or choose another folder"
    else:
        cause = f"cannot write {folder}: {error}"
    return f"{cause}. What was there before is untouched"
