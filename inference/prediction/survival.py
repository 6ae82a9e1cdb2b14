"""The chance that a round accepts the next d tokens of a text, from laws and drafts alone.

Pure but for the acceptance formulas of the decoder. With S_d the chance that a round accepts at
least d drafts, given that a lossless decoder emits this text x:

* chosen drafts, whatever the rule, and coupled ones: 1 if x's next d tokens are a path of the tree;
* drawn chains, `rejection`: the product of min(1, q(x_i) / p(x_i)), as a draft x_i is drawn and
  accepted with min(p, q)(x_i), and x_i is emitted with p(x_i);
* drawn chains, `block`: the least of 1 and of the products of q(x_i) / p(x_i) down to each depth,
  by its invariant that the drafts x_1..x_i are kept with h_i (`inference.rules.block`);
* drawn trees: estimated without bias from drawn trees, with the same weights. Below the first level
  these are rarely large and mostly 0, so the estimate is noisy and its interval wide: it takes
  many texts. All others are exact.

Letters: S survival, V target vocabulary, p target law, q draft law, r what the target still owes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from inference.rules.acceptance import accept_probability, proposals, residual_law
from inference.tree import TokenTree


class Laws(Protocol):
    """The target's laws along a text."""

    def law(self, place: int) -> Tensor:
        """(V,) that the token behind new token number ``place`` is drawn from."""
        ...


def chain_survival(ratios: Sequence[float], rule: str) -> list[float]:
    """S of a drawn chain along a text.

    Args:
        ratios: by depth q(x) / p(x) of the text's token.
        rule: "rejection" or "block".
    """
    found, product, least = [], 1.0, 1.0
    for value in ratios:
        if rule == "block":
            product *= value
            least = min(least, product)
        else:
            least *= min(1.0, value)
        found.append(least)
    return found


def path_survival(tree: TokenTree, following: Sequence[int]) -> list[float]:
    """S of a tree of chosen drafts: whether the text is one of its paths.

    Args:
        tree: drafted.
        following: tokens of the text behind its root.
    """
    found: list[float] = []
    node: int | None = 0
    for token in following[: int(tree.depths.max())]:
        node = None if node is None else tree.child_with_token(node, token)
        found.append(float(node is not None))
    return found


def drawn_survival(
    tree: TokenTree, following: Sequence[int], laws: Laws, place: int
) -> list[float]:
    """An estimate of S from one tree of drawn drafts, unbiased over its draws.

    Child j of a node is tried if those before it were rejected, and is x and accepted with
    min(r_j, q_j)(x), r_j being what the target still owes. Its share of p(x), summed over the
    children, is what the level passes on; where x was really drawn, its share goes further down.

    Args:
        tree: drafted.
        following: tokens of the text behind its root.
        laws: of the target.
        place: of the root among the new tokens.
    """
    found: list[float] = []
    weight, node = 1.0, 0
    for depth, token in enumerate(following[: int(tree.depths.max())]):
        if weight == 0.0:
            found.append(0.0)
            continue
        p = laws.law(place + depth)
        owed, left, passed, below, taken = p, 1.0, 0.0, 0, 0.0
        for child, q in proposals(tree, node, p):
            passed += left * min(float(owed[token]), float(q[token]))
            accepted = left * accept_probability(owed, q, tree.token(child))
            if tree.token(child) == token:
                below, taken = child, accepted
            left -= accepted
            owed = residual_law(owed, q)
        found.append(weight * share_of(passed, float(p[token])))
        weight, node = weight * share_of(taken, float(p[token])), below
    return found


def share_of(above: float, below: float) -> float:
    """A quotient; 0 where rounding makes the text's own token impossible."""
    return above / below if below > 0.0 else 0.0
