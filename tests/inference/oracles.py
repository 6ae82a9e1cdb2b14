"""Exact enumeration of what a rule emits, and the reference verifier.

`verify` itself is run with coins that take every branch and know its probability, over every tree
that the drafter could have drawn. The law of the emitted tokens, completed by the target, must
equal the target's law over sequences.

Letters: V vocabulary.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from inference.rules.acceptance import (
    Coins,
    Law,
    Verdict,
    accept_probability,
    proposals,
    residual_law,
)
from inference.sampling import SamplingParams, probabilities
from inference.tree import Proposal, TokenTree
from inference.verify import verify

Prefix = tuple[int, ...]
Laws = Callable[[Prefix], Tensor]  # drafted prefix below the root -> (V,)
Ends = Callable[[Prefix], bool]  # whether a text ends here
WeightedTrees = list[tuple[float, TokenTree]]

EXACT = 1e-12


# Traversal verification (arXiv:2505.12398) --------------------------------------------------------


def traversal(tree: TokenTree, law: Law, coins: Coins, position: int = 0) -> Verdict:
    """Verify any tree from the leaves up; `block` on chains, `match` on one-hot trees.

    Kept as a reference: it looks ahead and needs noise of its own for every node.
    """

    def visit(node: int, weight: float) -> Verdict | None:
        """What is emitted at or below a node, or None if that is refused.

        Invariant: given the path, a verdict comes with probability `weight`, and then the token
        behind `node` has law `owed`.
        """
        owed = law(node)
        for child, draft in proposals(tree, node, owed):
            heir = accept_probability(weight * owed, draft, tree.token(child))
            verdict = visit(child, heir)
            if verdict is not None:
                return verdict
            surplus = float((weight * owed - draft).clamp(min=0.0).sum())
            owed = residual_law(weight * owed, draft)
            left = surplus + 1.0 - weight
            weight = surplus / left if left > 0.0 else 1.0
        path = tree.path(node)[1:]
        if node == 0 or coins.accept(weight, position, node):
            return Verdict(path, coins.draw(owed, position + 1 + len(path)))
        return None

    verdict = visit(0, 1.0)
    assert verdict is not None
    return verdict


# Every branch of a walk ---------------------------------------------------------------------------


class ScriptedCoins:
    """Follow a script of choices, extend it with first choices, and track the probability."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.options: list[int] = []
        self.probability = 1.0

    def _choose(self, probabilities: list[float]) -> int:
        if len(self.options) == len(self.script):
            self.script.append(0)
        choice = self.script[len(self.options)]
        self.options.append(len(probabilities))
        self.probability *= probabilities[choice]
        return choice

    def accept(self, probability: float, position: int, index: int) -> bool:
        return self._choose([probability, 1.0 - probability]) == 0

    def draw(self, probs: Tensor, position: int) -> int:
        return self._choose((probs / probs.sum()).tolist())  # as the keyed draw does


def outcomes(walk: Callable[[Coins], Verdict]) -> Iterator[tuple[float, Verdict]]:
    """Every verdict of a walk that has a probability, with it."""
    script: list[int] = []
    while True:
        coins = ScriptedCoins(script)
        verdict = walk(coins)
        if coins.probability > 0.0:
            yield coins.probability, verdict
        while script and script[-1] + 1 == coins.options[len(script) - 1]:
            script.pop()
        if not script:
            return
        script[-1] += 1


def prefix_of(tree: TokenTree, node: int) -> Prefix:
    return tuple(tree.token(ancestor) for ancestor in tree.path(node)[1:])


def walk_of(
    tree: TokenTree, target: Laws, rule: str, ends: Ends | None = None
) -> Callable[[Coins], Verdict]:
    """One rule, or "traversal", on one tree, at position 0, for any coins."""

    def law(node: int) -> Tensor:
        return target(prefix_of(tree, node))

    if rule == "traversal":
        assert ends is None
        return lambda coins: traversal(tree, law, coins)
    ended = None if ends is None else lambda tokens: ends(tuple(tokens))
    return lambda coins: verify(tree, law, rule, seed=0, position=0, coins=coins, ended=ended)


def verdict_law(tree: TokenTree, target: Laws, rule: str) -> Counter[tuple[Prefix, int | None]]:
    """Probability of every verdict on one tree."""
    table: Counter[tuple[Prefix, int | None]] = Counter()
    for probability, verdict in outcomes(walk_of(tree, target, rule)):
        table[tuple(verdict.path), verdict.next_token] += probability  # type: ignore[assignment]
    return table


