"""The forward passes of ``speculators`` 0.9.0, written out from a file's own tensors.

Nothing of Headway's heads is used. As in its classes all steps of EAGLE-3 run on all rows,
P-EAGLE's mask rows attend by rollout, and a block of DFlash sees the text before its anchor.

Legend: T rows of text, S drafts, R rows in all, H hidden, A heads, d head size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu


class Network:
    """A file of theirs, run on its own.

    Args:
        config: of the file.
        tensors: of the file.
        embedding: (V, H) of the verifier, where the file has none.
        output: (V, H) of the verifier, where the file has none.
    """

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor, output: Tensor
    ) -> None:
        self.config, self.layers = config, config["transformer_layer_config"]
        self.tensors = {"embed_tokens.weight": embedding, "lm_head.weight": output, **tensors}
        self.seen: list[list[tuple[Tensor, Tensor]]] = []

    def of(self, name: str, x: Tensor) -> Tensor:
        """A linear map by its name; its bias if it has one."""
        return linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        """A norm by its name."""
        weight = self.tensors[f"{name}.weight"]
        return rms_norm(x, weight.shape, weight, self.layers["rms_norm_eps"])

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids (...) -> (..., H)."""
        return self.tensors["embed_tokens.weight"][ids]

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """(A, R, d) with rotary positions (R,)."""
        size = x.shape[-1]
        angle = positions[:, None] * self.frequencies(size)
        cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
        half = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), dim=-1)
        return x * cos + half * sin

    def frequencies(self, size: int) -> Tensor:
        """(d/2,) of rotary embeddings: plain, linear or Llama 3.1's, which stretches long waves by
        a factor, keeps short ones and goes from one to the other in between.
        """
        rope = self.layers["rope_parameters"]
        plain = rope["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        if rope["rope_type"] == "default":
            return plain
        stretched = plain / rope["factor"]
        if rope["rope_type"] == "linear":
            return stretched
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * plain / (2 * torch.pi)
        part = ((turns - low) / (high - low)).clamp(0, 1)
        return part * plain + (1 - part) * stretched

    def heads(self, name: str, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """(R, ...) -> (A, R, d), normed and turned where the layer does so."""
        split = self.of(f"{name}_proj", x).unflatten(-1, (-1, self.layers["head_dim"]))
        if f"{name}_norm.weight" in self.tensors:
            split = self.norm(f"{name}_norm", split)
        split = split.transpose(0, 1)
        return split if positions is None else self.turned(split, positions)

    def layer(
        self,
        index: int,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        mask: Tensor,
        before: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """A decoder layer behind its input norm.

        Args:
            index: of the layer.
            x: (R, ...) input of attention.
            residual: (R, H).
            positions: (R,).
            mask: (R, keys) bool.
            before: keys and values (A, keys, d) in front of its own.
        """
        place = f"layers.{index}.self_attn"
        q, k = (self.heads(f"{place}.{name}", x, positions) for name in "qk")
        v = self.heads(f"{place}.v", x)
        if before is not None:
            k, v = torch.cat((before[0], k), dim=1), torch.cat((before[1], v), dim=1)
        self.kept = k, v
        mixed = scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, enable_gqa=True
        )
        residual = residual + self.of(f"{place}.o_proj", mixed[0].transpose(0, 1).flatten(1))
        inner = self.norm(f"layers.{index}.post_attention_layernorm", residual)
        mlp = f"layers.{index}.mlp"
        gated = silu(self.of(f"{mlp}.gate_proj", inner)) * self.of(f"{mlp}.up_proj", inner)
        return residual + self.of(f"{mlp}.down_proj", gated)

    def fused(self, features: Tensor) -> Tensor:
        """(R, F·H) -> (R, H)."""
        if self.config["norm_before_fc"]:
            features = self.norm("input_norm", features)
        if self.config["fc_norm"]:
            parts = features.chunk(len(self.config["eagle_aux_hidden_state_layer_ids"]), dim=-1)
            features = torch.cat([self.norm(f"fc_norm.{i}", x) for i, x in enumerate(parts)], -1)
        return self.of("fc", features)

    def eagle(
        self,
        embeds: Tensor,
        feature: Tensor,
        positions: Tensor,
        mask: Tensor,
        memory: list[tuple[Tensor, Tensor] | None],
    ) -> Tensor:
        """All layers of EAGLE-3 on (R, H) each; ``memory`` holds each layer's keys and values."""
        hidden = self.norm("layers.0.hidden_norm", feature)
        residual = hidden if self.config["norm_before_residual"] else feature
        x = torch.cat((self.norm("layers.0.input_layernorm", embeds), hidden), dim=-1)
        for index in range(self.layers["num_hidden_layers"]):
            if index:
                x = self.norm(f"layers.{index}.input_layernorm", residual)
            residual = self.layer(index, x, residual, positions, mask, memory[index])
            memory[index] = self.kept
        return residual


def chain(network: Network, features: Tensor, tokens: Tensor, steps: int) -> Tensor:
    """EAGLE-3: (S, Vd) of the last row of the text at every step; all rows run at each."""
    count, rows = len(features), len(tokens)
    feature = network.fused(
        torch.cat((features, features.new_zeros(rows - count, features.shape[1])))
    )
    mask, logits = torch.ones(rows, rows, dtype=torch.bool).tril(), []
    memory: list[tuple[Tensor, Tensor] | None] = [None] * network.layers["num_hidden_layers"]
    for step in range(steps):
        ids = torch.cat((tokens[step:], tokens.new_zeros(step)))
        positions = torch.arange(rows) + step
        feature = network.eagle(network.embed(ids), feature, positions, mask, memory)
        normed = network.norm("norm", feature)
        logits.append(network.of("lm_head", normed)[count - 1])
        feature = normed if network.config["norm_output"] else feature
        mask = torch.cat((mask, torch.eye(rows, dtype=torch.bool)), dim=-1)
    return torch.stack(logits)


def parallel(network: Network, features: Tensor, tokens: Tensor, drafts: int) -> Tensor:
    """P-EAGLE: (K, Vd) of the last row of the text and the mask rows of its rollout."""
    count = len(features)
    masks = torch.full((drafts - 1,), network.config["mask_token_id"])
    wide = torch.cat((features, network.tensors["mask_hidden"][0].expand(drafts - 1, -1)))
    embeds = network.embed(torch.cat((tokens[:count], masks)))
    positions = torch.arange(len(wide))
    mask = torch.ones(len(wide), len(wide), dtype=torch.bool).tril()
    memory: list[tuple[Tensor, Tensor] | None] = [None] * network.layers["num_hidden_layers"]
    hidden = network.eagle(embeds, network.fused(wide), positions, mask, memory)
    return network.of("lm_head", network.norm("norm", hidden))[count - 1 :]


def block(network: Network, features: Tensor, tokens: Tensor, drafts: int) -> Tensor:
    """DFlash and DSpark: (S, Vd) of the block whose anchor stands behind the text."""
    config, count, size = network.config, len(features), network.config["block_size"]
    context = network.norm("hidden_norm", network.of("fc", features))
    ids = torch.full((size,), config["mask_token_id"])
    ids[0] = tokens[count - 1]
    hidden, positions = network.embed(ids), count + torch.arange(size)
    for index, kind in enumerate(network.layers["layer_types"]):
        mask = torch.ones(size, count + size, dtype=torch.bool)
        if kind == "sliding_attention" and not config["sliding_window_non_causal"]:
            mask = mask.tril(count)
        place = f"layers.{index}.self_attn"
        before = (
            network.heads(f"{place}.k", context, torch.arange(count)),
            network.heads(f"{place}.v", context),
        )
        x = network.norm(f"layers.{index}.input_layernorm", hidden)
        hidden = network.layer(index, x, hidden, positions, mask, before)
    hidden = network.norm("norm", hidden)
    logits = network.of("lm_head", hidden) + markov(network, hidden, tokens[count - 1 :])
    return logits[size - drafts :]


def markov(network: Network, hidden: Tensor, tokens: Tensor) -> Tensor:
    """(B, Vd) bias of every row of a block, the texts' own tokens before it."""
    config = network.config
    if not config.get("markov_rank"):
        return torch.zeros(1)
    before = tokens
    if not config["sample_from_anchor"]:
        before = torch.cat((tokens[:1], tokens))
    embedded = network.tensors["markov_head.markov_w1.weight"][before[: len(hidden)]]
    if config["markov_head_type"] == "gated":
        gate = network.of("markov_head.gate_proj", torch.cat((hidden, embedded), dim=-1)).sigmoid()
        return network.of("markov_head.markov_w2", gate * embedded)
    if config["markov_head_type"] == "rnn":
        state, out = torch.zeros(config["markov_rank"]), []
        for row, token in zip(hidden, embedded, strict=True):
            joint = network.of("markov_head.joint_proj", torch.cat((state, token, row)))
            gate, candidate, output = joint.chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            out.append(output.tanh())
        embedded = torch.stack(out)
    return network.of("markov_head.markov_w2", embedded)
