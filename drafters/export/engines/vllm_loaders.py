"""vLLM's draft models, as read in its wheels (``vllm/model_executor/models``).

Since 0.32 its general loader refuses names that it does not know, but for biases, which it drops
without a word. Parameters that nothing fills are not noticed: what the loaders of EAGLE, DFlash
and DSpark return keeps the check for them from running.
"""

from typing import Any

from drafters.export.dialect import TensorSpec
from drafters.export.engines.layers import (
    SLIDING,
    block_parameters,
    common,
    default_layers,
    eagle3_parameters,
    embedding,
    first,
    hidden_states_ids,
    layer_types,
    nested,
    norm_before_fc,
    windows,
)
from drafters.export.engines.loader import REFUSED, Config, Loader, Reading
from drafters.export.engines.sglang_loaders import IDS, eagle1_layers
from drafters.export.engines.speculators_config import flat
from drafters.target import TargetModel

MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
DRAFT_IDS = "draft_id_to_target_id"
_QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
_RENAMED = (("midlayer.", "layers.0."), ("d2t", DRAFT_IDS))


def _captured(config: Config) -> tuple[int, ...] | None:
    """``hidden_states`` indices that a config asks for; None if it does not say."""
    top = config.get(IDS)
    block = nested(config, "dflash_config").get("target_layer_ids")
    flat_ids = config.get("target_layer_ids")
    return tuple(top) if top else hidden_states_ids(block) or hidden_states_ids(flat_ids)


def _mask_token(config: Config) -> int | None:
    """For the slots that draft in parallel."""
    block = nested(config, "dflash_config").get("mask_token_id")
    return first(block, *(config.get(name) for name in MASK_KEYS))


def _draft_vocab(config: Config) -> int:
    return config.get("draft_vocab_size") or config["vocab_size"]


def _output(config: Config, target: TargetModel) -> list[TensorSpec]:
    """The output matrix, or else the target's, and the map of a smaller vocabulary."""
    size, whole = _draft_vocab(config), _draft_vocab(config) == target.vocab_size
    found = [TensorSpec("lm_head.weight", (size, config["hidden_size"]), optional=whole)]
    return found if whole else [*found, TensorSpec(DRAFT_IDS, (size,), "int64")]


# EAGLE-3 and P-EAGLE ------------------------------------------------------------------------------


def _features(config: Config) -> int:
    ids = (config.get(IDS) if _qwen3(config) else None) or nested(config, "eagle_config").get(IDS)
    said = config.get("num_aux_layers") if _qwen3(config) else None
    return first(said, config.get("num_aux_hidden_states"), len(ids) if ids else None, 3)


def _qwen3(config: Config) -> bool:
    """Whether it is the class with Qwen3's layers, which counts features by the top level too."""
    return "Qwen3" in config["architectures"][0]


def _eagle3_parameters(config: Config, target: TargetModel) -> list[TensorSpec]:
    found = eagle3_parameters(config, _features(config), qk_norm=_qwen3(config))
    return [*found, *_output(config, target)]


def _peagle_parameters(config: Config, target: TargetModel) -> list[TensorSpec]:
    wide = _features(config) * (config.get("target_hidden_size") or config["hidden_size"])
    return [*_eagle3_parameters(config, target), TensorSpec("mask_hidden", (1, 1, wide))]


def _eagle3_refuses(config: Config, target: TargetModel) -> list[str]:
    captured, features = _captured(config) or default_layers(target), _features(config)
    found = []
    if len(captured) != features:
        found.append(
            f"{len(captured)} layers are captured and the fusion is built for {features}: "
            "num_aux_hidden_states says how many"
        )
    if config.get("attention_bias"):
        found.append("attention_bias: biases that no head has stay as they were initialised")
    return found


def _peagle_refuses(config: Config, target: TargetModel) -> list[str]:
    found = _eagle3_refuses(config, target)
    if _mask_token(config) is None:
        found.append(f"no token for the slots that draft in parallel: {', '.join(MASK_KEYS)}")
    return found


def _eagle3_reads(config: Config, target: TargetModel) -> Reading:
    used = nested(config, "eagle_config").get("use_aux_hidden_state", True)
    return {
        **common(config),
        "feature_layers": (_captured(config) or default_layers(target)) if used else (),
        "norm_before_residual": bool(config.get("norm_before_residual")),
        "norm_before_fc": norm_before_fc(config),
        "fc_norm": bool(config.get("fc_norm")),
        "norm_output": bool(config.get("norm_output")),
        "draft_vocab_size": _draft_vocab(config),
    }


_EAGLE3: dict[str, Any] = {
    "engine": "vllm",
    "versions": ("0.32.0", "0.33.0"),
    "model": "Eagle3LlamaForCausalLM, Eagle3Qwen3ForCausalLM",
    "source": "vllm/model_executor/models/llama_eagle3.py, qwen3_eagle3.py",
    "renamed": _RENAMED,
    "plain": ("lm_head", DRAFT_IDS, "mask_hidden"),
    "dropped": (".bias",),
    "unknown": REFUSED,
    "reads": _eagle3_reads,
    "flat": flat,
}


