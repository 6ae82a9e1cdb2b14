"""Names and keys of the dialects that heads are stored in, as Headway's own.

A strict reader (``drafters.export``) refuses what does not fit. Here nothing is refused that can
still be measured: what is odd becomes a finding, and the head is built as far as it goes.

Legend: D hidden, V / Vd target / draft vocabulary, F captured layers, K heads.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafters import TargetModel
from drafters.config import default_feature_layers, spread_feature_layers
from drafters.export.fields import from_outputs
from drafters.loading import FAMILIES
from drafters.rope import extension_problems
from drafters.vocab import from_offsets
from recipes.diagnosis.findings import Finding, fault, unknown

IDS = "eagle_aux_hidden_state_layer_ids"
_SHAPE = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "sliding_window",
)
_OWN = {cls.config_class.model_type: name for name, cls in FAMILIES.items()}
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_VLLM_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_OUTPUT, _VLLM_OUTPUT = re.compile(r"(\d+)\.\d+\.weight"), re.compile(r"lm_heads\.(\d+)\.weight")
_IGNORED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")


@dataclass
class Translated:
    """A head file in Headway's words.

    Attributes:
        dialect: whose file it is.
        family: of the head.
        options: fields of the family's configuration.
        state: tensors by Headway's names.
        layers: the feature layers as the file names them, valid or not.
        embedding: the target's embedding, where the file has a copy.
        findings: what is odd already.
    """

    dialect: str
    family: str
    options: dict[str, Any]
    state: dict[str, Tensor]
    layers: tuple[int, ...] = ()
    embedding: Tensor | None = None
    findings: list[Finding] = field(default_factory=list)


def translate(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
) -> Translated:
    """Recognise the dialect by its keys and tensor names.

    Raises:
        ValueError: it is none of those known.
    """
    if config.get("model_type") in _OWN:
        return _native(config, tensors)
    flat = {**(config.get("transformer_layer_config") or {}), **config}
    names = {
        name.removeprefix("model.").removeprefix("medusa_heads."): t for name, t in tensors.items()
    }
    if any(re.match(r"\d+\.\d+\.", name) or name.startswith("blocks.0.layers") for name in names):
        return _medusa(flat, names)
    if "fc.weight" in names and "hidden_norm.weight" in names:
        return _dflash(flat, names, target)
    if "midlayer.hidden_norm.weight" in names or "layers.0.hidden_norm.weight" in names:
        return _eagle3(flat, names, target)
    if "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names:
        return _eagle1(flat, names)
    raise ValueError(
        f"no head of a known dialect (architectures {config.get('architectures')}, tensors "
        f"{sorted(names)[:4]}...): Headway, SGLang / SpecForge / EAGLE, vLLM, speculators, "
        "ModelOpt, Medusa and DFlash files are read"
    )


def _native(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Translated:
    family = _OWN[config["model_type"]]
    known = FAMILIES[family].config_class().own_fields()
    options = {name: value for name, value in config.items() if name in known}
    layers = options.pop("feature_layers", None)
    return Translated("headway", family, options, dict(tensors), tuple(layers or ()))


def _eagle3(config: dict[str, Any], names: dict[str, Tensor], target: TargetModel) -> Translated:
    first = "midlayer" if "midlayer.hidden_norm.weight" in names else "layers.0"
    dialect = "SGLang / EAGLE" if first == "midlayer" else "vLLM / ModelOpt"
    if config.get("speculators_model_type"):
        dialect = "speculators"
    state = {
        f"midlayer.{name.removeprefix(first + '.')}" if name.startswith(first + ".") else name: t
        for name, t in names.items()
        if name not in _IGNORED
    }
    embedding = state.pop("embed_tokens.weight", None)
    found = Translated(dialect, "eagle3", _decoder_options(config, state), state, (), embedding)
    found.options["norm_before_residual"] = bool(config.get("norm_before_residual"))
    found.options["norm_before_fc"] = "input_norm.weight" in state
    d2t = state.pop("d2t", state.pop("draft_id_to_target_id", None))
    rows = state["lm_head.weight"].shape[0] if "lm_head.weight" in state else None
    if rows == target.hidden_size and state["lm_head.weight"].shape[1] != target.hidden_size:
        rows = state["lm_head.weight"].shape[1]  # stored the other way round
    if rows is not None and rows < target.vocab_size:
        found.options["draft_vocab_size"] = rows
        state["draft_vocab"] = _draft_vocab(d2t, names.get("t2d"), rows, target, found)
    fc_norms = sum(name.startswith("fc_norm.") for name in state)
    found.options["fc_norm"] = bool(fc_norms)
    if fc_norms and not config.get("fc_norm"):
        found.findings.append(
            fault(
                "norm",
                "the file has fc_norm tensors and its config no fc_norm: engines leave them out",
                'set "fc_norm": true in config.json',
            )
        )
    found.options["norm_output"] = bool(config.get("norm_output"))
    found.layers = _eagle3_layers(config, target, found)
    return found


def _draft_vocab(
    d2t: Tensor | None, t2d: Tensor | None, rows: int, target: TargetModel, found: Translated
) -> Tensor:
    """(Vd,) absolute ids; offsets unless only absolute ids make sense."""
    if d2t is None or len(d2t) != rows:
        what = "missing" if d2t is None else f"of {len(d2t)} tokens"
        found.findings.append(
            fault(
                "vocabulary",
                f"d2t is {what}; the output matrix has {rows} rows, the target's "
                f"{target.vocab_size}",
                "copy d2t from the trained checkpoint; it cannot be made up again",
            )
        )
        return torch.arange(rows)
    offsets, marked = from_offsets(d2t.long()), None if t2d is None else t2d.bool()
    if _maps(offsets, target.vocab_size, marked):
        return offsets
    if _maps(d2t.long(), target.vocab_size, marked):
        found.findings.append(
            fault(
                "vocabulary",
                "d2t holds absolute token ids where this dialect has offsets",
                "store d2t - arange(len(d2t))",
            )
        )
        return d2t.long()
    if _maps(offsets, target.vocab_size, None):
        found.findings.append(
            fault(
                "vocabulary",
                "d2t and t2d disagree about which tokens are drafted",
                "take both from the same checkpoint",
            )
        )
        return offsets
    found.findings.append(
        fault(
            "vocabulary",
            "d2t leads out of the target's vocabulary or sends two rows to one token",
            "copy d2t from the trained checkpoint",
        )
    )
    return torch.arange(rows)


def _maps(ids: Tensor, size: int, marked: Tensor | None) -> bool:
    """Whether ids are distinct tokens, and those that ``marked`` (V,) marks."""
    if ids.min() < 0 or ids.max() >= size or ids.unique().numel() != ids.numel():
        return False
    return marked is None or (len(marked) == size and bool(marked[ids].all()))


def _eagle3_layers(
    config: Mapping[str, Any], target: TargetModel, found: Translated
) -> tuple[int, ...]:
    """``hidden_states`` indices; the nested list of SGLang counts one lower."""
    outer, inner = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
    nested = from_outputs(inner) if inner else None
    if outer and nested and list(outer) != nested:
        found.findings.append(
            fault(
                "layer ids",
                f"config.json contradicts itself: the top-level list {list(outer)} must be one "
                f"higher than eagle_config's {list(inner or ())}",
                "write the trained layers as hidden_states indices at the top level, one lower in "
                "eagle_config",
            )
        )
    if not outer and not nested:
        found.findings.append(
            unknown("layer ids", "none in the file: the default [2, n/2, n-3] is taken")
        )
    return tuple(outer or nested or default_feature_layers(target.num_layers))


def _eagle1(config: dict[str, Any], names: dict[str, Tensor]) -> Translated:
    state = {name: tensor for name, tensor in names.items() if name not in _IGNORED}
    embedding = state.pop("embed_tokens.weight", None)
    options = {**_decoder_options(config, state), "fc_bias": "fc.bias" in state}
    options["num_layers"] = len(
        {name.split(".")[1] for name in state if name.startswith("layers.")}
    )
    return Translated("EAGLE", "eagle1", options, state, (), embedding)


def _medusa(config: dict[str, Any], names: dict[str, Tensor]) -> Translated:
    """Official ``{head}.{layer}.linear.*`` and ``{head}.{L}.weight``, or vLLM's."""
    state, blocks = {}, 0
    official = any(re.match(r"\d+\.", name) for name in names)
    for name, tensor in names.items():
        if match := _BLOCK.fullmatch(name) or _VLLM_BLOCK.fullmatch(name):
            head, layer, kind = match.groups()
            state[f"blocks.{head}.{layer}.linear.{kind}"] = tensor
            blocks = max(blocks, int(layer) + 1)
        elif match := _OUTPUT.fullmatch(name) or _VLLM_OUTPUT.fullmatch(name):
            state[f"lm_heads.{match[1]}.weight"] = tensor
        else:
            state["draft_vocab" if name == "token_map" else name] = tensor
    shared = "lm_heads.0.weight" not in state
    heads = {name.split(".")[1] for name in state if name.startswith("blocks.")}
    options: dict[str, Any] = {"num_heads": len(heads), "num_layers": blocks}
    options["shared_lm_head"] = shared
    if not shared:
        options["draft_vocab_size"] = state["lm_heads.0.weight"].shape[0]
    state.pop("lm_head.weight", None)  # vLLM's shared one is the target's
    return Translated("Medusa" if official else "vLLM Medusa", "medusa", options, state)


