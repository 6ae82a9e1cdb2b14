"""SGLang's draft models, as read in its wheels (``sglang/srt/models``).

All of them skip names that they do not know and keep what nothing fills, without a word. The
embedding and, but for EAGLE-3, the output matrix are always the target's.
"""

from typing import Any

from drafters.export.dialect import TensorSpec
from drafters.export.engines.layers import (
    FULL,
    SLIDING,
    block_parameters,
    common,
    default_layers,
    eagle3_parameters,
    first,
    hidden_states_ids,
    layer_types,
    nested,
    norm_before_fc,
    windows,
)
from drafters.export.engines.loader import LAYER_KEYS, Config, Loader, Reading
from drafters.export.fields import llama_layer
from drafters.target import TargetModel

IDS = "eagle_aux_hidden_state_layer_ids"
DEFAULT_BLOCK = 16
NEEDS = (*LAYER_KEYS, "model_type")
"""Transformers reads config.json first, and finds no class without the last one."""
FIRST_WINDOW = 28
"""Qwen3's ``max_window_layers`` where a config does not say."""


def _wrong_width(config: Config, target: TargetModel) -> list[str]:
    """Of models that take the target's embedding as it is."""
    hidden = config["hidden_size"]
    if hidden == target.hidden_size:
        return []
    return [
        f"hidden_size {hidden} is not the target's ({target.hidden_size}), whose embedding it takes"
    ]


# EAGLE-3 ------------------------------------------------------------------------------------------


def _features(config: Config) -> int:
    ids = nested(config, "eagle_config").get(IDS)
    return first(config.get("num_aux_hidden_states"), len(ids) if ids else None, 3)


def _eagle3_parameters(config: Config, target: TargetModel) -> list[TensorSpec]:
    read = {**config, "fc_norm": _norms_each(config)}
    found = eagle3_parameters(read, _features(config), hidden_norms=True)
    if config.get("bias"):
        found.append(TensorSpec("model.fc.bias", (config["hidden_size"],)))
        found += [
            TensorSpec(f"model.layers.{layer}.self_attn.o_proj.bias", (config["hidden_size"],))
            for layer in range(config["num_hidden_layers"])
        ]
    reduced = config["draft_vocab_size"]
    if reduced is None:  # the target's output matrix takes the place of one in the file
        return found
    whole = reduced == config["vocab_size"]
    return [
        *found,
        TensorSpec("lm_head.weight", (reduced, config["hidden_size"])),
        TensorSpec("hot_token_id", (reduced,), "int64", optional=whole),
    ]


def _norms_each(config: Config) -> bool:
    """Whether every feature is normed by itself."""
    return bool(config.get("fc_norm") or config.get("use_aux_norm"))


def _eagle3_refuses(config: Config, target: TargetModel) -> list[str]:
    found = []
    if "draft_vocab_size" not in config:
        found.append("draft_vocab_size is missing: the model reads it without a default")
    if config.get("tie_word_embeddings"):
        found.append("tie_word_embeddings is true: the output matrix becomes the embedding")
    if config.get("attention_bias"):
        found.append("attention_bias: its projections of queries, keys and values have none")
    if (
        _features(config) * (config.get("target_hidden_size") or config["hidden_size"])
        == config["hidden_size"]
    ):
        found.append("the captured features are as wide as the head, so the fusion is left out")
    return found


def _eagle3_reads(config: Config, target: TargetModel) -> Reading:
    eagle = nested(config, "eagle_config")
    used = eagle.get("use_aux_hidden_state", True)
    layers = hidden_states_ids(eagle.get(IDS)) or default_layers(target)
    return {
        **common(config),
        "feature_layers": layers if used else (),
        "norm_before_residual": False,
        "norm_before_fc": norm_before_fc(config),
        "fc_norm": _norms_each(config),
        "norm_output": bool(config.get("norm_output")),
        "own_embedding": False,
        "draft_vocab_size": config["draft_vocab_size"] or config["vocab_size"],
    }


def _eagle3_reads_0_5_12(config: Config, target: TargetModel) -> Reading:
    return {**_eagle3_reads(config, target), "norm_before_fc": False}


