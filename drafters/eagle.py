"""EAGLE heads: decoder layers that draft from the target's own hidden states.

Row t holds the pair (feature of t, embedding of token t+1) and predicts token t+2.

EAGLE-3 (arXiv:2503.01840): the first feature is ``fuse`` of captured target layers; later steps
feed the last layer's own output back, un-normed (``norm_output`` feeds the normed one, as EAGLE-3.1
does). Attention of the first layer reads cat(norm(embedding), norm(feature)), embedding first; the
residual stream is the un-normed feature (``norm_before_residual`` takes the normed one). Tensor
names follow the dialect the serving engines load: the first layer is ``midlayer``, further ones
``layers.1``, ... Heads of trainers that trained the embedding too bring it (``own_embedding``).

Legend: B batch, T rows, D hidden, F captured layers, Vd draft vocabulary.
"""

import torch
from torch import Tensor, nn

from drafters.base import SequentialDrafter
from drafters.families import Eagle3Config
from drafters.layers import (
    Attend,
    Attention,
    DecoderLayer,
    GatedMLP,
    Recomputed,
    RMSNorm,
    copy_layer,
)


class Eagle3Layer(Recomputed):
    """The first decoder layer: input (embedding, feature), output the residual stream."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config, layer=0, input_size=2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size)
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self, embeds: Tensor, feature: Tensor, position_ids: Tensor, attend: Attend
    ) -> Tensor:
        """(B, T, D) embeddings and (B, T, D) features -> (B, T, D)."""
        residual, *qkv = self.inside(self._project, embeds, feature, position_ids)
        return self.inside(self._finish, residual, attend(self.self_attn.layer, *qkv))

    def _project(
        self, embeds: Tensor, feature: Tensor, position_ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The residual stream (B, T, D) and what ``Attention.project`` gives."""
        normed = self.hidden_norm(feature)
        pair = torch.cat((self.input_layernorm(embeds), normed), dim=-1)  # (B, T, 2D)
        residual = normed if self.norm_before_residual else feature
        return residual, *self.self_attn.project(pair, position_ids)

    def _finish(self, residual: Tensor, out: Tensor) -> Tensor:
        hidden = residual + self.self_attn.output(out)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Drafter(SequentialDrafter):
    """EAGLE-3: ``forward`` is one draft step."""

    config_class = Eagle3Config
    family = "eagle3"

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        count = len(config.feature_layers or ())
        self.fc = nn.Linear(count * size, size, bias=False)
        self.input_norm = RMSNorm(count * size, eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(size, eps) for _ in range(count)) if config.fc_norm else None
        )
        self.midlayer = Eagle3Layer(config)
        further = range(1, config.num_layers)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(config, i) for i in further})
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size or 0, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if config.own_embedding else None
        self.post_init()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The fused target layers."""
        return tuple(self.config.feature_layers)

    def embed(self, token_ids: Tensor) -> Tensor:
        """(...) token ids -> (..., D), by the head's own embedding or else the target's."""
        own = self.embed_tokens
        return self.target.embed(token_ids) if own is None else own(token_ids)

    def fuse(self, features: Tensor) -> Tensor:
        """Captured layers (B, T, F·D) -> the first feature (B, T, D)."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        return self.fc(features)

    def begin(
        self, features: Tensor | None, hidden: Tensor, position_ids: Tensor, attend: Attend
    ) -> Tensor:
        """``fuse`` of the captured layers (B, T, F·D)."""
        assert features is not None
        return self.fuse(features.to(self.fc.weight.dtype))

    def forward(
        self,
        feature: Tensor,
        token_ids: Tensor,
        position_ids: Tensor,
        attend: Attend,
        depth: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """One draft step, the same at every depth; ``hidden`` is normed."""
        embeds = self.embed(token_ids).to(feature.dtype)
        output = self.decode(embeds, feature, position_ids, attend)
        hidden = self.norm(output)
        return hidden, hidden if self.config.norm_output else output

    def decode(
        self, embeds: Tensor, feature: Tensor, position_ids: Tensor, attend: Attend
    ) -> Tensor:
        """(B, T, D) embeddings and (B, T, D) features -> the last layer's output (B, T, D)."""
        output = self.midlayer(embeds, feature, position_ids, attend)
        for layer in self.layers.values():
            output = layer(output, position_ids, attend)
        return output

    def logits(self, hidden: Tensor, depth: int = 0) -> Tensor:
        """Normed hidden states (..., D) -> draft logits (..., Vd)."""
        return self.lm_head(hidden)

    def output_modules(self) -> list[nn.Module | None]:
        """The output matrix."""
        return [self.lm_head]

    @torch.no_grad()
    def initialise_output(self) -> None:
        """The output matrix takes the target's rows, and so does an embedding of its own."""
        self.lm_head.weight.copy_(self.head_rows().to(self.lm_head.weight))
        if self.embed_tokens is not None:
            every = torch.arange(self.config.vocab_size, device=self.target.device)
            self.embed_tokens.weight.copy_(self.target.embed(every))

    @torch.no_grad()
    def initialise_from_target(self) -> None:
        """Start from the target instead of from noise.

        Where the target's last layers have the shape of
        the draft layers (any Llama-like target), the draft layers start as those, the first one on
        the feature half of its input, the fused feature as the last captured one, and the final
        norm as the target's: the untrained head then roughly continues the target's own residual
        stream. On SmolLM2-135M this is worth about as much as doubling the first hundred steps.
        """
        count, size = self.config.num_layers, self.config.hidden_size
        if count > self.target.num_layers or not self._copy_first_layer(self.target.block(-count)):
            return
        for index, layer in self.layers.items():
            copy_layer(layer, self.target.block(int(index) - count))
        self.norm.weight.copy_(self.target.block()["norm.weight"])
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -size:] += torch.eye(
            size, dtype=self.fc.weight.dtype, device=self.fc.weight.device
        )

    def _copy_first_layer(self, block: dict[str, Tensor]) -> bool:
        """The target's layer on the feature half of the input, where every shape fits."""
        wide = {f"self_attn.{name}_proj.weight" for name in "qkv"}
        padded = {
            name: torch.cat((torch.zeros_like(weight), weight), dim=-1) if name in wide else weight
            for name, weight in block.items()
            if name != "input_layernorm.weight"
        }
        kept = {
            name: self.midlayer.get_parameter(name)[:, : self.config.hidden_size].clone()
            for name in wide
        }
        if block:
            padded["hidden_norm.weight"] = block["input_layernorm.weight"]
        if not copy_layer(self.midlayer, padded):
            return False
        for name, weight in kept.items():  # the embedding half keeps its random start
            self.midlayer.get_parameter(name)[:, : self.config.hidden_size] = weight
        return True
