"""The tensors of a head's folder, whoever wrote it: safetensors, or pickles that run no code."""

import pickle
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from drafters.export.dialect import DTYPES
from drafters.export.folder import WEIGHTS, ExportError, read_json, read_tensors

PICKLED_WEIGHTS = "pytorch_model.bin"
INDEX, PICKLED_INDEX = f"{WEIGHTS}.index.json", f"{PICKLED_WEIGHTS}.index.json"
SAFE = (WEIGHTS, "medusa_lm_head.safetensors", "speculator.safetensors")
MASK = "mask_embedding.pt"
PICKLED = (PICKLED_WEIGHTS, "medusa_lm_head.pt", "hydra_lm_head.pt", "speculator.pt")
PICKLE_ENDINGS = (".bin", ".pt")


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, in one file or in shards; safetensors before pickles.

    Args:
        folder: of a head, ours or another trainer's.

    Raises:
        ExportError: none there, damaged, a pickle that holds anything but tensors, an index that
            contradicts its shards, or a file beside them that changes what the head computes.
    """
    if (folder / MASK).is_file():
        raise ExportError(
            f"{folder}: {MASK}: heads with an embedding of their own for the mask token are not "
            "supported"
        )
    for index, names in ((INDEX, SAFE), (PICKLED_INDEX, PICKLED)):
        if (folder / index).is_file():
            return _sharded(folder, index)
        for name in names:
            if (folder / name).is_file():
                return file_tensors(folder / name)
    raise ExportError(
        f"{folder}: no tensors in it: one of "
        f"{', '.join((*SAFE, INDEX, *PICKLED, PICKLED_INDEX))} is needed"
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
    return pickled_tensors(path) if path.suffix in PICKLE_ENDINGS else read_tensors(path)


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


def _sharded(folder: Path, index: str) -> dict[str, Tensor]:
    """Tensors of all shards, which are those that the index puts into each, and no others.

    Raises:
        ExportError: the index is damaged, names files elsewhere or of another kind, or contradicts
            its shards or a whole file beside it.
    """
    places = _weight_map(folder, index)
    whole = index.removesuffix(".index.json")
    if (folder / whole).is_file() and whole not in places.values():
        raise ExportError(
            f"{folder}: both {whole} and {index}, which does not name it: programs differ in which "
            "of them they read; remove the one that does not belong to the head"
        )
    found: dict[str, Tensor] = {}
    problems = []
    for shard in sorted(set(places.values())):
        held = file_tensors(folder / shard)
        listed = {name for name, place in places.items() if place == shard}
        problems += [
            f"{name} is in the index and not in {shard}: half a copy?"
            for name in sorted(listed - set(held))
        ]
        problems += [
            f"{shard} also holds {name}, which the index puts "
            f"{'into ' + places[name] if name in places else 'nowhere'}: programs differ in "
            "whether they read it"
            for name in sorted(set(held) - listed)
        ]
        found |= {name: held[name] for name in listed & set(held)}
    if problems:
        raise ExportError(f"{folder / index}: {'; '.join(problems)}")
    return found


def _weight_map(folder: Path, index: str) -> dict[str, str]:
    """The file of every tensor.

    Raises:
        ExportError: no such map, or files outside of the folder or of another kind.
    """
    places = read_json(folder / index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ExportError(f"{folder / index}: no weight_map of tensors to files in it")
    endings = PICKLE_ENDINGS if index == PICKLED_INDEX else (".safetensors",)
    for shard in places.values():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(endings):
            raise ExportError(
                f"{folder / index}: {shard!r} is not the name of a {' or '.join(endings)} file in "
                "this folder"
            )
    return places
