"""Grown and static trees: which nodes they hold, and that drawn ones stay lossless.

Letters: V vocabulary, K depths of one pass.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import inference.proposers.growth as growth_module
from drafters import TargetModel, build_drafter
from inference.proposers import RowState, TreeOptions, build_proposer
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.growth import Growth, StaticGrowth, new_tree
from inference.proposers.laws import node_scores
from inference.proposers.marginals import grow_marginals
from inference.rules.acceptance import Coins, Verdict
from inference.sampling import SamplingParams
from inference.shapes.static_tree import static_tree
from inference.tree import Proposal, TokenTree
from inference.verify import verify
from tests.inference.drafting import decode, noisy_copy, plain
from tests.inference.oracles import (
    EXACT,
    Laws,
    Prefix,
    outcomes,
    prefix_of,
    random_logits,
    sequence_law,
    warped,
)
from tests.tiny import tiny_target

CPU = torch.device("cpu")
Chances = Callable[[Prefix], float]


def state_of(depth: int, sampling: SamplingParams | None = None) -> RowState:
    return RowState([4, 0], 1, None, torch.zeros(0, 1), depth, sampling or SamplingParams())


def grow(
    options: TreeOptions,
    state: RowState,
    logits: Laws,
    rule: str = "match",
    vocab: int = 9,
    columns: list[int] | None = None,
    chances: Chances | None = None,
) -> TokenTree:
    """Level by level, as proposers that draft step by step do."""
    ids = None if columns is None else torch.tensor(columns)
    tree = new_tree(options, state, rule, CPU, vocab, ids)
    frontier = torch.zeros(1, dtype=torch.int64)
    while len(frontier):
        above = tree.candidates
        so_far = [path(above.tokens, above.parents, node) for node in frontier.tolist()]
        rows = torch.stack([logits(prefix) for prefix in so_far])
        given = None if chances is None else torch.tensor([chances(prefix) for prefix in so_far])
        tree.add_children(frontier, rows, given)
        frontier = tree.frontier() if tree.levels < tree.depth else frontier[:0]
    return tree.finish()[0]


def path(tokens: Tensor, parents: Tensor, node: int) -> Prefix:
    found: list[int] = []
    while node > 0:
        found.append(int(tokens[node]))
        node = int(parents[node])
    return tuple(found[::-1])


def prefixes(tree: TokenTree) -> list[Prefix]:
    return [prefix_of(tree, node) for node in range(tree.num_nodes)]


# Static trees -----------------------------------------------------------------------------------


SHAPE = static_tree([(0,), (2,), (0, 1), (2, 0), (2, 3), (2, 3, 0), (2, 3, 0, 1)])


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_a_shape_is_filled_with_the_tokens_of_its_ranks(rule: str) -> None:
    sampling = SamplingParams(0.7, seed=5)
    logits = random_logits(3, 9)
    options = TreeOptions(size=2, depth=1, top_k=1, shape=SHAPE)  # the shape alone counts
    tree = grow(options, state_of(9, sampling), logits, rule)
    expected: list[Prefix] = [()]
    kind = Proposal.COUPLED if rule == "coupled" else Proposal.ONE_HOT
    for ranks in SHAPE.paths():
        prefix: Prefix = ()
        for depth, rank in enumerate(ranks):
            scores = node_scores(logits(prefix)[None], None, sampling, kind, 2 + depth, 0.8)[0]
            prefix = (*prefix, int(scores.argsort(descending=True)[rank]))
        expected.append(prefix)
    assert prefixes(tree) == expected and tree.proposal is kind
    assert tree.parents.tolist() == SHAPE.parents.tolist()


def test_a_shape_is_cut_where_the_text_ends() -> None:
    whole = grow(TreeOptions(shape=SHAPE), state_of(9), random_logits(3, 9))
    for depth in range(5):
        cut = grow(TreeOptions(shape=SHAPE), state_of(depth), random_logits(3, 9))
        assert prefixes(cut) == [prefix for prefix in prefixes(whole) if len(prefix) <= depth]


def test_only_inner_nodes_are_expanded() -> None:
    tree = new_tree(TreeOptions(shape=SHAPE), state_of(9), "match", CPU, 9)
    assert isinstance(tree, StaticGrowth) and tree.depth == 4
    root = torch.zeros(1, dtype=torch.int64)
    tree.add_children(root, torch.randn(1, 9))
    assert tree.frontier().tolist() == [1, 2]
    tree.add_children(tree.frontier(), torch.randn(2, 9))
    assert tree.frontier().tolist() == [5]


@pytest.mark.parametrize("columns", [[1, 4, 7], [2, 3]])
def test_ranks_beyond_the_vocabulary_stay_empty(columns: list[int]) -> None:
    logits = random_logits(3, len(columns))
    tree = grow(TreeOptions(shape=SHAPE), state_of(9), logits, columns=columns)
    assert set(tree.tokens[1:].tolist()) <= set(columns)
    assert len(tree.children(0)) == (2 if len(columns) > 2 else 1)
    tree = grow(TreeOptions(shape=static_tree([(5,)])), state_of(9), logits, columns=columns)
    assert tree.num_nodes == 1


def test_impossible_tokens_are_not_proposed() -> None:
    def logits(prefix: Prefix) -> Tensor:
        return torch.tensor([0.0, -torch.inf, 1.0, -torch.inf])

    tree = grow(TreeOptions(shape=SHAPE), state_of(9), logits, vocab=4)
    assert prefixes(tree) == [(), (2,), (2, 0)]


def test_drawn_children_take_the_places_of_the_shape() -> None:
    """As many at each node as it has children, the j-th with the subtree of the j-th."""
    options = TreeOptions(shape=SHAPE)
    state = state_of(9, SamplingParams(1.0, seed=2))
    tree = grow(options, state, random_logits(3, 9), "rejection")
    assert tree.proposal is Proposal.DENSE and tree.parents.tolist() == SHAPE.parents.tolist()
    tree = grow(replace(options, draws="one"), state, random_logits(3, 9), "rejection")
    assert tree.proposal is Proposal.MIXED and tree.parents.tolist() == SHAPE.parents.tolist()
    inner = [node for node in range(tree.num_nodes) if tree.children(node)]
    for node in inner:
        kinds = [tree.is_drawn(child) for child in tree.children(node)]
        assert kinds == [True] + [False] * (len(kinds) - 1)


def test_a_law_with_too_few_tokens_leaves_the_last_places_empty() -> None:
    sampling = SamplingParams(1.0, top_k=1, seed=2)
    for draws in ("all", "one"):
        options = TreeOptions(shape=SHAPE, draws=draws)
        tree = grow(options, state_of(9, sampling), random_logits(3, 9), "rejection")
        assert tree.parents.tolist() == [-1, 0, 1]  # of (0,) and (0, 1)


# How likely it is that a node's children are reached ----------------------------------------------


def chance(prefix: Prefix) -> float:
    generator = torch.Generator().manual_seed(hash((77, *prefix)) % 2**63)
    return float(torch.rand(1, generator=generator))


def survives(prefix: Prefix, least: float) -> bool:
    """Whether a node has children: the product over its path, its own included."""
    product = 1.0
    for end in range(len(prefix) + 1):
        product *= float(torch.tensor(chance(prefix[:end])))
    return product >= least


@pytest.mark.parametrize("shape", [None, SHAPE])
@pytest.mark.parametrize("least", [0.05, 0.2, 0.5])
def test_nodes_unlikely_to_be_passed_get_no_children(shape: Any, least: float) -> None:
    logits = random_logits(6, 9)
    options = TreeOptions(400, 4, 3, shape=shape)
    whole = prefixes(grow(options, state_of(9), logits))
    cut = prefixes(grow(replace(options, min_survival=least), state_of(9), logits, chances=chance))
    if shape is not None:  # a grown tree may use the room for other nodes
        assert cut == [p for p in whole if all(survives(p[:e], least) for e in range(len(p)))]
    assert all(survives(prefix[:-1], least) for prefix in cut if prefix)
    assert len(cut) < len(whole) or least < 0.1
    inner = {prefix[:-1] for prefix in cut if prefix}
    assert inner or not survives((), least)


def test_all_nodes_survive_a_sure_head() -> None:
    logits = random_logits(6, 9)
    plain = grow(TreeOptions(12, 3, 3), state_of(9), logits)
    sure = grow(TreeOptions(12, 3, 3, min_survival=0.9), state_of(9), logits, chances=lambda _: 1.0)
    assert prefixes(plain) == prefixes(sure)


def test_a_root_without_hope_is_a_tree() -> None:
    for shape in (None, SHAPE):
        options = TreeOptions(12, 3, 3, min_survival=0.9, shape=shape)
        tree = grow(options, state_of(9), random_logits(6, 9), chances=lambda _: 0.5)
        assert tree.num_nodes == 1


def test_survival_needs_chances() -> None:
    for shape in (None, SHAPE):
        options = TreeOptions(min_survival=0.1, shape=shape)
        with pytest.raises(ValueError, match="confidence"):
            grow(options, state_of(9), random_logits(6, 9))
    with pytest.raises(ValueError, match="confidence"):
        marginals(TreeOptions(min_survival=0.1), "match", torch.randn(2, 9), None)


# Exact laws ---------------------------------------------------------------------------------------


COLUMNS = [0, 2, 3]
SAMPLING = SamplingParams(0.9)
DRAFTS = random_logits(8, len(COLUMNS), 0.7)
PASS = torch.stack([DRAFTS((9, depth)) for depth in range(3)])  # (K, Vd), whatever the path


def counted_draws(coins: Coins) -> Callable[[Tensor, Tensor, int], Tensor]:
    """`draw_top` whose draws are choices of the coins."""

    def draw_top(law: Tensor, noise: Tensor, count: int) -> Tensor:
        left, taken = law.clone(), []
        for _ in range(min(count, int((law > 0).sum()))):
            support = left.nonzero().flatten()
            taken.append(int(support[coins.draw(left[support], 0)]))
            left[taken[-1]] = 0.0
        return torch.tensor(taken, dtype=torch.int64)

    return draw_top


def distance(make: Callable[[], TokenTree], rule: str, length: int, sampling: Any = None) -> float:
    """Total variation between what a rule emits and the target's law, over every draw."""
    target_law = warped(random_logits(7, 4, 0.7), sampling or SAMPLING)
    found: Counter[Prefix] = Counter()

    def walk(coins: Coins) -> tuple[TokenTree, Verdict]:
        with mock.patch.object(growth_module, "draw_top", counted_draws(coins)):
            tree = make()
        laws = {node: target_law(prefix_of(tree, node)) for node in range(tree.num_nodes)}
        return tree, verify(tree, laws.__getitem__, rule, 0, 1, coins)

    every: Any = outcomes(walk)  # type: ignore[arg-type]
    for probability, (tree, verdict) in every:
        text = (*(tree.token(node) for node in verdict.path), verdict.next_token)
        for whole, rest in sequence_law(target_law, length - len(text), text).items():
            found[whole] += probability * rest
    expected = sequence_law(target_law, length)
    return 0.5 * sum(abs(found[t] - expected.get(t, 0.0)) for t in {*found, *expected})


