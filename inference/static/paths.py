"""Trees whose shape, or whose laws, do not depend on the path.

`ShapeGrowth` fills a shape that was fixed beforehand (`inference.proposers.growth.StaticGrowth`).
`PathsGrowth` keeps the best paths over laws of one pass (`inference.proposers.marginals`): of every
level only as many as the tree can hold, which is exact, as no path is better than its beginning.

Legend: B sequences, M candidates, F frontier nodes, C children, R ranks, K levels, N nodes, Vd
draft vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from inference.proposers.options import TreeOptions
from inference.shapes.static_tree import StaticTree
from inference.static.growth import (
    Candidates,
    DraftLaw,
    DynamicGrowth,
    Grown,
    Growth,
    survival_of,
    top_children,
)
from inference.static.tree import DraftTree


class Level(NamedTuple):
    """What a shape has below the nodes of one depth.

    Attributes:
        frontier: (F,) nodes with children.
        places: (F,) place of each one's parent in the frontier of the level before.
        rows: (C,) place of each child's parent in ``frontier``.
        ranks: (C,) of the children.
        most: R, one more than the largest rank.
    """

    frontier: Tensor
    places: Tensor
    rows: Tensor
    ranks: Tensor
    most: int


def shape_levels(shape: StaticTree, device: torch.device | str | None = None) -> list[Level]:
    """The levels of a shape whose nodes are in order of depth, parent and rank, as those that
    `static_tree` makes are; read on the host, once.
    """
    levels, above, made = [], [0], [0]
    ranks, before = shape.ranks.tolist(), {0: 0}
    while above:
        children = [child for node in above for child in shape.children[node]]
        place = {node: index for index, node in enumerate(above)}
        rows = [place[node] for node in above for _ in shape.children[node]]
        numbers = [[before[node] for node in above], rows, [ranks[child] for child in children]]
        places, row_index, rank_index = (torch.tensor(of, device=device) for of in numbers)
        most = max(ranks[child] for child in children) + 1
        levels.append(
            Level(torch.tensor(above, device=device), places, row_index, rank_index, most)
        )
        before = dict(zip(children, rows, strict=True))
        above = [child for child in children if shape.children[child]]
        made += children
    assert made == list(range(shape.num_nodes)), "nodes of a shape are in order"
    return levels


class ShapeGrowth(Growth):
    """Trees of one shape; a child of rank r is the rank-r token of its node's scores.

    Node i of the tree is node i of the shape: what a text has no room for, or a law no token, is
    padding in its place.

    Args:
        options: with a shape.
        law: of the drafts, ONE_HOT or COUPLED.
        max_depth: (B,) longest paths, or None.
    """

    def __init__(self, options: TreeOptions, law: DraftLaw, max_depth: Tensor | None) -> None:
        assert options.shape is not None
        super().__init__(options, law, max_depth)
        self.levels = shape_levels(options.shape, law.positions.device)
        self.widths = [len(level.frontier) for level in self.levels]

    def add(self, grown: Grown, logits: Tensor, acceptance: Tensor | None = None) -> Grown:
        """The candidates of the shape's ranks."""
        level, shape = self.levels[grown.levels], (*grown.frontier.shape, -1)
        columns, scores = top_children(self.law, logits, grown.levels, level.most)
        candidates, survival = survival_of(grown, acceptance)
        scores = self._limited(grown, scores, survival).expand(shape)
        tokens = self.law.ids(columns.expand(shape)[:, level.rows, level.ranks])
        grown = grown._replace(candidates=candidates)
        return self._append(grown, tokens, scores[:, level.rows, level.ranks], survival)

    def _append(
        self, grown: Grown, tokens: Tensor, scores: Tensor, survival: Tensor | None
    ) -> Grown:
        """The trees with the shape's next level.

        Args:
            grown: the trees so far.
            tokens: (B, C) absolute ids.
            scores: (B, C) of each after its parent; -inf where there is no such child.
            survival: (B, F) chance that a child of each frontier node is accepted, or None.
        """
        level, candidates = self.levels[grown.levels], grown.candidates
        batch = len(tokens)
        parents = level.frontier[level.rows].expand(batch, -1)
        if survival is not None:
            assert candidates.survival is not None
            survival = torch.cat([candidates.survival, survival[:, level.rows]], dim=1)
        candidates = Candidates(
            torch.cat([candidates.tokens, tokens], dim=1),
            torch.cat([candidates.parents, parents], dim=1),
            torch.cat([candidates.scores, candidates.scores.gather(1, parents) + scores], dim=1),
            survival,
        )
        levels, frontier, places = grown.levels + 1, parents[:, :0], parents[:, :0]
        if levels < len(self.levels):
            below = self.levels[levels]
            frontier, places = below.frontier.expand(batch, -1), below.places.expand(batch, -1)
        return Grown(candidates, frontier, places, levels, grown.laws, grown.drawn)

    def finish(self, grown: Grown) -> DraftTree:
        """All candidates, each in its place."""
        candidates = grown.candidates
        valid = candidates.scores > -torch.inf
        survival = candidates.survival
        return DraftTree(
            torch.where(valid, candidates.tokens, 0),
            torch.where(valid, candidates.parents, -1),
            valid,
            survival=None if survival is None else survival.float(),
        )


