"""Expected tokens against the slow twins, choices by hand, and what may be looked at, exactly."""

import itertools
import math
import random

import pytest
import torch

from inference.scheduling.schedule import (
    Arm,
    Choice,
    Table,
    best_choice,
    chain_tokens,
    cut_chain,
    cut_tree,
    first_chain,
    least_survival,
    may_look,
    menu,
    plain_step,
    tree_tokens,
)
from inference.shapes.sequoia import expected_tokens
from inference.shapes.static_tree import optimal_static_tree
from inference.tree import Proposal, TokenTree
from tests.inference.oracles import (
    EXACT,
    Prefix,
    WeightedTrees,
    by_depth,
    drawn_trees,
    random_laws,
    total_variation,
)
from tests.inference.scheduling.costs import cost_table

TARGET, DRAFT = random_laws(5, 3), random_laws(10, 3)


# Expected tokens ----------------------------------------------------------------------------------


def test_a_chain_emits_a_geometric_sum() -> None:
    found = chain_tokens([0.8] * 5)
    assert found == pytest.approx([(1 - 0.8 ** (n + 1)) / 0.2 for n in range(6)])


def test_trees_of_all_sizes_equal_those_built_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        table = torch.rand(3, 4, generator=generator, dtype=torch.float64) / 4
        found = tree_tokens(table.tolist(), 12)
        for depth, size in itertools.product(range(1, 4), range(2, 13)):
            most = sum(4**level for level in range(1, depth + 1))
            shape = optimal_static_tree(table[:depth], min(size - 1, most))
            assert found[depth - 1][size - 1] == pytest.approx(
                expected_tokens(shape, table[:depth]), abs=1e-12
            )
        assert all(row[0] == 1.0 for row in found)


# Choices ------------------------------------------------------------------------------------------


def test_a_menu_holds_chains_of_all_lengths_and_trees_of_all_sizes() -> None:
    costs = cost_table({1: 1.0, 2: 1.0, 4: 1.5, 8: 2.0}, step=0.1, depth=3, rest=0.05)
    table = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.3, 0.2, 0.1]]
    found = menu(Arm("head", 3, 3, 8), table, costs, 0)
    chains = [choice for choice in found if choice.top_k == 1]
    assert [(choice.depth, choice.size) for choice in chains] == [(1, 2), (2, 3), (3, 4)]
    assert [choice.tokens for choice in chains] == pytest.approx([1.5, 1.7, 1.76])
    assert [choice.seconds for choice in chains] == pytest.approx([1.15, 1.5, 1.85])
    trees = {(choice.depth, choice.size): choice for choice in found if choice.top_k == 3}
    assert set(trees) == {(1, 4), (1, 8), (2, 4), (2, 8), (3, 8)}
    assert trees[1, 4].tokens == pytest.approx(1.8)
    assert trees[1, 8].tokens == pytest.approx(1.8)  # there are no more than three
    assert trees[2, 4].tokens == pytest.approx(1.0 + 0.5 + 0.2 + 0.2)
    assert trees[2, 8].seconds == pytest.approx(2.0 + 0.2 + 0.05)
    few = menu(Arm("head", 3, 3, 8), table, costs, 0, depth=2, size=4)
    assert {(c.depth, c.size, c.top_k) for c in few} == {(1, 2, 1), (2, 3, 1), (1, 4, 3), (2, 4, 3)}
    assert menu(Arm("head", 3, 3, 8), table, costs, 0, depth=0) == []
    assert menu(Arm("head", 3, 3, 8), table, costs, 0, size=1) == []


def test_copies_cost_no_drafting() -> None:
    costs = cost_table({1: 1.0, 4: 1.5}, step=0.1, depth=3)
    [one, *_] = menu(Arm("anything", 3, copies=True), [[0.5]] * 3, costs, 0)
    assert one.seconds == pytest.approx(costs.verify(2, 0))


def test_the_best_choice_is_that_of_a_full_search_and_may_be_none() -> None:
    source = random.Random(0)
    found = set()
    for _ in range(200):
        verify = {1: 1.0} | {n: source.uniform(0.8, 3.0) for n in (2, 3, 4, 6)}
        costs = cost_table(verify, step=source.uniform(0.0, 0.3), depth=5)
        rates = [[source.random()] for _ in range(5)]
        choices = [plain_step(costs, 0), *menu(Arm("head", 5), rates, costs, 0)]
        best = best_choice(choices)
        survival = [math.prod(rate for [rate] in rates[:n]) for n in range(6)]
        expected = [
            sum(survival[: n + 1]) / (costs.verify(n + 1, 0) + costs.draft("head", n))
            for n in range(6)
        ]
        assert best.rate == pytest.approx(max(expected))
        assert best.depth == expected.index(max(expected))
        found.add(best.depth)
    assert {0, 1, 5} <= found


