"""Tree shapes without tokens: one for every round (Medusa, arXiv:2401.10774), or the best one over
the laws of a round that was drafted in one pass (DDTree, arXiv:2604.12989).

Pure: torch and the standard library. Node 0 is the root, as in `inference.tree`.

Letters: N tree nodes (root included), K heads, R ranks.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class StaticTree:
    """A tree shape without tokens; node 0 is the root.

    Attributes:
        parents: (N,) long, as in `TokenTree`.
        depths: (N,) long, in order; a node at depth d is filled from the draft law of depth d-1.
        ranks: (N,) long; which of that law's candidates a node takes, 0 the best; 0 at the root.
    """

    parents: Tensor
    depths: Tensor
    ranks: Tensor

    @property
    def num_nodes(self) -> int:
        """N, root included."""
        return len(self.parents)

    @cached_property
    def depth(self) -> int:
        """Of the deepest node."""
        return int(self.depths.max())

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self.num_nodes == self.depth + 1

    @cached_property
    def children(self) -> list[list[int]]:
        """Per node its children, best rank first."""
        below: list[list[int]] = [[] for _ in range(self.num_nodes)]
        ranks = self.ranks.tolist()
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                below[parent].append(node)
        return [sorted(nodes, key=ranks.__getitem__) for nodes in below]

    def paths(self) -> list[tuple[int, ...]]:
        """One path of ranks per node, root excluded: what `static_tree` takes."""
        found: list[tuple[int, ...]] = []
        for parent, rank in zip(self.parents.tolist(), self.ranks.tolist(), strict=True):
            found.append((*found[parent], rank) if parent >= 0 else ())
        return found[1:]


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
    values, order = accuracy.sort(dim=1, descending=True, stable=True)
    places = [path for _, path in itertools.islice(_best_paths(values.log().tolist()), size)]
    if len(places) < size:
        raise ValueError(
            f"optimal_static_tree: size {size} exceeds the {len(places)} nodes that "
            f"{num_heads} heads of {num_ranks} ranks can make"
        )
    ranks = order.tolist()
    return static_tree([tuple(ranks[k][place] for k, place in enumerate(path)) for path in places])


def best_first(log_probs: Tensor, size: int) -> StaticTree:
    """The best paths over laws that do not depend on the path (DDTree, arXiv:2604.12989).

    Args:
        log_probs: (K, R) of the R best tokens at each depth, in descending order, at most 0.
        size: draft tokens, root excluded; fewer are kept if fewer have a probability.

    Returns:
        The shape of the nodes with the highest sum of log-probabilities along their path. It holds
        the parent of each of its nodes, as no child is better than its parent.
    """
    assert log_probs.ndim == 2 and bool((log_probs.diff(dim=1).nan_to_num() <= 0).all()), "unsorted"
    best = itertools.islice(_best_paths(log_probs.tolist()), size)
    return static_tree([path for score, path in best if score > -float("inf")])


def _best_paths(log_probs: list[list[float]]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """All paths with their sums, in order: a path makes way for its next sibling and first child.

    Args:
        log_probs: K rows of R in descending order.
    """
    # An entry is (-sum, path, sum of the parent).
    heap: list[tuple[float, tuple[int, ...], float]] = []
    if log_probs and log_probs[0]:
        heap.append((-log_probs[0][0], (0,), 0.0))
    while heap:
        negative, path, above = heapq.heappop(heap)
        yield -negative, path
        depth, sibling = len(path), path[-1] + 1
        if sibling < len(log_probs[depth - 1]):
            score = above + log_probs[depth - 1][sibling]
            heapq.heappush(heap, (-score, (*path[:-1], sibling), above))
        if depth < len(log_probs):
            score = -negative + log_probs[depth][0]
            heapq.heappush(heap, (-score, (*path, 0), -negative))
