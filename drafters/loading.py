"""Which family a name or a folder means:

Building a new head for a target, and loading a saved one.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from drafters.base import Drafter
from drafters.config import Eagle3Config, MedusaConfig
from drafters.eagle import Eagle3Drafter
from drafters.medusa import MedusaDrafter
from drafters.target import TargetModel

FAMILIES: dict[str, type[Drafter]] = {"eagle3": Eagle3Drafter, "medusa": MedusaDrafter}


def eagle3_config(target: TargetModel, **options: Any) -> Eagle3Config:
    """A configuration whose block has the target's own shape; ``options`` override fields."""
    theirs = target.config
    heads = theirs.num_attention_heads
    shape = {
        "intermediate_size": getattr(theirs, "intermediate_size", None) or 4 * target.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(theirs, "num_key_value_heads", None) or heads,
        "head_dim": getattr(theirs, "head_dim", None) or target.hidden_size // heads,
        "rms_norm_eps": getattr(theirs, "rms_norm_eps", 1e-5),
        "rope_theta": _rope_theta(theirs),
        "max_position_embeddings": target.max_length,
    }
    return Eagle3Config(**{**target.shape_fields(), **shape, **options})


def medusa_config(target: TargetModel, **options: Any) -> MedusaConfig:
    """A configuration for this target; ``options`` override fields."""
    return MedusaConfig(**{**target.shape_fields(), **options})


CONFIGS = {"eagle3": eagle3_config, "medusa": medusa_config}


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
    if family not in CONFIGS:
        raise ValueError(f"drafter.type {family!r} is unknown: choose one of {sorted(CONFIGS)}")
    drafter_class = FAMILIES[family]
    known = drafter_class.config_class.__dataclass_fields__
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"drafter.{unknown[0]}: the {family} head has no such option")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = drafter_class(CONFIGS[family](target, **options))
    nn.Module.to(drafter, target.device)
    return drafter.attach(target)


def load_drafter(folder: str | Path, target: TargetModel, **kwargs: Any) -> Drafter:
    """Load any native head, whatever its family, and attach its target.

    Raises:
        ValueError: not a Headway head, damaged, or trained on another target.
    """
    try:
        config = AutoConfig.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"head {folder}: no readable config.json of a draft head ({error})"
        ) from error
    for drafter_class in FAMILIES.values():
        if isinstance(config, drafter_class.config_class):
            return drafter_class.load(folder, target, **kwargs)
    raise ValueError(
        f"head {folder}: model_type {config.model_type!r} is not one of Headway's heads"
    )


def _rope_theta(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = parameters.get("full_attention", parameters)  # Gemma keeps one set per layer type
    return float(nested.get("rope_theta", 10000.0))
