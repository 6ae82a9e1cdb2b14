"""Token trees: what a proposer hands to the verifier.

Pure: torch and the standard library. A tree is data, a chain is a tree, and node 0 is always the
root: the last committed token x_a, which is verified again only because its row predicts x_{a+1}.

Letters: N tree nodes (root included), M candidate nodes, F frontier nodes, R candidates per
frontier node, K draft steps or heads, V target vocabulary.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


class Proposal(enum.Enum):
    """How the children of a tree were proposed; decides which acceptance rules are lossless."""

    ONE_HOT = "one_hot"
    """Chosen deterministically given the context (argmax, top-k, n-gram match)."""
    DENSE = "dense"
    """Drawn from the law q recorded in `TokenTree.draft_probs`, without replacement."""
    COUPLED = "coupled"
    """The top of log q plus the noise that the target itself draws with at that position."""


def ancestor_mask(parents: Tensor) -> Tensor:
    """Who sees whom: a node attends to itself and to its ancestors.

    Args:
        parents: (N,) index of each node's parent, below the node's own index; -1 for a root.

    Returns:
        (N, N) bool; row i is true at i and at every ancestor of i.
    """
    num_nodes = len(parents)
    mask = torch.zeros(num_nodes, num_nodes, dtype=torch.bool, device=parents.device)
    nodes = ancestors = torch.arange(num_nodes, device=parents.device)
    while len(nodes):  # one turn per level, not per node
        mask[nodes, ancestors] = True
        ancestors = parents[ancestors]
        nodes, ancestors = nodes[ancestors >= 0], ancestors[ancestors >= 0]
    return mask


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Draft tokens of one round, as a tree below the last committed token.

    Attributes:
        tokens: (N,) long, absolute target ids; `tokens[0]` is the committed token x_a.
        parents: (N,) long, `parents[0] == -1` and `parents[i] < i`.
        proposal: how the children were chosen, one kind for the whole tree.
        draft_probs: (N, V), only for `Proposal.DENSE`: row i is the law q from which the children
            of node i were drawn, in index order and without replacement. Rows of leaves are unused.
    """

    tokens: Tensor
    parents: Tensor
    proposal: Proposal
    draft_probs: Tensor | None = None

    def __post_init__(self) -> None:
        """Check the shape of the tree; the walk of `verify` relies on every one of these."""
        if self.tokens.ndim != 1 or self.tokens.shape != self.parents.shape or not self.num_nodes:
            raise ValueError(
                "TokenTree.tokens and .parents must be 1-D, of equal length and hold the root; got "
                f"shapes {tuple(self.tokens.shape)} and {tuple(self.parents.shape)}"
            )
        if self.tokens.dtype != torch.long or self.parents.dtype != torch.long:
            raise ValueError("TokenTree.tokens and .parents must be torch.long (int64)")
        if self._parents[0] != -1:
            raise ValueError(f"TokenTree.parents[0] must be -1 (the root), got {self._parents[0]}")
        for node, parent in enumerate(self._parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"TokenTree.parents[{node}] is {parent}; parents come before their children, "
                    f"so it must lie in [0, {node - 1}]"
                )
        self._check_draft_probs()
        if sum(map(len, self._children)) != self.num_draft_tokens:
            raise ValueError("TokenTree.tokens: two children of one node hold the same token")

    def _check_draft_probs(self) -> None:
        if (self.proposal is Proposal.DENSE) != (self.draft_probs is not None):
            raise ValueError(
                "TokenTree.draft_probs is needed for Proposal.DENSE and must be None otherwise; "
                f"the proposal is {self.proposal.name}"
            )
        if self.draft_probs is None:
            return
        if self.draft_probs.ndim != 2 or len(self.draft_probs) != self.num_nodes:
            raise ValueError(
                f"TokenTree.draft_probs must be (N={self.num_nodes}, V), one row per node; got "
                f"{tuple(self.draft_probs.shape)}"
            )
        if max(self._tokens) >= self.draft_probs.shape[1]:
            raise ValueError(
                f"TokenTree.draft_probs covers {self.draft_probs.shape[1]} tokens but "
                f"{max(self._tokens)} was drafted; scatter a reduced vocabulary to absolute ids"
            )

    @classmethod
    def chain(
        cls,
        tokens: Tensor,
        proposal: Proposal = Proposal.ONE_HOT,
        draft_probs: Tensor | None = None,
    ) -> TokenTree:
        """A tree without branches.

        Args:
            tokens: (N,) the committed token followed by the drafted ones.
            proposal: how the drafted tokens were chosen.
            draft_probs: (N-1, V) for `Proposal.DENSE`: row i is the law that token i+1 was drawn
                from. The unused row of the leaf is added here.
        """
        parents = torch.arange(-1, len(tokens) - 1, device=tokens.device)
        if draft_probs is not None:
            if draft_probs.ndim != 2 or len(draft_probs) != len(tokens) - 1:
                raise ValueError(
                    f"TokenTree.chain: draft_probs must be (N-1={len(tokens) - 1}, V), one law per "
                    f"drafted token; got {tuple(draft_probs.shape)}"
                )
            leaf = draft_probs.new_zeros(1, draft_probs.shape[1])
            draft_probs = torch.cat([draft_probs, leaf])
        return cls(tokens, parents, proposal, draft_probs)

    @property
    def num_nodes(self) -> int:
        """N, root included: the rows that the target runs."""
        return len(self.tokens)

    @property
    def num_draft_tokens(self) -> int:
        """N - 1: the tokens that the drafter proposed."""
        return self.num_nodes - 1

    @cached_property
    def depths(self) -> Tensor:
        """(N,) distance from the root; node i sits at absolute position a + depths[i]."""
        return self._mask.sum(dim=1) - 1

    def ancestor_mask(self) -> Tensor:
        """(N, N) bool; row i is true at i and at its ancestors."""
        return self._mask

    def token(self, node: int) -> int:
        """The token of `node`."""
        return self._tokens[node]

    def children(self, node: int) -> list[int]:
        """Children of `node` in index order, which is the order they were proposed in."""
        return list(self._children[node].values())

    def child_with_token(self, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`, or None."""
        return self._children[node].get(token)

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        nodes = [node]
        while nodes[-1] != 0:
            nodes.append(self._parents[nodes[-1]])
        return nodes[::-1]

    # The walk runs on the host: each tensor is read once per tree, not once per node.

    @cached_property
    def _mask(self) -> Tensor:
        return ancestor_mask(self.parents)

    @cached_property
    def _tokens(self) -> list[int]:
        return self.tokens.tolist()

    @cached_property
    def _parents(self) -> list[int]:
        return self.parents.tolist()

    @cached_property
    def _children(self) -> list[dict[int, int]]:
        """Per node: token -> child, in index order."""
        children: list[dict[int, int]] = [{} for _ in range(self.num_nodes)]
        for node in range(1, self.num_nodes):
            children[self._parents[node]].setdefault(self._tokens[node], node)
        return children


# Static trees: one shape for every round (Medusa, arXiv:2401.10774) ---------------------------


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


# Dynamic trees: expand, keep everything, rerank at the end (EAGLE-2, arXiv:2406.16858) ----------


@dataclass(frozen=True, eq=False)
class Candidates:
    """Every node drafted so far, in order of creation; node 0 is the root.

    Attributes:
        tokens: (M,) long.
        parents: (M,) long, -1 for the root.
        scores: (M,) log-probability of the path from the root to the node; 0 for the root.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor

    @classmethod
    def root(cls, token: int, device: torch.device | str | None = None) -> Candidates:
        """Start from the committed token alone."""
        return cls(
            tokens=torch.tensor([token], device=device),
            parents=torch.tensor([-1], device=device),
            scores=torch.zeros(1, device=device),
        )


def expand(
    candidates: Candidates, frontier: Tensor, tokens: Tensor, log_probs: Tensor
) -> Candidates:
    """Append R children to each frontier node; none is dropped until `rerank`.

    Args:
        candidates: the M nodes so far.
        frontier: (F,) indices of the nodes to expand.
        tokens: (F, R) the candidates of each, normally the top-k of its draft law; absolute ids.
        log_probs: (F, R) their log-probabilities, at most 0.

    Returns:
        M + F*R nodes; the new ones follow the old, grouped by frontier node.
    """
    scores = candidates.scores[frontier, None] + log_probs.to(candidates.scores.dtype)
    parents = frontier[:, None].expand_as(tokens)
    return Candidates(
        tokens=torch.cat([candidates.tokens, tokens.reshape(-1)]),
        parents=torch.cat([candidates.parents, parents.reshape(-1)]),
        scores=torch.cat([candidates.scores, scores.reshape(-1)]),
    )


def best_frontier(candidates: Candidates, start: int, width: int) -> Tensor:
    """The next nodes to expand: the best `width` of those created since index `start`.

    Returns:
        (F <= width,) indices, best first; nodes of probability zero are left out.
    """
    scores = candidates.scores[start:]
    best = scores.topk(min(width, len(scores)))
    return best.indices[best.values > -torch.inf] + start


def rerank(
    candidates: Candidates, size: int, proposal: Proposal = Proposal.ONE_HOT
) -> tuple[TokenTree, Tensor]:
    """Keep the best `size` candidates as the tree to verify, in order of creation.

    A child never scores above its parent and is created after it, so a stable sort keeps the
    parent of every kept node. What is kept may depend on the drafted values only because the
    rules for ONE_HOT and COUPLED trees allow it; a tree of drawn tokens must not be pruned.

    Args:
        candidates: all nodes, root included.
        size: draft tokens to keep, root excluded; fewer are kept if fewer have a probability.
        proposal: kind recorded in the tree.

    Returns:
        The tree, and (N,) the candidate index of each of its nodes.
    """
    assert proposal is not Proposal.DENSE, "drawing and then dropping is biased"
    scores = candidates.scores[1:]
    order = scores.argsort(descending=True, stable=True)[:size]
    order = order[scores[order] > -torch.inf]
    kept = torch.cat([order.new_zeros(1), order.sort().values + 1])
    parents = torch.searchsorted(kept, candidates.parents[kept])
    parents[0] = -1
    return TokenTree(candidates.tokens[kept], parents, proposal), kept
