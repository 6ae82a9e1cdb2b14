"""A proposer that knows the true continuation, and drafts it among wrong tokens."""

from collections.abc import Sequence

import torch

from inference.proposers.base import Proposer, RowState, Session
from inference.proposers.laws import proposal_kind
from inference.tree import Proposal, TokenTree


class NoisyOracle(Proposer):
    """Drafts the true continuation among wrong tokens, off its path and on it.

    Every level of a tree has a wrong sibling before or after the true token, with a wrong child
    of its own; at some positions the true token is missing, so that rounds end at all depths.

    Args:
        texts: per row of the batch its prompt and true continuation.
        depth: longest path.
        wrong: whether there are wrong tokens at all; without, the drafts are the true chain.
    """

    def __init__(self, texts: Sequence[list[int]], depth: int = 4, wrong: bool = True) -> None:
        self.texts, self.depth, self.wrong = texts, depth, wrong

    @property
    def chains(self) -> bool:
        return not self.wrong

    def start(self, session: Session) -> None:
        assert session.batch_size == len(self.texts)
        self.rule = session.rule

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        rows = zip(self.texts, states, strict=True)
        return [None if state is None else self.grow(text, state) for text, state in rows]

    def grow(self, text: list[int], state: RowState) -> TokenTree:
        kind = proposal_kind(self.rule, state.sampling)
        if kind is Proposal.DENSE:
            kind = Proposal.ONE_HOT
        place = len(state.tokens)
        truth = text[place : place + min(self.depth, state.max_depth)]
        if not self.wrong:
            return TokenTree.chain(torch.tensor([state.tokens[-1], *truth]), kind)
        tokens, parents, node = [state.tokens[-1]], [-1], 0
        for position, token in enumerate(truth, start=place):
            children = [(token + 7) % 96, token]
            if position % 11 in (0, 1, 3, 6):
                children[1] = (token + 11) % 96  # the end of what can be accepted
            if position % 3 == 0:
                children.reverse()
            first = len(tokens)
            tokens += children
            parents += [node, node]
            if position + 1 < place + len(truth):
                tokens.append((token + 13) % 96)  # below the wrong sibling
                parents.append(first + children.index((token + 7) % 96))
            if token not in children:
                break
            node = first + children.index(token)
        return TokenTree(torch.tensor(tokens), torch.tensor(parents), kind)
