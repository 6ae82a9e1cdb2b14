"""No drafts: every round verifies the last committed token alone, which is plain decoding."""

from collections.abc import Sequence

import torch

from inference.proposers.base import Proposer, RowState, Session
from inference.tree import Proposal, TokenTree


class NoDrafts(Proposer):
    """Proposes nothing."""

    @property
    def chains(self) -> bool:
        """A root alone does not branch."""
        return True

    def start(self, session: Session) -> None:
        """Nothing is kept."""

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """The root of each sequence."""
        return [None if state is None else root_only(state) for state in states]


def root_only(state: RowState, proposal: Proposal = Proposal.ONE_HOT) -> TokenTree:
    """A tree without drafts.

    Args:
        state: of the sequence.
        proposal: kind of the drafts that are not there.
    """
    return TokenTree(torch.tensor(state.tokens[-1:]), torch.tensor([-1]), proposal)