_EAGLE3: dict[str, Any] = {
    "engine": "sglang",
    "needs": NEEDS,
    "model": "LlamaForCausalLMEagle3",
    "source": "sglang/srt/models/llama_eagle3.py",
    "families": ("eagle3",),
    "architectures": ("LlamaForCausalLMEagle3",),
    "parameters": _eagle3_parameters,
    "refuses": _eagle3_refuses,
    "renamed": (
        ("midlayer", "layers.0"),
        ("aux_norm_low", "fc_norm.0"),
        ("aux_norm_mid", "fc_norm.1"),
        ("aux_norm_high", "fc_norm.2"),
        ("d2t", "hot_token_id"),
    ),
    "as_they_are": True,
}


# EAGLE-1 ------------------------------------------------------------------------------------------


def eagle1_layers(config: Config) -> list[TensorSpec]:
    """Layers of EAGLE-1, of which the first has no input norm."""
    found = []
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        found += llama_layer(name, config, input_norm=layer > 0, engine=name)
    return found


def _eagle1_parameters(config: Config, target: TargetModel) -> list[TensorSpec]:
    hidden = config["hidden_size"]
    return [
        TensorSpec("model.fc.weight", (hidden, 2 * hidden)),
        TensorSpec("model.fc.bias", (hidden,)),  # always there: random unless the file has it
        *eagle1_layers(config),
        TensorSpec("model.embed_tokens.weight", (config["vocab_size"], hidden), optional=True),
    ]


def _eagle1_refuses(config: Config, target: TargetModel) -> list[str]:
    found = _wrong_width(config, target)
    if config.get("tie_word_embeddings"):
        found.append("tie_word_embeddings is true: it stops as it shares the target's matrices")
    found += [
        f"{key}: its projections have biases then, which no file fills"
        for key in ("attention_bias", "bias")
        if config.get(key)
    ]
    return found


def _eagle1_reads(config: Config, target: TargetModel) -> Reading:
    return common(config)


# DFlash and DSpark --------------------------------------------------------------------------------


def _block_key(config: Config, name: str) -> Any:
    """Nested before top level."""
    return first(nested(config, "dflash_config").get(name), config.get(name))


def _layer_ids(config: Config) -> tuple[int, ...]:
    return tuple(_block_key(config, "target_layer_ids") or ())


def _window(config: Config) -> int | None:
    """As Qwen3's config class leaves it."""
    return config.get("sliding_window") if config.get("use_sliding_window") else None


def _layer_types(config: Config) -> list[str]:
    """Those of the file, or what Qwen3's config class puts in their place."""
    window, first_window = _window(config), config.get("max_window_layers", FIRST_WINDOW)
    return layer_types(config) or [
        FULL if window is None or layer < first_window else SLIDING
        for layer in range(config["num_hidden_layers"])
    ]


def _dflash_parameters(config: Config, target: TargetModel) -> list[TensorSpec]:
    return block_parameters(config, len(_layer_ids(config)), "", config["hidden_size"])


def _dflash_refuses(config: Config, target: TargetModel) -> list[str]:
    found = _wrong_width(config, target)
    ids, count = _layer_ids(config), _block_key(config, "num_target_layers") or target.num_layers
    if not ids:
        found.append("target_layer_ids are missing: layers would be spread over the target")
    found += [
        f"target layer {k} is not in 0..num_target_layers-1={count - 1}"
        for k in ids
        if not 0 <= k < count
    ]
    if _block_key(config, "mask_token_id") is None:
        found.append("mask_token_id is missing: the string <|MASK|> would be looked up")
    if SLIDING in _layer_types(config) and _window(config) is None:
        found.append("sliding layers need sliding_window and use_sliding_window at the top level")
    if config.get("attention_bias"):
        found.append("attention_bias: its projections have biases then, which no file fills")
    return found


def _dflash_reads(config: Config, target: TargetModel) -> Reading:
    types, said, window = _layer_types(config), config.get("is_causal"), _window(config)
    return {
        **common(config),
        "feature_layers": hidden_states_ids(_layer_ids(config)),
        "causal": tuple(kind == SLIDING if said is None else bool(said) for kind in types),
        "windows": windows([window if kind == SLIDING else None for kind in types], target),
        "mask_token_id": _block_key(config, "mask_token_id"),
        "draft_vocab_size": target.vocab_size,
        "block_size": first(_block_key(config, "block_size"), DEFAULT_BLOCK),
    }


