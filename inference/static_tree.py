"""Static trees: one shape for every round, filled from heads that predict all depths at once
(Medusa, arXiv:2401.10774).

Pure: torch and the standard library. Node 0 is the root, as in `inference.tree`.

Letters: N tree nodes (root included), K heads, R ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class StaticTree:
    """A tree shape without tokens; node 0 is the root.

    Attributes:
        parents: (N,) long, as in `TokenTree`.
        depths: (N,) long; a node at depth d is filled from head d-1.
        ranks: (N,) long; which of its head's candidates a node takes, 0 the best; 0 at the root.
    """

    parents: Tensor
    depths: Tensor
    ranks: Tensor


def static_tree(ranks: Sequence[tuple[int, ...]]) -> StaticTree:
    """Build a shape from Medusa's notation: one path of ranks per node, root excluded.

    Args:
        ranks: for instance `[(0,), (0, 0), (1,)]`, in any order: the best token of head 0, its
            best continuation from head 1, and the second best token of head 0.

    Returns:
        The shape, nodes in order of depth and then of rank.
    """
    paths = [(), *sorted(ranks, key=lambda path: (len(path), path))]
    index = {path: node for node, path in enumerate(paths)}
    if len(index) != len(paths):
        raise ValueError("static_tree: a path of ranks is listed twice or is empty")
    for path in paths[1:]:
        if path[:-1] not in index:
            raise ValueError(f"static_tree: {path} is listed without its parent {path[:-1]}")
        if min(path) < 0:
            raise ValueError(f"static_tree: {path} holds a negative rank; ranks start at 0")
    return StaticTree(
        parents=torch.tensor([-1, *(index[path[:-1]] for path in paths[1:])]),
        depths=torch.tensor([len(path) for path in paths]),
        ranks=torch.tensor([0, *(path[-1] for path in paths[1:])]),
    )


def optimal_static_tree(accuracy: Tensor, size: int) -> StaticTree:
    """The shape with the highest expected number of accepted tokens (arXiv:2401.10774).

    A node is worth the product of accuracies along its path. Products only shrink with depth and
    with rank, so taking the most valuable node next, always, is optimal for their sum.

    Args:
        accuracy: (K, R); [k, r] is the rate at which the rank-r token of head k is the true one,
            given that the path before it is. Ranks may be in any order of accuracy.
        size: draft tokens to place, root excluded.
    """
    if accuracy.ndim != 2 or not bool(((accuracy >= 0) & (accuracy <= 1)).all()):
        raise ValueError("optimal_static_tree: accuracy must be (K, R) with entries in [0, 1]")
    num_heads, num_ranks = accuracy.shape
    values, order = (t.tolist() for t in accuracy.sort(dim=1, descending=True, stable=True))
    # An entry is (-value, place in the sorted order of each head along the path, parent's value).
    frontier: list[tuple[float, tuple[int, ...], float]] = [(-values[0][0], (0,), 1.0)]
    chosen: list[tuple[int, ...]] = []
    while len(chosen) < size:
        if not frontier:
            raise ValueError(
                f"optimal_static_tree: size {size} exceeds the {len(chosen)} nodes that "
                f"{num_heads} heads of {num_ranks} ranks can make"
            )
        negative_value, places, parent_value = heapq.heappop(frontier)
        chosen.append(tuple(order[head][place] for head, place in enumerate(places)))
        head, sibling = len(places) - 1, places[-1] + 1
        if sibling < num_ranks:
            value = parent_value * values[head][sibling]
            heapq.heappush(frontier, (-value, (*places[:-1], sibling), parent_value))
        if head + 1 < num_heads:
            value = -negative_value * values[head + 1][0]
            heapq.heappush(frontier, (-value, (*places, 0), -negative_value))
    return static_tree(chosen)
