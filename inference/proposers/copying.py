"""What all proposers that copy text share: no network, no noise, so their drafts are one-hot.

Legend: N tree nodes.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch

from inference.proposers.base import Proposer, RowState
from inference.tree import Proposal, TokenTree


class CopyingProposer(Proposer):
    """Drafts that are a function of the text."""

    @abstractmethod
    def copy(self, row: int, state: RowState) -> TokenTree | None:
        """The tree of one sequence; None where nothing is known.

        Args:
            row: of the batch.
            state: of the sequence.
        """

    def copies(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """The trees of all running sequences for which something is known."""
        return [
            None if state is None else self.copy(row, state) for row, state in enumerate(states)
        ]

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """The same; the root alone where nothing is known."""
        return [
            one_hot_tree(state.tokens[-1:], [-1], state.hidden.device)
            if state is not None and tree is None
            else tree
            for state, tree in zip(states, self.copies(states), strict=True)
        ]


def one_hot_tree(
    tokens: Sequence[int], parents: Sequence[int], device: torch.device | str
) -> TokenTree:
    """A tree of deterministically chosen tokens.

    Args:
        tokens: N, the committed token first.
        parents: N, -1 first.
        device: of the tensors.
    """
    return TokenTree(
        torch.tensor(tokens, device=device),
        torch.tensor(parents, device=device),
        Proposal.ONE_HOT,
    )
