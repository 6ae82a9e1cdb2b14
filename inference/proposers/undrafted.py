"""No drafts at all: every round is a plain step of the speculative decoder.

It is what a size of 1 means, and what the loop itself costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from inference.proposers.base import Proposer, RowState, Session
from inference.proposers.copying import one_hot_tree
from inference.tree import TokenTree


class UndraftedProposer(Proposer):
    """Trees of the root alone."""

    @property
    def chains(self) -> bool:
        """Always."""
        return True

    def start(self, session: Session) -> None:
        """Remember where tensors live."""
        self.device = session.target.device

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """The last committed token of each running sequence."""
        return [
            None if state is None else one_hot_tree(state.tokens[-1:], [-1], self.device)
            for state in states
        ]
