"""The tensors of a head's folder, whoever wrote it: safetensors, or a pickle that runs no code."""

import json
import pickle
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from drafters.export.dialect import DTYPES
from drafters.export.folder import WEIGHTS, ExportError, read_tensors

INDEX = f"{WEIGHTS}.index.json"
SAFE = (WEIGHTS, "medusa_lm_head.safetensors", "speculator.safetensors")
MASK = "mask_embedding.pt"
PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt", "speculator.pt")


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, in one file or in shards; safetensors before pickles.

    Args:
        folder: of a head, ours or another trainer's.

    Raises:
        ExportError: none there, damaged, a pickle that holds anything but tensors, or a file
            beside them that changes what the head computes.
    """
    if (folder / MASK).is_file():
        raise ExportError(
            f"{folder}: {MASK}: heads with an embedding of their own for the mask token are not "
            "supported"
        )
    if (folder / INDEX).is_file():
        return _sharded(folder)
    for name in SAFE:
        if (folder / name).is_file():
            return read_tensors(folder / name)
    for name in PICKLED:
        if (folder / name).is_file():
            return pickled_tensors(folder / name)
    raise ExportError(
        f"{folder}: no tensors in it: one of {', '.join((*SAFE, INDEX, *PICKLED))} is needed"
    )


def as_engines_cast(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Foreign tensors in the types that dialects declare, as engines cast them while they load.

    Floating-point tensors of several types (norms in float32 beside halves) become what most
    numbers are; ``d2t`` int64 and ``t2d`` bool. Tables of rotary frequencies, which are computed
    again, are left out.

    Args:
        tensors: of a folder.
    """
    found = {name: t for name, t in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    numbers: Counter[torch.dtype] = Counter()
    for tensor in found.values():
        numbers[tensor.dtype] += tensor.numel() if tensor.dtype in DTYPES else 0
    main = max(DTYPES, key=lambda dtype: numbers[dtype])
    for name, tensor in found.items():
        if tensor.dtype in DTYPES:
            found[name] = tensor.to(main)
        elif name == "d2t" and tensor.dtype == torch.int32:
            found[name] = tensor.long()
        elif name == "t2d" and not tensor.is_floating_point():
            found[name] = tensor.bool()
    return found


def file_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one file, safetensors or a pickle, as its name says.

    Raises:
        ExportError: missing or damaged.
    """
    return pickled_tensors(path) if path.suffix in (".pt", ".bin") else read_tensors(path)


def pickled_tensors(path: Path) -> dict[str, Tensor]:
    """A state dict of a legacy file, read without running any code that it may hold.

    Raises:
        ExportError: damaged, or it holds anything but a state dict.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except pickle.UnpicklingError as error:
        raise ExportError(
            f"{path}: refused: it is a pickle that holds more than tensors and may run code when "
            "opened; have its tensors saved as model.safetensors where you trust it "
            f"({str(error).splitlines()[0]})"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise ExportError(
            f"{path}: cannot read it, it is damaged or cut short ({error}); get it again"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ExportError(f"{path}: not a state dict: names and tensors are expected")
    return found


def _sharded(folder: Path) -> dict[str, Tensor]:
    """Shards, as their index has them."""
    try:
        where = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError) as error:
        raise ExportError(f"{folder / INDEX}: cannot read it: {error!r}") from error
    found: dict[str, Tensor] = {}
    for shard in sorted(set(where.values())):
        found |= read_tensors(folder / shard)
    if missing := sorted(set(where) - set(found)):
        raise ExportError(f"{folder}: {missing[0]} is in the index and in no shard: half a copy?")
    return found
