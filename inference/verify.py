"""Lossless acceptance: one walk down the tree.

One lemma is behind every rule. A node has the target law p and children x_1, x_2, ...; child j was
proposed from q_j, its law given everything drawn before it. Start with r = p; accept child j with
probability min(1, r(x_j) / q_j(x_j)); on rejection r becomes norm(max(0, r - q_j)). When no child
is left, the next token is drawn from r. The emitted token then has law p exactly:

* `rejection` is the lemma itself, for drawn children (arXiv:2211.17192 on chains, without
  replacement on trees as in arXiv:2402.12374) and for one-hot ones.
* With one-hot q_j the lemma telescopes to "draw once from p and follow the child that matches":
  `match`. Any pruning or reranking of the tree is allowed.
* `coupled` is the same walk; its children were proposed with the noise that the target draws with
  (arXiv:2408.07978 on chains). The output of both equals plain sampling with the same seed.

At temperature 0 the law is one-hot and every rule follows the argmax: there is no second path.

Letters: N tree nodes, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inference.sampling import Stream, sample, uniform_at
from inference.tree import Proposal, TokenTree

Law = Callable[[int], Tensor]
"""Node index -> (V,) target probabilities after warpers. Called once, for visited nodes only."""

RULES: dict[str, frozenset[Proposal]] = {
    "match": frozenset({Proposal.ONE_HOT}),
    "coupled": frozenset({Proposal.COUPLED}),
    "rejection": frozenset({Proposal.DENSE, Proposal.ONE_HOT}),
}
"""The rules, with the proposals for which each is offered."""


@dataclass(frozen=True)
class Verdict:
    """What a round emits.

    Attributes:
        path: accepted nodes from the root's child downwards, root excluded; may be empty.
        next_token: the token after the last accepted one (recovered or bonus), always emitted.
    """

    path: list[int]
    next_token: int


class Coins(Protocol):
    """The random choices of a walk, apart from it, so that tests can take every branch."""

    def accept(self, probability: float, position: int, rank: int) -> bool:
        """Whether to accept the child of this rank as the token at `position`."""
        ...

    def draw(self, probs: Tensor, position: int) -> int:
        """A token for `position` from the law `probs` (V,)."""
        ...


@dataclass(frozen=True)
class KeyedCoins:
    """Coins that are a function of (seed, position): the ones used for decoding.

    Attributes:
        seed: of the noise.
        stream: of the token draws.
    """

    seed: int
    stream: Stream

    def accept(self, probability: float, position: int, rank: int) -> bool:
        """One coin per position and child, inside (0, 1): 1 always accepts and 0 never does."""
        coin = uniform_at(self.seed, Stream.ACCEPT, position, torch.tensor(rank))
        return float(coin) < probability

    def draw(self, probs: Tensor, position: int) -> int:
        """The keyed draw at this position."""
        return sample(probs, self.seed, position, self.stream)


def verify(
    tree: TokenTree, law: Law, rule: str, seed: int, position: int, coins: Coins | None = None
) -> Verdict:
    """Walk down the tree and decide what this round emits.

    Args:
        tree: the drafted tokens.
        law: target probabilities at a node of the tree; called lazily.
        rule: one of `RULES`; must fit the tree's proposal.
        seed: of the noise.
        position: absolute position a of the root.
        coins: replaces the noise keyed by `seed`.
    """
    check_rule(rule, tree.proposal)
    if rule == "rejection":
        return _rejection(tree, law, coins or KeyedCoins(seed, Stream.RESIDUAL), position)
    return _match(tree, law, coins or KeyedCoins(seed, Stream.TARGET), position)


def check_rule(rule: str, proposal: Proposal) -> None:
    """Refuse a rule that is unknown or not offered for trees of this kind."""
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}; got {rule!r}")
    if proposal not in RULES[rule]:
        fitting = [name for name, proposals in RULES.items() if proposal in proposals]
        raise ValueError(
            f"rule {rule!r} does not fit a tree of {proposal.name} proposals; "
            f"use {' or '.join(repr(name) for name in fitting)}"
        )


def _match(tree: TokenTree, law: Law, coins: Coins, position: int) -> Verdict:
    """Draw from the target and follow the child that matches, until none does."""
    node = 0
    path: list[int] = []
    while True:
        token = coins.draw(law(node), position + 1 + len(path))
        child = tree.child_with_token(node, token)
        if child is None:
            return Verdict(path, token)
        node = child
        path.append(child)


def _rejection(tree: TokenTree, law: Law, coins: Coins, position: int) -> Verdict:
    """Accept or reject each child in turn; a leaf, or all rejected, draws from what is left."""
    node = 0
    path: list[int] = []
    while True:
        child, residual = _accept_child(tree, node, law(node), coins, position + 1 + len(path))
        if child is None:
            return Verdict(path, coins.draw(residual, position + 1 + len(path)))
        node = child
        path.append(child)


def _accept_child(
    tree: TokenTree, node: int, residual: Tensor, coins: Coins, position: int
) -> tuple[int | None, Tensor]:
    """The accepted child of `node`, or None and the law of the token to emit instead.

    Args:
        tree: the drafted tokens.
        node: whose children compete for `position`.
        residual: (V,) the target's law at `node`.
        coins: decides.
        position: absolute position of the children.
    """
    draft_law = None if tree.draft_probs is None else tree.draft_probs[node].to(residual)
    for rank, child in enumerate(tree.children(node)):
        token = tree.token(child)
        if draft_law is None:
            proposed = torch.zeros_like(residual)
            proposed[token] = 1.0
        else:
            proposed = draft_law / draft_law.sum()
        if coins.accept(accept_probability(residual, proposed, token), position, rank):
            return child, residual
        residual = residual_law(residual, proposed)
        if draft_law is not None:  # the next child was drawn from what this one left
            draft_law = draft_law.clone()
            draft_law[token] = 0.0
    return None, residual


def accept_probability(residual: Tensor, proposed: Tensor, token: int) -> float:
    """min(1, r(x) / q(x)) for a token x proposed from q.

    Args:
        residual: (V,) law r that the target still owes.
        proposed: (V,) law q that the token was drawn from.
        token: x.
    """
    mass = float(proposed[token])
    if not mass > 0.0:
        raise ValueError(
            f"draft_probs gives token {token} the probability {mass} although it was drafted; "
            "record the law that the drafts were really drawn from"
        )
    return min(1.0, float(residual[token]) / mass)


def residual_law(residual: Tensor, proposed: Tensor) -> Tensor:
    """norm(max(0, r - q)): what the target still owes after a rejection. Both (V,).

    Equal laws leave nothing, and then a rejection has probability zero; if rounding lets one
    through, r itself is a law to draw from.
    """
    left = (residual - proposed).clamp_(min=0.0)
    mass = left.sum()
    return left / mass if float(mass) > 0.0 else residual