def expected_accepted(trees: WeightedTrees, target: Laws, rule: str) -> float:
    """Mean number of accepted drafts per round."""
    return sum(
        weight * probability * len(verdict.path)
        for weight, tree in trees
        for probability, verdict in outcomes(walk_of(tree, target, rule))
    )


# Laws over texts ----------------------------------------------------------------------------------


@functools.cache
def sequence_law(
    target: Laws, length: int, start: Prefix = (), ends: Ends | None = None
) -> dict[Prefix, float]:
    """The target's law over texts that continue `start` by up to `length` tokens, to their end."""
    if length == 0 or (start and ends is not None and ends(start)):
        return {start: 1.0}
    law: dict[Prefix, float] = {}
    for token, probability in enumerate(target(start).tolist()):
        if probability > 0.0:
            for text, rest in sequence_law(target, length - 1, (*start, token), ends).items():
                law[text] = probability * rest
    return law


def emitted_law(
    trees: WeightedTrees, target: Laws, rule: str, length: int, ends: Ends | None = None
) -> dict[Prefix, float]:
    """Law of the first `length` tokens: what one round emits, completed by the target."""
    law: Counter[Prefix] = Counter()
    for weight, tree in trees:
        for probability, verdict in outcomes(walk_of(tree, target, rule, ends)):
            tokens = tuple(tree.token(node) for node in verdict.path)
            if ends is not None:
                over = [ends(tokens[:end]) for end in range(1, len(tokens) + 1)]
                assert not any(over[:-1]), "emitted tokens behind the end"
                assert (verdict.next_token is None) == any(over), "the end was not told"
            if verdict.next_token is not None:
                tokens += (verdict.next_token,)
            for text, rest in sequence_law(target, length - len(tokens), tokens, ends).items():
                law[text] += weight * probability * rest  # type: ignore[assignment]
    return dict(law)


def total_variation(
    trees: WeightedTrees, target: Laws, rule: str, length: int, ends: Ends | None = None
) -> float:
    """Distance of the emitted law from the target's; 0 is lossless."""
    assert sum(weight for weight, _ in trees) == pytest.approx(1.0, abs=1e-12)
    emitted = emitted_law(trees, target, rule, length, ends)
    expected = sequence_law(target, length, (), ends)
    texts = emitted.keys() | expected.keys()
    return 0.5 * sum(abs(emitted.get(text, 0.0) - expected.get(text, 0.0)) for text in texts)


# Laws of targets and drafters ---------------------------------------------------------------------


def random_logits(seed: int, vocab: int, sharpness: float = 1.5) -> Laws:
    """Logits of their own for every prefix, float64."""

    @functools.cache
    def logits(prefix: Prefix) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**63)
        return torch.randn(vocab, generator=generator, dtype=torch.float64) * sharpness

    return logits


def random_laws(seed: int, vocab: int, sharpness: float = 1.5, hole: bool = False) -> Laws:
    """A law of its own for every prefix; with a hole, one token of each law is impossible."""
    logits = random_logits(seed, vocab, sharpness)

    @functools.cache
    def law(prefix: Prefix) -> Tensor:
        values = logits(prefix).clone()
        if hole:
            values[hash((seed, *prefix)) % vocab] = -torch.inf
        return values.softmax(-1)

    return law


def warped(
    logits: Laws, sampling: SamplingParams, columns: list[int] | None = None, vocab: int = 0
) -> Laws:
    """The law after the warpers; of a reduced vocabulary, scattered to absolute ids."""

    @functools.cache
    def law(prefix: Prefix) -> Tensor:
        probs = probabilities(logits(prefix), sampling)
        if columns is None:
            return probs
        return torch.zeros(vocab, dtype=probs.dtype).index_copy(0, torch.tensor(columns), probs)

    return law


