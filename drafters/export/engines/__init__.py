"""engines: the loading code of serving engines, declared, and the strict check made of it.

Written from the sources of the versions named in each ``Loader``. It runs nothing of an engine; the
``interop`` folder does, where an engine can run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.base import Drafter
from drafters.export.engines import sglang_loaders, vllm_loaders
from drafters.export.engines.loader import Loaded, Loader, differences, load
from drafters.export.engines.meaning import meaning
from drafters.export.folder import CONFIG, read_json, read_tensors
from drafters.export.tensors import INDEX, folder_tensors

LOADERS: tuple[Loader, ...] = (*sglang_loaders.LOADERS, *vllm_loaders.LOADERS)

__all__ = ["LOADERS", "Loaded", "Loader", "engine_problems", "engine_tensors", "loaders_for"]


def loaders_for(config: Mapping[str, Any], family: str) -> list[Loader]:
    """Those that take a folder.

    Args:
        config: of the folder.
        family: of its head.
    """
    return [
        loader
        for loader in LOADERS
        if family in loader.families
        and set(loader.architectures) & set(loader.flat(config).get("architectures") or [""])
    ]


def engine_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors that an engine reads of a folder: those of its index, or else those of every
    safetensors file in it, whatever its name.

    Raises:
        ExportError: no tensors in it, or damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file() or not files:
        return folder_tensors(folder)
    found: dict[str, Tensor] = {}
    for path in files:
        found |= read_tensors(path)
    return found


def engine_problems(folder: str | Path, head: Drafter) -> dict[Loader, list[str]]:
    """What each engine that takes a folder would not use, or use wrongly.

    Args:
        folder: of an export.
        head: that was read from it, with its target attached.

    Returns:
        By loader; an empty list where the engine computes what the head does, and no entry for
        engines that do not take such a folder.

    Raises:
        ExportError: the folder cannot be read.
    """
    folder = Path(folder)
    written, tensors = read_json(folder / CONFIG), engine_tensors(folder)
    found = {}
    for loader in loaders_for(written, head.family):
        config = loader.flat(written)
        problems = load(loader, config, tensors, head.target).problems
        if not loader.stops(config, head.target):
            problems += differences(loader, config, meaning(head), head.target)
        found[loader] = problems
    return found
