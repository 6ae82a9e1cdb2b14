"""EAGLE-3 heads (arXiv:2503.01840) as SGLang, vLLM and llama.cpp load them.

A folder with ``config.json`` and ``model.safetensors``, tensors named ``midlayer.*``. The draft
vocabulary is written as offsets, ``d2t[i] = target id - i``: the only place where Headway makes
them. Layer ids are written twice: at the top level as ``hidden_states`` indices (vLLM, llama.cpp),
nested in ``eagle_config`` one lower (SGLang counts outputs of layers).

Legend: D hidden, V target vocabulary, Vd draft vocabulary.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafters.base import Drafter
from drafters.config import default_feature_layers
from drafters.eagle import Eagle3Drafter
from drafters.export.check import (
    ARCHITECTURE,
    DTYPES,
    NUM_FEATURES,
    check_config,
    check_folder,
    from_sglang_layers,
    simulate_loader,
    target_problems,
    to_sglang_layers,
)
from drafters.export.folder import (
    CONFIG,
    MANIFEST,
    WEIGHTS,
    Export,
    ExportError,
    folder_bytes,
    publish,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from drafters.export.golden import golden_inputs, golden_logits, write_golden
from drafters.families import Eagle3Config
from drafters.target import TargetModel
from drafters.vocab import draft_index, from_offsets, to_offsets

logger = logging.getLogger(__name__)

FORMAT = "sglang"
SERVED = ("sglang", "vllm", "llama.cpp")
SERVED_3_1 = ("sglang",)  # fc_norm and norm_output
_NOT_WEIGHTS = ("embed_tokens.weight", "d2t", "t2d")


def write_sglang(
    drafter: Drafter,
    folder: str | Path,
    with_embeddings: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> Export:
    """Write an EAGLE-3 head for serving, and read it back before it gets its name.

    Args:
        drafter: the head, with its target attached.
        folder: where to; an export that is already there is replaced, anything else is refused.
        with_embeddings: also write a copy of the target's embedding, for engines that do not
            share it.
        provenance: versions, commit and command line, for the record.

    Returns:
        What was written, with the tensors left out and notes for the user.

    Raises:
        ExportError: not an EAGLE-3 head, not expressible in the dialect, or the folder cannot be
            written.
    """
    head = _require_expressible(drafter)
    tensors, left_out = sglang_tensors(head, with_embeddings)
    config = sglang_config(head)
    if left_out:
        logger.warning("left out, the %s dialect has no place for it: %s", FORMAT, list(left_out))
    with publish(Path(folder)) as temporary:
        write_json(config, temporary / CONFIG)
        write_tensors(tensors, temporary / WEIGHTS, {"format": "pt"})
        write_golden(head, temporary)
        write_json(_manifest(head, tensors, left_out, provenance), temporary / MANIFEST)
        _read_back(head, config, temporary)
        size = folder_bytes(temporary)
    return Export(
        folder=Path(folder),
        format=FORMAT,
        served=SERVED_3_1 if config["fc_norm"] or config["norm_output"] else SERVED,
        num_tensors=len(tensors),
        bytes=size,
        left_out=left_out,
        notes=_notes(config, head.config.reference),
    )


def read_sglang(folder: str | Path, target: TargetModel) -> Eagle3Drafter:
    """Load an EAGLE-3 head of this dialect, ours or another trainer's, and attach its target.

    Args:
        folder: with config.json and model.safetensors.
        target: the model it was trained on.

    Raises:
        ExportError: damaged, incomplete, or of a kind that Headway's head cannot compute.
        ValueError: the target is not the one recorded with the export.
    """
    folder = Path(folder)
    config = _completed(read_json(folder / CONFIG), target)
    check_config(config)
    for problem in target_problems(config, target):
        if not problem.startswith("max_position_embeddings"):
            raise ExportError(f"{folder}: wrong target {target.name!r}: {problem}")
        logger.warning("%s: %s: engines limit the context to it", folder, problem)
    tensors = read_tensors(folder / WEIGHTS)
    simulate_loader(config, tensors)
    _check_embedding(tensors, target, folder)
    head = Eagle3Drafter(_headway_config(config, folder, target))
    nn.Module.to(head, target.device, tensors["fc.weight"].dtype)
    head.load_state_dict(_state(tensors))
    return head.attach(target).eval()


def sglang_tensors(
    head: Eagle3Drafter, with_embeddings: bool = False
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors of the file by name, and the names of the head's tensors that are not in it."""
    tensors = dict(head.state_dict())
    left_out = tuple(sorted(name for name in tensors if name.startswith("confidence.")))
    for name in left_out:
        del tensors[name]
    draft_vocab = tensors.pop("draft_vocab", None)
    if draft_vocab is not None:
        tensors["d2t"] = to_offsets(draft_vocab)
        tensors["t2d"] = draft_index(draft_vocab, head.config.vocab_size) >= 0
    if with_embeddings:
        weight = head.target.embedding.get_parameter("weight")
        tensors["embed_tokens.weight"] = weight.to(head.fc.weight.dtype)
    return tensors, left_out


