"""Tree shapes: hand-drawn masks, EAGLE-2 growth."""

import pytest
import torch

from inference.tree import (
    Candidates,
    Proposal,
    TokenTree,
    ancestor_mask,
    append,
    best_frontier,
    expand,
    rerank,
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
    assert tree.depth == 3 and TokenTree.chain(torch.tensor([4])).depth == 0
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


def mixed_tree(kinds: list[bool], **changes: object) -> TokenTree:
    fields = {
        "tokens": torch.tensor([0, 3, 1, 2]),
        "parents": torch.tensor([-1, 0, 0, 1]),
        "proposal": Proposal.MIXED,
        "draft_probs": torch.full((4, 5), 0.2),
        "drawn": torch.tensor(kinds),
    }
    return TokenTree(**{**fields, **changes})  # type: ignore[arg-type]


def test_mixed_trees_tell_drawn_from_chosen_tokens() -> None:
    tree = mixed_tree([False, True, False, True])
    assert [tree.is_drawn(node) for node in range(4)] == [False, True, False, True]
    with pytest.raises(ValueError, match="drawn children of a node must come before"):
        mixed_tree([False, False, True, True])
    with pytest.raises(ValueError, match="MIXED trees"):
        mixed_tree([True] * 4, drawn=None)
    with pytest.raises(ValueError, match="DENSE and MIXED trees"):
        mixed_tree([True] * 4, draft_probs=None)
    with pytest.raises(ValueError, match="the proposal is DENSE"):
        mixed_tree([True] * 4, proposal=Proposal.DENSE)
    with pytest.raises(ValueError, match=r"\(N=4,\) bool"):
        mixed_tree([True] * 3)
    with pytest.raises(ValueError, match="int64"):  # what it is, not what it should be
        mixed_tree([True] * 4, drawn=torch.ones(4, dtype=torch.long))


def test_the_kind_of_a_tree_is_that_of_its_tokens() -> None:
    """All but the root of a DENSE tree were drawn, and none of the deterministic kinds."""
    laws = torch.full((2, 10), 0.1)
    dense = TokenTree.chain(torch.tensor([5, 6, 7]), Proposal.DENSE, laws)
    assert [dense.is_drawn(node) for node in range(3)] == [False, True, True]
    for proposal in (Proposal.ONE_HOT, Proposal.COUPLED):
        tree = TokenTree.chain(torch.tensor([5, 6, 7]), proposal)
        assert not any(tree.is_drawn(node) for node in range(3))
    drawn = torch.tensor([False, False, True])
    chain = TokenTree.chain(torch.tensor([5, 6, 7]), Proposal.MIXED, laws, drawn)
    assert [chain.is_drawn(node) for node in range(3)] == drawn.tolist()


def test_a_chain_has_no_branches() -> None:
    assert TokenTree.chain(torch.tensor([5])).is_chain
    assert TokenTree.chain(torch.tensor([5, 6, 7])).is_chain
    assert not make_tree().is_chain
    assert not TokenTree(
        torch.tensor([5, 6, 7]), torch.tensor([-1, 0, 0]), Proposal.ONE_HOT
    ).is_chain


# Static trees -----------------------------------------------------------------------------------


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


def test_nodes_get_different_numbers_of_children() -> None:
    log_probs = torch.tensor([0.5, 0.25, 0.1]).log()
    parents, tokens = torch.tensor([1, 1, 2]), torch.tensor([30, 31, 32])
    candidates = append(grown(), parents, tokens, log_probs)
    assert candidates.tokens.tolist() == [50, 10, 11, 20, 21, 22, 23, 30, 31, 32]
    assert candidates.parents.tolist()[7:] == [1, 1, 2]
    assert torch.allclose(candidates.scores[7:].exp(), torch.tensor([0.3, 0.15, 0.03]))


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


@pytest.mark.parametrize("proposal", [Proposal.DENSE, Proposal.MIXED])
def test_drawn_trees_are_not_pruned(proposal: Proposal) -> None:
    with pytest.raises(AssertionError, match="biased"):
        rerank(grown(), 4, proposal)


def test_impossible_candidates_are_left_out() -> None:
    candidates = expand(
        Candidates.root(0),
        torch.tensor([0]),
        torch.tensor([[1, 2]]),
        torch.tensor([[0.0, -torch.inf]]),
    )
    assert best_frontier(candidates, start=1, width=2).tolist() == [1]
    assert rerank(candidates, size=2)[0].tokens.tolist() == [0, 1]
