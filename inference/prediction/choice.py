"""Which chain or tree would be the fastest, from the same pass.

A chain cut shorter accepts what it accepted, up to its end; where drafts are chosen, a static tree
accepts the text as far as the text's ranks are one of its paths: both are replayed exactly. Trees
that are grown in each round are replayed at the sizes that were asked for. A static tree is fitted
to the positions that it is replayed on, which flatters it by a little.

Letters: K depths, R ranks, n nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from inference.prediction.rounds import walk
from inference.prediction.text import Look
from inference.scheduling.schedule import RoundCosts, plain_step
from inference.shapes.static_tree import StaticTree, optimal_static_tree

RANKS = 10
SIZES = (4, 8, 16, 32, 64)
"""Static trees that are tried where no costs say otherwise."""


@dataclass(frozen=True)
class Size:
    """One way to draft.

    Attributes:
        drafts: "chain", "static", "grown" or "none".
        size: nodes, root included.
        depth: longest path.
        tau: predicted tokens per round, the target's own included.
        tokens_per_second: predicted; None without costs.
    """

    drafts: str
    size: int
    depth: int
    tau: float
    tokens_per_second: float | None


@dataclass(frozen=True)
class Best:
    """All ways that were tried.

    Attributes:
        chains: of 1, 2, ..., K drafts.
        trees: static and grown ones.
        plain: tokens per second without drafts; None without costs.
    """

    chains: list[Size]
    trees: list[Size]
    plain: float | None

    @property
    def choice(self) -> Size | None:
        """The fastest, no drafts included; None without costs."""
        if self.plain is None:
            return None
        ways = [Size("none", 1, 0, 1.0, self.plain), *self.chains, *self.trees]
        return max(ways, key=lambda way: (way.tokens_per_second or 0.0, -way.size))

    def to_dict(self) -> dict[str, Any]:
        """Plain values: "chains" and "trees" with the fields of `Size`, "plain_tokens_per_second",
        and "choice", one of them or None.
        """
        choice = self.choice
        return {
            "chains": [asdict(way) for way in self.chains],
            "trees": [asdict(way) for way in self.trees],
            "plain_tokens_per_second": self.plain,
            "choice": None if choice is None else asdict(choice),
        }


def best_sizes(
    looks: Sequence[Look],
    depth: int,
    branch: int,
    costs: RoundCosts | None,
    arm: str,
    context: float,
    drawn: bool,
) -> Best:
    """Try chains of every length, and trees.

    Args:
        looks: the pass over each text.
        depth: K.
        branch: children of a node of a grown tree.
        costs: of rounds; None for no speeds.
        arm: the head's name in them.
        context: committed tokens.
        drawn: drafts are drawn: ranks say nothing, and static trees are not tried.
    """

    def way(drafts: str, size: int, deep: int, top_k: int, tau: float) -> Size:
        if costs is None or size > costs.widest():
            return Size(drafts, size, deep, tau, None)
        drafting = costs.draft(arm, deep, top_k) if deep else 0.0
        seconds = drafting + costs.verify(size, context) + costs.rest()
        return Size(drafts, size, deep, tau, tau / seconds)

    chains = [
        way("chain", deep + 1, deep, 1, replayed(looks, [look.chains for look in looks], deep))
        for deep in range(1, depth + 1)
    ]
    known = SIZES if costs is None else [size for size in costs.widths() if size > 2]
    table = rank_table(looks, depth)
    trees: list[Size] = []
    for size in () if drawn else known:
        shape = fitted(table, size)
        sizes = [tree.size for tree in trees]
        if shape is not None and not shape.is_chain and shape.num_nodes not in sizes:
            survival = [static_survival(look, shape) for look in looks]
            tau = replayed(looks, survival, shape.depth)
            widest = max(map(len, shape.children))
            trees.append(way("static", shape.num_nodes, shape.depth, widest, tau))
    for size in looks[0].grown:
        tau = replayed(looks, [look.grown[size] for look in looks], depth)
        trees.append(way("grown", size, min(depth, size - 1), branch, tau))
    plain = None if costs is None else plain_step(costs, context).rate
    return Best(chains, trees, plain)


def replayed(looks: Sequence[Look], survival: Sequence[list[list[float]]], longest: int) -> float:
    """Tokens per round, pooled over texts.

    Args:
        looks: for how deep drafts may go.
        survival: S by text, position and depth.
        longest: deepest draft.
    """
    tokens, rounds = 0, 0.0
    for look, rows in zip(looks, survival, strict=True):
        depths = [float(min(room, longest)) for room in look.room]
        found = walk(rows, depths, longest)
        tokens, rounds = tokens + found.tokens, rounds + found.rounds
    return tokens / rounds


def rank_table(looks: Sequence[Look], depth: int) -> Tensor:
    """(K, R) chance that the child of a rank is the text's token, given that all before it were
    within R ranks.
    """
    hits = torch.zeros(depth, RANKS, dtype=torch.float64)
    reached = torch.zeros(depth, dtype=torch.float64)
    for look in looks:
        for row in look.ranks:
            for place, rank in enumerate(row):
                reached[place] += 1.0
                if rank is None or rank >= RANKS:
                    break
                hits[place, rank] += 1.0
    return hits / reached.clamp(min=1.0)[:, None]


def fitted(table: Tensor, size: int) -> StaticTree | None:
    """The best static tree of so many nodes, root included; None if the rates make none."""
    count, paths = 0, 1
    for width in (table > 0).sum(1).tolist():
        paths *= width
        count += paths
    return optimal_static_tree(table, min(size - 1, count)) if count else None


def static_survival(look: Look, shape: StaticTree) -> list[list[float]]:
    """S of a static tree of chosen drafts: how far the text's ranks are one of its paths.

    Args:
        look: at a text.
        shape: of the tree.
    """
    paths = set(shape.paths())
    found = []
    for row, room in zip(look.ranks, look.room, strict=True):
        ranks = [-1 if rank is None else rank for rank in row[: min(room, shape.depth)]]
        found.append([float(tuple(ranks[:deep]) in paths) for deep in range(1, len(ranks) + 1)])
    return found
