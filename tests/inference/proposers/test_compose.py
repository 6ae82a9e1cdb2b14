"""Several proposers, one tree: what is kept, in what order, and that the law is the target's."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import Eagle3Drafter, TargetModel, build_drafter
from inference.cache import TreeCache
from inference.engine import EagerEngine
from inference.generate import plain_generate, speculative_generate
from inference.proposers import SequentialProposer
from inference.proposers.base import Proposer, Resume, RowState, Session
from inference.proposers.compose import ComposedProposer, merge_trees, select_layers
from inference.proposers.growth import TreeOptions
from inference.proposers.ngram import NgramProposer
from inference.proposers.suffix import SuffixProposer
from inference.sampling import SamplingParams
from inference.timing import PhaseTimer
from inference.tree import Proposal, TokenTree
from tests.inference.oracles import (
    EXACT,
    WeightedTrees,
    by_depth,
    drafted_trees,
    drawn_trees,
    expected_accepted,
    greedy_draft,
    prefix_of,
    random_laws,
    total_variation,
)
from tests.tiny import tiny_target

Path = tuple[int, ...]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module")
def head(target: TargetModel) -> Eagle3Drafter:
    head = build_drafter("eagle3", target, seed=3).double()
    head.set_draft_vocab(torch.arange(target.vocab_size))
    assert isinstance(head, Eagle3Drafter)
    return head.eval()


def tree_of(*found: Path, kind: Proposal = Proposal.ONE_HOT, root: int = 0) -> TokenTree:
    """A tree with these paths, in this order; every prefix must be among them."""
    place = {(): 0} | {path: node for node, path in enumerate(found, start=1)}
    return TokenTree(
        torch.tensor([root, *(path[-1] for path in found)]),
        torch.tensor([-1, *(place[path[:-1]] for path in found)]),
        kind,
    )


def paths(tree: TokenTree) -> list[Path]:
    return [prefix_of(tree, node) for node in range(1, tree.num_nodes)]


def sure(tree: TokenTree, *chances: float) -> TokenTree:
    """The tree with predictions of its draft tokens."""
    return replace(tree, survival=torch.tensor([1.0, *chances]))


class Fixed(Proposer):
    """Proposes given trees, asks for given layers, and remembers what it was told."""

    def __init__(
        self, *trees: TokenTree | None, layers: tuple[int, ...] = (), resumes: Resume | None = None
    ) -> None:
        self.trees, self.layers, self.resumes = list(trees), layers, resumes
        self.calls: list[tuple] = []
        self.states: list[Sequence[RowState | None]] = []

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.layers

    def start(self, session: Session) -> None:
        self.calls.append(("start", session))

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        self.states.append(states)
        return self.trees

    def finish(self, row: int, tokens: list[int]) -> None:
        self.calls.append(("finish", row, tokens))

    def resume(self) -> Resume | None:
        return self.resumes


def state(features: torch.Tensor | None = None) -> RowState:
    return RowState([5, 0], 1, features, torch.zeros(1, 4), 9, SamplingParams())


def session(target: TargetModel, rule: str = "match") -> Session:
    return Session(
        EagerEngine(target), TreeCache(target.model.config, 1, 64), 1, PhaseTimer(), rule, [0]
    )


# Merging -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Proposal.ONE_HOT, Proposal.COUPLED])
def test_predictions_stay_with_the_heads_own_nodes(kind: Proposal) -> None:
    head = sure(tree_of((1,), (2,), (1, 3), kind=kind), 0.8, 0.7, 0.5)
    copied = tree_of((1,), (1, 4), (1, 3), (1, 3, 5), (6,))
    merged = merge_trees([head, copied], 99)
    assert paths(merged) == [(1,), (2,), (1, 3), (1, 4), (1, 3, 5), (6,)]
    assert merged.survival is not None
    assert merged.survival.tolist() == pytest.approx(
        [1.0, 0.8, 0.7, 0.5, math.nan, math.nan, math.nan], nan_ok=True
    )
    cut = merge_trees([head, copied], 3).survival
    assert cut is not None and cut.tolist() == pytest.approx([1.0, 0.8, 0.7])
    assert merge_trees([copied, tree_of((1,))], 99).survival is None


def test_a_prediction_is_one_for_the_heads_first_child() -> None:
    """Copied nodes come first here, and make the head's second child the first."""
    head = sure(tree_of((2,), (1,), (1, 3)), 0.8, 0.7, 0.5)
    merged = merge_trees([tree_of((1,), (4,)), head], 99)
    assert paths(merged) == [(1,), (4,), (2,), (1, 3)]
    assert merged.survival is not None
    assert merged.survival.tolist() == pytest.approx(
        [1.0, math.nan, math.nan, 0.8, 0.5], nan_ok=True
    )


