"""Which family a name or a folder means:

Building a new head for a target, and loading a saved one.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from drafters.base import Drafter
from drafters.block import DFlashDrafter, choose_mask_token
from drafters.config import DecoderConfig, DrafterConfig
from drafters.dspark import DSparkDrafter
from drafters.eagle import Eagle3Drafter
from drafters.eagle1 import Eagle1Drafter
from drafters.families import DFlashConfig
from drafters.hub import head_folder
from drafters.hydra import HydraDrafter
from drafters.medusa import MedusaDrafter
from drafters.mtp import MtpDrafter
from drafters.peagle import PEagleDrafter
from drafters.target import TargetModel

FAMILIES: dict[str, type[Drafter]] = {
    drafter.family: drafter
    for drafter in (
        MedusaDrafter,
        HydraDrafter,
        Eagle1Drafter,
        Eagle3Drafter,
        MtpDrafter,
        PEagleDrafter,
        DFlashDrafter,
        DSparkDrafter,
    )
}
"""By the name that a configuration gives them; a new family adds its class here."""


def build_config(
    config_class: type[DrafterConfig], target: TargetModel, **options: Any
) -> DrafterConfig:
    """A configuration whose layers have the target's own shape; ``options`` override fields."""
    shape: dict[str, Any] = target.shape_fields()
    if issubclass(config_class, DecoderConfig):
        shape |= layer_shape(target)
    if issubclass(config_class, DFlashConfig) and options.get("mask_token_id") is None:
        options["mask_token_id"] = choose_mask_token(target)
    return config_class(**{**shape, **options})


def layer_shape(target: TargetModel) -> dict[str, Any]:
    """The fields of a :class:`~drafters.config.DecoderConfig` for layers like the target's."""
    theirs = target.config
    heads = theirs.num_attention_heads
    return {
        "intermediate_size": getattr(theirs, "intermediate_size", None) or 4 * target.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(theirs, "num_key_value_heads", None) or heads,
        "head_dim": getattr(theirs, "head_dim", None) or target.hidden_size // heads,
        "rms_norm_eps": getattr(theirs, "rms_norm_eps", 1e-5),
        "rope_theta": _rope_theta(theirs),
        "max_position_embeddings": target.max_length,
    }


def build_drafter(family: str, target: TargetModel, seed: int = 0, **options: Any) -> Drafter:
    """A new, untrained head attached to ``target``.

    Args:
        family: a key of ``FAMILIES``.
        target: the model to draft for.
        seed: initialisation seed.
        **options: fields of the family's config.

    Raises:
        ValueError: unknown family or option.
    """
    if family not in FAMILIES:
        raise ValueError(f"drafter.type {family!r} is unknown: choose one of {sorted(FAMILIES)}")
    drafter_class = FAMILIES[family]
    known = drafter_class.config_class.__dataclass_fields__
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"drafter.{unknown[0]}: the {family} head has no such option")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = drafter_class(build_config(drafter_class.config_class, target, **options))
    nn.Module.to(drafter, target.device)
    return drafter.attach(target)


def load_drafter(folder: str | Path, target: TargetModel, **kwargs: Any) -> Drafter:
    """Load any native head, whatever its family, and attach its target.

    Args:
        folder: of the head, or its hub id, also at a revision (``user/name@revision``).
        target: the model it was trained on.
        **kwargs: passed to ``from_pretrained``.

    Raises:
        ValueError: not found, not a Headway head, damaged, or trained on another target.
    """
    folder = head_folder(folder)
    kind = type(saved_config(folder))  # families extend one another
    drafter_class = next(each for each in FAMILIES.values() if each.config_class is kind)
    return drafter_class.load(folder, target, **kwargs)


def saved_config(folder: Path) -> DrafterConfig:
    """The configuration of a native head.

    Raises:
        ValueError: not a Headway head.
    """
    try:
        config = AutoConfig.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"head {folder}: no readable config.json of a draft head ({error})"
        ) from error
    if not isinstance(config, DrafterConfig):
        raise ValueError(
            f"head {folder}: model_type {config.model_type!r} is not one of Headway's heads"
        )
    return config


def _rope_theta(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = parameters.get("full_attention", parameters)  # Gemma keeps one set per layer type
    return float(nested.get("rope_theta", 10000.0))
