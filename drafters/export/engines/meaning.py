"""What an engine must understand of a head to compute what the head's own code does.

Legend: F captured layers.
"""

from typing import Any

from drafters.base import Drafter
from drafters.block import DFlashDrafter
from drafters.dspark import DSparkDrafter
from drafters.eagle import Eagle3Drafter
from drafters.medusa import MedusaDrafter
from drafters.peagle import PEagleDrafter


def meaning(head: Drafter) -> dict[str, Any]:
    """By words that are fields of Headway's configurations where there is one.

    Args:
        head: with its target attached.

    Returns:
        ``feature_layers`` as ``hidden_states`` indices, ``causal`` and ``windows`` one value a
        layer, ``num_drafts`` of heads that have a fixed number.
    """
    config: Any = head.config
    if isinstance(head, MedusaDrafter):
        return {"num_heads": config.num_heads, "num_layers": config.num_layers}
    found = {"rms_norm_eps": config.rms_norm_eps, "rope_theta": float(config.rope_theta)}
    found["num_layers"] = config.num_layers
    if head.feature_layers:
        found["feature_layers"] = tuple(head.feature_layers)
    if isinstance(head, Eagle3Drafter):
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "own_embedding"):
            found[name] = getattr(config, name)
        found["draft_vocab_size"] = config.draft_vocab_size
        if isinstance(head, PEagleDrafter):
            return found
        return {**found, "norm_output": config.norm_output}
    if isinstance(head, DFlashDrafter):
        found |= _block(head)
    return found


def _block(head: DFlashDrafter) -> dict[str, Any]:
    """Of heads that draft blocks."""
    config = head.config
    found: dict[str, Any] = {
        "causal": tuple(head.causal),
        "windows": tuple(head.windows),
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
    }
    if isinstance(head, DSparkDrafter):
        names = ("markov_rank", "markov_type", "sample_from_anchor")
        found |= {name: getattr(head.config, name) for name in names}
    return found
