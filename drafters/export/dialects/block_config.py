"""config.json of DFlash and DSpark heads: its keys, what contradicts what, and how files of other
trainers are completed.

Legend: V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from drafters.export.dialect import EMBEDDING, KeySpec
from drafters.export.fields import (
    FILE_KEYS,
    LAYER_FIELDS,
    PARSED_KEYS,
    complete_layers,
    from_outputs,
    vocab_state,
)
from drafters.export.folder import ExportError
from drafters.target import TargetModel

NESTED, IDS, AUXILIARY = "dflash_config", "target_layer_ids", "eagle_aux_hidden_state_layer_ids"
OUTPUT = "lm_head.weight"
SLIDING, FULL = "sliding_attention", "full_attention"
BLOCK_KEYS = (
    *FILE_KEYS,
    *(
        KeySpec(name, int, positive=True)
        for name in ("num_hidden_layers", "num_target_layers", "block_size")
    ),
    KeySpec("draft_vocab_size", int, positive=True, optional=True),
    KeySpec("architectures", list),
    KeySpec("model_type", str, "qwen3"),
    KeySpec("layer_types", list),
    KeySpec("use_sliding_window", bool),
    KeySpec("sliding_window", (int, type(None)), positive=True),
    KeySpec("is_causal", (bool, type(None))),
    KeySpec(AUXILIARY, list),
    KeySpec(NESTED, dict),
)
# What heads of other trainers have, by key, with the one value that means they have not.
FOREIGN = {
    "attention_sink_bias": (False, "sinks in the attention"),
    "add_swa_attention_sink_bias": (False, "sinks in the attention"),
    "attention_value_scale": (1.0, "scaled values in the attention"),
    "conv_kernel_size": (0, "DFlash 2's convolutions"),
    "selector_rank": (0, "DFlash 2's candidate selector"),
    "gru_hidden_dim": (0, "Domino's recurrent head"),
    "output_multiplier": (1.0, "scaled logits"),
    "logit_scale": (1.0, "scaled logits"),
    "final_logit_softcapping": (0, "capped logits"),
    "input_embedding_scale": (1.0, "scaled embeddings"),
    "rope_is_neox_style": (True, "interleaved RoPE"),
    "is_neox_style": (True, "interleaved RoPE"),
    "partial_rotary_factor": (1.0, "RoPE on a part of each head"),
    "quantization_config": (None, "quantised weights"),
    "use_aux_hidden_state": (True, "no captured layers"),
}
PARSED = (
    *PARSED_KEYS,
    "num_target_layers",
    "block_size",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "is_causal",
    AUXILIARY,
    NESTED,
)


def drafted(config: Mapping[str, Any]) -> int:
    """Vd, which the config of a head with the whole vocabulary leaves out."""
    return config.get("draft_vocab_size") or config["vocab_size"]


def with_vocab(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same with ``draft_vocab_size``."""
    return {**config, "draft_vocab_size": drafted(config)}


def block_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a DFlash configuration, from a checked config."""
    kinds, nested = config["layer_types"], config[NESTED]
    sliding = [layer for layer, kind in enumerate(kinds) if kind == SLIDING]
    mixed = 0 < len(sliding) < len(kinds)
    by_kind = config["is_causal"] is None  # causal where the window is, as engines take it
    copied = (*LAYER_FIELDS, "vocab_size", "rope_theta", "max_position_embeddings", "block_size")
    return {
        **{name: config[name] for name in copied},
        "draft_vocab_size": drafted(config),
        "num_layers": config["num_hidden_layers"],
        "mask_token_id": nested["mask_token_id"],
        "feature_layers": from_outputs(nested[IDS]),
        "qk_norm": True,
        "sliding_window": config["sliding_window"],
        "window_layers": sliding if mixed else None,
        "causal": bool(config["is_causal"]),
        "causal_layers": sliding if by_kind else None,
    }


def block_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head's tensors, without what is the target's."""
    not_weights = (EMBEDDING, OUTPUT, "d2t", "t2d")
    return {n: t for n, t in tensors.items() if n not in not_weights} | vocab_state(tensors)


def foreign_problems(config: Mapping[str, Any]) -> list[str]:
    """What the network of another trainer has and Headway's has not."""
    problems = []
    for where, keys in (("", config), (f"{NESTED}.", config[NESTED])):
        for name, (without, what) in FOREIGN.items():
            if keys.get(name) not in (None, without):
                problems.append(
                    f"{where}{name}={keys[name]!r}: heads with {what} are not supported"
                )
    if config.get("target_hidden_size", config["hidden_size"]) != config["hidden_size"]:
        problems.append(
            f"target_hidden_size={config['target_hidden_size']} differs from hidden_size: heads "
            "narrower or wider than their target are not supported"
        )
    return problems


def id_problems(config: Mapping[str, Any]) -> list[str]:
    """Layer ids that the target does not have, or lists of them that contradict each other."""
    ids, last = config[NESTED].get(IDS), config["num_target_layers"] - 2
    if not isinstance(ids, list) or not ids or not all(isinstance(k, int) for k in ids):
        return [f"{NESTED}.{IDS} must be layer ids, got {ids}"]
    if ids != sorted(set(ids)) or ids[0] < -1 or ids[-1] > last:
        return [
            f"{NESTED}.{IDS} must be increasing ids of layers, -1 (the embedding) to {last} (what "
            f"the last layer gives is normed before it can be captured), got {ids}"
        ]
    if config.get(IDS, ids) != ids:
        return [f"{IDS} is {config[IDS]} but {NESTED} says {ids}"]
    if config[AUXILIARY] != from_outputs(ids):
        return [
            f"layer ids disagree: {NESTED}.{IDS} is {ids} (outputs of layers), so {AUXILIARY} must "
            f"be one higher (hidden_states index), but it is {config[AUXILIARY]}"
        ]
    return []


