"""Block heads in the decoder: the training pass again, the target's tokens, the true laws."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import TargetModel
from inference.cache import TreeCache
from inference.engine import EagerEngine
from inference.proposers import RowState, Session, build_proposer
from inference.proposers import block as block_module
from inference.proposers.block import BlockProposer
from inference.proposers.context_cache import ContextCache
from inference.proposers.growth import TreeOptions
from inference.sampling import SamplingParams, probabilities
from inference.shapes.static_tree import static_tree
from inference.timing import PhaseTimer
from inference.tree import Proposal, TokenTree
from recipes.parity import decode_rounds
from tests.blocks import VARIANTS, block_head, block_objective
from tests.inference.drafting import GREEDY, SAMPLED, WARPED, decode, plain
from tests.tiny import tiny_target
from training.data.batches import collate
from training.data.chat import TokenizedRow
from training.features import TargetBatch, run_target

IDS = torch.randint(3, 96, (31,), generator=torch.Generator().manual_seed(0)).tolist()
TREE = TreeOptions(size=12, depth=4, top_k=3)


@functools.cache
def target() -> TargetModel:
    return tiny_target()


@functools.cache
def head_of(name: str) -> Any:
    family, options = VARIANTS[name]
    return block_head(target(), family, **options)


def proposer_of(name: str, options: TreeOptions = TREE) -> BlockProposer:
    proposer = build_proposer(head_of(name), options)
    assert isinstance(proposer, BlockProposer)
    return proposer


def begin(proposer: BlockProposer, rule: str = "match") -> None:
    cache = TreeCache(target().model.config)
    proposer.start(Session(EagerEngine(target()), cache, 1, PhaseTimer(), rule, [0]))


@functools.cache
def document(layers: tuple[int, ...]) -> TargetBatch:
    rows = [[TokenizedRow(IDS, [True] * len(IDS))]]
    return run_target(target(), collate(rows, len(IDS)), layers)


def state_at(head: Any, root: int, start: int = 0, sampling: SamplingParams = GREEDY) -> RowState:
    """The text up to ``root``, of which positions from ``start`` are new."""
    data = document(head.feature_layers)
    assert data.features is not None
    part = slice(start, root)
    return RowState(
        IDS[: root + 1], 1, data.features[0, part], data.last_hidden[0, part], 9, sampling
    )


# --- parity: the decoder drafts what training has drafted


@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_gives_the_logits_of_the_training_pass(name: str) -> None:
    """Through rounds of a real decode, with wrong branches and a cache, at every depth."""
    head, proposer = head_of(name), proposer_of(name)
    objective = block_objective(head).eval()
    data = document(head.feature_layers)
    begin(proposer)
    compared = 0
    for state in decode_rounds(target(), IDS, head.feature_layers):
        root = len(state.tokens) - 1
        drafted = proposer.forced(state, IDS[root + 1 :])
        trained = objective.forced(data, torch.tensor([root]))
        assert len(drafted) == min(head.num_drafts, len(IDS) - root)
        for depth, logits in enumerate(drafted):
            expected = objective.logits(trained[depth][0], depth)
            torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)
            compared += 1
    assert compared > 40


@pytest.mark.parametrize("name", ["dflash two layers", "jetspec sliding", "peagle two layers"])
def test_a_long_prompt_in_stretches_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_of(name)
    state = state_at(head_of(name), 16)
    begin(proposer)
    whole = proposer.forced(state, [4, 5, 6])
    for rows in (5, 8, 16):
        monkeypatch.setattr(block_module, "PREFILL_ROWS", rows)
        begin(proposer)
        for found, expected in zip(proposer.forced(state, [4, 5, 6]), whole, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["dflash", "dspark rnn", "peagle"])
def test_a_round_leaves_only_committed_rows(name: str) -> None:
    """What was drafted before, and how the text was cut into rounds, changes nothing."""
    proposer, head = proposer_of(name), head_of(name)
    begin(proposer)
    for start, root in ((0, 5), (5, 6), (6, 12)):
        proposer.propose([state_at(head, root, start)])
        assert proposer._caches[0].length == root
    [found] = proposer.propose([state_at(head, 15, 12)])
    begin(proposer)
    [fresh] = proposer.propose([state_at(head, 15)])
    assert found is not None and fresh is not None
    assert torch.equal(found.tokens, fresh.tokens)
    assert torch.equal(found.parents, fresh.parents)
    proposer.finish(0, [])
    assert not proposer._caches


def test_features_must_be_those_of_the_new_positions() -> None:
    proposer = proposer_of("dflash")
    begin(proposer)
    state = state_at(head_of("dflash"), 6)
    with pytest.raises(AssertionError, match="exactly the new positions"):
        proposer.propose([replace(state, features=state.features[1:])])


def test_one_pass_over_the_whole_block_per_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even near the end of the text, where fewer drafts are wanted."""
    head, sizes = head_of("dspark vanilla"), []
    forward = type(head).forward

    def counted(self: Any, token_ids: Tensor, *rest: Any) -> Tensor:
        sizes.append(tuple(token_ids.shape))
        return forward(self, token_ids, *rest)

    monkeypatch.setattr(type(head), "forward", counted)
    proposer = proposer_of("dspark vanilla")
    begin(proposer)
    [tree] = proposer.propose([replace(state_at(head, 6), max_depth=2)])
    assert tree is not None
    assert int(tree.depths.max()) == 2
    assert sizes == [(1, 7)]


