"""A model's checkpoint on disk: which tensor is in which file, and files rewritten without some.

Files are read by their headers and copied byte for byte, so that neither the size of a checkpoint
nor dtypes that torch does not know matter.
"""

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters.export.folder import CONFIG, WEIGHTS, ExportError, read_json, write_json

INDEX = f"{WEIGHTS}.index.json"
_LENGTH = 8  # bytes that say how long the header is
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """The safetensors files of a model.

    Attributes:
        folder: of the model.
        config: its config.json.
        places: file of every tensor, by the tensor's name.
    """

    folder: Path
    config: dict[str, Any]
    places: dict[str, str]

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of the config that describes the language model."""
        nested: dict[str, Any] = self.config.get("text_config", self.config)
        return nested

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Some tensors, in the dtype of the file.

        Raises:
            ExportError: a file is damaged, or does not hold what the index says.
        """
        found: dict[str, Tensor] = {}
        for file in sorted({self.places[name] for name in names}):
            path = self.folder / file
            try:
                with safe_open(path, framework="pt") as opened:
                    held = set(opened.keys())
                    wanted = [name for name in names if self.places[name] == file and name in held]
                    found |= {name: opened.get_tensor(name) for name in wanted}
            except (OSError, SafetensorError) as error:
                raise ExportError(f"{path}: missing, damaged or cut short ({error})") from error
        if missing := sorted(set(names) - set(found)):
            raise ExportError(
                f"{self.folder}: {missing[0]} is not in {self.places[missing[0]]}, where {INDEX} "
                "says it is: half a copy?"
            )
        return found


def open_checkpoint(folder: Path) -> Checkpoint:
    """What a model's folder holds; no tensor is read.

    Args:
        folder: with config.json and safetensors, in one file or with an index.

    Raises:
        ExportError: there are none, or their index or header cannot be read.
    """
    config = read_json(folder / CONFIG)
    if (folder / INDEX).is_file():
        places = read_json(folder / INDEX).get("weight_map")
        if not isinstance(places, dict):
            raise ExportError(f"{folder / INDEX}: no weight_map in it")
        return Checkpoint(folder, config, places)
    if not (folder / WEIGHTS).is_file():
        raise ExportError(f"{folder}: neither {WEIGHTS} nor {INDEX} is there")
    header, _ = read_header(folder / WEIGHTS)
    return Checkpoint(folder, config, dict.fromkeys(header, WEIGHTS))


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """What a safetensors file says about its tensors, without the metadata, and where data begins.

    Raises:
        ExportError: missing, or not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            header, start = _header(file)
    except (OSError, ValueError) as error:
        raise ExportError(f"{path}: missing, damaged or cut short ({error})") from error
    header.pop("__metadata__", None)
    return header, start


def copy_without(source: Path, names: Collection[str], path: Path) -> None:
    """Write a safetensors file without some of its tensors; the others byte for byte.

    Args:
        source: to read.
        names: of tensors to leave out.
        path: to write.
    """
    with source.open("rb") as read, path.open("wb") as write:
        header, start = _header(read)
        kept = {name: dict(entry) for name, entry in header.items() if name not in names}
        parts, end = [], 0
        for name, entry in kept.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            parts.append((start + first, last - first))
            entry["data_offsets"] = [end, end + last - first]
            end += last - first
        encoded = json.dumps(kept, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % _LENGTH)
        write.write(len(encoded).to_bytes(_LENGTH, "little") + encoded)
        for place, length in parts:
            read.seek(place)
            _copy_bytes(read, write, length)
    shutil.copymode(source, path)


def write_index(folder: Path, places: Mapping[str, str]) -> None:
    """Write the index of a folder whose files are all there.

    Args:
        folder: of the model.
        places: file of every tensor.
    """
    total = 0
    for file in sorted(set(places.values())):
        header, _ = read_header(folder / file)
        total += sum(
            entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values()
        )
    ordered = dict(sorted(places.items()))
    write_json({"metadata": {"total_size": total}, "weight_map": ordered}, folder / INDEX)


def index_problems(checkpoint: Checkpoint) -> list[str]:
    """Where files and index contradict each other: loaders believe either the one or the other."""
    problems = []
    for file in sorted(set(checkpoint.places.values())):
        if not (checkpoint.folder / file).is_file():
            problems.append(f"{file} is missing, though the index names it")
            continue
        header, start = read_header(checkpoint.folder / file)
        listed = {name for name, place in checkpoint.places.items() if place == file}
        problems += [f"{name} is not in {file}" for name in sorted(listed - set(header))]
        problems += [
            f"{file} also holds {name}, which the index puts "
            f"{'elsewhere' if name in checkpoint.places else 'nowhere'}: some engines load it"
            for name in sorted(set(header) - listed)
        ]
        end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if (size := (checkpoint.folder / file).stat().st_size) != end:
            problems.append(f"{file} has {size} bytes instead of {end}: it is cut short")
    return problems


def dtype_of(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Of the floating-point tensors of a file."""
    return next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())


def _header(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """Header with its metadata, and where data begins.

    Raises:
        ValueError: not a safetensors file.
    """
    length = int.from_bytes(file.read(_LENGTH), "little")
    text = file.read(min(length, 100 << 20))  # the format allows no longer ones
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header, _LENGTH + length


def _copy_bytes(read: IO[bytes], write: IO[bytes], length: int) -> None:
    while length:
        block = read.read(min(length, _BLOCK))
        if not block:
            raise ExportError("a file of the target is cut short")
        write.write(block)
        length -= len(block)
