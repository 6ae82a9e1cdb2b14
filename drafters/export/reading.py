"""Reading a head of any dialect, ours or another trainer's, and checking it as an engine would."""

import logging
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig

from drafters.base import Drafter
from drafters.config import DrafterConfig
from drafters.export.dialect import Dialect, Parts
from drafters.export.folder import CONFIG, MANIFEST, ExportError, read_json
from drafters.export.golden import GOLDEN, check_golden
from drafters.export.tensors import as_engines_cast, file_tensors, folder_tensors
from drafters.loading import FAMILIES
from drafters.target import TargetModel

logger = logging.getLogger(__name__)

RECORDED = ("target_name", "target_fingerprint", "reference")
"""Of a head's configuration: kept in the manifest, as dialects have no place for them."""


def read_folder(folder: str | Path, target: TargetModel, dialect: Dialect) -> Drafter:
    """Load a head and attach its target. Where golden logits travel with it they are compared.

    Args:
        folder: with config.json and the tensors.
        target: the model it was trained on.
        dialect: of the folder.

    Returns:
        The head, in the dtype of its file.

    Raises:
        ExportError: damaged, incomplete, or of a kind that Headway's heads cannot compute.
        ValueError: the target is not the one recorded with the export.
    """
    folder = Path(folder)
    config, tensors = _completed(folder, target, dialect)
    dialect.check_config(config)
    for problem in dialect.target_problems(config, target):
        if not problem.startswith("max_position_embeddings"):
            raise ExportError(f"{folder}: wrong target {target.name!r}: {problem}")
        logger.warning("%s: %s: engines limit the context to it", folder, problem)
    dialect.check_tensors(config, tensors)
    if foreign := dialect.borrowed_problems(config, tensors, target):
        raise ExportError(f"{folder}: {'; '.join(foreign)}")
    head = _build(dialect.parts(config, tensors, target), target, folder)
    if (folder / GOLDEN).is_file():
        check_golden(head, folder)
    return head


def check_folder(
    folder: str | Path, target: TargetModel | None, dialect: Dialect
) -> dict[str, Tensor]:
    """Read an export as an engine would: nothing is completed, nothing renamed.

    Args:
        folder: the export.
        target: it is to be served with, to compare sizes and the longest position; None compares
            none.
        dialect: it is to be served as.

    Returns:
        Its tensors.

    Raises:
        ExportError: naming everything that is wrong.
    """
    folder = Path(folder)
    config = read_json(folder / CONFIG)
    dialect.check_config(config, target)
    check_parsed(folder, config, dialect)
    tensors = file_tensors(folder / dialect.weights)
    dialect.check_tensors(config, tensors)
    return tensors


def check_parsed(folder: Path, config: dict[str, Any], dialect: Dialect) -> None:
    """transformers, which engines read configs with, must keep what was written.

    Raises:
        ExportError: it cannot parse config.json, or reads something else in it.
    """
    try:
        parsed = AutoConfig.from_pretrained(folder).to_dict()
    except Exception as error:  # transformers' validators raise several kinds
        if dialect.unknown_to_transformers:
            return
        raise ExportError(f"{folder}: transformers cannot parse config.json: {error}") from error
    if changed := dialect.parsed_problems(config, parsed):
        raise ExportError(f"{folder}: transformers reads config.json differently: {changed}")


def folder_config(folder: Path, target: TargetModel, dialect: Dialect) -> DrafterConfig:
    """The configuration of a head, with nothing of it compared with the target's weights.

    Args:
        folder: with config.json and the tensors.
        target: the model it was trained on; its weights may be on the meta device.
        dialect: of the folder.

    Raises:
        ExportError: damaged, incomplete, or of a kind that Headway's heads cannot compute.
    """
    config, tensors = _completed(folder, target, dialect)
    dialect.check_config(config)
    dialect.check_tensors(config, tensors)
    return _config(dialect.parts(config, tensors, target), target, folder)


def _completed(
    folder: Path, target: TargetModel, dialect: Dialect
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors, whoever wrote them, in the words of the dialect."""
    tensors = dialect.renamed(as_engines_cast(folder_tensors(folder)))
    config = dialect.adapted(read_json(folder / CONFIG), tensors)
    return dialect.complete(config, target), tensors


def _config(parts: Parts, target: TargetModel, folder: Path) -> DrafterConfig:
    """Fields of a file, of the target, and of our manifest where there is one."""
    recorded = read_json(folder / MANIFEST) if (folder / MANIFEST).exists() else {}
    kept = {name: recorded.get(name) for name in RECORDED}
    shape = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "target_num_layers": target.num_layers,
    }
    return FAMILIES[parts.family].config_class(**{**shape, **parts.options, **kept})


def _build(parts: Parts, target: TargetModel, folder: Path) -> Drafter:
    head = FAMILIES[parts.family](_config(parts, target, folder))
    dtype = next(tensor.dtype for tensor in parts.state.values() if tensor.is_floating_point())
    nn.Module.to(head, target.device, dtype)
    head.load_state_dict(parts.state)
    return head.attach(target).eval()
