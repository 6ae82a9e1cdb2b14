"""Hydra (arXiv:2402.05109): Medusa's heads, each of which also reads the tokens drafted before it.

Head i (from 0) reads cat(hidden state of t, embeddings of tokens t+1 .. t+1+i), of width (i+2)·D,
and predicts token t+2+i. Its first residual block is S x + SiLU(W x + b) with a linear skip S that
narrows to D, further ones are Medusa's x + SiLU(W x + b). Hydra++ puts one decoder layer, the
prefix layer, over the hidden states first; it reads the target's last hidden states (after the
final norm) and its output replaces them, normed with ``prefix_norm``, as in the authors' code.

At the start S copies the hidden state and ignores the embeddings, every W and b is zero and each
output matrix is a copy of the target's; started from the target, the prefix layer adds nothing
either. So an untrained head says what the target says about t+1 (nearly so under a prefix norm,
which starts at the mean size of hidden states).

Legend: B batch, T rows, K heads, D hidden, Vd draft vocabulary.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from drafters.base import SequentialDrafter
from drafters.families import HydraConfig
from drafters.layers import Attend, DecoderLayer, Recomputed, RMSNorm, copy_layer
from drafters.medusa import ResidualBlock, ZeroLinear


class SkipLinear(nn.Linear):
    """(i+2)·D -> D; starts as the identity on the first D inputs and zero on the others."""


class NarrowingBlock(Recomputed):
    """S x + SiLU(W x + b).

    Args:
        size: D.
        parts: how many vectors of that size it reads.
    """

    def __init__(self, size: int, parts: int) -> None:
        super().__init__()
        self.skip = SkipLinear(parts * size, size)
        self.linear = ZeroLinear(parts * size, size)

    def forward(self, x: Tensor) -> Tensor:
        """(..., parts·D) -> (..., D)."""
        return self.inside(self._narrow, x)

    def _narrow(self, x: Tensor) -> Tensor:
        return self.skip(x) + nn.functional.silu(self.linear(x))


class HydraDrafter(SequentialDrafter):
    """Sequentially dependent heads: step ``depth`` of ``forward`` is head ``depth``.

    The feature that goes from step to step is the head's input so far: the hidden state and the
    embeddings of the tokens since.
    """

    config_class = HydraConfig
    family = "hydra"

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        size, heads = config.hidden_size, range(config.num_heads)
        self.prefix = DecoderLayer(config, 0) if config.num_layers else None
        self.prefix_norm = RMSNorm(size, config.rms_norm_eps) if config.prefix_norm else None
        self.blocks = nn.ModuleList(
            nn.Sequential(
                NarrowingBlock(size, head + 2),
                *(ResidualBlock(size) for _ in range(1, config.mlp_layers)),
            )
            for head in heads
        )
        self.lm_heads = (
            None
            if config.shared_lm_head
            else nn.ModuleList(
                nn.Linear(size, config.draft_vocab_size or 0, bias=config.lm_head_bias)
                for _ in heads
            )
        )
        self.post_init()

    @property
    def num_drafts(self) -> int:
        """K."""
        return self.config.num_heads

    def begin(
        self, features: Tensor | None, hidden: Tensor, position_ids: Tensor, attend: Attend
    ) -> Tensor:
        """The last hidden states (B, T, D), through the prefix layer where there is one."""
        hidden = hidden.to(next(self.blocks.parameters()).dtype)
        if self.prefix is None:
            return hidden
        hidden = self.prefix(hidden, position_ids, attend)
        return hidden if self.prefix_norm is None else self.prefix_norm(hidden)

    def forward(
        self,
        feature: Tensor,
        token_ids: Tensor,
        position_ids: Tensor,
        attend: Attend,
        depth: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Head ``depth``.

        Args:
            feature: (B, T, (depth+1)·D).
            token_ids: (B, T).
            position_ids: (B, T), without effect: heads do not attend.
            attend: without effect.
            depth: which head, below K.

        Returns:
            ``(hidden (B, T, D), next_feature (B, T, (depth+2)·D))``.
        """
        embeds = self.target.embed(token_ids).to(feature.dtype)
        feature = torch.cat((feature, embeds), dim=-1)
        return self.blocks[depth](feature), feature

    def logits(self, hidden: Tensor, depth: int = 0) -> Tensor:
        """(..., D) output of head ``depth`` -> draft logits (..., Vd)."""
        if self.lm_heads is None:
            return self.borrowed_logits(hidden)
        return self.lm_heads[depth](hidden)

    def output_modules(self) -> list[nn.Module | None]:
        """The heads' own output matrices, where they have any."""
        return [self.lm_heads]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ZeroLinear):
            init.zeros_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, SkipLinear):
            init.eye_(module.weight)
            init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    @torch.no_grad()
    def initialise_output(self) -> None:
        """Every trainable output matrix starts as a copy (never an alias) of the target's rows."""
        for linear in self.lm_heads or ():
            assert isinstance(linear, nn.Linear)
            linear.weight.copy_(self.head_rows().to(linear.weight))

    @torch.no_grad()
    def initialise_from_target(self) -> None:
        """The prefix layer starts as the target's last layer, where the shapes fit, with its two
        outputs at zero; its norm gives hidden states the size that the target's final norm does.
        """
        if self.prefix is None:
            return
        weights = self.target.block()
        copy_layer(self.prefix, weights)
        self.prefix.self_attn.o_proj.weight.zero_()
        self.prefix.mlp.down_proj.weight.zero_()
        if self.prefix_norm is not None and "norm.weight" in weights:
            self.prefix_norm.weight.fill_(weights["norm.weight"].float().pow(2).mean().sqrt())
