"""Several proposers behind one tree: a head's guesses beside what the text itself suggests.

The same path of tokens is one node, whoever proposed it. With drawn drafts (``rejection`` and
``block`` at a temperature) the lemma of ``inference.verify`` wants every child to come with its law
given the children before it. The drawn ones therefore keep their recorded law and their order, none
of them is dropped, and what the others propose follows them as chosen (one-hot) children.

A head's predictions of survival stay with its own nodes. Nothing predicts a copied one: it is NaN,
and so is a head's node that became its parent's first child without having been it in the head's
tree, as a prediction is one for the first child.

Legend: N tree nodes, n positions, F layers, D width of one layer.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from inference.proposers.base import Proposer, Resume, RowState, Session
from inference.tree import DRAWN_KINDS, Proposal, TokenTree


class ComposedProposer(Proposer):
    """Merges the trees of several proposers into one for each sequence.

    Args:
        proposers: two or more. Where ``size`` cuts, nodes of earlier ones are kept.
        size: nodes the target verifies per round, root included. Drawn nodes are never cut, so a
            proposer that draws may exceed it.

    Raises:
        ValueError: fewer than two proposers, one twice, or a size below 2.
    """

    def __init__(self, *proposers: Proposer, size: int) -> None:
        if len(proposers) < 2:
            raise ValueError(
                f"ComposedProposer: two or more proposers are needed, got {len(proposers)}"
            )
        if len(set(map(id, proposers))) < len(proposers):
            raise ValueError(
                "ComposedProposer: the same proposer is given twice; it would absorb every text "
                "twice. Build one for each place"
            )
        if size < 2:
            raise ValueError(f"ComposedProposer: size >= 2 is needed, got {size}")
        self.proposers, self.size = proposers, size

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """All layers that a member asks for, each once."""
        layers = (layer for proposer in self.proposers for layer in proposer.feature_layers)
        return tuple(dict.fromkeys(layers))

    def start(self, session: Session) -> None:
        """Start all members."""
        for proposer in self.proposers:
            proposer.start(session)

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """One merged tree for each sequence.

        Raises:
            ValueError: two members draw from a law.
        """
        proposed = [
            proposer.propose([self._own_features(proposer, state) for state in states])
            for proposer in self.proposers
        ]
        merged: list[TokenTree | None] = []
        for row, state in enumerate(states):
            trees = [trees[row] for trees in proposed]
            if state is None:
                merged.append(None)
            else:
                grown = [tree for tree in trees if tree is not None]
                assert len(grown) == len(trees), "every running sequence needs a tree"
                self._check_draws(grown)
                merged.append(merge_trees(grown, self.size))
        return merged

    def finish(self, row: int, tokens: list[int]) -> None:
        """Tell all members."""
        for proposer in self.proposers:
            proposer.finish(row, tokens)

    def resume(self) -> Resume | None:
        """Nothing: a layer that has run on one member's tree has not run on the merged one.

        Raises:
            ValueError: a member has run layers of the target.
        """
        for proposer in self.proposers:
            if proposer.resume() is not None:
                raise ValueError(
                    f"ComposedProposer: {type(proposer).__name__} has run layers of the target on "
                    "its own tree and cannot share a tree; use it alone"
                )
        return None

    def _own_features(self, proposer: Proposer, state: RowState | None) -> RowState | None:
        """The state with the columns of the layers that a member asked for."""
        if state is None:
            return None
        features = select_layers(state.features, self.feature_layers, proposer.feature_layers)
        return replace(state, features=features)

    def _check_draws(self, trees: Sequence[TokenTree]) -> None:
        names = [
            type(proposer).__name__
            for proposer, tree in zip(self.proposers, trees, strict=True)
            if tree.proposal in DRAWN_KINDS
        ]
        if len(names) > 1:
            raise ValueError(
                f"ComposedProposer: {' and '.join(names)} both draw their drafts under this rule, "
                "and a tree can hold the draws of one; use rule 'match' or 'coupled'"
            )


def select_layers(
    features: Tensor | None, captured: tuple[int, ...], wanted: tuple[int, ...]
) -> Tensor | None:
    """The columns of some of the captured layers.

    Args:
        features: (n, F·D) in the order of ``captured``; None if nothing was captured.
        captured: F layers.
        wanted: some of them, in the order wanted.

    Returns:
        (n, len(wanted)·D); None if no layer is wanted.
    """
    if not wanted:
        return None
    assert features is not None
    if wanted == captured:
        return features
    places = [captured.index(layer) for layer in wanted]
    return features.unflatten(1, (len(captured), -1))[:, places].flatten(1)


def merge_trees(trees: Sequence[TokenTree], size: int) -> TokenTree:
    """One tree that holds the nodes of several with the same root.

    Args:
        trees: in order of priority; at most one has drawn nodes. That one goes first, whole.
        size: nodes to keep at most, root included, as far as they were not drawn.

    Returns:
        MIXED if chosen nodes joined a tree with drawn ones; COUPLED if any tree is.
    """
    drawn_trees = [tree for tree in trees if tree.proposal in DRAWN_KINDS]
    assert len(drawn_trees) <= 1, "a tree can hold the draws of one proposer"
    drawn = drawn_trees[0] if drawn_trees else None
    nodes = _Nodes(trees[0])
    for tree in [*drawn_trees, *(tree for tree in trees if tree is not drawn)]:
        nodes.add(tree, None if tree is drawn else size)
    device = trees[0].tokens.device
    survival = nodes.survival(device)
    tokens = torch.tensor(nodes.tokens, device=device)
    parents = torch.tensor(nodes.parents, device=device)
    if drawn is None:
        coupled = any(tree.proposal is Proposal.COUPLED for tree in trees)
        kind = Proposal.COUPLED if coupled else Proposal.ONE_HOT
        return TokenTree(tokens, parents, kind, survival=survival)
    chosen = len(tokens) - drawn.num_nodes
    if not chosen:
        return drawn
    assert drawn.draft_probs is not None
    return TokenTree(
        tokens,
        parents,
        Proposal.MIXED,
        torch.cat(
            [drawn.draft_probs, drawn.draft_probs.new_zeros(chosen, drawn.draft_probs.shape[1])]
        ),
        torch.tensor(
            [drawn.is_drawn(node) for node in range(drawn.num_nodes)] + [False] * chosen,
            device=device,
        ),
        survival,
    )


class _Nodes:
    """Nodes of the merged tree so far; node 0 is the root."""

    def __init__(self, tree: TokenTree) -> None:
        self.tokens, self.parents = [tree.token(0)], [-1]
        self.index: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        self.predicted: dict[int, float] = {}  # by the confidence output of a tree's proposer
        self.first: dict[int, int] = {}  # child of each node

    def add(self, tree: TokenTree, size: int | None) -> None:
        """Add the nodes of a tree that are not there yet, in index order.

        Args:
            tree: its parents precede their children.
            size: of the merged tree at most, root included; nodes below one that was cut are cut
                too. None keeps all.
        """
        assert tree.token(0) == self.tokens[0], "the trees hang from different tokens"
        place = {0: 0}
        predicted = [] if tree.survival is None else tree.survival.tolist()
        for node, parent in enumerate(tree.parents.tolist()):
            if parent not in place:
                continue
            edge = (place[parent], tree.token(node))
            if edge not in self.index:
                if size is not None and len(self.tokens) >= size:
                    continue
                self.index[edge] = len(self.tokens)
                self.tokens.append(edge[1])
                self.parents.append(edge[0])
                self.first.setdefault(edge[0], self.index[edge])
            place[node] = self.index[edge]
            leads = self.first.get(place[parent]) == place[node]
            if predicted and (not leads or tree.children(parent)[0] == node):
                self.predicted.setdefault(place[node], predicted[node])

    def survival(self, device: torch.device) -> Tensor | None:
        """(N,) chances, NaN where there is no prediction; None if no tree has any."""
        if not self.predicted:
            return None
        chances = [self.predicted.get(node, math.nan) for node in range(1, len(self.tokens))]
        return torch.tensor([1.0, *chances], device=device)
