"""Block verification of a drafted chain (arXiv:2403.10444): all of it is judged together.

Token by token, a draft that was likelier under the draft law than under the target's is rejected
even where the tokens before it were less likely than they should be. Here the surplus is carried:
with h_0 = 1 and h_i = min(1, h_{i-1} p_i(x_i) / q_i(x_i)), the law emitted after x_1..x_i must hold
the mass h_i of the drafts that begin so. From the last draft to the first, x_i is where the round
stops with probability

    h_i                       if x_i is the last draft, and the next token is drawn from p,
    S_i / (S_i + 1 - h_i)     otherwise, S_i = sum_x max(0, h_i p(x) - q(x)), and the next token is
                              drawn from max(0, h_i p - q) / S_i,

p and q being the laws after x_i. It accepts at least as many tokens as `rejection` does on average,
and no rule for chains accepts more.

What is decided about x_i depends on the drafts behind it, also those that are then thrown away. The
noise of a round, drafts included, must therefore be its own: the next round drafts at some of the
same positions again, and noise keyed by absolute position alone would be used twice. Coins are
keyed by the root's position, of which every round has another, and the depth.

Letters: N tree nodes, V target vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from inference.rules.acceptance import (
    Coins,
    Ended,
    Law,
    Verdict,
    accept_probability,
    cut,
    proposals,
    residual_law,
)
from inference.tree import TokenTree


def block(
    tree: TokenTree, law: Law, coins: Coins, position: int, ended: Ended | None = None
) -> Verdict:
    """Decide how much of a chain to keep, and what follows.

    Args:
        tree: a chain, of drawn or chosen tokens or both.
        law: target probabilities at a node; called for every node in order, down to the first draft
            that the target excludes.
        coins: decide.
        position: absolute position a of the root.
        ended: tells where the text ends; asked about the accepted tokens afterwards.

    Raises:
        ValueError: the tree has branches.
    """
    if not tree.is_chain:
        raise ValueError(
            "rule 'block' verifies chains: draft one child per node (branch 1), or use 'rejection' "
            "for trees"
        )
    laws, drafts, weights = _weigh(tree, law)
    node = len(laws) - 1
    while node > 0 and not coins.accept(
        _stop_probability(weights[node], laws[node], drafts[node]), position, node
    ):
        node -= 1
    path = list(range(1, node + 1))
    ending = cut(tree, path, ended)
    if ending is not None:
        return Verdict(ending, None)
    owed, draft = laws[node], drafts[node]
    if draft is not None:
        owed = residual_law(weights[node] * owed, draft)
    return Verdict(path, coins.draw(owed, position + 1 + node))


def _weigh(tree: TokenTree, law: Law) -> tuple[list[Tensor], list[Tensor | None], list[float]]:
    """Laws p and q behind each node that may be accepted, and its weight h.

    Returns:
        p (V,), q (V,) or None behind the last draft, and h, for the root and every draft before the
        first of weight 0.
    """
    laws: list[Tensor] = []
    drafts: list[Tensor | None] = []
    weights = [1.0]
    for node in range(tree.num_nodes):  # node i of a chain is at depth i
        laws.append(law(node))
        child, draft = next(proposals(tree, node, laws[node]), (None, None))
        drafts.append(draft)
        if child is None or draft is None:
            break
        weight = accept_probability(weights[node] * laws[node], draft, tree.token(child))
        if weight == 0.0:
            break
        weights.append(weight)
    return laws, drafts, weights


def _stop_probability(weight: float, law: Tensor, draft: Tensor | None) -> float:
    """Probability to stop at a draft after everything behind it was refused.

    Args:
        weight: its h.
        law: (V,) p behind it.
        draft: (V,) q behind it, None for the last draft.
    """
    if draft is None:
        return weight
    surplus = float((weight * law - draft).clamp_(min=0.0).sum())
    left = surplus + 1.0 - weight
    return surplus / left if left > 0.0 else 1.0  # 0/0: what is behind is refused by rounding only
