"""Lossless acceptance: what a round of drafted tokens emits.

One lemma is behind the rules that walk down the tree. A node has the target law p and children x_1,
x_2, ...; child j was proposed from q_j, its law given everything drawn before it. Start with r = p;
accept child j with probability min(1, r(x_j) / q_j(x_j)); on rejection r becomes norm(max(0, r -
q_j)). When no child is left, the next token is drawn from r. The emitted token then has law p:

* `rejection` is the lemma itself, for drawn children (arXiv:2211.17192 on chains, without
  replacement on trees as in arXiv:2402.12374), for one-hot ones, and for one-hot ones behind drawn
  ones (with one drawn child this is the optimal test of arXiv:2502.18779).
* With one-hot q_j the lemma telescopes to "draw once from p and follow the child that matches":
  `match`. Any pruning or reranking of the tree is allowed.
* `coupled` is the same walk; its children were proposed with the noise that the target draws with
  (arXiv:2408.07978 on chains). The output of both equals plain sampling with the same seed.

These ask for the target's law once at each node they visit, in the order of the text, as plain
decoding does. `block` (`inference.rules.block`) judges a chain as a whole. At temperature 0 the law
is one-hot and every rule follows the argmax: there is no second path.

Letters: N tree nodes, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from inference.rules.acceptance import (
    Coins,
    Ended,
    KeyedCoins,
    Law,
    Verdict,
    accept_probability,
    proposals,
    residual_law,
)
from inference.rules.block import block
from inference.rules.lossy import LOSSY_RULES, lossy_typical
from inference.sampling import Stream
from inference.tree import Proposal, TokenTree

RULES: dict[str, frozenset[Proposal]] = {
    "match": frozenset({Proposal.ONE_HOT}),
    "coupled": frozenset({Proposal.COUPLED, Proposal.ONE_HOT}),
    "rejection": frozenset({Proposal.DENSE, Proposal.MIXED, Proposal.ONE_HOT}),
    "block": frozenset({Proposal.DENSE, Proposal.MIXED, Proposal.ONE_HOT}),
}
"""The lossless rules, with the proposals for which each is offered; `block` for chains only."""

SAME_TOKENS = ("match", "coupled")
"""Rules whose output is a function of target and seed, whatever was drafted: plain sampling's own
tokens. Those of the others follow the target's law."""

ALL_RULES = RULES | LOSSY_RULES
"""Everything that `verify` knows."""


Draw = Callable[[int, int], int]
"""(node, position) -> the token that the target draws at that position, behind that node."""


def verify(
    tree: TokenTree,
    law: Law,
    rule: str,
    seed: int,
    position: int,
    coins: Coins | None = None,
    ended: Ended | None = None,
    draw: Draw | None = None,
) -> Verdict:
    """Decide what this round emits.

    Args:
        tree: the drafted tokens.
        law: target probabilities at a node of the tree. Called once per visited node, in the order
            of the text; `block` calls it ahead, and `lossy_typical` beside.
        rule: one of `ALL_RULES`; must fit the tree's proposal.
        seed: of the noise.
        position: absolute position a of the root.
        coins: replaces the noise keyed by `seed`.
        ended: tells whether the text ends with the last of the tokens accepted so far this round;
            asked once per accepted token, in order. The round emits nothing behind the end.
        draw: plain sampling's own draw, for `match` and `coupled`, which then ask it alone, once
            per visited node, in the order of the text: a greedy token is found faster than its law
            is written down. None draws from `law` with the coins.

    Raises:
        ValueError: a rule that is unknown or does not fit the tree; drafts of probability zero.
    """
    check_rule(rule, tree.proposal)
    if rule == "block":
        return block(tree, law, coins or KeyedCoins(seed, Stream.RESIDUAL), position, ended)
    if rule == "lossy_typical":
        return lossy_typical(tree, law, coins or KeyedCoins(seed, Stream.TARGET), position, ended)
    if rule == "rejection":
        judging = coins or KeyedCoins(seed, Stream.RESIDUAL)
        return _walk(
            lambda node, position: _accept_or_reject(tree, node, law(node), judging, position),
            position,
            ended,
        )
    assert coins is None or draw is None, "two sources of the same draws"
    if draw is None:
        drawing = coins or KeyedCoins(seed, Stream.TARGET)
        return _walk(_matching(tree, lambda node, at: drawing.draw(law(node), at)), position, ended)
    return _walk(_matching(tree, draw), position, ended)


def check_rule(rule: str, proposal: Proposal) -> None:
    """Refuse a rule that is unknown or not offered for trees of this kind."""
    if rule not in ALL_RULES:
        raise ValueError(f"rule must be one of {', '.join(ALL_RULES)}; got {rule!r}")
    if proposal not in ALL_RULES[rule]:
        fitting = [name for name, proposals in RULES.items() if proposal in proposals]
        raise ValueError(
            f"rule {rule!r} does not fit a tree of {proposal.name} proposals; "
            f"use {' or '.join(repr(name) for name in fitting)}"
        )


Step = Callable[[int, int], tuple[int | None, int]]
"""Node and position of its children -> the accepted child or None, and the token there."""


def _walk(step: Step, position: int, ended: Ended | None) -> Verdict:
    """Go down from the root while a child is accepted."""
    node = 0
    path: list[int] = []
    tokens: list[int] = []
    while True:
        child, token = step(node, position + 1 + len(path))
        if child is None:
            return Verdict(path, token)
        path.append(child)
        tokens.append(token)
        if ended is not None and ended(list(tokens)):
            return Verdict(path, None)
        node = child


def _matching(tree: TokenTree, draw: Draw) -> Step:
    """Draw from the target and follow the child that matches."""

    def step(node: int, position: int) -> tuple[int | None, int]:
        token = draw(node, position)
        return tree.child_with_token(node, token), token

    return step


def _accept_or_reject(
    tree: TokenTree, node: int, law: Tensor, coins: Coins, position: int
) -> tuple[int | None, int]:
    """Accept or reject each child in turn; a leaf, or all rejected, draws from what is left."""
    residual = law
    for rank, (child, proposed) in enumerate(proposals(tree, node, law)):
        token = tree.token(child)
        if coins.accept(accept_probability(residual, proposed, token), position, rank):
            return child, token
        residual = residual_law(residual, proposed)
    return None, coins.draw(residual, position)
