"""Tiny random targets of many architectures: unmodified transformers models, built in code.

    target = zoo_target("gemma2")

Weights are large enough that greedy decoding has clear winners, windows are short enough (8) that
a short text leaves them. Everything has the tokenizer of `tests.tiny`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from drafters import TargetModel
from tests.tiny import END, SPECIALS, START, tiny_tokenizer

WINDOW = 8
LAYERS = 4
SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = [SLIDING, FULL, SLIDING, FULL]

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": SPECIALS.index(START),
    "eos_token_id": SPECIALS.index(END),
    "pad_token_id": SPECIALS.index(END),
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
"""Of mixtures; their grouped kernel knows no float64, so they run with "eager" experts."""

ZOO: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": WINDOW, "head_dim": 8},
    "gemma2": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "layer_types": MIXED,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 20.0,
    },
    "gemma3_text": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
        "final_logit_softcapping": 20.0,
    },
    "phi3": {"sliding_window": None},
    "olmo2": {},
    "gpt_neox": {},
    "granite": {
        "logits_scaling": 8.0,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.3,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "gpt_oss": {
        "head_dim": 8,
        "sliding_window": WINDOW,
        "layer_types": MIXED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, **EXPERTS},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gemma": {"head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 512},
    "olmo": {},
    "olmo3": {"sliding_window": WINDOW, "layer_types": MIXED},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"head_dim": 8, "sliding_window": WINDOW, "layer_types": MIXED},
    "starcoder2": {"sliding_window": WINDOW},
    "stablelm": {},
    "phi": {},
    "glm4": {"head_dim": 8},
    "exaone4": {"head_dim": 8, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL] * 2},
    "helium": {"head_dim": 8},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "nemotron": {},
    "seed_oss": {"head_dim": 8},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **EXPERTS,
    },
}
"""Options of each architecture beyond `COMMON`, by `model_type`."""


def zoo_target(
    name: str,
    dtype: torch.dtype = torch.float64,
    attn: str | None = None,
    seed: int = 0,
    **options: Any,
) -> TargetModel:
    """A random target of an architecture.

    Args:
        name: key of `ZOO`, or any `model_type` with the `options` it needs.
        dtype: of the weights.
        attn: attention implementation; None leaves the choice to transformers.
        seed: of the weights.
        options: of the config, over those of the zoo.
    """
    config = CONFIG_MAPPING[name](**{**COMMON, **ZOO.get(name, {}), **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    return TargetModel(model.to(dtype), tiny_tokenizer(96), name=name)


def float64_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep float64 models in float64: norms, routers and eager attention of transformers round to
    float32 on the way, which two equal computations do not always do alike.
    """
    softmax = torch.nn.functional.softmax

    def keep_softmax(x: Tensor, dim: int, *args: Any, **kwargs: Any) -> Tensor:
        return x.softmax(dim) if x.dtype == torch.float64 else softmax(x, dim, *args, **kwargs)

    def keeping(convert: Callable) -> Callable:
        def converted(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            out = convert(self, *args, **kwargs)
            narrowed = self.dtype == torch.float64 and isinstance(out, Tensor)
            return self if narrowed and out.dtype == torch.float32 else out

        return converted

    monkeypatch.setattr(torch.nn.functional, "softmax", keep_softmax)
    for name in ("to", "type", "float"):
        monkeypatch.setattr(torch.Tensor, name, keeping(getattr(torch.Tensor, name)))
