"""Sequoia's programme against every tree there is, and against the greedy search."""

import functools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from inference.shapes.sequoia import choose_tree, expected_tokens, optimal_tree
from inference.shapes.static_tree import optimal_static_tree, static_tree

Path = tuple[int, ...]


def every_tree(nodes: int, depth: int, width: int) -> Iterator[list[Path]]:
    """Rank paths of all trees of exactly so many nodes, where no child is skipped."""

    @functools.cache
    def below(nodes: int, depth: int) -> list[list[Path]]:
        """Of a root with any number of children, itself among the nodes."""
        if nodes == 1:
            return [[]]
        return [] if depth == 0 else forests(nodes - 1, depth - 1, 0)

    def forests(nodes: int, depth: int, first: int) -> list[list[Path]]:
        if nodes == 0:
            return [[]]
        if first == width:
            return []
        return [
            [(first,), *((first, *path) for path in own), *others]
            for share in range(1, nodes + 1)
            for own in below(share, depth)
            for others in forests(nodes - share, depth, first + 1)
        ]

    yield from below(nodes, depth)


def value(paths: list[Path], table: Tensor) -> float:
    return 1.0 + sum(math.prod(float(table[k, r]) for k, r in enumerate(path)) for path in paths)


def rates(seed: int, depths: int, width: int, rising: bool) -> Tensor:
    """A table of rates whose rows sum to less than 1."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(depths, width, generator=generator, dtype=torch.float64)
    table = 0.9 * table / table.sum(1, keepdim=True)
    return table if rising else table.sort(dim=1, descending=True).values


def test_there_are_as_many_trees_as_catalan_numbers() -> None:
    assert [sum(1 for _ in every_tree(n, 9, 9)) for n in range(1, 8)] == [1, 1, 2, 5, 14, 42, 132]


@pytest.mark.parametrize("rising", [False, True])
@pytest.mark.parametrize("size", [2, 3, 5, 7, 8])
@pytest.mark.parametrize(("depth", "width"), [(1, 3), (2, 3), (3, 2), (4, 4)])
def test_no_tree_is_better(depth: int, width: int, size: int, rising: bool) -> None:
    for seed in range(3):
        table = rates(seed, 4, 4, rising)
        shape, expected = optimal_tree(table, size, depth, width)
        assert shape.num_nodes <= size and shape.depth <= depth and int(shape.ranks.max()) < width
        best = max(
            value(paths, table)
            for nodes in range(1, size + 1)
            for paths in every_tree(nodes, depth, width)
        )
        assert expected == pytest.approx(best, abs=1e-12)
        assert value(shape.paths(), table) == pytest.approx(expected, abs=1e-12)
        assert expected_tokens(shape, table) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("size", [2, 6, 13, 40])
def test_the_greedy_search_agrees_where_rates_fall(size: int) -> None:
    """It may take any ranks, but has no reason to skip one; where rates rise it does."""
    for seed in range(4):
        table = rates(seed, 5, 6, rising=False)
        greedy = expected_tokens(optimal_static_tree(table, size - 1), table)
        assert optimal_tree(table, size)[1] == pytest.approx(greedy, abs=1e-12)
        table = rates(seed, 5, 6, rising=True)
        greedy = expected_tokens(optimal_static_tree(table, size - 1), table)
        assert optimal_tree(table, size)[1] <= greedy + 1e-12
    table = torch.tensor([[0.1, 0.7]])
    assert optimal_static_tree(table, 1).paths() == [(1,)]
    assert optimal_tree(table, 2)[0].paths() == [(0,)]  # the second is not tried before the first


def test_one_row_of_rates_serves_all_depths() -> None:
    row = torch.tensor([0.6, 0.2, 0.1])
    shape, expected = optimal_tree(row, 12, depth=4)
    again, same = optimal_tree(row.expand(4, -1), 12)
    assert shape.paths() == again.paths() and expected == pytest.approx(same, abs=1e-12)


def test_nodes_that_are_never_accepted_are_left_out() -> None:
    shape, expected = optimal_tree(torch.tensor([[0.5, 0.0], [0.5, 0.0]]), 9)
    assert sorted(shape.paths()) == [(0,), (0, 0)] and expected == pytest.approx(1.75)


def test_the_fastest_tree_is_chosen() -> None:
    """Against a search over all depths and sizes by hand."""
    table = rates(5, 4, 3, rising=False)
    verify = {2: 1.0, 4: 1.1, 8: 1.3, 16: 2.6}
    for step in (0.01, 0.2, 1.5):
        draft = [step * depth for depth in range(1, 5)]
        found = choose_tree(table, verify, draft)
        every = {
            (draft[depth - 1] + seconds) / optimal_tree(table, size, depth)[1]: (size, depth)
            for size, seconds in verify.items()
            for depth in range(1, 5)
        }
        size, depth = every[min(every)]
        assert found.seconds_per_token == pytest.approx(min(every), abs=1e-12)
        assert found.shape.num_nodes <= size and found.shape.depth <= depth
        assert expected_tokens(found.shape, table) == pytest.approx(found.tokens_per_round)


def test_costs_decide_the_shape() -> None:
    table = torch.tensor([[0.6, 0.2, 0.1]] * 6)
    sizes = range(2, 33)
    free = choose_tree(table, dict.fromkeys(sizes, 1.0), [0.0] * 6)
    assert free.shape.num_nodes == 32 and free.shape.depth > 3
    steep = choose_tree(table, {size: float(size) for size in sizes}, [0.0] * 6)
    assert steep.shape.num_nodes == 2
    slow = choose_tree(table, dict.fromkeys(sizes, 1.0), [5.0 * depth for depth in range(1, 7)])
    assert slow.shape.depth < free.shape.depth


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (torch.tensor([0.5]), {"size": 4}, "with a depth"),
        (torch.tensor([[1.5]]), {"size": 4}, r"\[0, 1\]"),
        (torch.tensor([[0.6, 0.6]]), {"size": 4}, "sum to more than 1"),
        (torch.tensor([[0.6]]), {"size": 4, "depth": 2}, r"1\.\.1"),
        (torch.tensor([[0.6]]), {"size": 4, "width": 0}, "width"),
        (torch.tensor([[0.6]]), {"size": 1}, "size must be"),
        (torch.tensor([[0.0]]), {"size": 4}, "nothing to draft"),
    ],
)
def test_refusals(table: Tensor, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimal_tree(table, **options)


def test_nothing_to_choose_from() -> None:
    table = torch.tensor([[0.5]])
    with pytest.raises(ValueError, match="at least one size"):
        choose_tree(table, {1: 1.0}, [0.1])
    with pytest.raises(ValueError, match="nothing to draft"):
        choose_tree(0 * table, {2: 1.0}, [0.1])


def test_expected_tokens_of_a_shape() -> None:
    table = torch.tensor([[0.5, 0.3], [0.4, 0.2]], dtype=torch.float64)
    shape = static_tree([(0,), (1,), (1, 1)])
    assert expected_tokens(shape, table) == pytest.approx(1 + 0.5 + 0.3 + 0.3 * 0.2)
