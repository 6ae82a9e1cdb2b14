"""What a head drafts at one position, kept so that a tree of any size can be made of it again.

A tree grows out of the children of its nodes. Children do not depend on the size, the depth or the
threshold of confidence that are asked for; these say which nodes have children and which nodes
stay. So the best children of every node that could have some are kept, and trees are grown of them
by the code that grows the decoder's (`inference.proposers.growth`), or for heads whose rows do not
know each other's tokens, put together as `inference.proposers.marginals` does.

Letters: E expanded nodes, R ranks (children of a node, likeliest first), K depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from inference.proposers.base import RowState
from inference.proposers.growth import Growth
from inference.proposers.options import TreeOptions
from inference.shapes.static_tree import best_first
from inference.tree import Proposal, TokenTree, expand

RULE = "match"
"""At temperature 0 all rules are this one."""


@dataclass(frozen=True)
class Order:
    """In which order trees of one depth take nodes in: one of n drafts holds the first n.

    Attributes:
        before: of the text's own nodes, from depth 1 down as far as there are some, how many nodes
            come before each.
        drafts: nodes in all, the root excluded.
    """

    before: list[int]
    drafts: int

    def of_size(self, size: int) -> tuple[int, int]:
        """Accepted drafts and nodes, root included, of a tree of at most so many nodes."""
        return sum(before < size - 1 for before in self.before), min(size - 1, self.drafts) + 1


@dataclass(frozen=True, eq=False)
class Grown:
    """Drafts of a head that drafts step by step.

    Child number r of expanded node number e has the place e · R + r.

    Attributes:
        nodes: (E,) place of each expanded node; -1 for the root, which is the first.
        tokens: (E, R) absolute ids of the likeliest children of each.
        scores: (E, R) float32, their log-probabilities behind it, in descending order.
        chances: (E,) that a draft made from it is accepted; None without a confidence output.
    """

    nodes: list[int]
    tokens: Tensor
    scores: Tensor
    chances: list[float] | None

    @cached_property
    def rows(self) -> dict[int, int]:
        """Place of an expanded node -> its number."""
        return {place: number for number, place in enumerate(self.nodes)}

    def tree(self, options: TreeOptions, state: RowState) -> tuple[TokenTree, int]:
        """What the decoder would verify.

        Args:
            options: of the tree.
            state: of the sequence; its hidden states and features are not looked at.

        Returns:
            The tree, and how many steps of the head it takes.
        """
        growth = self.grow(options, state)
        tree = growth.finish()[0]
        tokens = torch.cat([tree.tokens[:1], self.tokens.flatten()[tree.tokens[1:]]])
        return replace(tree, tokens=tokens), growth.levels

    def grow(self, options: TreeOptions, state: RowState) -> Regrowth:
        """The candidates of that tree; their tokens are places."""
        growth = Regrowth(self, options, state)
        frontier = torch.zeros(1, dtype=torch.int64)
        while len(frontier) and growth.levels < growth.depth:
            growth.add_kept(frontier)
            frontier = growth.frontier()
        return growth

    def orders(
        self, options: TreeOptions, state: RowState, following: Sequence[int]
    ) -> list[Order]:
        """Of trees down to depth 1, 2, ..., as far as the options and the text allow.

        Args:
            options: of the trees; their size does not matter.
            state: of the sequence.
            following: tokens that the text goes on with.
        """
        growth = self.grow(options, state)
        parents = growth.candidates.parents.tolist()
        places, tokens = growth.candidates.tokens.tolist(), self.tokens.flatten().tolist()
        below: dict[tuple[int, int], int] = {}
        depths = [0] * len(parents)
        for node in range(1, len(parents)):
            depths[node] = depths[parents[node]] + 1
            below[parents[node], tokens[places[node]]] = node
        own = [0]
        for token in following:
            child = below.get((own[-1], token))
            if child is None:
                break
            own.append(child)
        found = []
        for depth in range(1, growth.levels + 1):
            drafted = sum(deep <= depth for deep in depths) - 1  # candidates are there by level
            order = growth.candidates.scores[1 : drafted + 1].argsort(descending=True, stable=True)
            before = order.argsort().tolist()
            found.append(Order([before[node - 1] for node in own[1 : depth + 1]], drafted))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "nodes": self.nodes,
            "tokens": self.tokens.tolist(),
            "scores": exact(self.scores),
            "chances": self.chances,
        }


class Regrowth(Growth):
    """Candidates out of kept children; the tokens of all but the root are their places.

    Args:
        kept: the drafts.
        options: of the tree.
        state: of the sequence.
    """

    def __init__(self, kept: Grown, options: TreeOptions, state: RowState) -> None:
        super().__init__(options, state, RULE, torch.device("cpu"), vocab_size=0)
        self.kept = kept

    def places(self, nodes: Tensor) -> list[int]:
        """Of candidates (F,)."""
        found = self.candidates.tokens[nodes].tolist()
        return [place if node else -1 for node, place in zip(nodes.tolist(), found, strict=True)]

    def add_kept(self, frontier: Tensor) -> None:
        """Children of candidates (F,) that are worth it.

        Raises:
            KeyError: one of them was not expanded when drafts were kept.
        """
        numbers = [self.kept.rows[place] for place in self.places(frontier)]
        chances = self.kept.chances
        acceptance = (
            None
            if chances is None
            else torch.tensor([chances[number] for number in numbers], dtype=torch.float64)
        )
        self.add_children(frontier, torch.tensor(numbers), acceptance)

    def _take_children(self, frontier: Tensor, logits: Tensor) -> None:
        """The best ``top_k`` that are kept; instead of logits come (F,) numbers of nodes."""
        ranks = self.kept.tokens.shape[1]
        width = min(self.options.top_k, ranks)
        places = logits[:, None] * ranks + torch.arange(width)
        scores = self.kept.scores[logits, :width]
        self.candidates = expand(self.candidates, frontier, places, scores)


@dataclass(frozen=True, eq=False)
class Marginals:
    """Drafts of a head whose rows of one pass do not know each other's tokens.

    Attributes:
        tokens: (K, R) absolute ids of the likeliest tokens at each depth.
        scores: (K, R) float32, their log-probabilities, in descending order.
        survival: (K,) chance that the drafts of all depths down to this one are accepted; None
            without a confidence output.
    """

    tokens: Tensor
    scores: Tensor
    survival: list[float] | None

    def tree(self, options: TreeOptions, state: RowState) -> tuple[TokenTree, int]:
        """As `Grown.tree`; all depths are one pass, which is as deep as was asked for."""
        asked = min(options.longest, state.max_depth, len(self.tokens))
        depth = self._worth(options, asked)
        root = torch.tensor(state.tokens[-1:])
        if depth < 1:
            return TokenTree.chain(root), max(asked, 0)
        values = self.scores[:depth, : options.top_k]
        shape = best_first(values, options.size - 1)
        depths, ranks = shape.depths[1:], shape.ranks[1:]
        tokens = torch.cat([root, self.tokens[depths - 1, ranks]])
        survival = None
        if self.survival is not None:
            survival = torch.tensor([1.0, *self.survival])[shape.depths]
        return TokenTree(tokens, shape.parents, Proposal.ONE_HOT, survival=survival), asked

    def _worth(self, options: TreeOptions, depth: int) -> int:
        """How deep a tree is that stops where it is not worth going on."""
        if options.min_survival == 0.0:
            return depth
        assert self.survival is not None, "confidence that the head does not have"
        worth = [chance >= options.min_survival for chance in self.survival[: max(depth, 0)]]
        return worth.index(False) if False in worth else depth

    def orders(
        self, options: TreeOptions, state: RowState, following: Sequence[int]
    ) -> list[Order]:
        """As `Grown.orders`, of the first ``options.size`` nodes."""
        deepest = min(options.longest, state.max_depth, len(self.tokens))
        ranked = self.tokens[:, : options.top_k].tolist()
        found = []
        for depth in range(1, deepest + 1):
            values = self.scores[:depth, : options.top_k]
            paths = best_first(values, options.size - 1).paths()
            sums = {path: _path_score(values.tolist(), path) for path in paths}
            before = {path: place for place, path in enumerate(sorted(paths, key=sums.__getitem__))}
            own: list[int] = []
            path: tuple[int, ...] = ()
            for ranks, token in zip(ranked[:depth], following, strict=False):
                path = (*path, ranks.index(token) if token in ranks else -1)
                if path not in before:
                    break
                own.append(before[path])
            found.append(Order(own, len(paths)))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "tokens": self.tokens.tolist(),
            "scores": exact(self.scores),
            "survival": self.survival,
        }


Drafts = Grown | Marginals


def drafts_from(record: dict[str, Any]) -> Drafts:
    """What ``to_dict`` gave.

    Raises:
        ValueError: no drafts.
    """
    try:
        tokens = torch.tensor(record["tokens"])
        scores = torch.tensor(record["scores"], dtype=torch.float32)
        if "nodes" in record:
            return Grown(record["nodes"], tokens, scores, record["chances"])
        return Marginals(tokens, scores, record["survival"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"drafts: not what was kept ({error!r}): record again") from error


def _path_score(values: list[list[float]], path: tuple[int, ...]) -> float:
    """Minus the log-probability of a path of ranks, added from the root down."""
    return -sum(row[rank] for row, rank in zip(values, path, strict=False))


def exact(values: Tensor) -> list[list[float]]:
    """Rows of float32 values as the shortest decimals that give the same values again."""
    return [[float(f"{value:.9g}") for value in row] for row in values.tolist()]