UNEVEN = static_tree([(0,), (1,), (1, 0), (1, 1)])
FIRST = static_tree([(0,), (0, 0), (0, 1), (1,)])
CHAIN = static_tree([(0,), (0, 0), (0, 0, 0)])


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (TreeOptions(shape=UNEVEN), "rejection"),
        (TreeOptions(shape=UNEVEN, draws="one"), "rejection"),
        (TreeOptions(shape=static_tree([(0,), (0, 0), (2,), (5,)])), "rejection"),
        (TreeOptions(shape=CHAIN), "block"),
        (TreeOptions(shape=CHAIN, min_survival=0.3), "block"),
        (TreeOptions(shape=UNEVEN, min_survival=0.3), "rejection"),
        (TreeOptions(shape=FIRST, min_survival=0.3, draws="one"), "rejection"),
        (TreeOptions(5, 2, 2, min_survival=0.3), "rejection"),
        (TreeOptions(4, 3, 1, min_survival=0.3), "block"),
        (TreeOptions(6, 2, 2, draws="one", min_survival=0.3), "rejection"),
        (TreeOptions(5, 2, 2, draws="none", min_survival=0.3), "rejection"),
    ],
)
def test_drawn_trees_are_lossless(options: TreeOptions, rule: str) -> None:
    """With a reduced vocabulary, and hopes that differ between drawn tokens."""
    state = state_of(options.longest, SAMPLING)
    hope = None if options.min_survival == 0.0 else hopes
    kept: list[tuple[int, ...]] = []

    def make() -> TokenTree:
        tree = grow(options, state, DRAFTS, rule, 4, COLUMNS, hope)
        kept.append(tuple(tree.parents.tolist()))
        return tree

    assert distance(make, rule, options.longest + 1) < EXACT
    assert options.min_survival == 0.0 or options.draws == "none" or len(set(kept)) > 1


