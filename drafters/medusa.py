"""Medusa heads (arXiv:2401.10774): K independent guesses from one hidden state.

Head i (from 0) reads the target's last hidden state of position t (after the final norm) and
predicts token t+2+i; token t+1 is the target's own. A residual block is x + SiLU(W x + b) with W
and b zero at the start, and the output matrix starts as a copy of the target's, so an untrained
head says what the target says about t+1.

Legend: B batch, T rows, K heads, L layers, D hidden, Vd draft vocabulary.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from drafters.base import Drafter
from drafters.families import MedusaConfig
from drafters.layers import Recomputed


class ZeroLinear(nn.Linear):
    """A linear map that starts at zero (its own class so that weight initialisation can tell it
    apart).
    """


class ResidualBlock(Recomputed):
    """x + SiLU(W x + b)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = ZeroLinear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.inside(self._change, x)

    def _change(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class MedusaDrafter(Drafter):
    """An independent head: ``forward`` maps one hidden state to K rows.

    The K·L residual blocks are distinct modules. With ``shared_lm_head`` all heads use the target's
    frozen matrix.
    """

    config_class = MedusaConfig
    family = "medusa"
    shape = "independent"

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(size) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )
        self.lm_heads = (
            None
            if config.shared_lm_head
            else nn.ModuleList(
                nn.Linear(size, config.draft_vocab_size or 0, bias=False)
                for _ in range(config.num_heads)
            )
        )
        self.post_init()

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., D) last hidden states of the target -> (K, ..., D), one row per head."""
        return torch.stack([block(hidden) for block in self.blocks])

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        """(..., D) output of head ``head`` -> draft logits (..., Vd)."""
        if self.lm_heads is None:
            return self.borrowed_logits(hidden)
        return self.lm_heads[head](hidden)

    def output_modules(self) -> list[nn.Module | None]:
        """The heads' own output matrices, where they have any."""
        return [self.lm_heads]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ZeroLinear):
            init.zeros_(module.weight)
            init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    @property
    def num_drafts(self) -> int:
        """K."""
        return self.config.num_heads

    @torch.no_grad()
    def initialise_output(self) -> None:
        """Every trainable output matrix starts as a copy (never an alias) of the target's rows."""
        for linear in self.lm_heads or ():
            assert isinstance(linear, nn.Linear)
            linear.weight.copy_(self.head_rows().to(linear.weight))
