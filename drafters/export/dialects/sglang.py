"""EAGLE-3 heads (arXiv:2503.01840) as SGLang, SpecForge, official EAGLE and llama.cpp have them.

A folder with ``config.json`` and ``model.safetensors``, tensors named ``midlayer.*``. Layer ids are
written twice: at the top level as ``hidden_states`` indices (vLLM, llama.cpp), nested in
``eagle_config`` one lower (SGLang counts outputs of layers).

Legend: H draft hidden, Ht target hidden, F captured layers.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from drafters.base import Drafter
from drafters.config import default_feature_layers
from drafters.export.dialect import (
    EMBEDDING,
    Dialect,
    KeySpec,
    Parts,
    TensorSpec,
    type_name,
    type_problems,
)
from drafters.export.fields import (
    LAYER_FIELDS,
    complete_layers,
    from_outputs,
    layer_keys,
    llama_layer,
    rope_extension,
    rope_keys,
    rope_problems,
    shape_refusals,
    size_problems,
    special_tokens,
    target_refusals,
    to_outputs,
    vocab_hint,
    vocab_problems,
    vocab_specs,
    vocab_state,
    vocab_tensors,
    without_identity,
)
from drafters.target import TargetModel

ARCHITECTURE = "LlamaForCausalLMEagle3"
IDS = "eagle_aux_hidden_state_layer_ids"
NUM_FEATURES = 3  # F: vLLM, llama.cpp and older SGLang know no other number
_SIZES = (
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
)
# Keys of other trainers that change what the head computes; no head of this dialect has them.
FOREIGN_KEYS = ("norm_before_residual", "norm_before_fc", "bias", "mlp_bias", "qkv_bias")
# What an engine must find unchanged after transformers has parsed the config.
PARSED_KEYS = (
    *_SIZES,
    "num_hidden_layers",
    "rms_norm_eps",
    "tie_word_embeddings",
    "fc_norm",
    "norm_output",
    IDS,
    "eagle_config",
)


class SglangEagle3(Dialect):
    """The most widely deployed form of EAGLE-3."""

    name = "sglang"
    parsed_keys = PARSED_KEYS
    families = ("eagle3",)
    engines = ("sglang", "vllm", "llama.cpp")
    embeddings = "optional"
    keys = (
        *(KeySpec(name, int, positive=True) for name in _SIZES),
        KeySpec("architectures", list, [ARCHITECTURE]),
        KeySpec("model_type", str, "llama"),
        KeySpec("num_hidden_layers", int, 1),
        KeySpec("rms_norm_eps", float),
        KeySpec("rope_theta", float),
        KeySpec("rope_parameters", dict),
        KeySpec("rope_scaling", (dict, type(None))),
        KeySpec("hidden_act", str, "silu"),
        KeySpec("tie_word_embeddings", bool, False),
        KeySpec("attention_bias", bool, False),
        KeySpec("torch_dtype", str),
        KeySpec("fc_norm", bool),
        KeySpec("norm_output", bool),
        KeySpec(IDS, list),
        KeySpec("eagle_config", dict),
    )

    def refusals(self, head: Drafter) -> list[str]:
        """Other layers than one of Llama's, other numbers of features than three."""
        found = shape_refusals(
            head,
            num_layers=1,
            qk_norm=False,
            sliding_window=None,
            norm_before_residual=False,
            norm_before_fc=False,
            own_embedding=False,
            rope_extension=head.config.rope_extension,
        )
        if len(head.feature_layers) != NUM_FEATURES:
            found.append(
                f"feature_layers {list(head.feature_layers)}: engines of this dialect fuse exactly "
                f"{NUM_FEATURES} layers"
            )
        return found + target_refusals(head)

    def served(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """llama.cpp has no place for EAGLE-3.1's norms, and stretched RoPE was not read there."""
        newer = config["fc_norm"] or config["norm_output"] or config["rope_scaling"]
        return ("sglang", "vllm") if newer else self.engines

    def config(self, head: Drafter) -> dict[str, Any]:
        """The longest position and the special tokens are the target's."""
        config, layers = head.config, list(head.feature_layers)
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            **layer_keys(head),
            "num_hidden_layers": 1,
            "target_hidden_size": head.target.hidden_size,
            "vocab_size": config.vocab_size,
            "draft_vocab_size": config.draft_vocab_size,
            "fc_norm": config.fc_norm,
            "norm_output": config.norm_output,
            **rope_keys(head),
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": type_name(next(head.parameters()).dtype),
            **special_tokens(head.target),
            IDS: layers,
            "eagle_config": {IDS: to_outputs(layers), "use_aux_hidden_state": True},
        }

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """The head's own names are those of this dialect."""
        dropped = {*self.left_out(head), "draft_vocab"}
        own = {name: t for name, t in head.state_dict().items() if name not in dropped}
        return own | vocab_tensors(head)

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """Layers and switches that not every version of an engine knows."""
        notes = []
        if config[IDS][0] == 0:
            notes.append(
                "feature layer 0 (the embedding) is SGLang's layer id -1, which several of its "
                "models cannot capture: check the acceptance length when serving"
            )
        if config["fc_norm"] or config["norm_output"]:
            notes.append(
                "fc_norm and norm_output are EAGLE-3.1: engines older than them ignore the keys"
            )
        if head.confidence is not None:
            notes.append("the confidence output is left out: these engines draft to a fixed length")
        return notes

    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """The first layer is called ``midlayer``, and its residual is SGLang's. Files without
        tensors that engines do without (``t2d``, a borrowed output matrix) are read as vLLM's.
        """
        if config.get("norm_before_residual") or "mask_hidden" in names:
            return False
        borrows = config.get("draft_vocab_size") is None and "lm_head.weight" not in names
        if borrows or ("d2t" in names and "t2d" not in names):
            return False
        return "midlayer.hidden_norm.weight" in names

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """What SpecForge and official EAGLE leave out."""
        config = complete_layers(config)
        defaults = {
            "num_hidden_layers": 1,
            "draft_vocab_size": config.get("vocab_size"),
            "target_hidden_size": config.get("hidden_size"),
            "torch_dtype": config.get("dtype", "float32"),
            "fc_norm": bool(config.get("use_aux_norm", False)),
            "norm_output": False,
            "tie_word_embeddings": False,
        }
        config |= {key: value for key, value in defaults.items() if config.get(key) is None}
        if config.get("architectures") == ["LlamaForCausalLM"]:  # official EAGLE's
            config["architectures"] = [ARCHITECTURE]
        nested = dict(config.get("eagle_config") or {})
        ids, inner = config.get(IDS), nested.get(IDS)
        if ids is None:
            ids = from_outputs(inner) if inner else default_feature_layers(target.num_layers)
        nested.setdefault("use_aux_hidden_state", True)
        nested[IDS] = to_outputs(ids) if inner is None else inner
        return {**config, IDS: ids, "eagle_config": nested}

    def renamed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """SpecForge saves a map of the whole vocabulary, too."""
        return without_identity(tensors)

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Layer ids, RoPE, sizes, and keys that the dialect does not have."""
        problems = [
            f"{key}={config[key]!r} is not supported" for key in FOREIGN_KEYS if config.get(key)
        ]
        problems += layer_id_problems(config) + rope_problems(config, extended=True)
        if config["draft_vocab_size"] > config["vocab_size"]:
            problems.append("draft_vocab_size is larger than vocab_size")
        problems += type_problems(config)
        return problems

    def target_problems(self, config: Mapping[str, Any], target: TargetModel) -> list[str]:
        """Sizes and the longest position."""
        return size_problems(config, target, "target_hidden_size")

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """Of one layer, three norms in EAGLE-3.1, and the vocabulary map."""
        hidden, wide = config["hidden_size"], config["target_hidden_size"]
        engine = "model.layers.0"
        found = [
            TensorSpec("fc.weight", (hidden, NUM_FEATURES * wide), parameter="model.fc.weight")
        ]
        if config["fc_norm"]:
            names = (f"fc_norm.{index}.weight" for index in range(NUM_FEATURES))
            found += [TensorSpec(name, (wide,), parameter=f"model.{name}") for name in names]
        found += llama_layer("midlayer", config, input_size=2 * hidden, engine=engine)
        return [
            *found,
            TensorSpec(
                "midlayer.hidden_norm.weight", (hidden,), parameter=f"{engine}.hidden_norm.weight"
            ),
            TensorSpec("norm.weight", (hidden,), parameter="model.norm.weight"),
            TensorSpec("lm_head.weight", (config["draft_vocab_size"], hidden)),
            TensorSpec(
                EMBEDDING,
                (config["vocab_size"], hidden),
                optional=True,
                parameter=f"model.{EMBEDDING}",
            ),
            *vocab_specs(config),
        ]

    def tensor_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> list[str]:
        """The vocabulary map."""
        return vocab_problems(config, tensors)

    def hint(self, name: str, config: Mapping[str, Any]) -> str:
        """Of the vocabulary map."""
        return vocab_hint(name, config)

    def parts(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> Parts:
        """An EAGLE-3 head."""
        copied = (*LAYER_FIELDS, "vocab_size", "draft_vocab_size", "rope_theta", "fc_norm")
        options = {name: config[name] for name in (*copied, "norm_output")}
        options["rope_extension"] = rope_extension(config)
        options["max_position_embeddings"] = config["max_position_embeddings"]
        options["feature_layers"] = list(config[IDS])
        not_weights = (EMBEDDING, "d2t", "t2d")
        state = {name: tensor for name, tensor in tensors.items() if name not in not_weights}
        return Parts("eagle3", options, state | vocab_state(tensors))


def engine_parameters(
    dialect: Dialect, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Parameters as an engine holds them, fused, with its own names.

    Args:
        dialect: that declares them.
        config, tensors: of a checked file.
    """
    shards: dict[str, list[Tensor]] = {}
    for spec in dialect.specs(config):
        if spec.name in tensors and spec.kind == "float":
            shards.setdefault(spec.parameter or spec.name, []).append(tensors[spec.name])
    return {name: torch.cat(parts) for name, parts in shards.items()}


def layer_id_problems(config: Mapping[str, Any]) -> list[str]:
    """Where the two lists of layer ids are missing or contradict each other."""
    ids, nested = config[IDS], config["eagle_config"].get(IDS)
    if config["eagle_config"].get("use_aux_hidden_state") is not True:
        return ["eagle_config.use_aux_hidden_state must be true"]
    if len(ids) != NUM_FEATURES or not all(isinstance(k, int) for k in ids):
        return [f"{IDS} must be {NUM_FEATURES} layer ids, got {ids}"]
    if nested != to_outputs(ids):
        return [
            f"layer ids disagree: eagle_config has {nested} (SGLang: output of layer), so the top "
            f"level must be one higher (vLLM, llama.cpp: hidden_states index), but it is {ids}"
        ]
    return []


SGLANG = SglangEagle3()
