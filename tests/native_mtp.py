"""Tiny random checkpoints with multi-token prediction modules, as the released ones lay them out.

The modules' decoder layers are layers that a model of more layers saved behind its own last one.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from drafters import TargetModel
from tests.tiny import tiny_tokenizer
from tests.zoo import COMMON, EXPERTS, FULL, SLIDING, WINDOW

LAYERS = 2
SPARSE = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}

KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **SPARSE,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_group": 2,
        "topk_group": 1,
    },
    "glm4_moe": {**SPARSE, "head_dim": 8, "n_group": 1, "topk_group": 1, "use_qk_norm": True},
    "qwen3_5_text": {"head_dim": 16, "layer_types": [FULL] * LAYERS},
    "qwen3_next": {
        "head_dim": 16,
        "num_experts": 4,
        **EXPERTS,
        "shared_expert_intermediate_size": 24,
        "decoder_sparse_step": 1,
        "layer_types": [FULL] * LAYERS,
    },
    "mellum": {
        "head_dim": 8,
        "num_experts": 4,
        **EXPERTS,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, FULL],
    },
}
"""DeepSeek-V3 and GLM-4-MoE keep the modules behind the last layer, Qwen and Mellum under ``mtp.``;
Mellum's have a window. Qwen's linear-attention layers are left out, as a target with them cannot
verify trees."""

MODULES = [(kind, 1) for kind in KINDS] + [("deepseek_v3", 2), ("glm4_moe", 3)]
"""Kinds and how many modules a checkpoint of theirs may have."""


def save_checkpoint(
    folder: Path,
    kind: str,
    modules: int = 1,
    drop: str | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Path:
    """A model folder with two shards, the MTP tensors in the second.

    Args:
        folder: to write.
        kind: key of ``KINDS``.
        modules: MTP modules; 0 leaves them out.
        drop: an MTP tensor to leave out, by the end of its name.
        seed: of the weights.
        dtype: of the files.
    """
    options = {**COMMON, "num_hidden_layers": LAYERS, **KINDS[kind]}
    longer = {**options, "num_hidden_layers": LAYERS + modules}
    if "layer_types" in longer:
        longer["layer_types"] = [*longer["layer_types"], *[FULL] * modules]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**longer)).double()
        for name, tensor in model.named_parameters():
            if "norm" in name or "correction_bias" in name:
                tensor.data += 0.2 * torch.randn_like(tensor)
        model.save_pretrained(folder)
        saved = dict(apart(load_file(folder / "model.safetensors")))
        own, extra = split(saved, kind, modules)
    (folder / "model.safetensors").unlink()
    extra = {name: t for name, t in extra.items() if drop is None or not name.endswith(drop)}
    shards = {"model-00001-of-00002.safetensors": own, "model-00002-of-00002.safetensors": extra}
    for file, tensors in shards.items():
        stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        save_file(stored, folder / file, metadata={"format": "pt"})
    places = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if modules and not kind.startswith("qwen"):
        options["num_mtp_layers"] = modules
    config = CONFIG_MAPPING[kind](**options, dtype=dtype)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tiny_tokenizer(96).save_pretrained(folder)
    return folder


def apart(saved: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Experts one by one, as released files have them."""
    for name, tensor in saved.items():
        place, _, kind = name.partition(".experts.")
        if kind == "gate_up_proj":
            for expert, both in enumerate(tensor):
                for part, weight in zip(("gate", "up"), both.chunk(2), strict=True):
                    yield f"{place}.experts.{expert}.{part}_proj.weight", weight.clone()
        elif kind == "down_proj":
            for expert, weight in enumerate(tensor):
                yield f"{place}.experts.{expert}.down_proj.weight", weight.clone()
        else:
            yield name, tensor


def split(
    saved: dict[str, Tensor], kind: str, modules: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's own tensors, and those of its MTP modules."""
    own, extra = {}, {}
    for name, tensor in saved.items():
        layer = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else -1
        (own if layer < LAYERS else extra)[name] = tensor
    behind = kind in ("deepseek_v3", "glm4_moe")
    size = COMMON["hidden_size"]
    for module in range(modules):
        place = f"model.layers.{LAYERS + module}."
        norm = (
            0.0 if kind.startswith("qwen") else 1.0
        )  # Qwen's norms store one less than they apply
        fresh = {key: norm + 0.2 * torch.randn(size, dtype=torch.float64) for key in "ehn"}
        projection = torch.randn(size, 2 * size, dtype=torch.float64) * 0.2
        if behind:
            extra |= {f"{place}{key}norm.weight": fresh[key] for key in "eh"}
            extra |= {
                f"{place}shared_head.norm.weight": fresh["n"],
                f"{place}eh_proj.weight": projection,
                f"{place}embed_tokens.weight": own["model.embed_tokens.weight"].clone(),
                f"{place}shared_head.head.weight": own["lm_head.weight"].clone(),
            }
        else:
            extra = {n.replace(place, f"mtp.layers.{module}."): t for n, t in extra.items()}
            extra |= {
                "mtp.pre_fc_norm_embedding.weight": fresh["e"],
                "mtp.pre_fc_norm_hidden.weight": fresh["h"],
                "mtp.norm.weight": fresh["n"],
                "mtp.fc.weight": projection,
            }
    return own, extra


def load_checkpoint(folder: Path, dtype: torch.dtype = torch.float64) -> TargetModel:
    """The target of a checkpoint; experts one by one, as their grouped kernel knows no float64."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager"
    )
    return TargetModel(model.to(dtype), tiny_tokenizer(96), name=str(folder))
