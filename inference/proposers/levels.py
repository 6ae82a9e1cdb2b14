"""The trees of a batch, grown together by a causal LM: one forward per level.

A node that is expanded is run once and stays in the model's cache as a pending row, whatever
becomes of it: a separate draft model commits the accepted ones of its own cache in the next round,
a target that drafts with some of its layers goes on where those left.

Trees may differ in shape: a level runs as many rows of every sequence as the sequence with the most
nodes has, and what is missing is padding that nobody sees.

Legend: B sequences, F nodes of a level, M pending rows (padding included), V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafters import TargetOutput
from inference.engine import Engine
from inference.proposers.growth import Growth
from inference.tree import ancestor_mask


class Branches:
    """The tree of one sequence and where its nodes are in the cache.

    Attributes:
        growth: its candidates.
        rows: per candidate its pending row; -1 if it has not been run as one.
        parents: per pending row the pending row of its parent; -1 below a committed root, at the
            root itself and for padding.
        depths: per pending row the distance from the first of its path.
    """

    def __init__(self, growth: Growth) -> None:
        self.growth = growth
        self.rows: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []

    def place(self, nodes: Sequence[int], padding: int) -> tuple[Tensor, Tensor]:
        """Give candidates the next pending rows, behind which rows of padding follow.

        Args:
            nodes: F candidates, parents before children.
            padding: rows.

        Returns:
            Depths (M + F,) of all rows so far, and (F, M + F) bool, which of them each new one
            sees; without the new padding.
        """
        above = self.growth.candidates.parents.tolist()
        self.rows += [-1] * (len(above) - len(self.rows))
        first = len(self.parents)
        for node in nodes:
            assert self.rows[node] == -1, "a node is run once"
            parent = self.rows[above[node]] if above[node] >= 0 else -1
            self.rows[node] = len(self.parents)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        depths = torch.tensor(self.depths, dtype=torch.int64)
        seen = ancestor_mask(torch.tensor(self.parents, dtype=torch.int64))[first:]
        self.parents += [-1] * padding
        self.depths += [0] * padding
        return depths, seen

    def frontier(self) -> Tensor:
        """Candidates (F,) to expand next; none where the tree is as deep as it may be."""
        return self.growth.frontier()

    def not_run(self, nodes: Sequence[int]) -> Tensor:
        """Those of the candidates that have no row yet."""
        rows = self.rows + [-1] * (len(self.growth.candidates.tokens) - len(self.rows))
        return torch.tensor([node for node in nodes if rows[node] < 0], dtype=torch.int64)

    def spelled(self, tokens: Sequence[int]) -> list[int]:
        """Pending rows of the nodes, from a child of the root down, that hold the first of these
        tokens, as far as there are any. The root must be committed.
        """
        below: dict[tuple[int, int], int] = {}
        found = self.growth.candidates.tokens.tolist()
        for node, row in enumerate(self.rows):
            if row >= 0:
                below[self.parents[row], found[node]] = row
        path: list[int] = []
        for token in tokens:
            row = below.get((path[-1] if path else -1, token), -1)
            if row < 0:
                break
            path.append(row)
        return path


def run_nodes(
    engine: Engine,
    cache: Any,
    trees: Sequence[Branches],
    nodes: Sequence[Tensor],
    **options: Any,
) -> TargetOutput:
    """Run some candidates of every tree, as pending rows.

    Args:
        engine: runs the model that drafts.
        cache: of the engine, one sequence for each tree.
        trees: B trees.
        nodes: B lists of candidates, at least one of them not empty.
        options: further arguments of `Engine.append`.
    """
    width = max(map(len, nodes))
    tokens = [
        tree.growth.candidates.tokens[some.to(tree.growth.candidates.tokens.device)].cpu()
        for tree, some in zip(trees, nodes, strict=True)
    ]
    places = [
        tree.place(some.tolist(), width - len(some))
        for tree, some in zip(trees, nodes, strict=True)
    ]
    depths, seen = [depth for depth, _ in places], [mask for _, mask in places]
    return engine.append(cache, tokens, depths, seen, **options)


def expand_nodes(trees: Sequence[Branches], nodes: Sequence[Tensor], logits: Tensor) -> None:
    """Children of the nodes that were just run.

    Args:
        trees: B trees.
        nodes: B lists of up to F candidates.
        logits: (B, F, V), on the device of the candidates.
    """
    for tree, some, rows in zip(trees, nodes, logits, strict=True):
        if len(some):
            tree.growth.add_children(some.to(logits.device), rows[: len(some)])