def sglang_config(head: Eagle3Drafter) -> dict[str, Any]:
    """config.json of the dialect; the longest position and the special tokens are the target's."""
    config, target = head.config, head.target
    layers = list(head.feature_layers)
    copied = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "vocab_size",
        "draft_vocab_size",
        "fc_norm",
        "norm_output",
    )
    theta = float(config.rope_theta)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **{name: getattr(config, name) for name in copied},
        "num_hidden_layers": 1,
        "target_hidden_size": target.hidden_size,
        "max_position_embeddings": target.max_length,
        "rope_theta": theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(head.fc.weight.dtype).removeprefix("torch."),
        **{
            name: getattr(target.config, name, None)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        },
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": to_sglang_layers(layers),
            "use_aux_hidden_state": True,
        },
    }


def _require_expressible(drafter: Drafter) -> Eagle3Drafter:
    if not isinstance(drafter, Eagle3Drafter) or drafter.family != "eagle3":
        raise ExportError(
            f"the {FORMAT} dialect is for eagle3 heads and this is a {drafter.family} head: export "
            "it with format native"
        )
    plain = {"num_layers": 1, "qk_norm": False, "sliding_window": None}
    for name, only in plain.items():
        if (value := getattr(drafter.config, name)) != only:
            raise ExportError(
                f"{name}={value}: loaders of the {FORMAT} dialect know only {name}={only}; export "
                "with format native"
            )
    layers = drafter.feature_layers
    if len(layers) != NUM_FEATURES:
        raise ExportError(
            f"feature_layers {list(layers)}: engines of the {FORMAT} dialect fuse exactly "
            f"{NUM_FEATURES} layers; export with format native"
        )
    if drafter.fc.weight.dtype not in DTYPES:
        raise ExportError(
            f"engines do not load {drafter.fc.weight.dtype} heads: use .float() first"
        )
    target = drafter.target
    ids = torch.arange(min(4, target.vocab_size), device=target.device)
    rows = torch.nn.functional.embedding(ids, target.embedding.get_parameter("weight"))
    if not torch.equal(target.embed(ids), rows):
        raise ExportError(
            f"target {target.name!r} scales its input embeddings, which engines do not do for a "
            "draft head: export with format native"
        )
    return drafter


def _read_back(head: Eagle3Drafter, config: dict[str, Any], folder: Path) -> None:
    """Everything that is written must come back: keys, tensors, and the very same logits."""
    found = read_json(folder / CONFIG)
    if differing := sorted(k for k in {*config, *found} if config.get(k) != found.get(k)):
        raise ExportError(f"config.json reads back differently: {', '.join(differing)}")
    check_folder(folder, head.target)
    again = read_sglang(folder, head.target)
    inputs = golden_inputs(head)
    if not torch.equal(golden_logits(head, inputs), golden_logits(again, inputs)):
        raise ExportError("the head read back gives other logits than the head written")


