"""EAGLE-3 (arXiv:2503.01840): one decoder block that drafts from the target's own hidden states.

Row t holds the pair (feature of t, embedding of token t+1) and predicts token t+2. The first
feature is ``fuse`` of three captured target layers; later steps feed the block's own output back,
un-normed (``norm_output`` feeds the normed one, as EAGLE-3.1 does). Attention reads
cat(norm(embedding), norm(feature)), embedding first; the residual stream is the un-normed feature.
Tensor names follow the dialect the serving engines load.

Legend: B batch, T rows, D hidden, F captured layers, Vd draft vocabulary.
"""

import torch
from torch import Tensor, nn

from drafters.base import Drafter
from drafters.config import Eagle3Config
from drafters.layers import Attend, Attention, GatedMLP, RMSNorm

_MLP = ("gate", "up", "down")


class Eagle3Layer(nn.Module):
    """The one decoder block;

    Input (embedding, feature), output the next feature before the final norm.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(
            2 * size,
            size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.rope_theta,
        )
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size)

    def forward(
        self, embeds: Tensor, feature: Tensor, position_ids: Tensor, attend: Attend
    ) -> Tensor:
        """(B, T, D) embeddings and (B, T, D) features -> (B, T, D)."""
        pair = torch.cat(
            (self.input_layernorm(embeds), self.hidden_norm(feature)), dim=-1
        )  # (B, T, 2D)
        hidden = feature + self.self_attn(pair, position_ids, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Drafter(Drafter):
    """A sequential head: ``forward`` is one draft step."""

    config_class = Eagle3Config
    family = "eagle3"
    shape = "sequential"

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        count = len(config.feature_layers or ())
        self.fc = nn.Linear(count * size, size, bias=False)
        self.fc_norm = (
            nn.ModuleList(RMSNorm(size, eps) for _ in range(count)) if config.fc_norm else None
        )
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size or 0, bias=False)
        self.post_init()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The fused target layers."""
        return tuple(self.config.feature_layers)

    def fuse(self, features: Tensor) -> Tensor:
        """Captured layers (B, T, F·D) -> the first feature (B, T, D)."""
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        return self.fc(features)

    def forward(
        self, feature: Tensor, token_ids: Tensor, position_ids: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """One draft step.

        Args:
            feature: (B, T, D), ``fuse`` output or the previous step's next feature.
            token_ids: (B, T) token following each row's feature position.
            position_ids: (B, T) rotary positions: t at step 0, t+i at step i.
            attend: the caller's attention over keys of other rows.

        Returns:
            ``(hidden, next_feature)``, both (B, T, D): ``hidden`` is normed, for :meth:`logits` and
            the confidence head; ``next_feature`` goes into the following step.
        """
        output = self.midlayer(
            self.target.embed(token_ids).to(feature.dtype), feature, position_ids, attend
        )
        hidden = self.norm(output)
        return hidden, hidden if self.config.norm_output else output

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states (..., D) -> draft logits (..., Vd)."""
        return self.lm_head(hidden)

    @torch.no_grad()
    def initialise_from_target(self) -> None:
        """Start from the target instead of from noise.

        The output matrix takes the target's rows. Where the target's last layer has the shape of
        the draft block (any Llama-like target), the block starts as that layer on the feature half
        of its input, the fused feature as the last captured one, and the final norm as the
        target's: the untrained head then roughly continues the target's own residual stream. On
        SmolLM2-135M this is worth about as much as doubling the first hundred steps.
        """
        self.lm_head.weight.copy_(self.head_rows().to(self.lm_head.weight))
        block = self.target.last_block()
        attention, size = self.midlayer.self_attn, self.config.hidden_size
        halves = {
            f"self_attn.{name}_proj.weight": getattr(attention, f"{name}_proj").weight[:, size:]
            for name in "qkv"
        }
        whole = {
            "self_attn.o_proj.weight": attention.o_proj.weight,
            **{
                f"mlp.{name}_proj.weight": getattr(self.midlayer.mlp, f"{name}_proj").weight
                for name in _MLP
            },
            "input_layernorm.weight": self.midlayer.hidden_norm.weight,
            "post_attention_layernorm.weight": self.midlayer.post_attention_layernorm.weight,
            "norm.weight": self.norm.weight,
        }
        places = halves | whole
        if not block or any(block[name].shape != place.shape for name, place in places.items()):
            return
        for name, place in places.items():
            place.copy_(block[name])
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -size:] += torch.eye(
            size, dtype=self.fc.weight.dtype, device=self.fc.weight.device
        )
