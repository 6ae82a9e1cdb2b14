"""What EAGLE-3 dialects with numbered layers have in common: vLLM's and ModelOpt's.

Legend: H draft hidden, Ht target hidden, F captured layers, L layers.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from drafters.export.borrowed import differing_rows
from drafters.export.dialect import EMBEDDING, KeySpec, TensorSpec
from drafters.export.dialects.sglang import IDS
from drafters.export.dialects.speculators import layer_id_problems
from drafters.export.fields import (
    LAYER_FIELDS,
    MARKS,
    OFFSETS,
    llama_layer,
    rope_extension,
    to_outputs,
    vocab_state,
)
from drafters.export.folder import ExportError
from drafters.target import TargetModel

ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
"""By ``model_type``: that of the layers, which have norms of queries and keys in Qwen3's."""
ALIASES = {
    "LlamaForCausalLM": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "PEagleDraftModel": "llama",
    "PeagleLlamaForCausalLM": "llama",
    "PeagleQwen3ForCausalLM": "qwen3",
}
"""Other names of the same classes in vLLM's registry, and what official EAGLE writes."""
FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
SIZES = (
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "num_aux_hidden_states",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
)
KEYS = (
    *(KeySpec(name, int, positive=True) for name in SIZES),
    *(KeySpec(name, bool) for name in FLAGS),
    KeySpec("architectures", list),
    KeySpec("model_type", str),
    KeySpec("rms_norm_eps", float),
    KeySpec("rope_theta", float),
    KeySpec("rope_parameters", dict),
    KeySpec("rope_scaling", (dict, type(None))),
    KeySpec("hidden_act", str, "silu"),
    KeySpec("tie_word_embeddings", bool, False),
    KeySpec("attention_bias", bool, False),
    KeySpec("mlp_bias", bool, False),
    KeySpec("torch_dtype", str),
    KeySpec("layer_types", list),
    KeySpec("sliding_window", (int, type(None))),
    KeySpec(IDS, list),
    KeySpec("eagle_config", dict),
)
# What an engine must find unchanged after transformers has parsed the config.
PARSED_KEYS = (
    *SIZES,
    *FLAGS,
    "rms_norm_eps",
    "tie_word_embeddings",
    "layer_types",
    "sliding_window",
    IDS,
    "eagle_config",
)
FIRST, OWN_FIRST = "layers.0.", "midlayer."


def numbered_layers(config: Mapping[str, Any]) -> list[TensorSpec]:
    """Fusion, norms and L layers; the first one reads embedding and feature.

    Args:
        config: with the keys of this file.
    """
    size, wide = config["hidden_size"], config["target_hidden_size"]
    features, qk_norm = config["num_aux_hidden_states"], config["model_type"] == "qwen3"
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, features * wide)}
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = (features * wide,)
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{index}.weight": (wide,) for index in range(features)}
    shapes |= {f"{FIRST}hidden_norm.weight": (size,), "norm.weight": (size,)}
    found = [TensorSpec(name, shape, parameter=f"model.{name}") for name, shape in shapes.items()]
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}"
        found += llama_layer(
            prefix, config, None if index else 2 * size, True, qk_norm, f"model.{prefix}"
        )
    return found


def head_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a head's configuration, of a checked file."""
    copied = (*LAYER_FIELDS, *FLAGS, "vocab_size", "draft_vocab_size", "rope_theta")
    return {
        **{name: config[name] for name in copied},
        "max_position_embeddings": config["max_position_embeddings"],
        "num_layers": config["num_hidden_layers"],
        "qk_norm": config["model_type"] == "qwen3",
        "rope_extension": rope_extension(config),
        "sliding_window": config["sliding_window"],
        "feature_layers": list(config[IDS]),
    }


def head_state(tensors: Mapping[str, Tensor], target: TargetModel) -> dict[str, Tensor]:
    """The head's state but for embeddings; an output matrix that is missing is the target's.

    Raises:
        ExportError: the target's has a bias.
    """
    not_weights = (EMBEDDING, OFFSETS, MARKS)
    state = {
        name.replace(FIRST, OWN_FIRST): tensor
        for name, tensor in tensors.items()
        if name not in not_weights
    }
    if "lm_head.weight" not in state:
        if target.lm_head.bias is not None:
            raise ExportError(
                f"the file has no lm_head.weight, and that of target {target.name!r} has a bias, "
                "which EAGLE-3 heads have no place for"
            )
        state["lm_head.weight"] = target.lm_head.weight.detach().to(tensors["fc.weight"].dtype)
    return state | vocab_state(tensors)


def is_own(table: Tensor, target: TargetModel, mask: int | None = None) -> bool:
    """Whether an embedding (V, H) is another one than the target's.

    Args:
        table: of a file.
        target: to compare with; one on the meta device has no weights to differ from.
        mask: a row that may differ.
    """
    weight = target.embedding.get_parameter("weight").detach()
    if weight.is_meta:
        return False
    if weight.shape != table.shape:
        return True
    differs = differing_rows(table, weight)
    if mask is not None:
        differs[mask] = False
    return bool(differs.any())


def nested_id_problems(config: Mapping[str, Any]) -> list[str]:
    """Where layer ids are missing, or the two lists of them contradict each other or their number.

    Args:
        config: with both lists.
    """
    ids, nested = config[IDS], config["eagle_config"]
    if nested.get("use_aux_hidden_state") is not True:
        return ["eagle_config.use_aux_hidden_state must be true"]
    if bool(nested.get("norm_before_fc")) != config["norm_before_fc"]:
        return [
            f"norm_before_fc is {config['norm_before_fc']} but eagle_config, which engines ask "
            f"first, says {nested.get('norm_before_fc')}"
        ]
    if problems := layer_id_problems(ids, IDS):
        return problems
    if len(ids) != config["num_aux_hidden_states"]:
        return [f"num_aux_hidden_states is {config['num_aux_hidden_states']} for {len(ids)} layers"]
    if nested.get(IDS) != to_outputs(ids):
        return [
            f"layer ids disagree: eagle_config has {nested.get(IDS)} (SGLang: output of layer), so "
            f"the top level must be one higher (vLLM, llama.cpp: hidden_states index), but it is "
            f"{ids}"
        ]
    return []