def attention_problems(config: Mapping[str, Any]) -> list[str]:
    """Windows and causality that engines would read differently."""
    kinds, nested = config["layer_types"], config[NESTED]
    if len(kinds) != config["num_hidden_layers"] or not set(kinds) <= {SLIDING, FULL}:
        return [f"layer_types must be {SLIDING} or {FULL} for each of the layers, got {kinds}"]
    problems = []
    window, slides = config["sliding_window"], SLIDING in kinds
    if slides != (window is not None) or slides != config["use_sliding_window"]:
        problems.append(
            f"layer_types {kinds}, use_sliding_window={config['use_sliding_window']} and "
            f"sliding_window={window} contradict each other"
        )
    if slides and nested.get("swa_window_size", window) != window:
        problems.append(
            f"sliding_window is {window} but {NESTED}.swa_window_size {nested['swa_window_size']}"
        )
    if nested.get("use_swa") and set(kinds) != {SLIDING}:
        problems.append(f"{NESTED}.use_swa asks for windows in all layers, layer_types is {kinds}")
    if config["is_causal"] is None and len(set(kinds)) == 1:
        problems.append("is_causal must be true or false where all layers have the same type")
    if nested.get("causal", config["is_causal"]) != config["is_causal"]:
        problems.append(
            f"is_causal is {config['is_causal']} but {NESTED}.causal {nested['causal']}"
        )
    return problems


# Other trainers' --------------------------------------------------------------------------------


def complete_block(config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
    """A foreign config with what engines take where its keys are missing; what is there stays.

    Args:
        config: of the file.
        target: of the head.

    Raises:
        ExportError: no base of RoPE: engines take different ones.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("rope_theta") is None and rope.get("rope_theta") is None:
        raise ExportError(
            "config.json: rope_theta is missing: engines take 10000 or 1000000 then; write the one "
            "that the head was trained with (the target's)"
        )
    config = complete_layers(config)
    nested = dict(config.get(NESTED) or {})

    def found(name: str, default: Any = None) -> Any:
        given = nested.get(name), config.get(name)
        return next((value for value in given if value is not None), default)

    layers, depth = config.get("num_hidden_layers") or 1, found("num_target_layers")
    depth = depth or target.num_layers
    kinds, window = _attention(config, nested, layers)
    ids = found(IDS) or engine_layer_ids(depth, layers)
    causal = config.get("is_causal")
    causal = nested.get("causal") if causal is None else causal
    if causal is None and len(set(kinds)) == 1:
        causal = kinds[0] == SLIDING
    top = {
        "num_hidden_layers": layers,
        "num_target_layers": depth,
        "block_size": found("block_size", 16),
        "max_position_embeddings": target.max_length,
        "torch_dtype": config.get("dtype", "float32"),
        "is_causal": causal,
        AUXILIARY: from_outputs([k for k in ids if isinstance(k, int)]),
    }
    below = {IDS: ids, "mask_token_id": _mask_token(found, target), "causal": causal}
    config |= {key: value for key, value in top.items() if config.get(key) is None}
    nested |= {key: value for key, value in below.items() if nested.get(key) is None}
    config["tie_word_embeddings"] = False  # copied from the target; both matrices are its own
    sliding = {"sliding_window": window, "use_sliding_window": SLIDING in kinds}
    return {**config, **sliding, "layer_types": kinds, NESTED: nested}


def engine_layer_ids(num_layers: int, draft_layers: int) -> list[int]:
    """The target layers of a file that names none, one for each layer of the head, as z-lab's code,
    SGLang and SpecForge take them.
    """
    if draft_layers == 1:
        return [num_layers // 2]
    step = (num_layers - 4) / (draft_layers - 1)
    return [round(1 + step * place) for place in range(draft_layers)]


def _attention(
    config: Mapping[str, Any], nested: Mapping[str, Any], layers: int
) -> tuple[list[str], int | None]:
    """The type of each layer, and the window of those that slide."""
    kinds, every = config.get("layer_types"), bool(nested.get("use_swa"))
    if kinds is None:
        slides = config.get("use_sliding_window") and config.get("sliding_window")
        first = config.get("max_window_layers", layers) if slides else layers
        kinds = [SLIDING if every or layer >= first else FULL for layer in range(layers)]
    elif every and SLIDING not in kinds:
        kinds = [SLIDING] * layers
    window = nested.get("swa_window_size") or config.get("sliding_window")
    return list(kinds), window if SLIDING in kinds else None


def _mask_token(found: Callable[..., Any], target: TargetModel) -> int | None:
    """Its id, by number or by name; SGLang's name where there is neither, if the target has it."""
    number = found("mask_token_id")
    if number is not None:
        return number
    return target.tokenizer.get_vocab().get(found("mask_token", "<|MASK|>"))
