"""What an EAGLE-3 export must contain, and a simulation of how serving engines load it.

SGLang skips a tensor whose name it does not know and leaves a parameter that no tensor names at
its random initial value, without a word; the only symptom is an acceptance length near 1. The
simulation below applies the engines' renaming and fusing of projections, and fails where they would
be silent.

Legend: H draft hidden, Ht target hidden, V target vocabulary, Vd draft vocabulary, A query width,
K key/value width, I intermediate size, F captured layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from drafters.export.folder import CONFIG, WEIGHTS, ExportError, read_json, read_tensors
from drafters.target import TargetModel
from drafters.vocab import from_offsets

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_FEATURES = 3  # F: vLLM, llama.cpp and older SGLang know no other number
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the file.

    Attributes:
        name: in model.safetensors.
        shape: in the letters of :func:`sizes`.
        parameter: the engine's parameter that it fills; several tensors fill one, stacked in order.
        kind: "float", "int64" or "bool".
        when: "always", "fc_norm" (EAGLE-3.1), "reduced" (Vd < V) or "optional".
    """

    name: str
    shape: tuple[str, ...]
    parameter: str
    kind: str = "float"
    when: str = "always"


_LAYER, _ENGINE = "midlayer", "model.layers.0"

EAGLE3_TENSORS = (
    TensorSpec("fc.weight", ("H", "F*Ht"), "model.fc.weight"),
    TensorSpec("fc_norm.0.weight", ("Ht",), "model.fc_norm.0.weight", when="fc_norm"),
    TensorSpec("fc_norm.1.weight", ("Ht",), "model.fc_norm.1.weight", when="fc_norm"),
    TensorSpec("fc_norm.2.weight", ("Ht",), "model.fc_norm.2.weight", when="fc_norm"),
    TensorSpec(f"{_LAYER}.hidden_norm.weight", ("H",), f"{_ENGINE}.hidden_norm.weight"),
    TensorSpec(f"{_LAYER}.input_layernorm.weight", ("H",), f"{_ENGINE}.input_layernorm.weight"),
    TensorSpec(
        f"{_LAYER}.post_attention_layernorm.weight",
        ("H",),
        f"{_ENGINE}.post_attention_layernorm.weight",
    ),
    TensorSpec(
        f"{_LAYER}.self_attn.q_proj.weight", ("A", "2H"), f"{_ENGINE}.self_attn.qkv_proj.weight"
    ),
    TensorSpec(
        f"{_LAYER}.self_attn.k_proj.weight", ("K", "2H"), f"{_ENGINE}.self_attn.qkv_proj.weight"
    ),
    TensorSpec(
        f"{_LAYER}.self_attn.v_proj.weight", ("K", "2H"), f"{_ENGINE}.self_attn.qkv_proj.weight"
    ),
    TensorSpec(
        f"{_LAYER}.self_attn.o_proj.weight", ("H", "A"), f"{_ENGINE}.self_attn.o_proj.weight"
    ),
    TensorSpec(f"{_LAYER}.mlp.gate_proj.weight", ("I", "H"), f"{_ENGINE}.mlp.gate_up_proj.weight"),
    TensorSpec(f"{_LAYER}.mlp.up_proj.weight", ("I", "H"), f"{_ENGINE}.mlp.gate_up_proj.weight"),
    TensorSpec(f"{_LAYER}.mlp.down_proj.weight", ("H", "I"), f"{_ENGINE}.mlp.down_proj.weight"),
    TensorSpec("norm.weight", ("H",), "model.norm.weight"),
    TensorSpec("lm_head.weight", ("Vd", "H"), "lm_head.weight"),
    TensorSpec("embed_tokens.weight", ("V", "H"), "model.embed_tokens.weight", when="optional"),
    TensorSpec("d2t", ("Vd",), "d2t", kind="int64", when="reduced"),
    TensorSpec("t2d", ("V",), "t2d", kind="bool", when="reduced"),
)


@dataclass(frozen=True)
class KeySpec:
    """One key of config.json: its type, and its only value where the dialect knows just one."""

    name: str
    kind: type | tuple[type, ...]
    only: Any = None


