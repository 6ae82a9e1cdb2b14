"""Trees out of Medusa's independent heads.

Legend: Vd draft vocabulary, K heads.
"""

from dataclasses import replace

import torch
from torch import Tensor

from drafters import MedusaDrafter
from inference.proposers.base import RowState
from inference.proposers.heads import HeadProposer, chain_shape, default_tree
from inference.proposers.marginals import grow_marginals
from inference.proposers.options import TreeOptions
from inference.tree import TokenTree


class MedusaProposer(HeadProposer):
    """Medusa's static tree (arXiv:2401.10774): the shape is fixed, the tokens come from the heads.

    A node at depth d takes the rank of its place in the shape among head d-1's candidates. Under
    ``rejection`` and ``block`` the candidates stay deterministic unless ``draws`` says otherwise:
    those rules verify them as one-hot proposals. With the shape of a chain (``top_k`` 1) this is
    blockwise parallel decoding (arXiv:1811.03115). ``grown`` options choose the shape anew each
    round, by the heads' own probabilities (arXiv:2604.12989).

    Args:
        drafter: attached head.
        options: of the tree; without a shape it is the head's own, or a default of ``size`` nodes.
    """

    drafter: MedusaDrafter

    def __init__(self, drafter: MedusaDrafter, options: TreeOptions | None = None) -> None:
        super().__init__(drafter, options)
        if self.options.shape is None and not self.options.grown:
            columns, longest = drafter.config.draft_vocab_size, self.options.longest
            assert columns is not None
            if self.options.top_k == 1:
                shape = chain_shape(longest)
            else:
                shape = default_tree(longest, self.options.size, columns)
            self.options = replace(self.options, shape=shape)

    @property
    def default_draws(self) -> str:
        """Nothing: tokens drawn by heads that do not know each other's do not fit together."""
        return "none"

    def reset(self, batch_size: int) -> None:
        """Medusa keeps nothing between rounds."""

    def grow(self, row: int, state: RowState) -> TokenTree:
        """Fill the shape, or grow one."""
        config = self.drafter.config
        logits, acceptance = self._rows(state)
        vocab = self.drafter.draft_vocab
        return grow_marginals(
            self.options, state, self._rule, logits, acceptance, config.vocab_size, vocab
        )

    def _rows(self, state: RowState) -> tuple[Tensor, Tensor | None]:
        """Logits (K, Vd) and chances of acceptance (K,) after the last committed position."""
        drafter, heads = self.drafter, range(self.drafter.config.num_heads)
        with self._timer.phase("draft"):
            dtype = next(drafter.blocks.parameters()).dtype
            rows = drafter(state.hidden[-1].to(dtype))  # (K, D)
            if drafter.lm_heads is None:
                logits = drafter.logits(rows, 0)  # at once: the output matrix is read once
            else:
                logits = torch.stack([drafter.logits(rows[head], head) for head in heads])
            chances = [drafter.acceptance(rows[head], head) for head in heads]
        kept = [chance for chance in chances if chance is not None]
        return logits, torch.stack(kept) if kept else None

    @torch.no_grad()
    def forced(self, state: RowState, tokens: list[int]) -> list[Tensor]:
        """The heads' logits; they do not depend on ``tokens``."""
        return list(self._rows(state)[0][: len(tokens) + 1])