# EAGLE-1 ------------------------------------------------------------------------------------------


def _eagle1_parameters(config: Config, target: TargetModel) -> list[TensorSpec]:
    hidden = config["hidden_size"]
    fusion = TensorSpec("model.fc.weight", (hidden, 2 * hidden))
    layers = eagle1_layers(config)
    if config.get("qkv_bias"):
        layers += [_bias(spec) for spec in layers if spec.name.endswith(_QKV)]
    return [fusion, *layers, embedding(config, optional=True)]


def _bias(spec: TensorSpec) -> TensorSpec:
    """Of a projection."""
    assert spec.parameter is not None
    name, parameter = (x.removesuffix("weight") + "bias" for x in (spec.name, spec.parameter))
    return TensorSpec(name, spec.shape[:1], parameter=parameter)


def _eagle1_reads(config: Config, target: TargetModel) -> Reading:
    return common(config)


def _nothing(config: Config, target: TargetModel) -> list[str]:
    return []


def _unwrapped(config: Config) -> Config:
    """The older form, a config within a config."""
    return {**config["model"], **config} if "model" in config else config


# Medusa -------------------------------------------------------------------------------------------


def _medusa_counts(config: Config) -> tuple[int, int]:
    """(heads, residual blocks): of keys that could mean either, the last one counts."""
    heads = [value for key, value in config.items() if "num" in key and "heads" in key]
    layers = [
        value
        for key, value in config.items()
        if "num" in key and "layers" in key and "heads" not in key
    ]
    return (heads or [5])[-1], (layers or [1])[-1]


def _medusa_parameters(config: Config, target: TargetModel) -> list[TensorSpec]:
    hidden, whole = config["hidden_size"], target.vocab_size
    reduced = config.get("truncated_vocab_size") or whole
    heads, layers = _medusa_counts(config)
    found = []
    for i, j in ((i, j) for i in range(heads) for j in range(layers)):
        found.append(TensorSpec(f"blocks.{i}.layers.{j}.weight", (hidden, hidden), zero=True))
        if config.get("medusa_fc_bias"):
            found.append(TensorSpec(f"blocks.{i}.layers.{j}.bias", (hidden,)))
    if config.get("original_lm_head"):
        found.append(TensorSpec("lm_head.weight", (reduced, hidden)))
    else:
        found += [TensorSpec(f"lm_heads.{i}.weight", (whole, hidden)) for i in range(heads)]
    if reduced < whole:
        found.append(TensorSpec("token_map", (reduced,), "int64"))
    return found


def _medusa_name(name: str) -> str:
    """The authors' names, which begin with two numbers."""
    parts = name.split(".")
    if len(parts) < 3 or not (parts[0].isdigit() and parts[1].isdigit()):
        return name
    if "linear" not in parts:
        return f"lm_heads.{parts[0]}.{'.'.join(parts[2:])}"
    kind = ".".join(parts[parts.index("linear") + 1 :])
    return f"blocks.{parts[0]}.layers.{parts[1]}.{kind}"


def _medusa_config(config: Config) -> Config:
    """With the defaults of its class, and the target's vocabulary where it says none."""
    return {"hidden_size": 4096, **config}


def _medusa_refuses(config: Config, target: TargetModel) -> list[str]:
    if config["hidden_size"] == target.hidden_size:
        return []
    return [f"hidden_size is taken to be {config['hidden_size']}: it is not the target's"]


def _medusa_reads(config: Config, target: TargetModel) -> Reading:
    heads, layers = _medusa_counts(config)
    return {"num_heads": heads, "num_layers": layers}


# DFlash and DSpark --------------------------------------------------------------------------------


def _dflash_parameters(config: Config, target: TargetModel) -> list[TensorSpec]:
    captured = _captured(config)
    features = len(captured) if captured else config["num_hidden_layers"]
    wide = config.get("target_hidden_size") or config["hidden_size"]
    found = block_parameters(config, features, "model.", wide)
    return [*found, embedding(config, optional=True), *_output(config, target)]


def _dflash_refuses(config: Config, target: TargetModel) -> list[str]:
    found = []
    if not _captured(config):
        found.append("no target_layer_ids")
    if _mask_token(config) is None:
        found.append(
            f"no token for empty slots: dflash_config.mask_token_id, {', '.join(MASK_KEYS)}"
        )
    if nested(config, "dflash_config").get("sample_from_anchor"):
        found.append("dflash_config.sample_from_anchor is true")
    return found


def _windows(config: Config) -> list[int | None]:
    block, types = nested(config, "dflash_config"), layer_types(config)
    asked = bool(block.get("use_swa"))
    size = block.get("swa_window_size", config.get("sliding_window"))
    count = config["num_hidden_layers"]
    if types is None or (asked and SLIDING not in types):
        return [size if asked else None] * count
    return [size if kind == SLIDING else None for kind in types]