def test_predictions_of_drawn_nodes_stay_too() -> None:
    [(_, drawn), *_] = drawn_trees(random_laws(2, 4), by_depth(2))
    merged = merge_trees([tree_of((0,), (1,), (2,), (3,)), sure(drawn, 0.6, 0.4)], 99)
    assert merged.proposal is Proposal.MIXED and merged.survival is not None
    assert merged.survival.tolist() == pytest.approx(
        [1.0, 0.6, 0.4, math.nan, math.nan], nan_ok=True
    )


def test_the_same_path_is_one_node_and_earlier_proposers_come_first() -> None:
    first = tree_of((1,), (2,), (1, 3))
    second = tree_of((1,), (1, 4), (1, 3), (1, 3, 5), (6,))
    both = [(1,), (2,), (1, 3), (1, 4), (1, 3, 5), (6,)]
    assert paths(merge_trees([first, second], 99)) == both
    assert paths(merge_trees([first, second], 6)) == both[:5]
    assert paths(merge_trees([first, second], 3)) == both[:2]


def test_below_a_node_that_was_cut_nothing_is_kept() -> None:
    merged = merge_trees([tree_of((1,), (2,)), tree_of((3,), (3, 1), (1,), (1, 7))], 3)
    assert paths(merged) == [(1,), (2,)]


RANDOM_TREE = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=6
).map(
    lambda ends: tree_of(
        *dict.fromkeys(end[:size] for end in ends for size in range(1, len(end) + 1))
    )
)


@settings(deadline=None, max_examples=200)
@given(trees=st.lists(RANDOM_TREE, min_size=2, max_size=4), size=st.integers(2, 20))
def test_merged_trees_hold_the_union_as_far_as_the_budget_goes(
    trees: list[TokenTree], size: int
) -> None:
    merged = paths(merge_trees(trees, size))
    union = list(dict.fromkeys(path for tree in trees for path in paths(tree)))
    assert len(merged) == min(size - 1, len(union))
    if len(union) < size:
        assert merged == union
    known: list[Path] = []  # priority: all of the first trees, or nothing of the later ones
    for tree in trees:
        known += [path for path in paths(tree) if path not in known]
        if len(known) >= size - 1:
            assert set(merged) <= set(known)
            break
        assert set(known) <= set(merged)


def test_noise_coupled_and_chosen_nodes_are_verified_as_coupled() -> None:
    coupled, chosen = tree_of((1,), kind=Proposal.COUPLED), tree_of((2,))
    for trees in ([coupled, chosen], [chosen, coupled]):
        assert merge_trees(trees, 9).proposal is Proposal.COUPLED
    assert merge_trees([chosen, chosen], 9).proposal is Proposal.ONE_HOT


# Drawn trees -------------------------------------------------------------------------------------

LOOKUP = tree_of((2,), (2, 0), (2, 0, 1), (3,), (1,), (1, 1))


def by_path(path: Path) -> int:
    """Two children of the root; the odd one gets a child."""
    return 0 if len(path) > 1 else (2, sum(path) % 2)[len(path)]


PLANS = {
    "drawn": lambda: drawn_trees(random_laws(201, 4), by_depth(2, 1)),
    "drawn by path": lambda: drawn_trees(random_laws(201, 4), by_path),
    "one drawn": lambda: drafted_trees(greedy_draft(random_laws(201, 4), 2, 2), Proposal.MIXED),
}


def merged_with_lookup(trees: WeightedTrees, size: int, lookup_first: bool) -> WeightedTrees:
    return [
        (weight, merge_trees([LOOKUP, tree] if lookup_first else [tree, LOOKUP], size))
        for weight, tree in trees
    ]