# --- lossless


def check_lossless(name: str, rule: str, sampling: SamplingParams, options: TreeOptions) -> None:
    proposer = proposer_of(name, options)
    found = decode(target(), proposer, rule=rule, sampling=sampling)
    assert found.sequences == plain(target(), sampling)


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_trees_give_the_target_s_tokens(name: str) -> None:
    check_lossless(name, "match", GREEDY, TREE)


@pytest.mark.parametrize("name", ["dflash", "dspark rnn", "dspark reduced", "peagle"])
@pytest.mark.parametrize("sampling", [SamplingParams(1.0, seed=5), WARPED], ids=["T1", "warped"])
def test_coupled_trees_give_the_target_s_samples(name: str, sampling: SamplingParams) -> None:
    check_lossless(name, "coupled", sampling, TREE)


@pytest.mark.parametrize("name", ["dflash", "dspark vanilla", "peagle sliding"])
def test_chains_and_static_trees_too(name: str) -> None:
    shape = static_tree([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
    for options in (TreeOptions(size=5, top_k=1), TreeOptions(shape=shape)):
        check_lossless(name, "match", GREEDY, options)
        check_lossless(name, "coupled", SAMPLED, options)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["dflash", "dspark gated", "peagle"])
def test_drawn_chains_end_and_stay_in_the_support(name: str, rule: str) -> None:
    options = TreeOptions(size=5, depth=4, top_k=1)
    found = decode(target(), proposer_of(name, options), rule=rule, sampling=SAMPLED)
    assert [len(new) for new in found.sequences] == [17, 11, 22]


# --- DSpark's laws


def drawn_tree(name: str, options: TreeOptions, root: int = 10) -> TokenTree:
    proposer = proposer_of(name, options)
    begin(proposer, "rejection")
    [tree] = proposer.propose([state_at(head_of(name), root, sampling=SAMPLED)])
    assert tree is not None
    return tree


@pytest.mark.parametrize("name", ["dspark vanilla", "dspark gated", "dspark rnn", "dspark reduced"])
@pytest.mark.parametrize(
    "options",
    [
        TreeOptions(size=14, depth=4, top_k=3),
        TreeOptions(shape=static_tree([(0,), (1,), (0, 0), (1, 0), (1, 0, 0)])),
    ],
    ids=["grown", "static"],
)
def test_a_node_s_law_is_the_true_one_given_its_path(name: str, options: TreeOptions) -> None:
    """What a drawn child is verified against is what drafting along its path alone gives."""
    tree, head = drawn_tree(name, options), head_of(name)
    assert tree.proposal is Proposal.DENSE and tree.draft_probs is not None
    compared = 0
    for node in range(tree.num_nodes):
        if not tree.children(node):
            continue
        path = [tree.token(above) for above in tree.path(node)[1:]]
        alone = proposer_of(name)
        begin(alone)
        logits = alone.forced(state_at(head, 10), path)[len(path)]
        law = torch.zeros(96, dtype=torch.float64)
        columns = slice(None) if head.draft_vocab is None else head.draft_vocab
        law[columns] = probabilities(logits[None], SAMPLED)[0].double()
        torch.testing.assert_close(tree.draft_probs[node].double(), law, atol=1e-6, rtol=0)
        compared += 1
    assert compared >= 4


def test_siblings_have_laws_of_their_own() -> None:
    """The Markov head tells paths apart that a block alone cannot."""
    options = TreeOptions(size=14, depth=3, top_k=3)
    tree = drawn_tree("dspark vanilla", options)
    assert tree.draft_probs is not None
    inner = [node for node in tree.children(0) if tree.children(node)]
    assert len(inner) >= 2
    first, second = (tree.draft_probs[node] for node in inner[:2])
    assert (first - second).abs().max() > 1e-3


def test_marginals_are_not_drawn_unless_asked_for() -> None:
    for name in ("dflash", "dspark none", "peagle"):
        assert drawn_tree(name, TREE).proposal is Proposal.ONE_HOT
        assert drawn_tree(name, replace(TREE, draws="all")).proposal is Proposal.DENSE
        assert proposer_of(name).draws == "none"
        assert proposer_of(name, replace(TREE, draws="one")).draws == "one"
    assert proposer_of("dspark rnn").draws == "all"
    assert drawn_tree("dspark rnn", TREE).proposal is Proposal.DENSE


def test_chains_go_as_deep_as_the_block() -> None:
    head = block_head(target(), "dflash", block_size=9)
    proposer = build_proposer(head, TreeOptions(size=9, top_k=1))
    assert isinstance(proposer, BlockProposer)
    begin(proposer)
    [tree] = proposer.propose([state_at(head, 10)])
    assert tree is not None and int(tree.depths.max()) == 8


# --- confidence


@pytest.mark.parametrize("name", ["dspark vanilla", "dspark rnn"])
def test_confidence_cuts_trees(name: str) -> None:
    """Nodes whose path is unlikely to survive get no children; nothing else changes."""
    head, state = head_of(name), state_at(head_of(name), 10)
    sizes = []
    for least in (0.0, 0.3, 0.999):
        proposer = proposer_of(name, replace(TREE, min_survival=least))
        begin(proposer)
        [tree] = proposer.propose([state])
        assert tree is not None
        sizes.append(tree.num_nodes)
    assert sizes[0] == 12 > sizes[2] == 1
    assert sizes[0] >= sizes[1] >= sizes[2]
    assert head.confidence is not None


def test_without_a_confidence_head_there_is_nothing_to_cut_by() -> None:
    proposer = proposer_of("dflash", replace(TREE, min_survival=0.5))
    begin(proposer)
    with pytest.raises(ValueError, match="needs a head with a confidence output"):
        proposer.propose([state_at(head_of("dflash"), 6)])


# --- the cache


def test_only_what_is_committed_stays_in_the_cache() -> None:
    cache = ContextCache([None, 2])
    k = torch.randn(1, 2, 3, 4)
    for layer in range(2):
        cache.append(layer, k, k)
    q = torch.randn(1, 4, 2, 4)
    first = [cache.rows(0, [True] * 2)(layer, q, k[:, :, :2], k[:, :, :2]) for layer in range(2)]
    again = [cache.rows(1, [True] * 2)(layer, q, k[:, :, :2], k[:, :, :2]) for layer in range(2)]
    assert cache.length == 4
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one, two)
    assert not torch.allclose(first[0], first[1]), "the second layer has a window"


def test_passes_write_in_place() -> None:
    """Nothing that is kept is copied by a pass, or by a commit of nothing."""
    cache = ContextCache([None])
    k = torch.randn(1, 2, 3, 4)
    cache.append(0, k, k)
    [layer] = cache._layers
    before = layer._keys
    for commit in (0, 1, 2, 0):
        cache.rows(commit, [True])(0, torch.randn(1, 4, 3, 4), k, k)
        cache.append(0, k[:, :, :0], k[:, :, :0])
        assert layer._keys is before
    assert cache.length == 6 and before is not None
    assert torch.equal(before[:, :, :6], torch.cat([k, k[:, :, :1], k[:, :, :2]], dim=2))