def test_of_equal_choices_the_smallest_and_then_the_shallowest_is_taken() -> None:
    def choice(depth: int, size: int, tokens: float = 2.0) -> Choice:
        return Choice("head", depth, 1, size, tokens, tokens)

    assert best_choice([choice(3, 4), choice(2, 4), choice(2, 8)]).same == ("head", 2, 1, 4)
    held = choice(3, 4)
    better = Choice("head", 5, 1, 6, 2.02, 2.0)
    assert best_choice([held, better], held, 0.02) is held
    assert best_choice([held, better], held, 0.005) is better
    assert best_choice([better], held, 0.5) is better


# Within a round -----------------------------------------------------------------------------------


def test_a_chain_is_cut_where_the_rest_would_not_pay() -> None:
    source = random.Random(1)
    for _ in range(100):
        survival = sorted((source.random() for _ in range(6)), reverse=True)
        seconds = [1.0 + source.random() * n for n in range(7)]
        rate = source.uniform(0.1, 2.0)
        found = cut_chain(survival, rate, lambda rows, s=seconds: s[rows - 1])
        values = [sum(survival[:n]) - rate * seconds[n] for n in range(7)]
        assert values[found] == max(values)
    assert cut_chain([0.9], 1.0, lambda rows: 1.0) == 1
    assert cut_chain([0.0], 1.0, lambda rows: 1.0) == 0


def test_with_the_rate_of_the_optimum_no_other_policy_is_faster() -> None:
    """Two kinds of rounds, equally often; policies cut each to a length of its own."""
    kinds = [[0.9, 0.8, 0.7], [0.3, 0.1, 0.0]]
    seconds = [1.0, 1.2, 1.4, 1.6]

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = sum(1 + sum(kind[:n]) for kind, n in zip(kinds, lengths, strict=True))
        return tokens / sum(seconds[n] for n in lengths)

    best = max(itertools.product(range(4), repeat=2), key=rate)
    cuts = [cut_chain(kind, rate(best), lambda rows: seconds[rows - 1]) for kind in kinds]
    assert tuple(cuts) == best
    assert best[0] > best[1]


def test_drafting_never_stops_where_going_on_could_pay() -> None:
    source = random.Random(2)
    stopped = 0
    for _ in range(300):
        steps = [source.choice([0.0, 0.05, 0.2, 0.4]) for _ in range(5)]
        seconds = list(itertools.accumulate(steps, initial=1.0))
        rate = source.uniform(0.5, 2.0)
        least = least_survival(rate, seconds)
        stopped += least > 0
        for here in range(5):
            chances = [least * 0.999] * (5 - here)  # all that follow are as good as the next
            gains = [
                sum(chances[:more]) - rate * (seconds[here + more] - seconds[here])
                for more in range(1, 6 - here)
            ]
            assert max(gains) <= 1e-12
    assert stopped > 50
    assert least_survival(1.0, [1.0, 1.0, 2.0]) == 0.0  # a free row
    assert least_survival(0.5, [1.0, 1.2, 1.4]) == pytest.approx(0.1)


# What may be looked at ----------------------------------------------------------------------------


def test_what_may_be_looked_at() -> None:
    for rule, kind, temperature, drafts, others in (
        ("match", Proposal.ONE_HOT, 1.0, True, True),
        ("coupled", Proposal.COUPLED, 1.0, True, True),
        ("rejection", Proposal.ONE_HOT, 0.0, True, True),
        ("rejection", Proposal.ONE_HOT, 1.0, True, False),
        ("rejection", Proposal.DENSE, 1.0, False, False),
        ("block", Proposal.MIXED, 1.0, False, False),
    ):
        found = may_look(rule, kind, temperature)
        assert (found.drafts, found.others) == (drafts, others), (rule, kind)


def test_trees_are_cut_from_behind() -> None:
    tree = TokenTree(
        torch.tensor([9, 1, 2, 3, 4, 5]),
        torch.tensor([-1, 0, 1, 0, 2, 3]),
        Proposal.ONE_HOT,
        survival=torch.tensor([1.0, 0.9, 0.8, 0.7, 0.6, 0.5]),
    )
    assert cut_tree(tree, 9, 9) is tree
    cut = cut_tree(tree, 4, 9)
    assert cut.tokens.tolist() == [9, 1, 2, 3] and cut.parents.tolist() == [-1, 0, 1, 0]
    flat = cut_tree(tree, 9, 1)
    assert flat.tokens.tolist() == [9, 1, 3] and flat.parents.tolist() == [-1, 0, 0]
    assert flat.survival is not None and flat.survival.tolist() == pytest.approx([1.0, 0.9, 0.7])
    assert cut_tree(tree, 1, 9).num_nodes == 1
    assert first_chain(tree, 2).tokens.tolist() == [9, 1, 2]
    assert first_chain(tree, 9).tokens.tolist() == [9, 1, 2, 4]


