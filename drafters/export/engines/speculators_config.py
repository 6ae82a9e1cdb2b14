"""A config of speculators as vLLM rewrites it before its models read it.

Read in ``vllm/transformers_utils/configs/speculators`` of 0.32.0 and 0.33.0, which are the same.
"""

from collections.abc import Mapping
from typing import Any

_COMMON = ("draft_vocab_size", "target_hidden_size")
_DSPARK = (
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "block_size",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "use_aux_hidden_state",
)
IDS = "eagle_aux_hidden_state_layer_ids"
BLOCK_IDS = "aux_hidden_state_layer_ids"


def flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the layers with the keys of the algorithm put in; others as they are.

    Args:
        config: of a folder.

    Returns:
        Keys as vLLM's model classes read them.
    """
    kind = config.get("speculators_model_type")
    if kind not in ("eagle3", "peagle", "dflash", "dspark"):
        return config
    found = dict(config.get("transformer_layer_config") or {})
    found |= {name: config[name] for name in _COMMON if config.get(name) is not None}
    if kind in ("eagle3", "peagle"):
        return found | _eagle3(config, found.get("model_type", "llama"))
    ids = config.get(BLOCK_IDS) or []
    found[IDS] = ids
    lower = [k - 1 for k in ids]
    if kind == "dflash":
        causal = not config.get("sliding_window_non_causal", True)
        block = {"mask_token_id": config.get("mask_token_id"), "target_layer_ids": lower}
        block |= {"causal": causal, "sample_from_anchor": config.get("sample_from_anchor", False)}
        return found | {"architectures": ["DFlashDraftModel"], "dflash_config": block}
    found |= {name: config[name] for name in _DSPARK if config.get(name) is not None}
    return found | {
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": lower,
        "sample_from_anchor": config.get("sample_from_anchor", False),
    }


def _eagle3(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Of EAGLE-3 and P-EAGLE."""
    parallel = config["speculators_model_type"] == "peagle"
    names = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    name = ("Peagle" if parallel else "Eagle3") + names.get(model_type, f"({model_type})")
    found: dict[str, Any] = {
        "architectures": [name],
        "norm_before_residual": config.get("norm_before_residual", not parallel),
        "norm_before_fc": config.get("norm_before_fc", False),
    }
    if parallel:
        found["pard_token"] = config.get("mask_token_id")
    else:
        found |= {key: config.get(key, False) for key in ("fc_norm", "norm_output")}
    if config.get(IDS):
        found[IDS] = config[IDS]
    return found