_POSITIVE = (
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
EAGLE3_KEYS = (
    *(KeySpec(name, int) for name in _POSITIVE),
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
    KeySpec("eagle_aux_hidden_state_layer_ids", list),
    KeySpec("eagle_config", dict),
)
# Keys of other trainers that change what the head computes; ours are never built that way.
FOREIGN_KEYS = ("norm_before_residual", "norm_before_fc", "bias", "mlp_bias", "qkv_bias")
# What an engine must find unchanged after transformers has parsed the config.
PARSED_KEYS = (
    *_POSITIVE,
    "num_hidden_layers",
    "rms_norm_eps",
    "tie_word_embeddings",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
)


@dataclass(frozen=True)
class EngineHead:
    """A head as an engine holds it: fused parameters, and the target id of each draft id."""

    parameters: dict[str, Tensor]
    hot_token_ids: Tensor | None


def to_sglang_layers(feature_layers: list[int]) -> list[int]:
    """``hidden_states`` index k (stream entering layer k) -> SGLang's id (output of a layer)."""
    return [k - 1 for k in feature_layers]


def from_sglang_layers(layer_ids: list[int]) -> list[int]:
    """Inverse of :func:`to_sglang_layers`."""
    return [k + 1 for k in layer_ids]


def sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """The letters of the shapes."""
    hidden, target = config["hidden_size"], config["target_hidden_size"]
    return {
        "H": hidden,
        "2H": 2 * hidden,
        "Ht": target,
        "F*Ht": NUM_FEATURES * target,
        "A": config["num_attention_heads"] * config["head_dim"],
        "K": config["num_key_value_heads"] * config["head_dim"],
        "I": config["intermediate_size"],
        "V": config["vocab_size"],
        "Vd": config["draft_vocab_size"],
    }


def check_folder(folder: Path, target: TargetModel | None = None) -> EngineHead:
    """Read an export as an engine would.

    Args:
        folder: the export.
        target: the target it is to be served with, to compare sizes and the longest position.

    Raises:
        ExportError: naming everything that is wrong.
    """
    config = read_json(folder / CONFIG)
    check_config(config, target)
    _check_parsed(folder, config)
    return simulate_loader(config, read_tensors(folder / WEIGHTS))


def check_config(config: Mapping[str, Any], target: TargetModel | None = None) -> None:
    """Required keys, values that the dialect fixes, and keys that must agree with each other.

    Raises:
        ExportError: naming everything that is wrong.
    """
    problems = [problem for spec in EAGLE3_KEYS for problem in _key_problems(spec, config)]
    problems += [
        f"{key}={config[key]!r} is not supported" for key in FOREIGN_KEYS if config.get(key)
    ]
    if not problems:  # the rest reads keys that are known to be there now
        problems += _layer_id_problems(config) + _rope_problems(config)
        if config["draft_vocab_size"] > config["vocab_size"]:
            problems.append("draft_vocab_size is larger than vocab_size")
        if target is not None:
            problems += target_problems(config, target)
    if problems:
        raise ExportError("config.json: " + "; ".join(problems))


def target_problems(config: Mapping[str, Any], target: TargetModel) -> list[str]:
    """Where a config does not fit the target it is to be served with."""
    wanted = {
        "vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "max_position_embeddings": target.max_length,
    }
    return [
        f"{key} is {config[key]} but the target has {value}"
        for key, value in wanted.items()
        if config[key] != value
    ]


def simulate_loader(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> EngineHead:
    """Place every tensor into the engine's parameters.

    Args:
        config: a config that passed :func:`check_config`.
        tensors: of model.safetensors.

    Raises:
        ExportError: an unknown, missing, mis-shaped or never-trained tensor, or a vocabulary map
            that does not fit.
    """
    reduced = config["draft_vocab_size"] < config["vocab_size"]
    conditions = {"fc_norm": config["fc_norm"], "reduced": reduced, "always": True}
    expected = {spec.name: spec for spec in EAGLE3_TENSORS if conditions.get(spec.when, True)}
    dtype = getattr(torch, config["torch_dtype"], None)
    problems = [
        f"unknown tensor {name} (an engine ignores it silently){_hint(name, reduced)}"
        for name in sorted(set(tensors) - set(expected))
    ]
    if dtype not in DTYPES:
        problems.append(f"torch_dtype {config['torch_dtype']} is not one of {_names(DTYPES)}")
    letters = sizes(config)
    for name, spec in expected.items():
        if name in tensors:
            shape = tuple(letters[letter] for letter in spec.shape)
            problems += _tensor_problems(spec, tensors[name], shape, dtype)
        elif spec.when != "optional":
            problems.append(f"missing tensor {name}{_hint(name, reduced)}")
    if not problems and reduced:
        problems += _vocab_problems(tensors["d2t"], tensors["t2d"], config["vocab_size"])
    if problems:
        raise ExportError("model.safetensors: " + "; ".join(problems))
    return _fuse(expected, tensors)


def _fuse(expected: Mapping[str, TensorSpec], tensors: Mapping[str, Tensor]) -> EngineHead:
    shards: dict[str, list[Tensor]] = {}
    for name, spec in expected.items():
        if name in tensors and spec.kind == "float":
            shards.setdefault(spec.parameter, []).append(tensors[name])
    parameters = {name: torch.cat(parts) for name, parts in shards.items()}
    hot = from_offsets(tensors["d2t"]) if "d2t" in tensors else None
    return EngineHead(parameters, hot)


def _key_problems(spec: KeySpec, config: Mapping[str, Any]) -> list[str]:
    if spec.name not in config:
        return [f"key {spec.name} is missing"]
    value = config[spec.name]
    kinds = spec.kind if isinstance(spec.kind, tuple) else (spec.kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        return [f"{spec.name} must be {' or '.join(k.__name__ for k in kinds)}, got {value!r}"]
    if spec.only is not None and value != spec.only:
        return [f"{spec.name} must be {spec.only!r}, got {value!r}"]
    if isinstance(value, int) and spec.name in _POSITIVE and value <= 0:
        return [f"{spec.name} must be positive, got {value}"]
    return []


def _layer_id_problems(config: Mapping[str, Any]) -> list[str]:
    ids = config["eagle_aux_hidden_state_layer_ids"]
    nested = config["eagle_config"].get("eagle_aux_hidden_state_layer_ids")
    if config["eagle_config"].get("use_aux_hidden_state") is not True:
        return ["eagle_config.use_aux_hidden_state must be true"]
    if len(ids) != NUM_FEATURES or not all(isinstance(k, int) for k in ids):
        return [f"eagle_aux_hidden_state_layer_ids must be {NUM_FEATURES} layer ids, got {ids}"]
    if nested != to_sglang_layers(ids):
        return [
            f"layer ids disagree: eagle_config has {nested} (SGLang: output of layer), so the top "
            f"level must be one higher (vLLM, llama.cpp: hidden_states index), but it is {ids}"
        ]
    return []


def _rope_problems(config: Mapping[str, Any]) -> list[str]:
    """Both spellings must say the same, and ask for plain RoPE, the only kind our heads have."""
    parameters, scaling = config["rope_parameters"], config["rope_scaling"]
    problems = []
    if parameters.get("rope_theta") != config["rope_theta"]:
        problems.append(
            f"rope_theta is {config['rope_theta']} but rope_parameters says "
            f"{parameters.get('rope_theta')}"
        )
    for name, value in (("rope_parameters", parameters), ("rope_scaling", scaling or {})):
        kind = value.get("rope_type", value.get("type", "default"))
        if kind != "default":
            problems.append(f"{name} asks for {kind!r} RoPE: only plain RoPE is supported")
    return problems


def _check_parsed(folder: Path, config: Mapping[str, Any]) -> None:
    """transformers, which engines read configs with, must keep what was written."""
    try:
        parsed = AutoConfig.from_pretrained(folder).to_dict()
    except Exception as error:  # transformers' validators raise several kinds
        raise ExportError(f"{folder}: transformers cannot parse config.json: {error}") from error
    changed = {key: parsed.get(key) for key in PARSED_KEYS if parsed.get(key) != config[key]}
    theta = (parsed.get("rope_parameters") or {}).get("rope_theta")
    if theta != config["rope_theta"]:
        changed["rope_theta"] = theta
    if changed:
        raise ExportError(f"{folder}: transformers reads config.json differently: {changed}")


def _tensor_problems(
    spec: TensorSpec, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None
) -> list[str]:
    if tuple(tensor.shape) != shape:
        return [f"{spec.name} has shape {list(tensor.shape)}, the config asks for {list(shape)}"]
    wanted = {"int64": torch.int64, "bool": torch.bool, "float": dtype}[spec.kind]
    if wanted is not None and tensor.dtype != wanted:
        return [f"{spec.name} is {_names([tensor.dtype])}, expected {_names([wanted])}"]
    if spec.kind != "float":
        return []
    if not tensor.isfinite().all():
        return [f"{spec.name} holds values that are not finite: training diverged"]
    if tensor.dim() == 2 and not tensor.any():
        return [f"{spec.name} is all zeros: it was never trained"]
    return []


def _vocab_problems(d2t: Tensor, t2d: Tensor, vocab_size: int) -> list[str]:
    targets = from_offsets(d2t)
    if targets.min() < 0 or targets.max() >= vocab_size:
        return [
            "d2t leads out of the target's vocabulary: it must hold offsets (target - draft id)"
        ]
    if targets.unique().numel() != targets.numel():
        return ["d2t sends two draft ids to one target id"]
    expected = torch.zeros(vocab_size, dtype=torch.bool)
    expected[targets] = True
    return [] if torch.equal(t2d, expected) else ["t2d does not mark the tokens that d2t leads to"]


def _hint(name: str, reduced: bool) -> str:
    if name not in ("d2t", "t2d"):
        return ""
    return f": draft_vocab_size is {'below' if reduced else 'equal to'} vocab_size"


def _names(dtypes: list[torch.dtype] | tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
