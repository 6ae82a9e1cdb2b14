"""P-EAGLE (arXiv:2602.01469): EAGLE-3's network, all K drafts of a round in one pass.

The last committed row p = a-1 holds the fused feature of p and the embedding of x_{p+1} = x_a, and
drafts x_{a+1}, as in EAGLE-3. K-1 mask rows follow it at positions p+1, p+2, ...; each holds the
learned feature ``mask_hidden`` (in place of captured layers, through the same fusion) and a learned
embedding, and row d drafts x_{p+2+d}. A mask row attends to the committed rows up to p and to the
mask rows of its own rollout up to itself, so the whole pass is causal.

The learned embedding takes the place that serving engines give to a token: they look the mask rows'
embedding up in the head's own embedding matrix, at the id that the config names. A head exported
to them carries the target's embedding matrix with ``mask_embedding`` written into a row that text
does not use (``drafters.block.choose_mask_token``). A head that brings an embedding of its own
(``own_embedding``) has the mask's in the row of ``mask_token_id``, and no ``mask_embedding``.

Legend: B batch, n rows, D hidden, F captured layers, K drafts.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from drafters.eagle import Eagle3Drafter
from drafters.families import PEagleConfig
from drafters.layers import Attend


class PEagleDrafter(Eagle3Drafter):
    """A block head with EAGLE-3's weights; ``forward`` is the pass over committed rows."""

    config_class = PEagleConfig
    family = "peagle"
    shape = "block"

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        width = len(config.feature_layers or ()) * config.hidden_size
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, width))
        init.normal_(self.mask_hidden)
        self.mask_embedding = None
        if not config.own_embedding:
            self.mask_embedding = nn.Parameter(torch.empty(config.hidden_size))
            init.normal_(self.mask_embedding)

    @property
    def num_drafts(self) -> int:
        """K."""
        return self.config.num_drafts

    def text_rows(self, features: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of depth 0.

        Args:
            features: (B, n, F·D) captured layers.
            token_ids: (B, n) the token behind each.

        Returns:
            Embeddings and features, both (B, n, D).
        """
        feature = self.fuse(features.to(self.fc.weight.dtype))
        return self.embed(token_ids).to(feature.dtype), feature

    def mask_rows(self, batch: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs of deeper rows: the learned embedding and feature, both (batch, count, D)."""
        feature = self.fuse(self.mask_hidden)
        shape = (batch, count, feature.shape[-1])
        return self.mask_row().to(feature.dtype).expand(shape), feature.expand(shape)

    def mask_row(self) -> Tensor:
        """The embedding of a mask row, (D,)."""
        if self.mask_embedding is not None:
            return self.mask_embedding
        assert self.embed_tokens is not None
        return self.embed_tokens.weight[self.config.mask_token_id]

    def run(self, rows: tuple[Tensor, Tensor], position_ids: Tensor, attend: Attend) -> Tensor:
        """Inputs (B, n, D) each -> (B, n, D), normed."""
        return self.norm(self.decode(*rows, position_ids, attend))

    @torch.no_grad()
    def initialise_from_target(self) -> None:
        """As EAGLE-3; the mask's embedding takes the size of the target's."""
        super().initialise_from_target()
        if self.mask_embedding is None:
            return
        some = torch.arange(min(self.config.vocab_size, 4096), device=self.target.device)
        size = self.target.embed(some).float().std().to(self.mask_embedding)
        self.mask_embedding.mul_(size / self.mask_embedding.std())
