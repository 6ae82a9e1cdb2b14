"""What a round would accept along a text, against enumeration of drafts and of the verifier.

Letters: V vocabulary, x a text, S survival.
"""

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from inference.prediction.survival import chain_survival, drawn_survival, path_survival
from inference.tree import Proposal, TokenTree
from tests.inference.oracles import (
    Laws,
    WeightedTrees,
    by_depth,
    drafted_trees,
    drawn_trees,
    greedy_draft,
    outcomes,
    prefix_of,
    random_laws,
    walk_of,
)

VOCAB = 3


class KnownLaws:
    """The target's laws along one text, in place of `TextLaws`."""

    def __init__(self, target: Laws, text: tuple[int, ...]) -> None:
        self.target, self.text = target, text

    def law(self, place: int) -> torch.Tensor:
        return self.target(self.text[:place]).double()


def share(target: Laws, text: tuple[int, ...]) -> float:
    return math.prod(float(target(text[:n])[text[n]]) for n in range(len(text)))


def enumerated(trees: WeightedTrees, target: Laws, rule: str, text: tuple[int, ...]) -> float:
    """P(a round accepts all of the text) / P(the target emits it)."""
    found = 0.0
    for weight, tree in trees:
        for probability, verdict in outcomes(walk_of(tree, target, rule)):
            kept = prefix_of(tree, verdict.path[-1]) if verdict.path else ()
            found += weight * probability * (kept[: len(text)] == text)
    return found / share(target, text)


def texts(longest: int) -> list[tuple[int, ...]]:
    return [
        text
        for length in range(1, longest + 1)
        for text in itertools.product(range(VOCAB), repeat=length)
    ]


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("seed", [1, 4])
def test_drawn_chains_have_exact_survival(rule: str, seed: int) -> None:
    target, draft = random_laws(seed, VOCAB), random_laws(seed + 50, VOCAB)
    trees = drawn_trees(draft, by_depth(1, 1, 1))
    for text in texts(3):
        ratios = [
            float(draft(text[:n])[text[n]] / target(text[:n])[text[n]]) for n in range(len(text))
        ]
        expected = enumerated(trees, target, rule, text)
        assert chain_survival(ratios, rule)[-1] == pytest.approx(expected, abs=1e-12)


def test_the_textbook_example() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 accepted by token, 11/9 by block."""
    p, q = torch.tensor([1 / 3, 2 / 3]), torch.tensor([2 / 3, 1 / 3])
    for rule, expected in (("rejection", 10 / 9), ("block", 11 / 9)):
        found = 0.0
        for text in itertools.product(range(2), repeat=2):
            ratios = [float(q[token] / p[token]) for token in text]
            found += math.prod(float(p[t]) for t in text) * sum(chain_survival(ratios, rule))
        assert found == pytest.approx(expected, abs=1e-6)


def mixed(draft: Laws) -> WeightedTrees:
    return drafted_trees(greedy_draft(draft, 2, 2), Proposal.MIXED)


def top_down(draft: Laws) -> WeightedTrees:
    return drawn_trees(draft, by_depth(2, 1))


@pytest.mark.parametrize("trees_of", [top_down, mixed])
def test_trees_of_drawn_drafts_are_right_on_average(
    trees_of: Callable[[Laws], WeightedTrees],
) -> None:
    target, draft = random_laws(2, VOCAB), random_laws(9, VOCAB)
    trees = trees_of(draft)
    for text in texts(2):
        found = 0.0
        for weight, tree in trees:
            estimate = drawn_survival(tree, text, KnownLaws(target, text), 0)
            found += weight * estimate[len(text) - 1]
        expected = enumerated(trees, target, "rejection", text)
        assert found == pytest.approx(expected, abs=1e-12)


def test_equal_laws_accept_whatever_is_drawn() -> None:
    target = random_laws(3, VOCAB)
    for _, tree in drawn_trees(target, by_depth(1)):
        found = drawn_survival(tree, (1,), KnownLaws(target, (1,)), 0)
        assert found == pytest.approx([1.0])


def test_chosen_drafts_accept_the_text_as_far_as_it_is_a_path() -> None:
    tree = TokenTree(
        torch.tensor([9, 1, 2, 3, 4]), torch.tensor([-1, 0, 0, 1, 3]), Proposal.ONE_HOT
    )
    assert path_survival(tree, [1, 3, 4, 5]) == [1.0, 1.0, 1.0]
    assert path_survival(tree, [1, 3, 5]) == [1.0, 1.0, 0.0]
    assert path_survival(tree, [2, 3, 4]) == [1.0, 0.0, 0.0]
    assert path_survival(tree, [7, 3]) == [0.0, 0.0] and path_survival(tree, []) == []
