"""Admission over a batch: against every other choice, and without bias where it looks backwards."""

import itertools
import random

import pytest

from inference.admission import admit, padded_width
from tests.inference.oracles import EXACT, WeightedTrees, by_depth, drawn_trees, total_variation
from tests.inference.test_schedule import DRAFT, TARGET, shortened


def chains(source: random.Random, rows: int, depth: int) -> list[list[float]]:
    return [
        list(itertools.accumulate((source.random() for _ in range(depth)), lambda a, b: a * b))
        for _ in range(rows)
    ]


def rate(survival: list[list[float]], counts: tuple[int, ...] | list[int], seconds: list) -> float:
    tokens = len(survival) + sum(sum(c[:n]) for c, n in zip(survival, counts, strict=True))
    return tokens / seconds[sum(counts)]


def best_of_all(survival: list[list[float]], seconds: list[float]) -> float:
    every = itertools.product(*(range(len(chain) + 1) for chain in survival))
    return max(rate(survival, n, seconds) for n in every if sum(n) < len(seconds))


def test_any_cost_gets_its_optimum() -> None:
    source = random.Random(0)
    for _ in range(100):
        survival = chains(source, 3, 3)
        seconds = [1.0 + source.random() for _ in range(source.choice([4, 10]))]
        found = admit(survival, seconds, backward=False)
        assert rate(survival, found, seconds) == pytest.approx(best_of_all(survival, seconds))


def test_looking_backwards_is_optimal_where_rows_get_dearer() -> None:
    source = random.Random(1)
    sizes = set()
    for _ in range(100):
        survival = chains(source, 3, 3)
        steps = sorted(source.uniform(0.0, 0.4) for _ in range(9))
        seconds = list(itertools.accumulate(steps, initial=1.0))
        found = admit(survival, seconds, backward=True)
        assert rate(survival, found, seconds) == pytest.approx(best_of_all(survival, seconds))
        sizes.add(sum(found))
    assert len(sizes) > 3


def test_looking_backwards_may_stop_short_of_a_step() -> None:
    survival, seconds = [[0.9, 0.9]], [1.0, 2.0, 2.0]
    assert admit(survival, seconds, backward=True) == [0]
    assert admit([[0.9, 0.9, 0.9]], [1.0, 2.0, 2.0, 1.9], backward=False) == [3]


def test_likelier_drafts_go_first_and_ties_to_the_earlier_sequence() -> None:
    survival = [[0.5, 0.5], [0.9, 0.1], [0.5]]
    assert admit(survival, [1.0, 1.0, 1.0], backward=True) == [1, 1, 0]
    assert admit(survival, [1.0], backward=True) == [0, 0, 0]


def admitted(seconds: list[float], backward: bool) -> WeightedTrees:
    """Chains of two drafts, cut by survival; what is said of the second depends on the first."""
    found: WeightedTrees = []
    for weight, tree in drawn_trees(DRAFT, by_depth(1, 1)):
        second = 0.9 if tree.token(1) == 0 else 0.1
        [drafts] = admit([[0.5, 0.5 * second]], seconds, backward)
        found.append((weight, shortened(tree, drafts)))
    return found


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("seconds", [[1.0, 1.6, 1.61], [1.0, 1.2, 1.4]])
def test_admission_of_drawn_drafts_must_look_backwards(rule: str, seconds: list[float]) -> None:
    assert total_variation(admitted(seconds, True), TARGET, rule, 3) < EXACT
    stairs = seconds[1] > 1.5  # the second draft decides about the first
    looking = total_variation(admitted(seconds, False), TARGET, rule, 3)
    assert (looking > 0.05) == stairs


def test_backward_admission_admits_different_numbers() -> None:
    sizes = {tree.num_nodes for _, tree in admitted([1.0, 1.2, 1.4], True)}
    assert sizes == {2, 3}


def test_padded_batches_share_one_width() -> None:
    source = random.Random(2)
    for _ in range(50):
        survival, seconds = chains(source, 3, 4), [1.0 + source.random() for _ in range(5)]
        found = padded_width(survival, seconds)
        rates = [(3 + sum(sum(chain[:n]) for chain in survival)) / seconds[n] for n in range(5)]
        assert rates[found] == max(rates)
    assert padded_width([[0.9]], [1.0]) == 0
