"""Trees out of heads: cached draft steps equal the training pass; rules get their kind."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import FAMILIES, Eagle3Drafter, MedusaDrafter, TargetModel, build_drafter
from inference.cache import TreeCache
from inference.engine import EagerEngine
from inference.generate import speculative_generate
from inference.proposers import (
    HeadProposer,
    MedusaProposer,
    Proposer,
    RowState,
    SequentialProposer,
    Session,
    TreeOptions,
    build_proposer,
    growth,
    laws,
)
from inference.proposers.build import PROPOSERS
from inference.proposers.heads import chain_shape, default_tree
from inference.proposers.laws import node_scores, proposal_kind
from inference.sampling import SamplingParams, draw_top, gumbel_at, probabilities, sample
from inference.shapes.static_tree import static_tree
from inference.timing import PhaseTimer
from inference.tree import Proposal, TokenTree
from tests.tiny import tiny_target
from training.data.batches import collate
from training.data.chat import TokenizedRow
from training.features import run_target
from training.objectives import ObjectiveOptions, UnrolledObjective

IDS = [7, 9, 30, 12, 41, 18, 22, 5, 33, 27, 14, 60]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module")
def head(target: TargetModel) -> Eagle3Drafter:
    head = build_drafter("eagle3", target, seed=3).double()
    head.set_draft_vocab(torch.arange(target.vocab_size))
    assert isinstance(head, Eagle3Drafter)
    return head.eval()


def row_state(target: TargetModel, head: Eagle3Drafter, ids: list[int], depth: int = 9) -> RowState:
    """As after a prefill of all but the last token."""
    out = target.forward(torch.tensor([ids[:-1]]), feature_layers=head.feature_layers)
    assert out.features is not None
    return RowState(list(ids), 1, out.features[0], out.last_hidden[0], depth, SamplingParams())


@functools.cache
def any_target() -> TargetModel:
    """For sessions; heads do not look at it."""
    return tiny_target()


def begin(proposer: Proposer, rule: str = "match") -> None:
    target = any_target()
    cache = TreeCache(target.model.config)
    proposer.start(Session(EagerEngine(target), cache, 1, PhaseTimer(), rule, [0]))


def training_logits(target: TargetModel, head: Eagle3Drafter, ids: list[int], depth: int) -> Tensor:
    """Teacher-forced logits of step `depth` in the row of the last committed feature."""
    objective = UnrolledObjective(head, ObjectiveOptions(steps=depth + 1))
    data = run_target(
        target, collate([[TokenizedRow(ids, [True] * len(ids))]], len(ids)), head.feature_layers
    )
    with torch.no_grad():
        return head.logits(objective.unroll(data)[depth][0, len(ids) - 2 - depth])


def started(head: Eagle3Drafter) -> SequentialProposer:
    proposer = SequentialProposer(head)
    begin(proposer)
    return proposer


def test_tree_steps_equal_the_training_pass_on_every_path(
    target: TargetModel, head: Eagle3Drafter
) -> None:
    proposer = started(head)
    found = proposer.absorb(0, row_state(target, head, IDS))
    assert torch.allclose(found.logits[0], training_logits(target, head, IDS, 0), atol=1e-12)
    first, second = torch.tensor([3, 50]), torch.tensor([8, 9, 70])
    root = torch.tensor([-1, -1])
    level = proposer.step(0, found.feature.expand(2, -1), first, root, 1)
    for row, token in enumerate(first.tolist()):
        expected = training_logits(target, head, [*IDS, token], 1)
        assert torch.allclose(level.logits[row], expected, atol=1e-12)
    above = torch.tensor([0, 1, 1])  # tree rows: one child of 3, two of 50
    logits = proposer.step(0, level.feature[above], second, above, 2).logits
    for row, (parent, token) in enumerate(zip(above.tolist(), second.tolist(), strict=True)):
        expected = training_logits(target, head, [*IDS, int(first[parent]), token], 2)
        assert torch.allclose(logits[row], expected, atol=1e-12)
    wrong = training_logits(target, head, [*IDS, 3, 70], 2)
    assert not torch.allclose(logits[2], wrong, atol=1e-6), "siblings must not see each other"


def test_a_known_continuation_is_drafted_as_in_training(
    target: TargetModel, head: Eagle3Drafter
) -> None:
    """And leaves the state as a proposed tree does."""
    proposer, state = started(head), row_state(target, head, IDS)
    forced = proposer.forced(state, [3, 8, 40])
    assert len(forced) == 4
    for depth, logits in enumerate(forced):
        expected = training_logits(target, head, [*IDS, 3, 8, 40][: len(IDS) + depth], depth)
        assert torch.allclose(logits, expected, atol=1e-12)
    more = row_state(target, head, [*IDS, 11, 12])
    assert more.features is not None
    late = replace(more, features=more.features[-2:], hidden=more.hidden[-2:])
    [logits] = proposer.forced(late, [])
    expected = training_logits(target, head, [*IDS, 11, 12], 0)
    assert torch.allclose(logits, expected, atol=1e-12)


def test_drafts_of_a_round_leave_no_trace(target: TargetModel, head: Eagle3Drafter) -> None:
    proposer = SequentialProposer(head, TreeOptions(12, 3, 3))
    begin(proposer)
    whole = row_state(target, head, IDS)
    assert whole.features is not None
    early = replace(whole, tokens=IDS[:7], features=whole.features[:6], hidden=whole.hidden[:6])
    proposer.propose([early])
    late = replace(whole, features=whole.features[6:], hidden=whole.hidden[6:])
    [after] = proposer.propose([late])
    begin(proposer)
    [fresh] = proposer.propose([whole])
    assert after is not None and fresh is not None
    assert after.tokens.tolist() == fresh.tokens.tolist()
    assert after.parents.tolist() == fresh.parents.tolist()


def test_dynamic_tree_holds_the_most_probable_paths(
    target: TargetModel, head: Eagle3Drafter
) -> None:
    """With full branching and two levels the tree can be enumerated by the training pass."""
    proposer = SequentialProposer(head, TreeOptions(6, 2, 96))
    begin(proposer)
    [tree] = proposer.propose([row_state(target, head, IDS)])
    assert tree is not None and tree.num_nodes == 6
    top = training_logits(target, head, IDS, 0).log_softmax(-1)
    scores = {(token,): float(top[token]) for token in range(96)}
    for token in top.topk(8).indices.tolist():
        below = training_logits(target, head, [*IDS, token], 1).log_softmax(-1)
        scores |= {(token, child): float(top[token] + below[child]) for child in range(96)}
    best = sorted(scores, key=lambda path: -scores[path])[:5]
    found = {tuple(tree.token(n) for n in tree.path(node)[1:]) for node in range(1, 6)}
    assert found == set(best)


@pytest.mark.parametrize(("top_k", "chain"), [(1, True), (4, False)])
def test_drawn_trees_record_their_law_and_drop_nothing(
    target: TargetModel, head: Eagle3Drafter, top_k: int, chain: bool
) -> None:
    proposer = SequentialProposer(head, TreeOptions(12, 3, top_k))
    sampling = SamplingParams(temperature=1.0, top_k=20, seed=4)
    begin(proposer, "rejection")
    [tree] = proposer.propose([replace(row_state(target, head, IDS), sampling=sampling)])
    assert tree is not None and tree.proposal is Proposal.DENSE and tree.draft_probs is not None
    law = probabilities(training_logits(target, head, IDS, 0), sampling)
    assert torch.allclose(tree.draft_probs[0].double(), law, atol=1e-7)
    inner = [node for node in range(tree.num_nodes) if tree.children(node)]
    assert all(abs(float(tree.draft_probs[node].sum()) - 1) < 1e-6 for node in inner)
    for node in inner:
        assert all(tree.draft_probs[node, tree.token(child)] > 0 for child in tree.children(node))
    assert (tree.num_nodes == 4 and int(tree.depths.max()) == 3) == chain


@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
@pytest.mark.parametrize("depth", [1, 2, 5, 7])
def test_drawn_trees_keep_to_their_size(
    target: TargetModel, head: Eagle3Drafter, depth: int, top_k: int
) -> None:
    """And use it up, where depth and branching leave room."""
    state = row_state(target, head, IDS)
    for size in (2, 3, 5, 8, 16, 27, 36, 40, 64):
        proposer = SequentialProposer(head, TreeOptions(size, depth, top_k))
        begin(proposer, "rejection")
        [tree] = proposer.propose([replace(state, sampling=SamplingParams(1.0, seed=size))])
        assert tree is not None and tree.proposal is Proposal.DENSE
        widest = max(len(tree.children(node)) for node in range(tree.num_nodes))
        assert tree.num_nodes <= size and widest <= top_k
        assert int(tree.depths.max()) == min(depth, size - 1)
        if top_k == 1:
            assert tree.parents.tolist() == list(range(-1, min(depth, size - 1)))
        elif top_k ** min(depth, 2) + top_k * (depth - 2) >= size:
            assert tree.num_nodes == size


def test_small_supports_leave_their_share_to_later_levels(
    target: TargetModel, head: Eagle3Drafter
) -> None:
    """A node cannot have more children than its law has tokens."""
    proposer = SequentialProposer(head, TreeOptions(20, 4, 8))
    begin(proposer, "rejection")
    sampling = SamplingParams(1.0, top_k=2, seed=1)
    [tree] = proposer.propose([replace(row_state(target, head, IDS), sampling=sampling)])
    assert tree is not None
    widths = torch.bincount(tree.depths).tolist()
    assert widths == [1, 2, 4, 7, 6]  # of shares of 5, 6, 7 and 6, and 20 in all


def counts_under_other_draws(
    target: TargetModel,
    head: Eagle3Drafter,
    monkeypatch: pytest.MonkeyPatch,
    level: int,
) -> set[tuple[int, ...]]:
    """Numbers of children of the nodes down to `level`; theirs and all below are redrawn."""
    state, noise, counts, tokens = row_state(target, head, IDS), growth.gumbel, set(), set()
    first = [0, 1, 5][level]  # first node of the level
    for salt in range(12):

        def keyed(seed: int, position: int, *rest: Any, now: int = salt) -> Tensor:
            node = position - ((len(IDS) - 1) << 20)
            return noise(seed if node < first else now, position, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(growth, "gumbel", keyed)
            proposer = SequentialProposer(head, TreeOptions(15, 3, 4))
            begin(proposer, "rejection")
            [tree] = proposer.propose([replace(state, sampling=SamplingParams(1.5, seed=99))])
        assert tree is not None
        nodes = (tree.depths <= level).nonzero().flatten().tolist()
        counts.add(tuple(len(tree.children(node)) for node in nodes))
        tokens.add(tuple(tree.tokens.tolist()))
    assert len(tokens) > 6, "the noise has no effect"
    return counts


@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_is_drawn_does_not_decide_how_many_are(
    target: TargetModel, head: Eagle3Drafter, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """A count that depends on the very children it counts biases the output."""
    assert len(counts_under_other_draws(target, head, monkeypatch, level)) == 1

    def draw_and_drop(law: Tensor, noise: Tensor, count: int) -> Tensor:
        drawn = draw_top(law, noise, count)
        return drawn[law[drawn] >= law.mean()]

    monkeypatch.setattr(growth, "draw_top", draw_and_drop)
    assert len(counts_under_other_draws(target, head, monkeypatch, level)) > 1


def test_drawn_children_follow_the_draft_law(target: TargetModel, head: Eagle3Drafter) -> None:
    state = row_state(target, head, IDS)
    law = probabilities(training_logits(target, head, IDS, 0), SamplingParams(1.0))
    counts = torch.zeros(target.vocab_size)
    for seed in range(600):
        proposer = SequentialProposer(head, TreeOptions(2, 1, 1))
        begin(proposer, "rejection")
        [tree] = proposer.propose([replace(state, sampling=SamplingParams(1.0, seed=seed))])
        assert tree is not None
        counts[tree.token(1)] += 1
    best = law.topk(5).indices
    expected, seen = 600 * law[best], counts[best]
    spread = (600 * law[best] * (1 - law[best])).sqrt()
    assert bool(((seen - expected).abs() < 5 * spread + 1).all())


def test_coupled_children_are_the_top_of_log_q_plus_the_targets_noise() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 12, dtype=torch.float64)
    sampling = SamplingParams(temperature=0.8, seed=11)
    scores = node_scores(logits, None, sampling, Proposal.COUPLED, 40, 0.7)
    noisy = (logits / 0.8).log_softmax(-1) + gumbel_at(11, 40, torch.arange(12))
    assert scores.argsort(-1).tolist() == noisy.argsort(-1).tolist()
    assert torch.allclose(scores.exp().sum(-1), torch.ones(3), atol=1e-5)
    reduced = torch.tensor([2, 3, 7])
    scores = node_scores(logits[:, :3], reduced, sampling, Proposal.COUPLED, 40, 0.7)
    noisy = (logits[:, :3] / 0.8).log_softmax(-1) + gumbel_at(11, 40, reduced)
    assert scores.argsort(-1).tolist() == noisy.argsort(-1).tolist()


def test_proposal_kinds() -> None:
    greedy, sampled = SamplingParams(), SamplingParams(1.0)
    assert proposal_kind("match", sampled) is Proposal.ONE_HOT
    assert proposal_kind("coupled", sampled) is Proposal.COUPLED
    assert proposal_kind("rejection", sampled) is Proposal.DENSE
    assert proposal_kind("rejection", greedy) is Proposal.ONE_HOT
    with pytest.raises(ValueError, match="rule"):
        proposal_kind("typical", sampled)


def test_medusa_fills_its_shape_from_the_heads(target: TargetModel) -> None:
    head = build_drafter("medusa", target, num_heads=2, draft_vocab_size=30).double()
    head.set_draft_vocab(torch.arange(target.vocab_size).flip(0))
    assert isinstance(head, MedusaDrafter)
    for block in head.blocks.parameters():
        torch.nn.init.normal_(block, std=0.3)
    shape = static_tree([(0,), (1,), (0, 0), (0, 2), (1, 0)])
    proposer = MedusaProposer(head, TreeOptions(shape=shape))
    begin(proposer)
    hidden = torch.randn(3, target.hidden_size, dtype=torch.float64)
    [tree] = proposer.propose([RowState(IDS, 1, None, hidden, 9, SamplingParams())])
    assert isinstance(tree, TokenTree)
    rows = head(hidden[-1])
    ranked = [
        head.to_target_ids(head.logits(row, k).argsort(descending=True)).tolist()
        for k, row in enumerate(rows)
    ]
    expected = [IDS[-1], ranked[0][0], ranked[0][1], ranked[1][0], ranked[1][2], ranked[1][0]]
    assert tree.tokens.tolist() == expected
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2]
    [short] = proposer.propose([RowState(IDS, 1, None, hidden, 1, SamplingParams())])
    assert short is not None and short.tokens.tolist() == expected[:3]
    [empty] = proposer.propose([RowState(IDS, 1, None, hidden, 0, SamplingParams())])
    assert empty is not None and empty.num_nodes == 1


def test_default_tree_has_the_asked_size() -> None:
    shape = default_tree(3, 24)
    assert len(shape.parents) == 24
    assert int(shape.depths.max()) <= 3


def test_every_family_has_its_proposer(target: TargetModel) -> None:
    assert set(PROPOSERS) == set(FAMILIES)
    for family in FAMILIES:
        options = {"num_heads": 2, "shared_lm_head": True} if family == "medusa" else {}
        proposer = build_proposer(build_drafter(family, target, **options))
        assert isinstance(proposer, HeadProposer)
        assert isinstance(proposer, MedusaProposer) == (family == "medusa")
        assert proposer.feature_layers == proposer.drafter.feature_layers
    with pytest.raises(KeyError, match="other"):  # no user can name one
        build_proposer(object.__new__(type("Other", (), {"family": "other"})))  # type: ignore[arg-type]


def test_what_the_options_leave_open_is_the_heads_own(target: TargetModel) -> None:
    """Its tree, its draft temperature, and no deeper than it drafts."""
    head = build_drafter("hydra", target, num_heads=2, tree=[[0], [1], [0, 0]])
    head.config.draft_temperature = 0.7
    options = SequentialProposer(head, TreeOptions(depth=6)).options
    assert options.shape is not None and options.shape.paths() == [(0,), (1,), (0, 0)]
    assert (options.draft_temperature, options.depth) == (0.7, 2)
    grown = SequentialProposer(head, TreeOptions(depth=6, grown=True)).options
    assert grown.shape is None
    given = static_tree([(0,)])
    proposer = SequentialProposer(head, TreeOptions(shape=given, draft_temperature=1.5))
    assert proposer.options.shape is given and proposer.options.draft_temperature == 1.5
    assert proposer.chains and not SequentialProposer(head).chains
    with pytest.raises(ValueError, match="3 deep but the head drafts 2"):
        SequentialProposer(head, TreeOptions(shape=chain_shape(3)))


@pytest.mark.parametrize(
    ("family", "options", "most"),
    [
        ("eagle3", {}, None),
        ("medusa", {"num_heads": 3}, 3),
        ("dflash", {"block_size": 9}, 8),
        ("peagle", {"num_drafts": 7}, 7),
    ],
)
def test_trees_are_as_deep_as_the_head_drafts(
    target: TargetModel, family: str, options: dict[str, Any], most: int | None
) -> None:
    head = build_drafter(family, target, **options)
    assert build_proposer(head).options.depth == (most or 5)
    assert build_proposer(head, TreeOptions(size=9)).options.longest == (most or 5)
    assert build_proposer(head, TreeOptions(depth=2)).options.depth == 2
    assert build_proposer(head, TreeOptions(depth=20)).options.depth == (most or 20)


@pytest.mark.parametrize("rule", ["match", "coupled", "rejection"])
@pytest.mark.parametrize("top_k", [1, 4])
def test_no_level_is_drafted_that_has_no_room(
    target: TargetModel, head: Eagle3Drafter, top_k: int, rule: str
) -> None:
    """Trees are those that were grown deeper and cut."""
    for size in (2, 3, 4):
        found = []
        for depth in (size - 1, 6):
            proposer = build_proposer(head, TreeOptions(size, top_k=top_k))
            assert proposer.options.depth == size - 1
            proposer.options = replace(proposer.options, depth=depth)
            sampling = SamplingParams(0.0 if rule == "match" else 1.0, seed=3)
            out = speculative_generate(
                target,
                proposer,
                [[3, 4, 5]],
                max_new_tokens=12,
                sampling=sampling,
                rule=rule,
                record_rounds=True,
            )
            trees = [done.tree for done in out.rounds]
            found.append([(tree.tokens.tolist(), tree.parents.tolist()) for tree in trees])
        assert found[0] == found[1]


def test_chains_are_chains_whatever_tree_the_head_has(target: TargetModel) -> None:
    for family in ("hydra", "medusa"):
        head = build_drafter(family, target, num_heads=3, tree=[[0], [1], [0, 0]])
        for options in (TreeOptions(top_k=1), TreeOptions(top_k=1, depth=2, grown=True)):
            proposer = build_proposer(head, options)
            assert proposer.chains and proposer.options.longest == (options.depth or 3)
        assert not build_proposer(head).chains
    chain = build_proposer(build_drafter("medusa", target, num_heads=3), TreeOptions(9, 2, 1))
    assert chain.chains and chain.options.longest == 2


def test_one_drawn_child_beside_the_likeliest(target: TargetModel, head: Eagle3Drafter) -> None:
    """Greedy drafts (arXiv:2502.18779): the drawn child comes first, from q without the others."""
    options = TreeOptions(12, 2, 4, draws="one")
    sampling = SamplingParams(1.2, seed=5)
    state = replace(row_state(target, head, IDS), sampling=sampling)
    proposer = SequentialProposer(head, options)
    begin(proposer, "rejection")
    [tree] = proposer.propose([state])
    assert tree is not None and tree.proposal is Proposal.MIXED and tree.draft_probs is not None
    law = probabilities(training_logits(target, head, IDS, 0), sampling)
    children = tree.children(0)
    assert [tree.is_drawn(child) for child in children] == [True] + [False] * (len(children) - 1)
    sure = [tree.token(child) for child in children[1:]]
    assert sure == law.topk(len(sure)).indices.tolist() and len(sure) >= 2
    rest = law.clone()
    rest[sure] = 0.0
    assert torch.allclose(tree.draft_probs[0].double(), rest / rest.sum(), atol=1e-7)
    begin(proposer, "rejection")
    [greedy] = proposer.propose([replace(state, sampling=SamplingParams())])
    assert greedy is not None and greedy.proposal is Proposal.ONE_HOT


def test_nothing_left_to_draw(target: TargetModel, head: Eagle3Drafter) -> None:
    """Where the likeliest tokens are all there is, they are the children."""
    sampling = SamplingParams(1.0, top_k=2, seed=5)
    state = replace(row_state(target, head, IDS), sampling=sampling)
    proposer = SequentialProposer(head, TreeOptions(9, 2, 4, draws="one"))
    begin(proposer, "rejection")
    [tree] = proposer.propose([state])
    assert tree is not None
    assert len(tree.children(0)) == 2
    assert not any(tree.is_drawn(node) for node in range(tree.num_nodes))


def test_the_draft_temperature_is_the_heads_own_unless_given(
    target: TargetModel, head: Eagle3Drafter
) -> None:
    sampling = SamplingParams(1.5, seed=4)
    state = replace(row_state(target, head, IDS), sampling=sampling)
    logits = training_logits(target, head, IDS, 0)
    head.config.draft_temperature = 0.5
    try:
        for given, used in ((None, 0.5), (2.0, 2.0)):
            proposer = SequentialProposer(head, TreeOptions(4, 3, 1, draft_temperature=given))
            begin(proposer, "block")
            [tree] = proposer.propose([state])
            assert tree is not None and tree.is_chain and tree.draft_probs is not None
            law = probabilities(logits, replace(sampling, temperature=1.5 * used))
            assert torch.allclose(tree.draft_probs[0].double(), law, atol=1e-7)
    finally:
        head.config.draft_temperature = 1.0


def test_blockwise_decoding_is_a_chain_of_heads() -> None:
    shape = chain_shape(3)
    assert shape.parents.tolist() == [-1, 0, 1, 2]
    assert shape.ranks.tolist() == [0, 0, 0, 0]


def test_medusa_with_a_draft_vocabulary_smaller_than_its_tree(target: TargetModel) -> None:
    head = build_drafter("medusa", target, num_heads=2, draft_vocab_size=4).double()
    head.set_draft_vocab(torch.arange(target.vocab_size))
    assert isinstance(head, MedusaDrafter)
    shape = MedusaProposer(head, TreeOptions(size=64)).options.shape
    assert shape is not None
    assert int(shape.ranks.max()) < 4 and len(shape.parents) == 1 + 4 + 16
    with pytest.raises(ValueError, match="candidate 4 of a head that ranks only 4"):
        MedusaProposer(head, TreeOptions(shape=static_tree([(4,)])))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharpness": 0.0}, "sharpness"),
        ({"draft_temperature": -1.0}, "draft_temperature"),
        ({"draws": "two"}, "draws"),
        ({"size": 1}, "size"),
        ({"depth": 0}, "depth"),
        ({"top_k": 0}, "top_k"),
        ({"min_survival": 1.0}, "min_survival"),
        ({"min_survival": -0.1}, "min_survival"),
        ({"shape": static_tree([])}, "shape"),
        ({"shape": static_tree([(0,)]), "grown": True}, "grown"),
    ],
)
def test_tree_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeOptions(**options)


@pytest.mark.parametrize("warper", [{"top_k": 1}, {"top_p": 0.3}, {"min_p": 0.3}])
def test_coupled_drafts_follow_the_warpers(
    warper: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that the draft law's own warpers drop give way, but are not ruled out."""
    torch.manual_seed(0)
    logits = torch.randn(1, 400, dtype=torch.float64) * 2

    def hits() -> int:
        """How often the best draft is the target's token, of 60, with a draft law that is right."""
        found = 0
        for seed in range(60):
            sampling = SamplingParams(1.0, seed=seed, **warper)
            scores = node_scores(logits, None, sampling, Proposal.COUPLED, 3, 0.8)
            assert bool((scores > -torch.inf).all())
            token = sample(probabilities(logits[0], sampling), seed, 3)
            found += int(scores.argmax()) == token
        return found

    following = hits()
    monkeypatch.setattr(laws, "OUTSIDE", 0.0)
    assert following >= 54 > hits() + 15


def test_long_prompts_are_absorbed_in_stretches(
    target: TargetModel, head: Eagle3Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = row_state(target, head, IDS)
    whole = started(head).absorb(0, state)
    for rows in (1, 4, 5):
        monkeypatch.setattr("inference.proposers.sequential.PREFILL_ROWS", rows)
        found = started(head).absorb(0, state)
        assert torch.allclose(found.logits, whole.logits, atol=1e-12)
        assert torch.allclose(found.feature, whole.feature, atol=1e-12)
