"""Reading a head of any dialect, ours or another trainer's, and checking it as an engine would."""

import logging
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig

from drafters.base import Drafter
from drafters.export.dialect import Dialect
from drafters.export.fields import EMBEDDING
from drafters.export.folder import CONFIG, MANIFEST, ExportError, read_json, read_tensors
from drafters.export.golden import GOLDEN, TOLERANCE, check_golden
from drafters.export.tensors import folder_tensors
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
    config = dialect.complete(read_json(folder / CONFIG), target)
    dialect.check_config(config)
    for problem in dialect.target_problems(config, target):
        if not problem.startswith("max_position_embeddings"):
            raise ExportError(f"{folder}: wrong target {target.name!r}: {problem}")
        logger.warning("%s: %s: engines limit the context to it", folder, problem)
    tensors = dialect.renamed(folder_tensors(folder))
    dialect.check_tensors(config, tensors)
    _check_embedding(tensors, target, folder)
    head = _build(config, tensors, target, dialect, folder)
    if (folder / GOLDEN).is_file():
        check_golden(head, folder, TOLERANCE)
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
    tensors = read_tensors(folder / dialect.weights)
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


def _build(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    target: TargetModel,
    dialect: Dialect,
    folder: Path,
) -> Drafter:
    parts = dialect.parts(config, tensors, target)
    recorded = read_json(folder / MANIFEST) if (folder / MANIFEST).exists() else {}
    kept = {name: recorded.get(name) for name in RECORDED}
    drafter_class = FAMILIES[parts.family]
    shape = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "target_num_layers": target.num_layers,
    }
    head = drafter_class(drafter_class.config_class(**{**shape, **parts.options, **kept}))
    dtype = next(tensor.dtype for tensor in parts.state.values() if tensor.is_floating_point())
    nn.Module.to(head, target.device, dtype)
    head.load_state_dict(parts.state)
    return head.attach(target).eval()


def _check_embedding(tensors: dict[str, Tensor], target: TargetModel, folder: Path) -> None:
    """An embedding in the file must be the target's: Headway's heads always borrow it."""
    found = tensors.get(EMBEDDING)
    if found is None:
        return
    weight = target.embedding.get_parameter("weight").cpu()
    if not weight.to(found.dtype).equal(found):
        raise ExportError(
            f"{folder}: {EMBEDDING} is not the embedding of {target.name!r}: the head has its own, "
            "or belongs to another target"
        )
