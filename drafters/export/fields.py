"""What dialects have in common: keys, layer ids, RoPE, layers of Llama's shape, vocabulary maps.

Legend: H draft hidden, Ht target hidden, V target vocabulary, Vd draft vocabulary, A query width, K
key/value width, I intermediate size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafters.base import Drafter
from drafters.block import choose_mask_token
from drafters.export.dialect import KeySpec, TensorSpec
from drafters.hub import split_revision
from drafters.peagle import PEagleDrafter
from drafters.rope import extension_problems
from drafters.target import TargetModel
from drafters.vocab import draft_index, from_offsets, to_offsets

OFFSETS, MARKS = "d2t", "t2d"
LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
)
"""Of config.json and of `DecoderConfig`, under the same names."""
SIZES = (
    *(name for name in LAYER_FIELDS if name != "rms_norm_eps"),
    "max_position_embeddings",
    "vocab_size",
)
DECODER_KEYS = (
    *(KeySpec(name, int, positive=True) for name in SIZES),
    KeySpec("rms_norm_eps", float),
    KeySpec("rope_theta", float),
    KeySpec("rope_parameters", dict),
    KeySpec("rope_scaling", (dict, type(None))),
)
"""Of every config with decoder layers."""
LAYER_KEYS = (
    *DECODER_KEYS,
    KeySpec("hidden_act", str, "silu"),
    KeySpec("attention_bias", bool, False),
)
"""And of those that name the kind of layer."""
FILE_KEYS = (
    *LAYER_KEYS,
    KeySpec("tie_word_embeddings", bool, False),
    KeySpec("torch_dtype", str),
)
"""And of those that are a whole config.json."""
PARSED_KEYS = (*SIZES, "num_hidden_layers", "rms_norm_eps", "tie_word_embeddings")
"""Of a whole config.json, what transformers must keep when it parses one."""
TARGET_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "max_position_embeddings": "max_length",
}
"""``Dialect.target_sizes`` of heads as wide as their target."""


# Layer ids ----------------------------------------------------------------------------------------


def to_outputs(layers: list[int]) -> list[int]:
    """``hidden_states`` indices k (the stream entering layer k: Headway, official EAGLE, vLLM,
    speculators, llama.cpp) -> ids of the layers whose output that is (SGLang, SpecForge, DFlash,
    DSpark).
    """
    return [k - 1 for k in layers]


def from_outputs(layer_ids: list[int]) -> list[int]:
    """Inverse of :func:`to_outputs`."""
    return [k + 1 for k in layer_ids]


# config.json --------------------------------------------------------------------------------------


def layer_keys(head: Drafter) -> dict[str, Any]:
    """The shape of a head's decoder layers."""
    return {name: getattr(head.config, name) for name in LAYER_FIELDS}


def rope_keys(head: Drafter) -> dict[str, Any]:
    """RoPE in both spellings, and the target's longest position: engines limit the draft's
    context, and with it the rotary tables, to what the draft's config says.
    """
    theta, extension = float(head.config.rope_theta), head.config.rope_extension
    return {
        "max_position_embeddings": head.target.max_length,
        "rope_theta": theta,
        "rope_scaling": extension and dict(extension),
        "rope_parameters": {**(extension or {"rope_type": "default"}), "rope_theta": theta},
    }