@pytest.mark.parametrize("lookup_first", [False, True])
@pytest.mark.parametrize("size", [2, 7, 99])
@pytest.mark.parametrize("plan", list(PLANS))
def test_drawn_nodes_keep_their_place_and_law(plan: str, size: int, lookup_first: bool) -> None:
    trees = PLANS[plan]()
    for (_, drawn), (_, merged) in zip(
        trees, merged_with_lookup(trees, size, lookup_first), strict=True
    ):
        count = drawn.num_nodes
        assert merged.num_nodes == max(count, min(size, len({*paths(drawn), *paths(LOOKUP)}) + 1))
        assert paths(merged)[: count - 1] == paths(drawn)
        assert merged.draft_probs is not None and drawn.draft_probs is not None
        assert torch.equal(merged.draft_probs[:count], drawn.draft_probs)
        assert [merged.is_drawn(node) for node in range(merged.num_nodes)] == [
            node < count and drawn.is_drawn(node) for node in range(merged.num_nodes)
        ]
        if merged.num_nodes == count:
            assert merged is drawn
        else:
            assert merged.proposal is Proposal.MIXED
            assert set(paths(merged)[count - 1 :]) <= set(paths(LOOKUP))


@pytest.mark.parametrize("size", [7, 99])
@pytest.mark.parametrize("plan", list(PLANS))
def test_rejection_on_merged_trees_is_lossless(plan: str, size: int) -> None:
    """Size 7 cuts: which looked-up nodes remain depends on what was drawn."""
    target = random_laws(200, 4)
    trees = merged_with_lookup(PLANS[plan](), size, False)
    length = 1 + max(int(tree.depths.max()) for _, tree in trees)
    assert total_variation(trees, target, "rejection", length) < EXACT


def test_looked_up_nodes_add_to_what_is_accepted() -> None:
    target = random_laws(200, 4)
    drawn = PLANS["drawn"]()
    both = merged_with_lookup(drawn, 99, False)
    alone = expected_accepted(drawn, target, "rejection")
    assert expected_accepted(both, target, "rejection") > alone + 0.1


def test_control_dropping_drawn_nodes_is_seen() -> None:
    """The test above must not pass for a merge that cuts drawn nodes to make room."""
    target = random_laws(200, 4)
    dropped = []
    for weight, tree in PLANS["drawn"]():
        kept = [node for node in range(3) if node == 0 or tree.token(node) != 2]  # 2 was looked up
        assert tree.draft_probs is not None
        dropped.append(
            (
                weight,
                TokenTree(
                    torch.tensor([*(tree.token(node) for node in kept), 2]),
                    torch.tensor([-1] + [0] * len(kept)),
                    Proposal.MIXED,
                    tree.draft_probs[[0] * (len(kept) + 1)],
                    torch.tensor([node > 0 for node in kept] + [False]),
                ),
            )
        )
    assert total_variation(dropped, target, "rejection", 2) > 1e-3


# The proposer ------------------------------------------------------------------------------------


def test_members_get_their_own_columns_of_the_features() -> None:
    members = [Fixed(layers=(4, 1)), Fixed(), Fixed(layers=(1, 6)), Fixed(layers=(6,))]
    for member in members:
        member.trees = [tree_of((1,)), None]
    composed = ComposedProposer(*members, size=9)
    assert composed.feature_layers == (4, 1, 6)
    features = torch.tensor([[4.0, 4.5, 1.0, 1.5, 6.0, 6.5]]).repeat(3, 1)
    trees = composed.propose([state(features), None])
    assert trees[1] is None
    given = []
    for member in members:
        ((row, ended),) = member.states
        assert row is not None and ended is None
        assert row.tokens == [5, 0]
        given.append(None if row.features is None else row.features[2].tolist())
    assert given == [[4.0, 4.5, 1.0, 1.5], None, [1.0, 1.5, 6.0, 6.5], [6.0, 6.5]]


def test_all_layers_in_order_are_passed_on_without_a_copy() -> None:
    features = torch.zeros(2, 6)
    assert select_layers(features, (3, 5), (3, 5)) is features
    assert select_layers(None, (), ()) is None