def _dflash(config: dict[str, Any], names: dict[str, Tensor], target: TargetModel) -> Translated:
    nested = config.get("dflash_config") or {}
    state = {name: tensor for name, tensor in names.items() if name not in _IGNORED}
    embedding = state.pop("embed_tokens.weight", None)
    state.pop("lm_head.weight", None)  # the target's
    options = _decoder_options(config, state)
    options |= {
        "block_size": config.get("block_size") or nested.get("block_size") or 8,
        "causal": bool(nested.get("causal")),
        "num_layers": len({n.split(".")[1] for n in state if n.startswith("layers.")}),
        "mask_token_id": nested.get("mask_token_id"),
    }
    ids = nested.get("target_layer_ids")
    layers = from_outputs(ids) if ids else spread_feature_layers(target.num_layers)
    return Translated("DFlash", "dflash", options, state, tuple(layers), embedding)


def _decoder_options(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fields of layers of Llama's shape; what the file leaves out is the target's."""
    options = {name: config[name] for name in _SHAPE if config.get(name) is not None}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if theta := config.get("rope_theta") or rope.get("rope_theta"):
        options["rope_theta"] = float(theta)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    extension = {key: rope[key] for key in rope if key not in ("rope_theta", "type")}
    if kind != "default" and not extension_problems(extension | {"rope_type": kind}):
        options["rope_extension"] = extension | {"rope_type": kind}
    heads = config.get("num_attention_heads")
    if heads and "head_dim" not in options and config.get("hidden_size"):
        options["head_dim"] = config["hidden_size"] // heads
    if heads and "num_key_value_heads" not in options:
        options["num_key_value_heads"] = heads
    options["qk_norm"] = any("q_norm" in name for name in state)
    further = {n.split(".")[1] for n in state if re.match(r"layers\.[1-9]\d*\.", n)}
    options["num_layers"] = 1 + len(further)
    return options
