"""The best tree shape for a cost table (Sequoia, arXiv:2402.12374).

Pure: torch and the standard library.

The j-th child of a node is the accepted one with probability b_j, given that the node is accepted:
the children before it were rejected and it was not. At most one child is accepted, so the b_j of a
node sum to at most 1; b_j may depend on the depth, but not on which path led there. A tree then
emits F = sum over its nodes of the product of b along their path tokens per round, the root's 1
included.

For drawn children, j is the order in which they are tried: there is no second child without a
first. `inference.shapes.static_tree.optimal_static_tree` looks at the same sum where any ranks may
be chosen. Where b does not rise with j both find the same optimum, as leaving out an earlier child
for a later one gains nothing. Where it rises somewhere the greedy search could skip a child and is
no answer for drawn trees; the programme here is.

Letters: N tree nodes (root included), K depths, R children.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference.shapes.static_tree import StaticTree, static_tree


def optimal_tree(
    acceptance: Tensor, size: int, depth: int | None = None, width: int | None = None
) -> tuple[StaticTree, float]:
    """The shape with the most expected tokens per round.

    Args:
        acceptance: (K, R) b by depth and child, or (R,) if it is the same at all depths.
        size: most nodes, root included. Nodes that would never be accepted are left out.
        depth: longest path; K if None, which a table for all depths does not have.
        width: most children per node; R if None.

    Returns:
        The shape, and its expected tokens per round, at least 1.

    Raises:
        ValueError: a table that is none, a depth that it does not reach, no room for a draft.
    """
    table = _table(acceptance, depth, width)
    if size < 2:
        raise ValueError(f"optimal_tree: size must be at least 2, the root and a draft; got {size}")
    plan = _Plan(table, size)
    nodes = plan.best(size)
    if nodes < 2:
        raise ValueError("optimal_tree: no draft is ever accepted by these rates: nothing to draft")
    return static_tree(plan.paths(nodes)), float(plan.values[nodes])


@dataclass(frozen=True)
class TreeChoice:
    """The fastest shape by a cost table.

    Attributes:
        shape: of the tree.
        tokens_per_round: expected, the target's own included.
        seconds_per_round: drafting and verifying.
    """

    shape: StaticTree
    tokens_per_round: float
    seconds_per_round: float

    @property
    def seconds_per_token(self) -> float:
        """Expected."""
        return self.seconds_per_round / self.tokens_per_round


def choose_tree(
    acceptance: Tensor,
    verify_seconds: Mapping[int, float],
    draft_seconds: Sequence[float],
    width: int | None = None,
) -> TreeChoice:
    """The shape with the least expected seconds per token.

    Args:
        acceptance: (K, R) or (R,), as for `optimal_tree`.
        verify_seconds: nodes, root included -> seconds of the target's forward; one of these sizes
            is chosen.
        draft_seconds: seconds to draft trees of depth 1, 2, ...: these depths are tried, as far as
            the table goes. Multiples of a step for heads that draft step by step, one number over
            and over for heads that draft in one pass.
        width: most children per node.

    Raises:
        ValueError: nothing to choose from.
    """
    sizes = sorted(size for size in verify_seconds if size > 1)
    most = len(draft_seconds) if acceptance.ndim == 1 else min(len(draft_seconds), len(acceptance))
    if not sizes or most == 0:
        raise ValueError("choose_tree: give seconds of at least one size above 1 and of one depth")
    best: TreeChoice | None = None
    for depth in range(1, most + 1):
        plan = _Plan(_table(acceptance, depth, width), sizes[-1])
        for size in sizes:
            nodes = plan.best(size)
            if nodes < 2:
                continue
            tokens = float(plan.values[nodes])
            seconds = draft_seconds[depth - 1] + verify_seconds[size]
            if best is None or seconds / tokens < best.seconds_per_token:
                best = TreeChoice(static_tree(plan.paths(nodes)), tokens, seconds)
    if best is None:
        raise ValueError("choose_tree: no draft is ever accepted by these rates: nothing to draft")
    return best


def expected_tokens(shape: StaticTree, acceptance: Tensor) -> float:
    """F of a shape: expected tokens per round.

    Args:
        shape: its rank r takes column r.
        acceptance: (K, R).
    """
    values = [1.0]
    for parent, depth, rank in zip(
        shape.parents.tolist(), shape.depths.tolist(), shape.ranks.tolist(), strict=True
    ):
        if depth:
            values.append(values[parent] * float(acceptance[depth - 1, rank]))
    return sum(values)


def _table(acceptance: Tensor, depth: int | None, width: int | None) -> Tensor:
    """(K, R) rates down to the depth and up to the width asked for."""
    if acceptance.ndim == 1 and depth is not None:
        acceptance = acceptance.expand(depth, -1)
    if acceptance.ndim != 2 or not bool(((acceptance >= 0) & (acceptance <= 1)).all()):
        raise ValueError(
            "acceptance must be (K, R), or (R,) with a depth, of rates in [0, 1]; got shape "
            f"{tuple(acceptance.shape)}"
        )
    if bool((acceptance.sum(1) > 1.0 + 1e-6).any()):
        raise ValueError(
            "acceptance: the rates of a depth sum to more than 1, but one child at most is "
            "accepted; give the chance that a child is the accepted one, whatever comes before it"
        )
    if depth is not None and not 1 <= depth <= len(acceptance):
        raise ValueError(f"depth must lie in 1..{len(acceptance)}, the table's; got {depth}")
    if width is not None and width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    return acceptance[:depth, :width].double()


class _Plan:
    """The best subtrees of every size, from the leaves up.

    With T(m, d, j) the best value of m nodes whose root sits at depth d and has j children,
    T(m, d, j) = max over y of T(m - y, d, j - 1) + b_j · max over j' of T(y, d + 1, j').

    Args:
        table: (K, R) rates.
        size: largest number of nodes.

    Attributes:
        values: (size + 1,) best value of a tree of exactly so many nodes; -inf if there is none.
    """

    def __init__(self, table: Tensor, size: int) -> None:
        nodes = torch.arange(size + 1)
        left = nodes[:, None] - nodes[None]  # m - y
        possible = (left >= 1) & (nodes[None] >= 1)
        leaf = torch.full((size + 1,), -torch.inf, dtype=torch.float64)
        leaf[1] = 1.0
        self.values = leaf
        self.counts: list[list[int]] = []  # per depth and size the root's children
        self.splits: list[list[list[int]]] = []  # per depth, child and size the child's share
        for rates in table.flip(0).tolist():
            found, splits = [leaf], [[0] * (size + 1)]
            for rate in rates:
                below = torch.where(self.values > -torch.inf, rate * self.values, -torch.inf)
                sums = torch.where(possible, found[-1][left.clamp(min=0)] + below, -torch.inf)
                best = sums.max(dim=1)
                found.append(best.values)
                splits.append(best.indices.tolist())
            chosen = torch.stack(found).max(dim=0)
            self.values = chosen.values
            self.counts.insert(0, chosen.indices.tolist())
            self.splits.insert(0, splits)

    def best(self, size: int) -> int:
        """The fewest nodes of the highest value, of at most so many."""
        values = self.values[: size + 1]
        return int((values == values.max()).nonzero()[0])

    def paths(self, nodes: int, depth: int = 0) -> list[tuple[int, ...]]:
        """Rank paths of the best subtree of so many nodes whose root, left out, is at a depth."""
        if nodes == 1:
            return []
        found: list[tuple[int, ...]] = []
        for child in range(self.counts[depth][nodes], 0, -1):
            share = self.splits[depth][child][nodes]
            below = self.paths(share, depth + 1)
            found += [(child - 1,), *((child - 1, *path) for path in below)]
            nodes -= share
        return found
