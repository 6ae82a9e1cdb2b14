"""LOSSY acceptance: the output is not the target's. Kept apart from the rules that are lossless.

Medusa's typical acceptance (arXiv:2401.10774) takes a draft wherever the target finds it likely
enough, instead of as often as the target would have said it. It accepts more and distorts the law:
likely drafts become certain, and unlikely ones impossible. It is here to be compared with, not for
text that must be the target's.

Letters: N tree nodes, V target vocabulary.
"""

from __future__ import annotations

import math

import torch

from inference.rules.acceptance import Coins, Ended, Law, Verdict, cut
from inference.tree import Proposal, TokenTree

LOSSY_RULES: dict[str, frozenset[Proposal]] = {"lossy_typical": frozenset({Proposal.ONE_HOT})}
"""The rules that change the output, with the proposals for which each is offered."""

POSTERIOR_THRESHOLD = 0.09
"""Medusa's epsilon: no draft needs to be likelier than this."""
POSTERIOR_ALPHA = 0.3
"""Medusa's alpha: where the target hesitates, drafts are measured against exp(-entropy)."""


class LossyWarning(UserWarning):
    """The rule in use does not reproduce the target's output."""


def lossy_typical(
    tree: TokenTree,
    law: Law,
    coins: Coins,
    position: int,
    ended: Ended | None = None,
    epsilon: float = POSTERIOR_THRESHOLD,
    alpha: float = POSTERIOR_ALPHA,
) -> Verdict:
    """Accept drafts that are typical of the target. LOSSY at any temperature above 0.

    A draft x is accepted if its parent is and p(x) > min(epsilon, alpha * exp(-H(p))). The longest
    accepted path wins, the likelier one of several, and the next token is drawn from p behind it.
    At temperature 0 this is greedy decoding.

    Args:
        tree: the drafted tokens, chosen deterministically.
        law: target probabilities at a node; called for every accepted node, level by level.
        coins: draw the next token.
        position: absolute position a of the root.
        ended: tells where the text ends; asked about the winning path afterwards.
        epsilon: probability that is always enough.
        alpha: factor on exp(-entropy); the entropy is in nats.
    """
    level = [(0.0, 0)]  # log-likelihood of the path and node, for all accepted nodes of a depth
    while True:
        laws = {node: law(node) for _, node in level}
        deeper = []
        for likelihood, node in level:
            entropy = float(torch.special.entr(laws[node]).sum())
            threshold = min(epsilon, alpha * math.exp(-entropy))
            for child in tree.children(node):
                probability = float(laws[node][tree.token(child)])
                if probability > threshold:
                    deeper.append((likelihood + math.log(probability), child))
        if not deeper:
            break
        level = deeper
    _, best = max(level, key=lambda entry: entry[0])
    path = tree.path(best)[1:]
    ending = cut(tree, path, ended)
    if ending is not None:
        return Verdict(ending, None)
    return Verdict(path, coins.draw(laws[best], position + 1 + len(path)))