def test_start_and_finish_reach_every_member(target: TargetModel) -> None:
    members = [Fixed(), Fixed()]
    composed = ComposedProposer(*members, size=9)
    call = session(target)
    composed.start(call)
    composed.finish(0, [1, 2])
    assert all(member.calls == [("start", call), ("finish", 0, [1, 2])] for member in members)


def test_two_proposers_that_draw_are_refused() -> None:
    ((_, drawn), *_) = drawn_trees(random_laws(1, 3), by_depth(1))
    composed = ComposedProposer(Fixed(tree_of((1,))), Fixed(drawn), Fixed(drawn), size=9)
    with pytest.raises(ValueError, match="Fixed and Fixed both draw"):
        composed.propose([state()])


def test_work_of_one_member_is_not_resumed() -> None:
    assert ComposedProposer(Fixed(), Fixed(), size=9).resume() is None
    ahead = Fixed(resumes=Resume(2, torch.zeros(1, 2, 4)))
    with pytest.raises(ValueError, match="Fixed has run layers"):
        ComposedProposer(Fixed(), ahead, size=9).resume()


def test_block_is_refused_before_any_token(target: TargetModel) -> None:
    composed = ComposedProposer(NgramProposer(), SuffixProposer(), size=9)
    with pytest.raises(ValueError, match="'block' verifies chains"):
        speculative_generate(target, composed, [[5, 6]], max_new_tokens=9, rule="block")


def test_refuses_options() -> None:
    member = Fixed()
    with pytest.raises(ValueError, match="two or more"):
        ComposedProposer(member, size=9)
    with pytest.raises(ValueError, match="given twice"):
        ComposedProposer(member, member, size=9)
    with pytest.raises(ValueError, match="size >= 2"):
        ComposedProposer(member, Fixed(), size=1)


PROMPTS = [[5, 6, 7, 8, 5, 6], [9] * 9, [30, 31]]


@pytest.mark.parametrize(
    ("rule", "temperature", "kind"),
    [
        ("match", 0.0, Proposal.ONE_HOT),
        ("match", 0.9, Proposal.ONE_HOT),
        ("coupled", 0.9, Proposal.COUPLED),
        ("rejection", 0.0, Proposal.ONE_HOT),
    ],
)
def test_output_is_plain_decoding(
    target: TargetModel, head: Eagle3Drafter, rule: str, temperature: float, kind: Proposal
) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=3, seed=5)
    composed = ComposedProposer(
        SequentialProposer(head, TreeOptions(size=8, depth=3, top_k=2)),
        NgramProposer(size=6),
        SuffixProposer(offset=4),
        size=16,
    )
    plain = plain_generate(target, PROMPTS, max_new_tokens=30, sampling=sampling)
    for _ in range(2):  # the second time with the outputs of the first in mind
        drafted = speculative_generate(
            target,
            composed,
            PROMPTS,
            max_new_tokens=30,
            sampling=sampling,
            rule=rule,
            record_rounds=True,
        )
        assert drafted.sequences == plain.sequences
        assert {done.tree.proposal for done in drafted.rounds} == {kind}
        assert max(done.tree.num_nodes for done in drafted.rounds) == 16
    assert drafted.num_forwards < 29


def test_drawn_and_looked_up_drafts_are_both_accepted(
    target: TargetModel, head: Eagle3Drafter
) -> None:
    composed = ComposedProposer(
        SequentialProposer(head, TreeOptions(size=8, depth=3, top_k=2)), SuffixProposer(), size=20
    )
    sampling = SamplingParams(temperature=0.7, seed=5)
    prompts = [[5, 6, 7] * 6, [9] * 9]
    accepted: set[bool] = set()
    for _ in range(3):
        done = speculative_generate(
            target,
            composed,
            prompts,
            max_new_tokens=40,
            sampling=sampling,
            rule="rejection",
            record_rounds=True,
        )
        for one in done.rounds:
            node = 0
            for token in one.accepted:
                child = one.tree.child_with_token(node, token)
                assert child is not None
                node = child
                accepted.add(one.tree.is_drawn(node))
    assert accepted == {True, False}