def _dflash_reads(config: Config, target: TargetModel) -> Reading:
    types = layer_types(config) or ["full_attention"] * config["num_hidden_layers"]
    said = first(config.get("is_causal"), nested(config, "dflash_config").get("causal"))
    return {
        **common(config),
        "feature_layers": _captured(config),
        "causal": tuple(kind == SLIDING if said is None else bool(said) for kind in types),
        "windows": windows(_windows(config), target),
        "mask_token_id": _mask_token(config),
        "draft_vocab_size": _draft_vocab(config),
    }


def _dspark_parameters(config: Config, target: TargetModel) -> list[TensorSpec]:
    rank, hidden = config["markov_rank"], config["hidden_size"]
    wide = hidden + rank * bool(config.get("confidence_head_with_markov"))
    return [
        *_dflash_parameters(config, target),
        TensorSpec("model.markov_head.markov_w1.weight", (config["vocab_size"], rank)),
        TensorSpec("model.markov_head.markov_w2.weight", (_draft_vocab(config), rank)),
        TensorSpec("model.confidence_head.proj.weight", (1, wide), optional=True),
        TensorSpec("model.confidence_head.proj.bias", (1,), optional=True),
    ]


def _dspark_refuses(config: Config, target: TargetModel) -> list[str]:
    name = config.get("architectures", [""])[0]
    found = [problem for problem in _dflash_refuses(config, target) if "anchor" not in problem]
    if not config.get("markov_rank"):
        found.append("markov_rank is missing at the top level, the only place where it is read")
    if name == "DSparkDraftModel" and config.get("model_type") != "qwen3":
        found.append("DSparkDraftModel is DeepSeek-V4's unless model_type is qwen3")
    return found


def _dspark_reads(config: Config, target: TargetModel) -> Reading:
    return {
        **_dflash_reads(config, target),
        "markov_rank": config["markov_rank"],
        "markov_type": "vanilla",  # the key is not read
        "sample_from_anchor": bool(config.get("sample_from_anchor", True)),
    }


_BLOCK: dict[str, Any] = {
    "engine": "vllm",
    "versions": ("0.32.0", "0.33.0"),
    "renamed": _RENAMED,
    "plain": ("lm_head", DRAFT_IDS),
    "dropped": (".bias",),
    "unknown": REFUSED,
    "flat": flat,
}

LOADERS = (
    Loader(
        families=("eagle3",),
        architectures=(
            "LlamaForCausalLMEagle3",
            "Eagle3LlamaForCausalLM",
            "Eagle3Qwen3ForCausalLM",
            "LlamaForCausalLM",
        ),
        parameters=_eagle3_parameters,
        refuses=_eagle3_refuses,
        **_EAGLE3,
    ),
    Loader(
        families=("peagle",),
        architectures=(
            "PEagleDraftModel",
            "PeagleLlamaForCausalLM",
            "PeagleQwen3ForCausalLM",
            "LlamaForCausalLMEagle3",
        ),
        parameters=_peagle_parameters,
        refuses=_peagle_refuses,
        **_EAGLE3,
    ),
    Loader(
        engine="vllm",
        versions=("0.32.0", "0.33.0"),
        model="EagleLlamaForCausalLM",
        source="vllm/model_executor/models/llama_eagle.py",
        families=("eagle1",),
        architectures=("LlamaForCausalLM", "EagleLlamaForCausalLM"),
        parameters=_eagle1_parameters,
        reads=_eagle1_reads,
        refuses=_nothing,
        plain=("lm_head",),
        skipped=(),
        dropped=(".bias",),
        unknown=REFUSED,
        flat=_unwrapped,
    ),
    Loader(
        engine="vllm",
        versions=("0.32.0",),  # 0.33.0 has no Medusa any more
        model="Medusa",
        source="vllm/model_executor/models/medusa.py",
        families=("medusa",),
        architectures=("MedusaModel", ""),
        parameters=_medusa_parameters,
        reads=_medusa_reads,
        refuses=_medusa_refuses,
        renamed=(("medusa_heads.", ""),),
        rewritten=_medusa_name,
        needs=(),
        flat=_medusa_config,
        prefix="",
        skipped=(),
        borrowed=(),
    ),
    Loader(
        model="DFlashQwen3ForCausalLM",
        source="vllm/model_executor/models/qwen3_dflash.py",
        families=("dflash",),
        architectures=("DFlashDraftModel",),
        parameters=_dflash_parameters,
        reads=_dflash_reads,
        refuses=_dflash_refuses,
        **_BLOCK,
    ),
    Loader(
        model="Qwen3DSparkForCausalLM",
        source="vllm/model_executor/models/qwen3_dspark.py",
        families=("dspark",),
        architectures=("Qwen3DSparkModel", "DSparkDraftModel"),
        parameters=_dspark_parameters,
        reads=_dspark_reads,
        refuses=_dspark_refuses,
        **_BLOCK,
    ),
)
