"""What every acceptance rule is made of: laws, coins, verdicts and the two formulas.

Letters: N tree nodes, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inference.sampling import Stream, sample, uniform_at
from inference.tree import TokenTree

Law = Callable[[int], Tensor]
"""Node index -> (V,) target probabilities after warpers. Called at most once per node."""

Ended = Callable[[list[int]], bool]
"""Tokens accepted so far this round -> whether the text ends with the last of them. Called once per
accepted token, in order."""


@dataclass(frozen=True)
class Verdict:
    """What a round emits.

    Attributes:
        path: accepted nodes from the root's child downwards, root excluded; may be empty.
        next_token: the token after the last accepted one (recovered or bonus); None if the text
            ended with an accepted token.
    """

    path: list[int]
    next_token: int | None


class Coins(Protocol):
    """The random choices of a rule, apart from it, so that tests can take every branch.

    In one text no two choices may share a coin: a rule never asks for the same arguments twice,
    in one round or in two.
    """

    def accept(self, probability: float, position: int, index: int) -> bool:
        """Whether to accept, by the coin of this pair of position and index."""
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

    def accept(self, probability: float, position: int, index: int) -> bool:
        """One coin per position and index, inside (0, 1): 1 always accepts and 0 never does."""
        coin = uniform_at(self.seed, Stream.ACCEPT, position, torch.tensor(index))
        return float(coin) < probability

    def draw(self, probs: Tensor, position: int) -> int:
        """The keyed draw at this position."""
        return sample(probs, self.seed, position, self.stream)


def proposals(tree: TokenTree, node: int, like: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The children of `node`, each with the law it was proposed from given the ones before it.

    Args:
        tree: the drafted tokens.
        node: whose children.
        like: (V,) gives dtype and device of the laws.

    Yields:
        Child, and (V,) its law: the recorded one without what earlier children took, renormalised,
        for a drawn child; one-hot for a chosen one.
    """
    left: Tensor | None = None
    for child in tree.children(node):
        token = tree.token(child)
        if tree.is_drawn(child):
            assert tree.draft_probs is not None
            left = tree.draft_probs[node].to(like) if left is None else left
            yield child, left / left.sum()
            left = left.clone()  # the next child was drawn from what this one left
            left[token] = 0.0
        else:
            one_hot = torch.zeros_like(like)
            one_hot[token] = 1.0
            yield child, one_hot


def accept_probability(residual: Tensor, proposed: Tensor, token: int) -> float:
    """min(1, r(x) / q(x)) for a token x proposed from q.

    Args:
        residual: (V,) mass r that the target still owes.
        proposed: (V,) law q that the token was drawn from.
        token: x.

    Raises:
        ValueError: q(x) is 0, so x cannot have been drawn from q.
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


def cut(tree: TokenTree, path: list[int], ended: Ended | None) -> list[int] | None:
    """The path up to the token that ends the text, or None if none of its tokens does.

    Args:
        tree: the drafted tokens.
        path: accepted nodes, root excluded.
        ended: tells the end; None if there is none.
    """
    if ended is None:
        return None
    tokens = [tree.token(node) for node in path]
    for length in range(1, len(path) + 1):
        if ended(tokens[:length]):
            return path[:length]
    return None