class PathsGrowth(DynamicGrowth):
    """The best paths over laws that do not depend on the path (DDTree, arXiv:2604.12989).

    Nodes are in order of depth, then of the ranks along their path. Scores are in float64, as the
    twin adds them. Where two paths of different length are equally good, the shorter one stays; of
    one length, the one with the better rank where they part.

    Args:
        options: of the trees; without a shape.
        law: of the drafts, ONE_HOT or COUPLED.
        max_depth: (B,) longest paths, or None.
        columns: Vd.
    """

    @staticmethod
    def most_expanded(options: TreeOptions) -> int:
        """All nodes that may be kept."""
        return options.size - 1

    def start(self, roots: Tensor) -> Grown:
        """Trees of the roots (B,) alone."""
        grown = super().start(roots)
        scores = grown.candidates.scores.double()
        return grown._replace(candidates=grown.candidates._replace(scores=scores))

    def add(self, grown: Grown, logits: Tensor, acceptance: Tensor | None = None) -> Grown:
        """The best children of all paths together.

        Args:
            grown: the trees so far.
            logits: (B, 1, Vd) of the children of every path.
            acceptance: (B, 1), or None.
        """
        assert logits.shape[1] == 1, "the laws of one pass do not depend on the path"
        columns, scores = top_children(self.law, logits, grown.levels, self.branch)
        candidates, survival = survival_of(grown, acceptance)
        scores = self._limited(grown, scores.double(), survival)
        scores = candidates.scores.gather(1, grown.frontier)[..., None] + scores  # (B, F, R)
        flat = scores.flatten(1)
        order = flat.argsort(dim=1, descending=True, stable=True)[:, : self.options.size - 1]
        order = order.sort(dim=1).values  # (B, C) in order of the paths
        places, start = order // self.branch, candidates.size
        tokens = self.law.ids(columns[:, 0]).gather(1, order % self.branch)
        if survival is not None:
            assert candidates.survival is not None
            survival = torch.cat([candidates.survival, survival.gather(1, places)], dim=1)
        candidates = Candidates(
            torch.cat([candidates.tokens, tokens], dim=1),
            torch.cat([candidates.parents, grown.frontier.gather(1, places)], dim=1),
            torch.cat([candidates.scores, flat.gather(1, order)], dim=1),
            survival,
        )
        levels = grown.levels + 1
        made = torch.arange(start, candidates.size, device=order.device).expand_as(order)
        last = levels == len(self.widths)
        return Grown(candidates, made[:, :0] if last else made, places, levels)
