"""vLLM's EAGLE-3 model written out: fused parameters, the residual carried beside the stream.

Legend: T rows, H hidden, F captured layers, Vd draft vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from drafters.layers import repeat_heads
from drafters.rope import rotate

IDS = "eagle_aux_hidden_state_layer_ids"


class VllmEngine:
    """A loaded head with the keys and values of what it has seen.

    Args:
        parameters: by the engine's names.
        config: of the folder.
        shared: (V, H) the target's embedding, for a head that has none.
    """

    def __init__(
        self, parameters: dict[str, Tensor], config: dict[str, Any], shared: Tensor
    ) -> None:
        self.parameters, self.config = parameters, config
        self.embedding = parameters.get("model.embed_tokens.weight", shared)
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = 0

    def weight(self, name: str) -> Tensor:
        return self.parameters[f"model.{name}.weight"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weight(name)
        return rms_norm(x, weight.shape, weight, self.config["rms_norm_eps"])

    def combine(self, features: Tensor) -> Tensor:
        """(T, F·H) captured layers -> (T, H)."""
        nested = self.config["eagle_config"]
        if nested.get("norm_before_fc", self.config.get("norm_before_fc", False)):
            features = self.norm(features, "input_norm")
        if self.config.get("fc_norm", False):
            parts = enumerate(features.chunk(self.config["num_aux_hidden_states"], dim=-1))
            features = torch.cat([self.norm(x, f"fc_norm.{i}") for i, x in parts], dim=-1)
        return features @ self.weight("fc").T

    def forward(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(T,) tokens and (T, H) features -> normed outputs and what is fed back, (T, H) each."""
        stream, residual = hidden, torch.zeros(0)
        for index in range(self.config["num_hidden_layers"]):
            layer = f"layers.{index}"
            if index == 0:
                embeds = self.norm(self.embedding[tokens], f"{layer}.input_layernorm")
                normed = self.norm(stream, f"{layer}.hidden_norm")
                residual = normed if self.config.get("norm_before_residual", False) else stream
                stream = torch.cat([embeds, normed], dim=-1)
            else:
                residual = residual + stream
                stream = self.norm(residual, f"{layer}.input_layernorm")
            stream = self.attention(index, stream)
            residual = residual + stream
            inner = self.norm(residual, f"{layer}.post_attention_layernorm")
            gate, up = (inner @ self.weight(f"{layer}.mlp.gate_up_proj").T).chunk(2, dim=-1)
            stream = (silu(gate) * up) @ self.weight(f"{layer}.mlp.down_proj").T
        residual = residual + stream
        normed = self.norm(residual, "norm")
        self.length += len(tokens)
        return normed, normed if self.config.get("norm_output", False) else residual

    def attention(self, index: int, x: Tensor) -> Tensor:
        """(T, input) -> (T, H), causal behind all rows so far."""
        config, name = self.config, f"layers.{index}.self_attn"
        count, size = len(x), config["head_dim"]
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        widths = [heads * size, groups * size, groups * size]
        parts = (x @ self.weight(f"{name}.qkv_proj").T).split(widths, dim=-1)
        q, k, v = (part.view(1, count, -1, size).transpose(1, 2) for part in parts)
        if config["model_type"] == "qwen3":
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        where = torch.arange(self.length, self.length + count)
        theta, scaling = config["rope_parameters"]["rope_theta"], config["rope_scaling"]
        q, k = (rotate(x, where[None], theta, scaling) for x in (q, k))
        if index in self.seen:
            k, v = (torch.cat(pair, 2) for pair in zip(self.seen[index], (k, v), strict=True))
        self.seen[index] = k, v
        back = where[:, None] - torch.arange(self.length + count)
        hidden = back < 0
        if config["layer_types"][index] == "sliding_attention":
            hidden = hidden | (back >= config["sliding_window"])
        scores = q @ repeat_heads(k, heads // groups).transpose(2, 3) / size**0.5
        mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ repeat_heads(
            v, heads // groups
        )
        return mixed.transpose(1, 2).reshape(count, -1) @ self.weight(f"{name}.o_proj").T

    def logits(self, normed: Tensor) -> Tensor:
        """(T, H) -> (T, Vd)."""
        return normed @ self.parameters["lm_head.weight"].T

    def targets(self, drafted: Tensor) -> list[int]:
        """Draft ids as the target's tokens."""
        offsets = self.parameters.get("draft_id_to_target_id")
        return (drafted if offsets is None else drafted + offsets[drafted]).tolist()


def golden_texts(config: dict[str, Any], steps: int) -> tuple[Tensor, Tensor]:
    """The inputs that golden logits are of: (6, F·H) features and (5 + steps,) tokens."""
    generator = torch.Generator().manual_seed(0)
    width = config["num_aux_hidden_states"] * config["target_hidden_size"]
    features = torch.randn(6, width, generator=generator)
    tokens = torch.randint(config["vocab_size"], (5 + steps,), generator=generator)
    return features, tokens


def chain(engine: VllmEngine, steps: int = 3) -> Tensor:
    """EAGLE-3's drafts one after another: (steps, Vd)."""
    features, tokens = golden_texts(engine.config, steps)
    hidden, out = engine.combine(features), []
    for start, end in ((0, 6), *((step, step + 1) for step in range(6, 5 + steps))):
        normed, following = engine.forward(tokens[start:end], hidden)
        out.append(engine.logits(normed[-1]))
        hidden = following[-1:]
    return torch.stack(out)


def one_pass(engine: VllmEngine, drafts: int) -> Tensor:
    """P-EAGLE's drafts, all in the pass that absorbs the text: (drafts, Vd)."""
    features, tokens = golden_texts(engine.config, drafts)
    mask = engine.combine(engine.parameters["mask_hidden"].view(-1)[None])
    hidden = torch.cat([engine.combine(features), mask.expand(drafts - 1, -1)])
    masks = torch.full((drafts - 1,), engine.config["pard_token"])
    normed, _ = engine.forward(torch.cat([tokens[:6], masks]), hidden)
    return engine.logits(normed[-drafts:])