def _dflash_reads_0_5_12(config: Config, target: TargetModel) -> Reading:
    """Knows neither causal blocks nor windows, and asks for ``rope_theta`` where the transformers
    it comes with (5.6.0) has it no more.
    """
    layers = config["num_hidden_layers"]
    read = {"causal": (False,) * layers, "windows": (None,) * layers, "rope_theta": 1e6}
    return {**_dflash_reads(config, target), **read}


_MARKOV_WIDTHS = {"gated": ("gate_proj", 1, 1), "rnn": ("joint_proj", 3, 2)}


def _dspark_parameters(config: Config, target: TargetModel) -> list[TensorSpec]:
    hidden, rank = config["hidden_size"], config["markov_rank"]
    shape, kind = (config["vocab_size"], rank), config.get("markov_head_type", "vanilla")
    found = [TensorSpec(f"markov_head.markov_w{i}.weight", shape) for i in (1, 2)]
    if kind in _MARKOV_WIDTHS:
        name, rows, columns = _MARKOV_WIDTHS[kind]
        found += [
            TensorSpec(f"markov_head.{name}.weight", (rows * rank, hidden + columns * rank)),
            TensorSpec(f"markov_head.{name}.bias", (rows * rank,)),
        ]
    return [*_dflash_parameters(config, target), *found]


def _dspark_refuses(config: Config, target: TargetModel) -> list[str]:
    found = _dflash_refuses(config, target)
    if not config.get("markov_rank"):
        found.append("markov_rank is missing at the top level, the only place that counts")
    if _block_key(config, "markov_head_type") is None:
        found.append("markov_head_type is missing")
    return found


def _dspark_reads(config: Config, target: TargetModel) -> Reading:
    return {
        **_dflash_reads(config, target),
        "markov_rank": config["markov_rank"],
        "markov_type": config.get("markov_head_type", "vanilla"),
        "sample_from_anchor": bool(config.get("sample_from_anchor", True)),
    }


_DFLASH: dict[str, Any] = {
    "engine": "sglang",
    "needs": NEEDS,
    "model": "DFlashDraftModel",
    "source": "sglang/srt/models/dflash.py",
    "families": ("dflash",),
    "architectures": ("DFlashDraftModel",),
    "parameters": _dflash_parameters,
    "refuses": _dflash_refuses,
    "as_they_are": True,
    "skipped": ("rotary_emb.",),
    "borrowed": (),
}

LOADERS = (
    Loader(versions=("0.5.12",), reads=_eagle3_reads_0_5_12, **_EAGLE3),
    Loader(versions=("0.5.23",), reads=_eagle3_reads, **_EAGLE3),
    Loader(
        engine="sglang",
        versions=("0.5.12", "0.5.23"),
        model="LlamaForCausalLMEagle",
        source="sglang/srt/models/llama_eagle.py",
        families=("eagle1",),
        architectures=("LlamaForCausalLMEagle",),
        parameters=_eagle1_parameters,
        reads=_eagle1_reads,
        refuses=_eagle1_refuses,
        skipped=("lm_head",),
        needs=NEEDS,
    ),
    Loader(versions=("0.5.12",), reads=_dflash_reads_0_5_12, **_DFLASH),
    Loader(versions=("0.5.23",), reads=_dflash_reads, **_DFLASH),
    Loader(
        engine="sglang",
        versions=("0.5.23",),
        model="DSparkDraftModel",
        needs=NEEDS,
        source="sglang/srt/models/dspark.py",
        families=("dspark",),
        architectures=("DSparkDraftModel", "Qwen3DSparkModel", "LingDSparkModel"),
        parameters=_dspark_parameters,
        reads=_dspark_reads,
        refuses=_dspark_refuses,
        as_they_are=True,
        # The confidence output is built in no mode but those for ragged verification.
        skipped=("lm_head.", "rotary_emb.", "embed_tokens.", "confidence_head."),
        borrowed=(),
    ),
)
