"""Proposers as arms: what they may be asked for, what they missed, what became of their drafts.

Letters: n positions, F·D captured features, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from inference.proposers.base import Proposer, RowState
from inference.proposers.compose import select_layers
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.heads import HeadProposer
from inference.proposers.ngram import NgramProposer
from inference.proposers.suffix import SuffixProposer
from inference.scheduling.schedule import Arm, Choice, cut_tree, first_chain
from inference.scheduling.survival import Outcome
from inference.tree import TokenTree

NEW = 2
"""Positions that are committed between two rounds, where drafting is measured."""


def describe(name: str, proposer: Proposer) -> Arm:
    """What a proposer may be asked for, by its options.

    Args:
        name: of the arm.
        proposer: a head's, a copying one or a draft model's.

    Raises:
        ValueError: trees of another size cannot be asked of it.
    """
    if isinstance(proposer, NgramProposer | SuffixProposer):
        return Arm(name, proposer.depth, proposer.branch, proposer.size, copies=True)
    if isinstance(proposer, DraftModelProposer) and proposer.chains:
        return Arm(name, proposer.options.longest, together=True)
    if isinstance(proposer, HeadProposer):
        options = proposer.options
        if options.chains:
            return Arm(name, options.longest)
        size = options.size if options.shape is None else options.shape.num_nodes
        return Arm(name, options.longest, options.top_k, size)
    raise ValueError(
        f"AdaptiveProposer: {type(proposer).__name__} cannot be an arm: it takes a trained head, "
        "NgramProposer, SuffixProposer, or a DraftModelProposer of chains (top_k=1)"
    )


def outcome_of(tree: TokenTree, new: Sequence[int], verified: bool = True) -> Outcome:
    """What became of a tree, seen from the text.

    Args:
        tree: that was proposed, or would have been.
        new: tokens that the round emitted; the text goes on behind them.
        verified: the round verified it. Then the last of the tokens is the target's own, whatever
            the tree holds there.
    """
    node = 0
    ranks: list[int] = []
    offered: list[int] = []
    for token in new:
        children = tree.children(node)
        if not children:
            break
        offered.append(len(children))
        child = tree.child_with_token(node, token)
        if child is None or (verified and len(ranks) == len(new) - 1):
            break
        ranks.append(children.index(child))
        node = child
    return Outcome(ranks, offered, len(new), tree.num_nodes, tree.depth)


def of_row(trees: Mapping[str, Sequence[TokenTree | None]], row: int) -> dict[str, TokenTree]:
    """By arm, the tree of one row.

    Args:
        trees: by arm, of all rows.
        row: of the batch.
    """
    found = {name: own[row] for name, own in trees.items()}
    return {name: tree for name, tree in found.items() if tree is not None}


def as_chosen(tree: TokenTree, choice: Choice) -> TokenTree:
    """A copied tree, cut to what was chosen."""
    if choice.top_k == 1:
        return first_chain(tree, choice.depth)
    return cut_tree(tree, choice.size, choice.depth)


class Backlog:
    """What arms have not been told yet: those that are idle are told when they are needed next.

    Args:
        layers: by arm, what it reads; of arms that copy text none is kept.
    """

    def __init__(self, layers: Mapping[str, tuple[int, ...]]) -> None:
        self.layers = dict(layers)
        self._waiting: dict[tuple[str, int], list[RowState]] = {}
        self._told: dict[tuple[str, int], int] = {}

    def start(self) -> None:
        """Other texts."""
        self._waiting, self._told = {}, {}

    def add(self, row: int, state: RowState) -> None:
        """One more round of a sequence."""
        for name in self.layers:
            self._waiting.setdefault((name, row), []).append(state)

    def finish(self, row: int) -> None:
        """Forget a sequence that has ended."""
        for name in self.layers:
            self._waiting.pop((name, row), None)
            self._told.pop((name, row), None)

    def positions(self, name: str, row: int, state: RowState) -> int:
        """How many more positions than in an arm's every round it would have to take in.

        The prompt is not counted: whoever drafts at all has to take it in, now or later.
        """
        told = self._told.get((name, row), state.prompt_length)
        return max(len(state.tokens) - told - NEW, 0)

    def take(self, name: str, row: int, all_layers: tuple[int, ...]) -> RowState:
        """The row's state with all positions since the arm's last call, in its own layers.

        Args:
            name: of the arm.
            row: of the batch.
            all_layers: that are captured, in order.
        """
        waiting = self._waiting.pop((name, row))
        self._told[name, row] = len(waiting[-1].tokens)
        features = [state.features for state in waiting if state.features is not None]
        return replace(
            waiting[-1],
            features=select_layers(
                torch.cat(features) if features else None, all_layers, self.layers[name]
            ),
            hidden=torch.cat([state.hidden for state in waiting]),
        )


def all_layers(proposers: Iterable[Proposer]) -> tuple[int, ...]:
    """All layers that proposers ask for, each once."""
    layers = (layer for arm in proposers for layer in arm.feature_layers)
    return tuple(dict.fromkeys(layers))