# The trees that a drafter may propose -------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How the children of a node are proposed.

    Attributes:
        law: (V,) what the drawn children are drawn from, without replacement.
        draws: how many are drawn, at most the tokens that have a probability.
        chosen: tokens that follow them; those that were drawn are left out.
    """

    law: Tensor
    draws: int = 0
    chosen: Prefix = ()


def drafted_trees(plan: Callable[[Prefix], Plan], proposal: Proposal) -> WeightedTrees:
    """Every tree that may be drafted, with its probability."""
    results: WeightedTrees = []

    def grow(weight: float, prefixes: list[Prefix], parents: list[int], drawn: list[bool]) -> None:
        node = len(expanded)
        if node == len(prefixes):
            results.append((weight, build(prefixes, parents, drawn)))
            return
        made = plan(prefixes[node])
        expanded.append(made)
        draws = min(made.draws, int((made.law > 0).sum()))
        for taken in itertools.permutations(range(len(made.law)), draws):
            probability, left = 1.0, float(made.law.sum())
            for token in taken:
                probability *= float(made.law[token]) / left if left > 0.0 else 0.0
                left -= float(made.law[token])
            if probability > 0.0:
                tokens = (*taken, *(token for token in made.chosen if token not in taken))
                children = [(*prefixes[node], token) for token in tokens]
                kinds = [place < draws for place in range(len(tokens))]
                grow(
                    weight * probability,
                    prefixes + children,
                    parents + [node] * len(tokens),
                    drawn + kinds,
                )
        expanded.pop()

    def build(prefixes: list[Prefix], parents: list[int], drawn: list[bool]) -> TokenTree:
        tokens = torch.tensor([prefix[-1] if prefix else 0 for prefix in prefixes])
        laws = torch.stack([made.law for made in expanded])
        return TokenTree(
            tokens,
            torch.tensor(parents),
            proposal,
            None if proposal is Proposal.ONE_HOT else laws,
            torch.tensor(drawn) if proposal is Proposal.MIXED else None,
        )

    expanded: list[Plan] = []
    grow(1.0, [()], [-1], [False])
    return results


def by_depth(*widths: int) -> Callable[[Prefix], int]:
    return lambda prefix: widths[len(prefix)] if len(prefix) < len(widths) else 0


def drawn_trees(draft: Laws, widths: Callable[[Prefix], int]) -> WeightedTrees:
    """Every tree of tokens drawn without replacement, `widths(prefix)` children per node."""
    return drafted_trees(lambda prefix: Plan(draft(prefix), widths(prefix)), Proposal.DENSE)


def top_tree(draft: Laws, *widths: int) -> TokenTree:
    """The deterministic tree of the most likely draft tokens."""

    def plan(prefix: Prefix) -> Plan:
        law = draft(prefix)
        return Plan(law, 0, tuple(law.topk(by_depth(*widths)(prefix)).indices.tolist()))

    ((_, tree),) = drafted_trees(plan, Proposal.ONE_HOT)
    return tree


def greedy_draft(draft: Laws, *widths: int) -> Callable[[Prefix], Plan]:
    """All but one child the most likely ones S, and one drawn from the rest (arXiv:2502.18779)."""

    def plan(prefix: Prefix) -> Plan:
        width = by_depth(*widths)(prefix)
        rest = draft(prefix).clone()
        if width == 0:
            return Plan(rest)
        sure = rest.topk(width - 1).indices
        rest[sure] = 0.0
        return Plan(rest / rest.sum() if float(rest.sum()) > 0.0 else rest, 1, tuple(sure.tolist()))

    return plan


# Decoding with the noise in use -------------------------------------------------------------------


def decode(
    target: Laws,
    seed: int,
    length: int,
    rule: str,
    propose: Callable[[Prefix, int], TokenTree],
    coins: Coins | None = None,
) -> tuple[Prefix, int]:
    """Tokens, and the number of rounds they took. The root of round 0 sits at position -1.

    Args:
        propose: text so far and position of the root -> a tree.
        coins: in place of the noise keyed by `seed`.
    """
    tokens: Prefix = ()
    rounds = 0
    while len(tokens) < length:
        base = tokens
        tree = propose(base, len(base) - 1)

        def law(node: int, base: Prefix = base, tree: TokenTree = tree) -> Tensor:
            return target(base + prefix_of(tree, node))

        verdict = verify(tree, law, rule, seed, len(base) - 1, coins)
        assert verdict.next_token is not None
        tokens += (*(tree.token(node) for node in verdict.path), verdict.next_token)
        rounds += 1
    return tokens[:length], rounds


def chi_square(texts: Iterable[Prefix], target: Laws, length: int) -> float:
    """Pearson's statistic of texts of some length; V**length - 1 degrees of freedom."""
    counts = Counter(texts)
    expected = {text: p * counts.total() for text, p in sequence_law(target, length).items()}
    assert counts.keys() <= expected.keys()
    return sum((counts[text] - mean) ** 2 / mean for text, mean in expected.items())
