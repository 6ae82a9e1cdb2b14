"""Tree shapes: hand-drawn masks, Medusa's static trees against brute force, EAGLE-2 growth."""

import itertools
import math

import pytest
import torch

from inference.tree import (
    Candidates,
    Proposal,
    TokenTree,
    ancestor_mask,
    best_frontier,
    expand,
    optimal_static_tree,
    rerank,
    static_tree,
)

#        0
#      /   \
#     1     2
#    / \     \
#   3   4     5
#       |
#       6
PARENTS = [-1, 0, 0, 1, 1, 2, 4]


def make_tree() -> TokenTree:
    tokens = torch.tensor([7, 1, 2, 3, 4, 3, 9])
    return TokenTree(tokens, torch.tensor(PARENTS), Proposal.ONE_HOT)


def test_mask_equals_the_drawn_one() -> None:
    drawn = """
        1 . . . . . .
        1 1 . . . . .
        1 . 1 . . . .
        1 1 . 1 . . .
        1 1 . . 1 . .
        1 . 1 . . 1 .
        1 1 . . 1 . 1
    """
    expected = [
        [cell == "1" for cell in line.split()] for line in drawn.split("\n") if line.strip()
    ]
    assert make_tree().ancestor_mask().tolist() == expected


def test_mask_takes_several_roots() -> None:
    mask = ancestor_mask(torch.tensor([-1, -1, 1]))
    assert mask.int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]


def test_depths_paths_and_children() -> None:
    tree = make_tree()
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert tree.path(6) == [0, 1, 4, 6]
    assert tree.path(0) == [0]
    assert tree.children(1) == [3, 4]
    assert tree.children(6) == []
    assert tree.child_with_token(1, 3) == 3
    assert tree.child_with_token(2, 3) == 5  # the same token below another parent
    assert tree.child_with_token(1, 9) is None
    assert (tree.num_nodes, tree.num_draft_tokens) == (7, 6)
    assert tree.token(6) == 9


def test_children_keep_their_order_of_proposal() -> None:
    tree = TokenTree(torch.tensor([0, 9, 4, 6]), torch.tensor([-1, 0, 0, 0]), Proposal.ONE_HOT)
    assert [tree.token(child) for child in tree.children(0)] == [9, 4, 6]


def test_chain() -> None:
    laws = torch.full((2, 10), 0.1)
    tree = TokenTree.chain(torch.tensor([5, 6, 7]), Proposal.DENSE, laws)
    assert tree.parents.tolist() == [-1, 0, 1]
    assert tree.depths.tolist() == [0, 1, 2]
    assert tree.draft_probs is not None
    assert torch.equal(tree.draft_probs, torch.cat([laws, torch.zeros(1, 10)]))
    assert TokenTree.chain(torch.tensor([5])).num_draft_tokens == 0
    with pytest.raises(ValueError, match="N-1=2"):
        TokenTree.chain(torch.tensor([5, 6, 7]), Proposal.DENSE, torch.full((3, 10), 0.1))


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([], [], "hold the root"),
        ([1, 2], [-1], "equal length"),
        ([1, 2], [0, 0], r"parents\[0\] must be -1"),
        ([1, 2, 3], [-1, 2, 0], r"parents\[1\] is 2"),
        ([1, 2], [-1, -1], r"parents\[1\] is -1"),
        ([1, 2, 2], [-1, 0, 0], "two children"),
    ],
)
def test_malformed_trees_are_refused(tokens: list[int], parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree(
            torch.tensor(tokens, dtype=torch.long),
            torch.tensor(parents, dtype=torch.long),
            Proposal.ONE_HOT,
        )


def test_int32_is_refused() -> None:
    with pytest.raises(ValueError, match="int64"):
        TokenTree(torch.tensor([1], dtype=torch.int32), torch.tensor([-1]), Proposal.ONE_HOT)


def test_draft_probs_go_with_drawn_trees_only() -> None:
    tokens, parents, laws = torch.tensor([0, 3]), torch.tensor([-1, 0]), torch.full((2, 4), 0.25)
    assert TokenTree(tokens, parents, Proposal.DENSE, laws).draft_probs is laws
    with pytest.raises(ValueError, match="DENSE"):
        TokenTree(tokens, parents, Proposal.DENSE)
    with pytest.raises(ValueError, match="ONE_HOT"):
        TokenTree(tokens, parents, Proposal.ONE_HOT, laws)
    with pytest.raises(ValueError, match="one row per node"):
        TokenTree(tokens, parents, Proposal.DENSE, laws[:1])
    with pytest.raises(ValueError, match="covers 3 tokens but 3"):
        TokenTree(tokens, parents, Proposal.DENSE, laws[:, :3])


# Static trees -----------------------------------------------------------------------------------


def test_static_tree_from_rank_paths() -> None:
    tree = static_tree([(1,), (0, 2), (0,), (1, 0), (0, 0), (0, 2, 1)])
    # order: (0,) (1,) (0,0) (0,2) (1,0) (0,2,1)
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2, 4]
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert tree.ranks.tolist() == [0, 0, 1, 0, 2, 0, 1]


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