def rope_extension(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a config whose ``rope_parameters`` passed :func:`rope_problems`; None for plain RoPE."""
    found = _extension(config["rope_parameters"])
    return None if found["rope_type"] == "default" else found


def _extension(rope: Mapping[str, Any]) -> dict[str, Any]:
    """One spelling of RoPE without what others have in it."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    left_out = ("rope_theta", "type", "rope_type")
    return {"rope_type": kind, **{key: rope[key] for key in rope if key not in left_out}}


def public_name(head: Drafter) -> str:
    """The head's target by the name that other programs load it by: these take a revision of the
    hub apart from the name.
    """
    return split_revision(head.config.target_name or head.target.name)[0]


def special_tokens(target: TargetModel) -> dict[str, Any]:
    """Ids as the target's config has them."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(target.config, name, None) for name in names}


def rope_theta(config: Mapping[str, Any]) -> float:
    """Of a config that may have it in any of three places."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return float(config.get("rope_theta") or nested.get("rope_theta") or 10000.0)


def complete_layers(config: dict[str, Any]) -> dict[str, Any]:
    """A foreign config with what engines take where its keys for layers and RoPE are missing."""
    heads = config.get("num_attention_heads") or 1
    theta = rope_theta(config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": (config.get("hidden_size") or 0) // heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_parameters": {**_extension(rope), "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
    }
    found = {key: value for key, value in defaults.items() if config.get(key) is None}
    return {**config, **found, "rope_theta": theta}


def rope_problems(config: Mapping[str, Any], extended: bool = False) -> list[str]:
    """Both spellings must say the same, and ask for RoPE that our heads have.

    Args:
        config: with ``rope_theta``, ``rope_parameters`` and ``rope_scaling``.
        extended: whether the dialect reads more than plain RoPE (:func:`rope_extension`).
    """
    parameters, scaling = config["rope_parameters"], config["rope_scaling"]
    problems = []
    if parameters.get("rope_theta") != config["rope_theta"]:
        problems.append(
            f"rope_theta is {config['rope_theta']} but rope_parameters says "
            f"{parameters.get('rope_theta')}"
        )
    for name, value in (("rope_parameters", parameters), ("rope_scaling", scaling or {})):
        found = _extension(value)
        if found["rope_type"] == "default":
            continue
        if not extended:
            kind = found["rope_type"]
            problems.append(f"{name} asks for {kind!r} RoPE: only plain RoPE is supported")
        else:
            problems += [f"{name}: {problem}" for problem in extension_problems(found)]
    spelled = [_extension(value) for value in (parameters, scaling) if value]
    plain = all(found["rope_type"] == "default" for found in spelled)
    if not problems and not plain and spelled[0] != spelled[-1]:
        problems.append(f"rope_scaling {scaling} and rope_parameters {parameters} disagree")
    return problems


# Heads that cannot be written ---------------------------------------------------------------------


def shape_refusals(head: Drafter, **only: Any) -> list[str]:
    """Fields of a head's configuration that have another value than the dialect knows.

    Args:
        head: to be written.
        **only: field to the one value that can be written; ``attention_bias`` to False and
            ``rope_extension`` to None where they are not named.
    """
    only = {"attention_bias": False, "rope_extension": None, **only}
    return [
        f"{name}={value}: loaders of this dialect know only {name}={wanted}"
        for name, wanted in only.items()
        if (value := getattr(head.config, name)) != wanted
    ]


def target_refusals(head: Drafter) -> list[str]:
    """What the target does that engines do not do for a draft head."""
    target = head.target
    ids = torch.arange(min(4, target.vocab_size), device=target.device)
    rows = torch.nn.functional.embedding(ids, target.embedding.get_parameter("weight"))
    if torch.equal(target.embed(ids), rows):
        return []
    return [
        f"target {target.name!r} scales its input embeddings, which engines do not do for a draft "
        "head"
    ]


def logit_refusals(head: Drafter) -> list[str]:
    """What the target does to its logits that engines do not do for a head that borrows its output
    matrix; of heads with copies of it in their files see ``borrowed.copy_refusals``.
    """
    target = head.target
    capped = getattr(target.config, "final_logit_softcapping", None)
    if target.lm_head.bias is None and target.logit_scale == 1.0 and not capped:
        return []
    return [
        f"target {target.name!r} scales, caps or shifts its logits, which engines do not do for a "
        "draft head"
    ]


# Tensors ------------------------------------------------------------------------------------------


def mask_place(head: PEagleDrafter) -> int:
    """The row of an embedding that holds the one of a P-EAGLE head's mask rows."""
    chosen = head.config.mask_token_id
    return choose_mask_token(head.target) if chosen is None else chosen


def masked_embedding(head: PEagleDrafter) -> Tensor:
    """(V, D): the head's own embedding, or the target's with the mask's in :func:`mask_place`."""
    if head.embed_tokens is not None:
        return head.embed_tokens.weight
    row = head.mask_row()
    weight = head.target.embedding.get_parameter("weight").to(row, copy=True)
    weight[mask_place(head)] = row
    return weight


def llama_layer(
    prefix: str,
    config: Mapping[str, Any],
    input_size: int | None = None,
    input_norm: bool = True,
    qk_norm: bool = False,
    engine: str | None = None,
) -> list[TensorSpec]:
    """Tensors of a decoder layer.

    Args:
        prefix: of the names, without the last dot.
        config: with ``LAYER_FIELDS``.
        input_size: of queries, keys and values; None means H.
        input_norm: whether it has an ``input_layernorm``.
        qk_norm: whether queries and keys are normalised per head.
        engine: prefix of the engine's fused parameters; None if nothing is fused.
    """
    hidden, size = config["hidden_size"], config["head_dim"]
    wide = input_size or hidden
    query, key = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    inner = config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (query, wide),
        "self_attn.k_proj": (key, wide),
        "self_attn.v_proj": (key, wide),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "post_attention_layernorm": (hidden,),
    }
    if input_norm:
        shapes["input_layernorm"] = (hidden,)
    if qk_norm:
        shapes |= {"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)}
    return [
        TensorSpec(
            f"{prefix}.{name}.weight", shape, parameter=engine and f"{engine}.{_fused(name)}.weight"
        )
        for name, shape in shapes.items()
    ]


def _fused(name: str) -> str:
    """The parameter of an engine that a projection is a part of."""
    module, _, part = name.rpartition(".")
    if part in ("q_proj", "k_proj", "v_proj"):
        return f"{module}.qkv_proj"
    return f"{module}.gate_up_proj" if part in ("gate_proj", "up_proj") else name


def vocab_specs(config: Mapping[str, Any], marks_optional: bool = False) -> list[TensorSpec]:
    """The vocabulary map of a head with fewer tokens than its target; nothing if it has all.

    Args:
        config: with ``vocab_size`` and ``draft_vocab_size``.
        marks_optional: whether ``t2d`` may be missing.
    """
    whole, reduced = config["vocab_size"], config["draft_vocab_size"]
    if reduced == whole:
        return []
    return [
        TensorSpec(OFFSETS, (reduced,), "int64"),
        TensorSpec(MARKS, (whole,), "bool", optional=marks_optional),
    ]


def vocab_tensors(head: Drafter) -> dict[str, Tensor]:
    """``d2t`` (Vd,) offsets, target id - draft id, and ``t2d`` (V,); nothing for a whole
    vocabulary. Offsets are made nowhere else.
    """
    if head.draft_vocab is None:
        return {}
    marks = draft_index(head.draft_vocab, head.config.vocab_size) >= 0
    return {OFFSETS: to_offsets(head.draft_vocab), MARKS: marks}


def vocab_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head's ``draft_vocab`` (Vd,) absolute ids; nothing for a whole vocabulary."""
    return {"draft_vocab": from_offsets(tensors[OFFSETS])} if OFFSETS in tensors else {}


def without_identity(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Foreign tensors without a vocabulary map from every token to itself, as trainers of heads
    with the target's whole vocabulary save it.
    """
    offsets, marks = tensors.get(OFFSETS), tensors.get(MARKS)
    if offsets is None or marks is None or offsets.shape != marks.shape:
        return tensors
    if offsets.any() or not marks.all():
        return tensors
    return {name: tensor for name, tensor in tensors.items() if name not in (OFFSETS, MARKS)}


def vocab_problems(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """Where a vocabulary map contradicts itself.

    Args:
        config: with ``vocab_size``.
        tensors: of the file.
    """
    if OFFSETS not in tensors:
        return []
    targets, size = from_offsets(tensors[OFFSETS]), config["vocab_size"]
    if targets.min() < 0 or targets.max() >= size:
        return [
            "d2t leads out of the target's vocabulary: it must hold offsets (target - draft id)"
        ]
    if targets.unique().numel() != targets.numel():
        return ["d2t sends two draft ids to one target id"]
    if MARKS not in tensors:
        return []
    expected = torch.zeros(size, dtype=torch.bool)
    expected[targets] = True
    if torch.equal(tensors[MARKS], expected):
        return []
    return ["t2d does not mark the tokens that d2t leads to"]


def vocab_hint(name: str, config: Mapping[str, Any]) -> str:
    """Why ``d2t`` or ``t2d`` is unknown or missing; nothing for other tensors."""
    if name not in (OFFSETS, MARKS):
        return ""
    reduced = config["draft_vocab_size"] < config["vocab_size"]
    return f": draft_vocab_size is {'below' if reduced else 'equal to'} vocab_size"
