"""Medusa's static trees: from rank paths, and the optimal one against brute force."""

import itertools
import math

import pytest
import torch

from inference.shapes.static_tree import StaticTree, best_first, optimal_static_tree, static_tree


def test_static_tree_from_rank_paths() -> None:
    tree = static_tree([(1,), (0, 2), (0,), (1, 0), (0, 0), (0, 2, 1)])
    # order: (0,) (1,) (0,0) (0,2) (1,0) (0,2,1)
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2, 4]
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert tree.ranks.tolist() == [0, 0, 1, 0, 2, 0, 1]


def test_what_a_shape_knows_of_itself() -> None:
    paths = [(0,), (1,), (0, 2), (0, 0), (1, 0), (0, 2, 1)]
    tree = static_tree(paths)
    assert (tree.num_nodes, tree.depth, tree.is_chain) == (7, 3, False)
    assert (
        sorted(tree.paths()) == sorted(paths) and static_tree(tree.paths()).paths() == tree.paths()
    )
    assert tree.children == [[1, 2], [3, 4], [5], [], [6], [], []]
    assert static_tree([(3,), (3, 1)]).is_chain and static_tree([]).is_chain
    by_hand = StaticTree(torch.tensor([-1, 0, 0]), torch.tensor([0, 1, 1]), torch.tensor([0, 4, 2]))
    assert by_hand.children == [[2, 1], [], []]  # best rank first


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([(0,), (1, 0)], "without its parent"),
        ([(0,), (0,)], "twice"),
        ([()], "empty"),
        ([(-1,)], "negative"),
    ],
)
def test_static_tree_refuses(ranks: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        static_tree(ranks)


def best_value_by_brute_force(accuracy: torch.Tensor, size: int) -> float:
    num_heads, num_ranks = accuracy.shape
    paths = [
        path
        for depth in range(1, num_heads + 1)
        for path in itertools.product(range(num_ranks), repeat=depth)
    ]
    value = {p: math.prod(accuracy[k, r].item() for k, r in enumerate(p)) for p in paths}
    trees = (
        chosen
        for chosen in itertools.combinations(paths, size)
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    )
    return max(sum(value[path] for path in tree) for tree in trees)


@pytest.mark.parametrize("size", [1, 2, 4, 5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_optimal_static_tree_beats_every_other(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    accuracy = torch.rand(2, 3, generator=generator, dtype=torch.float64)  # ranks unsorted
    tree = optimal_static_tree(accuracy, size)
    assert len(tree.parents) == size + 1
    value = [1.0]
    for node in range(1, size + 1):
        head, rank = int(tree.depths[node]) - 1, int(tree.ranks[node])
        value.append(value[int(tree.parents[node])] * accuracy[head, rank].item())
    assert sum(value[1:]) == pytest.approx(best_value_by_brute_force(accuracy, size), abs=1e-12)


def test_optimal_static_tree_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="size 7 exceeds the 6 nodes"):
        optimal_static_tree(torch.full((2, 2), 0.5), 7)
    with pytest.raises(ValueError, match=r"entries in \[0, 1\]"):
        optimal_static_tree(torch.full((2, 2), 1.5), 2)


# Laws of one pass ---------------------------------------------------------------------------------


def sorted_laws(seed: int, depths: int, ranks: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    laws = torch.randn(depths, 12, generator=generator, dtype=torch.float64) * 2
    return laws.log_softmax(-1).topk(ranks).values


@pytest.mark.parametrize("size", [1, 2, 5, 11, 30, 39, 100])
@pytest.mark.parametrize(("depths", "ranks"), [(1, 3), (3, 3), (2, 5), (4, 2)])
def test_best_paths_against_all_paths(depths: int, ranks: int, size: int) -> None:
    for seed in range(4):
        laws = sorted_laws(seed, depths, ranks)
        every = [
            path
            for depth in range(1, depths + 1)
            for path in itertools.product(range(ranks), repeat=depth)
        ]
        every.sort(key=lambda path: -sum(laws[k, r].item() for k, r in enumerate(path)))
        assert set(best_first(laws, size).paths()) == set(every[:size])


def test_impossible_paths_are_left_out() -> None:
    laws = torch.tensor([[-0.1, -2.0, -torch.inf], [-0.5, -torch.inf, -torch.inf]])
    assert best_first(laws, 50).paths() == [(0,), (1,), (0, 0), (1, 0)]
    assert best_first(laws[:0], 5).num_nodes == 1
    assert best_first(torch.full((2, 2), -torch.inf), 5).num_nodes == 1


def test_ties_keep_the_parents() -> None:
    """Of equally good paths a parent is taken before its children."""
    tree = best_first(torch.zeros(3, 2), 3)
    assert tree.num_nodes == 4  # `static_tree` refuses paths without their parents


def test_unsorted_laws_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="unsorted"):
        best_first(torch.tensor([[-2.0, -1.0]]), 2)
