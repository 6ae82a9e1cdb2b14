"""Token trees: what a proposer hands to the verifier.

Pure: torch and the standard library. A tree is data, a chain is a tree, and node 0 is always the
root: the last committed token x_a, which is verified again only because its row predicts x_{a+1}.

Letters: N tree nodes (root included), M candidate nodes, C new ones, F frontier nodes, R candidates
per frontier node, K draft steps or heads, V target vocabulary.
"""

from __future__ import annotations

import enum
import math
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
    MIXED = "mixed"
    """Some drawn as for DENSE, others chosen as for ONE_HOT; `TokenTree.drawn` tells which."""


DRAWN_KINDS = frozenset({Proposal.DENSE, Proposal.MIXED})
"""Kinds with tokens drawn from a recorded law, of which none may be dropped afterwards."""


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
        draft_probs: (N, V), only for DENSE and MIXED: row i is the law q from which the drawn
            children of node i were drawn, in index order and without replacement. Rows of nodes
            without drawn children are unused.
        drawn: (N,) bool, only for MIXED: whether a node was drawn or chosen. A chosen token may
            depend on its drawn siblings, which come before it. The root's entry is unused.
        survival: (N,) predicted chance that the node is accepted, as its parent's first child, and
            all nodes on the way to it are; NaN where nobody predicted it, as for copied nodes in a
            merged tree. None without a confidence output. Verification does not look at it.
        log_q: (N,) log-probability of each token behind its parent under the draft law, the root's
            unused; None where no law chose, or noise had a say. Verification does not look at it.
    """

    tokens: Tensor
    parents: Tensor
    proposal: Proposal
    draft_probs: Tensor | None = None
    drawn: Tensor | None = None
    survival: Tensor | None = None
    log_q: Tensor | None = None

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
        self._check_drawn()
        if sum(map(len, self._children)) != self.num_draft_tokens:
            raise ValueError("TokenTree.tokens: two children of one node hold the same token")

    def _check_draft_probs(self) -> None:
        for name, value, kinds in (
            ("draft_probs", self.draft_probs, DRAWN_KINDS),
            ("drawn", self.drawn, {Proposal.MIXED}),
        ):
            if (self.proposal in kinds) != (value is not None):
                raise ValueError(
                    f"TokenTree.{name} is needed for {' and '.join(sorted(k.name for k in kinds))} "
                    f"trees and must be None otherwise; the proposal is {self.proposal.name}"
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

    def _check_drawn(self) -> None:
        if self.drawn is None:
            return
        if self.drawn.shape != self.tokens.shape or self.drawn.dtype != torch.bool:
            raise ValueError(
                f"TokenTree.drawn must be (N={self.num_nodes},) bool; got "
                f"{tuple(self.drawn.shape)} {self.drawn.dtype}"
            )
        for children in self._children:
            kinds = [self._drawn[child] for child in children.values()]
            if kinds != sorted(kinds, reverse=True):
                raise ValueError(
                    "TokenTree.drawn: the drawn children of a node must come before the chosen ones"
                )

    @classmethod
    def chain(
        cls,
        tokens: Tensor,
        proposal: Proposal = Proposal.ONE_HOT,
        draft_probs: Tensor | None = None,
        drawn: Tensor | None = None,
    ) -> TokenTree:
        """A tree without branches.

        Args:
            tokens: (N,) the committed token followed by the drafted ones.
            proposal: how the drafted tokens were chosen.
            draft_probs: (N-1, V) for DENSE and MIXED: row i is the law that token i+1 was drawn
                from. The unused row of the leaf is added here.
            drawn: (N,) bool for MIXED, as in `TokenTree`.
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
        return cls(tokens, parents, proposal, draft_probs, drawn)

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

    @cached_property
    def depth(self) -> int:
        """Of the deepest node; on the host alone."""
        found = [0] * self.num_nodes
        for node, parent in enumerate(self._parents[1:], start=1):
            found[node] = found[parent] + 1
        return max(found)

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self._parents == list(range(-1, self.num_nodes - 1))

    def is_drawn(self, node: int) -> bool:
        """Whether `node` was drawn from its parent's row of `draft_probs`; false for the root."""
        return node > 0 and self._drawn[node]

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

    def draft_chances(self) -> list[float | None]:
        """Per node the draft law's probability of its token; None where no law is known.

        Of drawn children it is that of the law they were drawn from, without regard to siblings
        drawn before them.
        """
        found: list[float | None] = [None] * self.num_nodes
        for node, parent in enumerate(self._parents[1:], start=1):
            if self.draft_probs is not None and self.is_drawn(node):
                found[node] = float(self.draft_probs[parent, self.token(node)])
            elif self.log_q is not None:
                found[node] = math.exp(float(self.log_q[node]))
        return found

    def first_path(self) -> list[int]:
        """The root, its first child, that one's first child, and so on to a leaf."""
        nodes = [0]
        while below := self._children[nodes[-1]]:
            nodes.append(next(iter(below.values())))
        return nodes

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
    def _drawn(self) -> list[bool]:
        if self.drawn is None:
            return [self.proposal is Proposal.DENSE] * self.num_nodes
        return self.drawn.tolist()

    @cached_property
    def _children(self) -> list[dict[int, int]]:
        """Per node: token -> child, in index order."""
        children: list[dict[int, int]] = [{} for _ in range(self.num_nodes)]
        for node in range(1, self.num_nodes):
            children[self._parents[node]].setdefault(self._tokens[node], node)
        return children


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

    def log_q(self, proposal: Proposal, kept: Tensor | slice = slice(None)) -> Tensor | None:
        """For `TokenTree.log_q`: of each of the kept nodes behind its parent, (N,)."""
        if proposal is not Proposal.ONE_HOT:
            return None  # drawn ones have a law of their own, and coupled scores are half noise
        return (self.scores - self.scores[self.parents])[kept]

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
    parents = frontier[:, None].expand_as(tokens)
    return append(candidates, parents.reshape(-1), tokens.reshape(-1), log_probs.reshape(-1))


def append(
    candidates: Candidates, parents: Tensor, tokens: Tensor, log_probs: Tensor
) -> Candidates:
    """Append C nodes.

    Args:
        candidates: the M nodes so far.
        parents: (C,) their indices.
        tokens: (C,) absolute ids.
        log_probs: (C,) of each after its parent, at most 0.

    Returns:
        M + C nodes; the new ones follow the old.
    """
    scores = candidates.scores[parents] + log_probs.to(candidates.scores.dtype)
    return Candidates(
        tokens=torch.cat([candidates.tokens, tokens]),
        parents=torch.cat([candidates.parents, parents]),
        scores=torch.cat([candidates.scores, scores]),
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
    assert proposal not in DRAWN_KINDS, "drawing and then dropping is biased"
    scores = candidates.scores[1:]
    order = scores.argsort(descending=True, stable=True)[:size]
    order = order[scores[order] > -torch.inf]
    kept = torch.cat([order.new_zeros(1), order.sort().values + 1])
    parents = torch.searchsorted(kept, candidates.parents[kept])
    parents[0] = -1
    return TokenTree(
        candidates.tokens[kept], parents, proposal, log_q=candidates.log_q(proposal, kept)
    ), kept