def _manifest(
    head: Eagle3Drafter,
    tensors: dict[str, Tensor],
    left_out: tuple[str, ...],
    provenance: Mapping[str, Any] | None,
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "family": head.family,
        "target_name": head.config.target_name,
        "target_fingerprint": head.config.target_fingerprint,
        "reference": head.config.reference,
        "tensors": {name: list(tensor.shape) for name, tensor in sorted(tensors.items())},
        "left_out": list(left_out),
        "provenance": dict(provenance or {}),
    }


def _notes(config: dict[str, Any], reference: dict[str, str] | None) -> tuple[str, ...]:
    notes = []
    if reference:
        notes.append(
            "serve it with the merged target that its training wrote (target/), not with "
            f"{reference['base']}, for whose law it was not trained"
        )
    if config["eagle_aux_hidden_state_layer_ids"][0] == 0:
        notes.append(
            "feature layer 0 (the embedding) is SGLang's layer id -1, which several of its models "
            "cannot capture: check the acceptance length when serving"
        )
    if config["fc_norm"] or config["norm_output"]:
        notes.append(
            "fc_norm and norm_output are EAGLE-3.1: engines older than them ignore the keys"
        )
    return tuple(notes)


def _completed(config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
    """A config with the keys that other trainers leave to the engines' defaults."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0)
    heads = config.get("num_attention_heads") or 1
    defaults = {
        "num_hidden_layers": 1,
        "draft_vocab_size": config.get("vocab_size"),
        "num_key_value_heads": heads,
        "head_dim": (config.get("hidden_size") or 0) // heads,
        "target_hidden_size": config.get("hidden_size"),
        "rope_theta": theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", **rope, "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": config.get("dtype", "float32"),
        "fc_norm": bool(config.get("use_aux_norm", False)),
        "norm_output": False,
    }
    config = config | {key: value for key, value in defaults.items() if config.get(key) is None}
    config["rope_theta"] = theta
    nested = dict(config.get("eagle_config") or {})
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    inner = nested.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = from_sglang_layers(inner) if inner else default_feature_layers(target.num_layers)
    nested.setdefault("use_aux_hidden_state", True)
    nested["eagle_aux_hidden_state_layer_ids"] = to_sglang_layers(ids) if inner is None else inner
    return {**config, "eagle_aux_hidden_state_layer_ids": ids, "eagle_config": nested}


def _headway_config(config: dict[str, Any], folder: Path, target: TargetModel) -> Eagle3Config:
    recorded = read_json(folder / MANIFEST) if (folder / MANIFEST).exists() else {}
    copied = (
        "hidden_size",
        "vocab_size",
        "draft_vocab_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "max_position_embeddings",
        "fc_norm",
        "norm_output",
    )
    return Eagle3Config(
        feature_layers=config["eagle_aux_hidden_state_layer_ids"],
        target_num_layers=target.num_layers,
        target_name=recorded.get("target_name"),
        target_fingerprint=recorded.get("target_fingerprint"),
        reference=recorded.get("reference"),
        **{name: config[name] for name in copied},
    )


def _state(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the file to the head's state dict."""
    state = {name: tensor for name, tensor in tensors.items() if name not in _NOT_WEIGHTS}
    if "d2t" in tensors:
        state["draft_vocab"] = from_offsets(tensors["d2t"])
    return state


def _check_embedding(tensors: dict[str, Tensor], target: TargetModel, folder: Path) -> None:
    """An embedding in the file must be the target's: Headway's head always borrows it."""
    found = tensors.get("embed_tokens.weight")
    if found is None:
        return
    weight = target.embedding.get_parameter("weight").cpu().to(found.dtype)
    if not torch.equal(found, weight):
        raise ExportError(
            f"{folder}: embed_tokens.weight is not the embedding of {target.name!r}: the head has "
            "its own, or belongs to another target"
        )