def hopes(prefix: Prefix) -> float:
    """The root is always passed, and one token of each of the others' is not."""
    return 0.1 if prefix and prefix[-1] == 3 else 0.9


@pytest.mark.parametrize("warper", [{"top_k": 2}, {"top_p": 0.6}])
def test_drawn_shapes_follow_the_warpers(warper: dict[str, Any]) -> None:
    sampling = SamplingParams(0.9, **warper)
    state, options = state_of(2, sampling), TreeOptions(shape=UNEVEN)
    found = distance(
        lambda: grow(options, state, DRAFTS, "rejection", 4, COLUMNS), "rejection", 3, sampling
    )
    assert found < EXACT


def test_to_give_up_after_the_draw_would_be_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: children are dropped for what they are."""
    draw_children = Growth._draw_children

    def regretting(self: Growth, frontier: Tensor, logits: Tensor) -> None:
        before = self.candidates
        draw_children(self, frontier, logits)
        if int(self.candidates.tokens[-1]) == 2:
            self.candidates = before

    monkeypatch.setattr(Growth, "_draw_children", regretting)
    options, state = TreeOptions(2, 1, 1), state_of(1, SAMPLING)
    found = distance(lambda: grow(options, state, DRAFTS, "rejection", 4, COLUMNS), "rejection", 2)
    assert found > 0.01


# Laws of one pass ---------------------------------------------------------------------------------


def marginals(
    options: TreeOptions,
    rule: str,
    rows: Tensor,
    acceptance: Tensor | None = None,
    state: RowState | None = None,
    columns: list[int] | None = None,
) -> TokenTree:
    ids = None if columns is None else torch.tensor(columns)
    vocab = 4 if columns is not None else rows.shape[-1]
    return grow_marginals(options, state or state_of(9), rule, rows, acceptance, vocab, ids)


@pytest.mark.parametrize("rule", ["match", "coupled", "rejection"])
@pytest.mark.parametrize("size", [2, 3, 9, 30, 200])
def test_best_paths_of_one_pass(rule: str, size: int) -> None:
    """What step-by-step growth of unlimited width keeps, drafting the same laws on every path."""
    rows = torch.randn(3, 5, generator=torch.Generator().manual_seed(size)) * 2
    state = state_of(9, SamplingParams(0.8, seed=size))
    found = marginals(TreeOptions(size, 9, 5), rule, rows, state=state)
    wide = TreeOptions(size, 3, 125, draws="none")
    slow = grow(wide, state, lambda prefix: rows[len(prefix)], rule, 5)
    assert set(prefixes(found)) == set(prefixes(slow)) and found.proposal is slow.proposal
    assert found.num_nodes == min(size, 1 + 5 + 25 + 125)


def test_branch_and_depth_bound_the_paths() -> None:
    rows = torch.randn(4, 6)
    tree = marginals(TreeOptions(60, 2, 3), "match", rows)
    best = rows.topk(3).indices.tolist()
    pairs = itertools.product(best[0], best[1])
    assert set(prefixes(tree)) == {(), *((token,) for token in best[0]), *pairs}
    chain = marginals(TreeOptions(60, 9, 1), "match", rows)
    assert chain.is_chain and chain.tokens.tolist()[1:] == rows.argmax(-1).tolist()
    for depth in range(4):
        cut = marginals(TreeOptions(60, 9, 3), "match", rows, state=state_of(depth))
        assert int(cut.depths.max()) == depth


def test_one_pass_fills_a_shape() -> None:
    rows = torch.randn(3, 6)
    tree = marginals(TreeOptions(shape=SHAPE), "match", rows)
    ranked = rows.argsort(-1, descending=True).tolist()
    expected = [tuple(ranked[k][r] for k, r in enumerate(p)) for p in SHAPE.paths() if len(p) <= 3]
    assert prefixes(tree)[1:] == expected


def test_nothing_of_one_pass_is_drawn_unless_asked_for() -> None:
    rows, state = torch.randn(3, 6), state_of(9, SamplingParams(1.0, seed=3))
    kinds = {None: Proposal.ONE_HOT, "all": Proposal.DENSE, "one": Proposal.MIXED}
    for draws, kind in kinds.items():
        tree = marginals(TreeOptions(9, 3, 2, draws=draws), "rejection", rows, state=state)
        assert tree.proposal is kind
        tree = marginals(TreeOptions(shape=UNEVEN, draws=draws), "rejection", rows, state=state)
        assert tree.proposal is kind


@pytest.mark.parametrize("shape", [None, SHAPE])
def test_one_pass_goes_as_deep_as_it_is_sure(shape: Any) -> None:
    rows, acceptance = torch.randn(4, 9), torch.tensor([0.9, 0.8, 0.5, 0.99])
    for least, depth in ((0.95, 0), (0.75, 1), (0.7, 2), (0.4, 2), (0.358, 3), (0.3, 4)):
        options = TreeOptions(200, 9, 3, min_survival=least, shape=shape)
        assert int(marginals(options, "match", rows, acceptance).depths.max()) == depth
    tree = marginals(TreeOptions(200, 9, 3, shape=shape), "match", rows, acceptance)
    assert int(tree.depths.max()) == 4


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (TreeOptions(4, 3, 1, draws="all"), "block"),
        (TreeOptions(4, 3, 1, draws="all"), "rejection"),
        (TreeOptions(5, 2, 2, draws="all"), "rejection"),
        (TreeOptions(4, 2, 2, draws="one"), "rejection"),
        (TreeOptions(5, 2, 2), "rejection"),
        (TreeOptions(shape=UNEVEN, draws="all"), "rejection"),
        (TreeOptions(shape=CHAIN, draws="all", min_survival=0.6), "block"),
    ],
)
def test_trees_of_one_pass_are_lossless(options: TreeOptions, rule: str) -> None:
    state = state_of(options.longest, SAMPLING)
    acceptance = torch.tensor([0.9, 0.8, 0.5])

    def make() -> TokenTree:
        return marginals(options, rule, PASS, acceptance, state, COLUMNS)

    assert distance(make, rule, options.longest + 1) < EXACT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_survival": 1.0}, "min_survival"),
        ({"min_survival": -0.1}, "min_survival"),
        ({"shape": static_tree([])}, "shape"),
        ({"shape": SHAPE, "grown": True}, "grown"),
        ({"draws": "two"}, "draws"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeOptions(**options)


def test_what_options_say_of_their_trees() -> None:
    assert TreeOptions(9, 3, 1).chains and not TreeOptions(9, 3, 2).chains
    assert TreeOptions(shape=CHAIN).chains and not TreeOptions(9, 3, 1, shape=UNEVEN).chains
    assert TreeOptions(9, 3, 1).longest == 3 and TreeOptions(shape=SHAPE).longest == 4


# In the decoder -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["match", "coupled"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.9, top_p=0.9, seed=3)])
def test_static_trees_of_a_draft_model_change_nothing(rule: str, sampling: SamplingParams) -> None:
    target = the_target()
    draft = noisy_copy(target, tiny_target, 0.1)
    proposer = DraftModelProposer(draft, TreeOptions(shape=SHAPE))
    found = decode(target, proposer, sampling=sampling, rule=rule, record_rounds=True)
    assert found.sequences == plain_texts(sampling)
    assert found.stats.num_accepted_tokens > 5
    sizes = [done.tree.num_nodes for done in found.rounds]
    assert max(sizes) == SHAPE.num_nodes and max(found.stats.proposed_by_depth) == SHAPE.depth


def test_a_draft_model_has_no_confidence() -> None:
    with pytest.raises(ValueError, match="min_survival"):
        DraftModelProposer(tiny_target(), TreeOptions(min_survival=0.1))


@pytest.mark.parametrize("rule", ["match", "coupled"])
@pytest.mark.parametrize("shape", [None, SHAPE])
def test_a_doubtful_head_drafts_less_and_changes_nothing(rule: str, shape: Any) -> None:
    target, sampling = the_target(), SamplingParams(0.9, seed=3)
    head = build_drafter("eagle3", target, confidence_head=True, seed=1).double().eval()
    head.set_draft_vocab(torch.ones(target.vocab_size))
    assert head.confidence is not None
    torch.nn.init.normal_(head.confidence.proj.weight, std=0.3)
    drafted = []
    for least in (0.0, 0.2, 0.6):
        proposer = build_proposer(head, TreeOptions(12, 3, 3, shape=shape, min_survival=least))
        found = decode(target, proposer, sampling=sampling, rule=rule)
        assert found.sequences == plain_texts(sampling)
        drafted.append(found.stats.num_draft_tokens)
    assert drafted[0] > drafted[1] > drafted[2]


def plain_texts(sampling: SamplingParams) -> list[list[int]]:
    return plain(the_target(), sampling)


@functools.cache
def the_target() -> TargetModel:
    return tiny_target()
