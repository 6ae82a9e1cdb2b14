"""What EAGLE-3 dialects have in common: SGLang's, vLLM's and ModelOpt's.

Legend: H draft hidden, Ht target hidden, F captured layers, L layers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from drafters.base import Drafter
from drafters.config import default_feature_layers
from drafters.export.borrowed import differing_rows
from drafters.export.dialect import EMBEDDING, Dialect, KeySpec, TensorSpec, type_problems
from drafters.export.dialects.speculators import captured_problems, layer_id_problems
from drafters.export.fields import (
    FILE_KEYS,
    LAYER_FIELDS,
    MARKS,
    OFFSETS,
    PARSED_KEYS,
    from_outputs,
    llama_layer,
    rope_extension,
    rope_problems,
    to_outputs,
    vocab_hint,
    vocab_problems,
    vocab_state,
)
from drafters.export.folder import ExportError
from drafters.target import TargetModel

IDS, OUTPUT = "eagle_aux_hidden_state_layer_ids", "lm_head.weight"
NUM_FEATURES = 3  # F: llama.cpp, older vLLM and SGLang know no other number
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
SWITCHES = FLAGS[:3]
COMMON_KEYS = (
    *FILE_KEYS,
    KeySpec("target_hidden_size", int, positive=True),
    KeySpec("draft_vocab_size", int, positive=True),
    *(KeySpec(name, bool) for name in SWITCHES),
    KeySpec(IDS, list),
    KeySpec("eagle_config", dict),
)
"""Of every EAGLE-3 dialect."""
COMMON_PARSED = (
    *PARSED_KEYS,
    "target_hidden_size",
    "draft_vocab_size",
    *SWITCHES,
    IDS,
    "eagle_config",
)
KEYS = (
    *COMMON_KEYS,
    KeySpec("architectures", list),
    KeySpec("model_type", str),
    KeySpec("num_hidden_layers", int, positive=True),
    KeySpec("num_aux_hidden_states", int, positive=True),
    KeySpec("norm_before_residual", bool),
    KeySpec("mlp_bias", bool, False),
    KeySpec("layer_types", list),
    KeySpec("sliding_window", (int, type(None))),
)
"""Of those with numbered layers."""
PARSED = (
    *COMMON_PARSED,
    "num_aux_hidden_states",
    "norm_before_residual",
    "layer_types",
    "sliding_window",
)
FIRST, OWN_FIRST = "layers.0.", "midlayer."


class Eagle3Form(Dialect):
    """Of EAGLE-3's forms."""

    families: ClassVar[tuple[str, ...]] = ("eagle3",)
    embeddings: ClassVar[str] = "optional"
    target_sizes: ClassVar[Mapping[str, str]] = {
        "vocab_size": "vocab_size",
        "target_hidden_size": "hidden_size",
        "max_position_embeddings": "max_length",
    }

    def target_problems(self, config: Mapping[str, Any], target: TargetModel) -> list[str]:
        """Captured layers, too."""
        sizes = super().target_problems(config, target)
        if layer_id_problems(config[IDS], IDS):
            return sizes  # reported already
        return captured_problems(config[IDS], IDS, target) + sizes

    def tensor_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> list[str]:
        """The vocabulary map."""
        return vocab_problems(config, tensors)

    def hint(self, name: str, config: Mapping[str, Any]) -> str:
        """Of the vocabulary map."""
        return vocab_hint(name, config)


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
    if OUTPUT not in state:
        if target.lm_head.bias is not None:
            raise ExportError(
                f"the file has no {OUTPUT}, and that of target {target.name!r} has a bias, "
                "which EAGLE-3 heads have no place for"
            )
        state[OUTPUT] = target.lm_head.weight.detach().to(tensors["fc.weight"].dtype)
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


def eagle_config(head: Drafter) -> dict[str, Any]:
    """The nested config of a head, and the list at the top level that goes with it."""
    layers = list(head.feature_layers)
    nested = {
        IDS: to_outputs(layers),
        "use_aux_hidden_state": True,
        "norm_before_fc": head.config.norm_before_fc,
    }
    return {IDS: layers, "eagle_config": nested}


def completed_eagle_config(config: Mapping[str, Any], target: TargetModel) -> dict[str, Any]:
    """Layer ids and ``norm_before_fc`` of a foreign config, in both places, as engines take them
    where they are missing; ids that are only nested are SGLang's.
    """
    nested = dict(config.get("eagle_config") or {})
    inner = nested.get(IDS)
    ids = config.get(IDS) or (from_outputs(inner) if inner else None)
    ids = ids or default_feature_layers(target.num_layers)
    before_fc = bool(nested.get("norm_before_fc", config.get("norm_before_fc")))
    nested = {"use_aux_hidden_state": True, **nested, IDS: inner or to_outputs(ids)}
    return {
        IDS: ids,
        "norm_before_fc": before_fc,
        "eagle_config": {**nested, "norm_before_fc": before_fc},
    }


def common_problems(config: Mapping[str, Any]) -> list[str]:
    """What is wrong with the keys of :data:`COMMON_KEYS`, each of which has the right type."""
    problems = nested_problems(config) + rope_problems(config, extended=True)
    if config["fc_norm"] and config["norm_before_fc"]:
        problems.append("fc_norm and norm_before_fc are both set: choose one")
    if config["draft_vocab_size"] > config["vocab_size"]:
        problems.append("draft_vocab_size is larger than vocab_size")
    if config["hidden_size"] != config["target_hidden_size"]:
        problems.append(
            f"hidden_size {config['hidden_size']} is not target_hidden_size "
            f"{config['target_hidden_size']}: such heads are not supported"
        )
    return problems + type_problems(config)


def nested_problems(config: Mapping[str, Any]) -> list[str]:
    """Where layer ids are missing, or ``eagle_config`` contradicts the top level.

    Args:
        config: with both.
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
    if nested.get(IDS) != to_outputs(ids):
        return [
            f"layer ids disagree: eagle_config has {nested.get(IDS)} (SGLang: output of layer), so "
            f"the top level must be one higher (vLLM, llama.cpp: hidden_states index), but it is "
            f"{ids}"
        ]
    return []