# Dynamic growth ---------------------------------------------------------------------------------


def grown() -> Candidates:
    """Root 50 with 10 (0.6) and 11 (0.3); 10 with 20 (0.5), 21 (0.4); 11 with 22 (0.9), 23."""
    candidates = expand(
        Candidates.root(50),
        torch.tensor([0]),
        torch.tensor([[10, 11]]),
        torch.tensor([[0.6, 0.3]]).log(),
    )
    return expand(
        candidates,
        torch.tensor([1, 2]),
        torch.tensor([[20, 21], [22, 23]]),
        torch.tensor([[0.5, 0.4], [0.9, 0.1]]).log(),
    )


def test_expand_accumulates_and_keeps_everything() -> None:
    candidates = grown()
    assert candidates.tokens.tolist() == [50, 10, 11, 20, 21, 22, 23]
    assert candidates.parents.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    expected = [1.0, 0.6, 0.3, 0.3, 0.24, 0.27, 0.03]
    assert torch.allclose(candidates.scores.exp(), torch.tensor(expected))


def test_frontier_is_the_best_of_the_newest_level() -> None:
    assert best_frontier(grown(), start=3, width=2).tolist() == [3, 5]
    assert best_frontier(grown(), start=3, width=9).tolist() == [3, 5, 4, 6]


def test_rerank_keeps_the_best_in_order_of_creation() -> None:
    tree, kept = rerank(grown(), size=4)
    # 10 (0.6), then 11 and 20 (0.3), then 22 (0.27); 21 (0.24) and 23 fall out
    assert kept.tolist() == [0, 1, 2, 3, 5]
    assert tree.tokens.tolist() == [50, 10, 11, 20, 22]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 2]
    assert tree.proposal is Proposal.ONE_HOT
    assert rerank(grown(), 4, Proposal.COUPLED)[0].proposal is Proposal.COUPLED


def test_rerank_takes_fewer_when_there_are_fewer() -> None:
    assert rerank(grown(), size=60)[0].num_draft_tokens == 6


def test_rerank_keeps_parents_on_ties() -> None:
    """A certain child (probability 1) scores exactly as its parent does."""
    candidates = Candidates.root(0)
    for depth in range(4):
        frontier = torch.tensor([2 * depth - 1 if depth else 0])
        tokens = torch.tensor([[2 * depth + 1, 2 * depth + 2]])
        candidates = expand(candidates, frontier, tokens, torch.tensor([[0.0, -3.0]]))
    for size in range(1, 9):
        tree, kept = rerank(candidates, size)
        assert tree.num_draft_tokens == size
        assert set(candidates.parents[kept[1:]].tolist()) <= set(kept.tolist())
    assert rerank(candidates, 4)[0].tokens.tolist() == [0, 1, 3, 5, 7]


def test_impossible_candidates_are_left_out() -> None:
    candidates = expand(
        Candidates.root(0),
        torch.tensor([0]),
        torch.tensor([[1, 2]]),
        torch.tensor([[0.0, -torch.inf]]),
    )
    assert best_frontier(candidates, start=1, width=2).tolist() == [1]
    assert rerank(candidates, size=2)[0].tokens.tolist() == [0, 1]