def test_drawn_drafts_are_not_dropped() -> None:
    for _, tree in drawn_trees(DRAFT, by_depth(1, 1)):
        assert cut_tree(tree, 3, 2) is tree
        with pytest.raises(ValueError, match="DENSE tree holds drawn drafts"):
            cut_tree(tree, 2, 2)


def shortened(tree: TokenTree, drafts: int) -> TokenTree:
    """A drawn chain without its last drafts: what `cut_tree` refuses to do."""
    assert tree.draft_probs is not None
    end = drafts + 1
    return TokenTree(tree.tokens[:end], tree.parents[:end], tree.proposal, tree.draft_probs[:end])


def confident(prefix: Prefix) -> bool:
    """What a confidence output may say of a draft behind these tokens."""
    return prefix[-1] != 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_stopping_that_looks_at_the_draft_itself_is_biased(rule: str) -> None:
    likely = [float(DRAFT(())[token]) >= 0.4 for token in range(3)]
    assert 0 < sum(likely) < 3
    cut: WeightedTrees = [
        (weight, tree if likely[tree.token(1)] else shortened(tree, 0))
        for weight, tree in drawn_trees(DRAFT, by_depth(1, 1))
    ]
    assert total_variation(cut, TARGET, rule, 3) > 0.05


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_stopping_that_looks_at_what_is_behind_a_draft_is_biased(rule: str) -> None:
    """The first draft is dropped because of what was drawn after it."""
    cut: WeightedTrees = [
        (weight, tree if tree.token(2) == 0 else shortened(tree, 0))
        for weight, tree in drawn_trees(DRAFT, by_depth(1, 1))
    ]
    assert total_variation(cut, TARGET, rule, 3) > 0.05


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_stopping_that_looks_backwards_is_not(rule: str) -> None:
    def widths(prefix: Prefix) -> int:
        return int(not prefix or (len(prefix) < 3 and confident(prefix)))

    trees = drawn_trees(DRAFT, widths)
    assert {tree.num_nodes for _, tree in trees} == {2, 3, 4}
    assert total_variation(trees, TARGET, rule, 4) < EXACT


def test_chosen_drafts_may_be_dropped_for_any_reason() -> None:
    chains = [
        TokenTree.chain(torch.tensor([0, first, second]))
        for first, second in itertools.product(range(3), repeat=2)
    ]
    for seed, chain in enumerate(chains):
        cut = cut_tree(chain, 1 + seed % 3, 2)
        for rule in ("match", "rejection", "block"):
            assert total_variation([(1.0, cut)], TARGET, rule, 3) < EXACT


def every_product(table: Table, size: int) -> list[list[float]]:
    """The readable twin of `tree_tokens`: all nodes of the full tree, the best of them."""
    level, pool, found = [1.0], [1.0], []
    for rates in table:
        level = [value * rate for value in level for rate in rates if rate > 0.0]
        pool = pool + level
        best = sorted(pool, reverse=True)[:size]
        found.append([sum(best[: count + 1]) for count in range(size)])
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_best_nodes_are_those_of_the_full_tree(seed: int) -> None:
    """Ties, zeros and ranks out of order included."""
    source = random.Random(seed)
    table = [
        [source.choice([0.0, 0.1, 0.25, 0.25, round(source.random(), 2)]) for _ in range(4)]
        for _ in range(4)
    ]
    size = source.choice([1, 2, 3, 7, 16, 40])
    for own, twin in zip(tree_tokens(table, size), every_product(table, size), strict=True):
        assert own == pytest.approx(twin, rel=1e-12)


@pytest.mark.parametrize("copies", [False, True])
def test_everything_on_the_menu_is_priced_alike(copies: bool) -> None:
    costs = cost_table({1: 0.05, 2: 0.06, 4: 0.07, 8: 0.1}, step=0.004, rest=0.002, slope=0.1)
    arm = Arm("head", 3, 2, 8, copies=copies)
    table = [[0.6, 0.2], [0.5, 0.1], [0.4, 0.1]]
    found = menu(arm, table, costs, 500)
    for choice in found:
        drafting = 0.0 if copies else costs.draft("head", choice.depth, choice.top_k)
        assert choice.seconds == drafting + costs.verify(choice.size, 500) + costs.rest()
        rates = [row[: choice.top_k] for row in table[: choice.depth]]
        assert choice.tokens == pytest.approx(every_product(rates, choice.size)[-1][-1])
    chains = [(depth, 1, depth + 1) for depth in (1, 2, 3)]
    trees = [(deep, 2, nodes) for deep in (1, 2, 3) for nodes in (2, 4, 8) if nodes > deep + 1]
    assert [choice.same[1:] for choice in found] == chains + trees
