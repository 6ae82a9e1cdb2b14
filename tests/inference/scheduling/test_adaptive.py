"""The adaptive proposer: the target's own tokens whatever is chosen, arms that miss nothing."""

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from drafters import TargetModel
from inference.cache import TreeCache
from inference.engine import EagerEngine
from inference.generate import Round, speculative_generate
from inference.proposers import Proposer, RowState, Session, TreeOptions, build_proposer
from inference.proposers.adaptive import AdaptiveProposer
from inference.proposers.arms import describe, outcome_of
from inference.proposers.compose import ComposedProposer
from inference.proposers.deciding import Estimates
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.ngram import NgramProposer
from inference.proposers.suffix import SuffixProposer
from inference.sampling import SamplingParams
from inference.scheduling.controller import controllers
from inference.scheduling.costs import CostTable
from inference.scheduling.schedule import Arm, Choice
from inference.scheduling.survival import Outcome
from inference.timing import PhaseTimer
from inference.tree import Proposal, TokenTree
from tests.blocks import block_head
from tests.inference.drafting import (
    GREEDY,
    NO_END,
    PROMPTS,
    SAMPLED,
    WARPED,
    decode,
    noisy_copy,
    p_value_of_rejection,
    plain,
)
from tests.inference.scheduling.costs import KEY
from tests.tiny import tiny_target

TREE = TreeOptions(8, 3, 3, grown=True)
CHAIN = TreeOptions(8, 3, 1)
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {}),
    "hydra": ("hydra", {}),
    "mtp": ("mtp", {"num_modules": 2}),
    "medusa": ("medusa", {}),
    "dflash": ("dflash", {}),
    "peagle": ("peagle", {"num_drafts": 4}),
    "dspark": ("dspark", {"markov_rank": 8, "confidence_head": True}),
}


@functools.cache
def target() -> TargetModel:
    return tiny_target(layers=4)


@functools.cache
def draft() -> TargetModel:
    return noisy_copy(target(), functools.partial(tiny_target, layers=4), 0.04)


def head_arm(name: str, options: TreeOptions = TREE) -> Proposer:
    family, config = HEADS[name]
    return build_proposer(block_head(target(), family, **config), options)


def arms_of(name: str, options: TreeOptions = TREE) -> dict[str, Proposer]:
    branch = options.top_k
    return {
        "head": head_arm(name, options),
        "copy": NgramProposer(6, 4, branch),
        "suffix": SuffixProposer(6, 4, branch),
    }


def costs(slow: float = 0.01) -> CostTable:
    points = {(width, 0, batch): 1.0 + slow * width for width in (1, 16) for batch in (1, 3)}
    return CostTable(KEY, points, {("head", 1, 1, 1): 0.01, ("head", 8, 1, 1): 0.08})


@dataclass
class Anything:
    """Makes any choice that it may make, plain steps among them."""

    arms: Sequence[Arm]
    source: random.Random
    rate: float = 1.0
    heard: list[Outcome] = field(default_factory=list)
    noted: list[tuple[str, Outcome]] = field(default_factory=list)
    made: list[Choice] = field(default_factory=list)

    def choose(
        self,
        context: float,
        batch: float = 1,
        depth: int | None = None,
        limits: Mapping[str, tuple[int, int]] | None = None,
        behind: Mapping[str, float] | None = None,
    ) -> Choice:
        self.made.append(self._choice(9 if depth is None else depth, limits or {}))
        return self.made[-1]

    def _choice(self, depth: int, limits: Mapping[str, tuple[int, int]]) -> Choice:
        arm = self.source.choice([None, *self.arms])
        if arm is not None:
            deepest, size = limits.get(arm.name, (arm.depth, arm.size))
            deepest = min(deepest, depth)
            if deepest > 0 and size > 1:
                deep = self.source.randint(1, deepest)
                top_k = self.source.choice([1, arm.top_k])
                wide = deep + 1 if top_k == 1 else self.source.randint(2, size)
                return Choice(arm.name, deep, top_k, wide, 1.0, 1.0)
        return Choice(None, 0, 1, 1, 1.0, 1.0)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.heard += outcomes

    def note(self, arm: str, outcome: Outcome) -> None:
        self.noted.append((arm, outcome))


def anything(seed: int = 0, kept: list[Anything] | None = None) -> Any:
    source = random.Random(seed)

    def new(arms: Sequence[Arm], shared: Estimates) -> Anything:
        made = Anything(arms, source)
        if kept is not None:
            kept.append(made)
        return made

    return new


@dataclass
class Scripted(Anything):
    """Makes the choices of a list, over and over."""

    script: Sequence[Choice] = ()

    def _choice(self, depth: int, limits: Mapping[str, tuple[int, int]]) -> Choice:
        found = self.script[(len(self.made)) % len(self.script)]
        return found if found.depth <= depth else Choice(None, 0, 1, 1, 1.0, 1.0)


# The output ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(HEADS))
@pytest.mark.parametrize(("rule", "sampling"), [("match", GREEDY), ("coupled", WARPED)])
def test_output_is_plain_decodings_own_whatever_is_chosen(
    name: str, rule: str, sampling: SamplingParams
) -> None:
    proposer = AdaptiveProposer(arms_of(name), anything(3))
    found = decode(target(), proposer, rule=rule, sampling=sampling)
    assert found.sequences == plain(target(), sampling)
    used = {arm for arm, *_ in proposer.made}
    assert {None, "head"} <= used and used & {"copy", "suffix"}


def test_a_draft_model_may_be_idle_too() -> None:
    arms = {"draft": DraftModelProposer(draft(), TreeOptions(8, 3, 1)), **arms_of("eagle3")}
    proposer = AdaptiveProposer(arms, anything(1))
    found = decode(target(), proposer)
    assert found.sequences == plain(target(), GREEDY)
    assert sum(count for (arm, *_), count in proposer.made.items() if arm == "draft") > 3


def test_a_controller_that_learns_gives_the_same_tokens() -> None:
    proposer = AdaptiveProposer(arms_of("eagle3", CHAIN), controllers(costs()))
    for sampling in (GREEDY, SAMPLED):
        found = decode(target(), proposer, sampling=sampling, rule="match")
        assert found.sequences == plain(target(), sampling)
    assert proposer.expected_tokens > 0 and proposer.expected_seconds > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_drawn_drafts_of_any_size_are_taken(name: str, rule: str) -> None:
    proposer = AdaptiveProposer(arms_of(name, CHAIN), anything(2), costs(), set())
    assert proposer.chains
    found = decode(target(), proposer, rule=rule, sampling=SAMPLED)
    assert [len(new) for new in found.sequences] == [17, 11, 22]


def test_the_law_of_rejection_is_the_targets() -> None:
    arms = {
        "draft": DraftModelProposer(draft(), TreeOptions(8, 3, 1)),
        "copy": NgramProposer(3, 2, 1),
    }
    proposer = AdaptiveProposer(arms, anything(5))
    assert p_value_of_rejection(target(), proposer, SamplingParams(0.8, seed=100), 400) > 1e-3
    assert len({depth for arm, depth, *_ in proposer.made if arm == "draft"}) > 1


# What arms are given ------------------------------------------------------------------------------


@dataclass
class Watched:
    """The trees of a head, with the text that each hangs from."""

    trees: list[tuple[list[int], TokenTree]] = field(default_factory=list)
    calls: int = 0

    def around(self, proposer: Proposer) -> None:
        inner = proposer.propose

        def propose(states: Sequence[RowState | None]) -> list[TokenTree | None]:
            found = inner(states)
            self.calls += 1
            for state, tree in zip(states, found, strict=True):
                if state is not None and tree is not None:
                    self.trees.append((list(state.tokens), tree))
            return found

        proposer.propose = propose  # type: ignore[method-assign]


@pytest.mark.parametrize("name", list(HEADS))
def test_an_arm_that_was_idle_drafts_as_if_it_had_not_been(name: str) -> None:
    """Against a fresh one that absorbs the whole text at once."""
    choice = Choice("head", 3, 3, 8, 1.0, 1.0)
    rest = Choice(None, 0, 1, 1, 1.0, 1.0)
    script = [rest, rest, choice, rest, choice, choice, rest, rest, rest]
    proposer = AdaptiveProposer(
        {"head": head_arm(name), "copy": NgramProposer()},
        lambda arms, shared: Scripted(arms, random.Random(0), script=script),
    )
    watched = Watched()
    watched.around(proposer.proposers["head"])
    decode(target(), proposer)
    assert 8 <= watched.calls == len(watched.trees) or watched.calls < len(watched.trees)
    for tokens, tree in watched.trees:
        fresh = head_arm(name)
        cache = TreeCache(target().model.config)
        fresh.start(Session(EagerEngine(target()), cache, 1, PhaseTimer(), "match", [0]))
        out = target().forward(torch.tensor([tokens[:-1]]), feature_layers=fresh.feature_layers)
        features = None if out.features is None else out.features[0]
        state = RowState(tokens, 1, features, out.last_hidden[0], 3, GREEDY)
        fresh.options = replace(fresh.options, shape=None, grown=True)  # type: ignore[attr-defined]
        [expected] = fresh.propose([state])
        assert expected is not None and expected.num_nodes == tree.num_nodes
        assert expected.tokens.tolist() == tree.tokens.tolist()
        assert expected.parents.tolist() == tree.parents.tolist()


def test_trees_have_the_size_that_was_chosen() -> None:
    sizes = [(1, 1, 2), (3, 1, 4), (2, 3, 5), (3, 3, 8), (1, 3, 3)]
    script = [Choice("head", deep, top_k, size, 1.0, 1.0) for deep, top_k, size in sizes]
    proposer = AdaptiveProposer(
        {"head": head_arm("eagle3")},
        lambda arms, shared: Scripted(arms, random.Random(0), script=script),
    )
    found: list[Round] = decode(target(), proposer, record_rounds=True).rounds
    for done, choice in zip([done for done in found if done.row == 2], script * 9, strict=False):
        if choice.depth <= int(done.tree.depths.max()):
            assert done.tree.num_nodes == choice.size
            assert int(done.tree.depths.max()) <= choice.depth
            assert done.tree.is_chain or choice.top_k > 1


# What controllers hear ----------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "sampling"), [("match", GREEDY), ("rejection", SAMPLED)])
def test_controllers_hear_what_became_of_every_round(rule: str, sampling: SamplingParams) -> None:
    kept: list[Anything] = []
    arms = {"draft": DraftModelProposer(draft(), TreeOptions(8, 3, 1)), "copy": NgramProposer()}
    proposer = AdaptiveProposer(arms, anything(4, kept))
    found = decode(target(), proposer, rule=rule, sampling=sampling, record_rounds=True)
    assert len(kept) == 3
    for row, chooser in enumerate(kept):
        rounds = [done for done in found.rounds if done.row == row][:-1]  # the last is not told
        assert [outcome.emitted for outcome in chooser.heard] == [len(r.emitted) for r in rounds]
        for outcome, done in zip(chooser.heard, rounds, strict=True):
            assert len(outcome.ranks) == len(done.accepted)
            assert outcome.size == done.tree.num_nodes
            node = 0
            for rank, token in zip(outcome.ranks, done.accepted, strict=True):
                child = done.tree.child_with_token(node, token)
                assert child is not None and done.tree.children(node)[rank] == child
                node = child
            assert len(outcome.offered) == len(done.accepted) + bool(done.tree.children(node))
    assert any(name == "copy" for chooser in kept for name, _ in chooser.noted)


def test_the_last_token_of_a_verified_round_was_not_accepted() -> None:
    """Under `block` the target may draw the very token that was refused."""
    chain = TokenTree.chain(torch.tensor([9, 1, 2, 3]))
    found = outcome_of(chain, [1, 2])
    assert (found.ranks, found.offered, found.emitted) == ([0], [1, 1], 2)
    unseen = outcome_of(chain, [1, 2], verified=False)
    assert (unseen.ranks, unseen.offered) == ([0, 0], [1, 1])
    wide = TokenTree(torch.tensor([9, 1, 2, 3]), torch.tensor([-1, 0, 0, 2]), Proposal.ONE_HOT)
    assert outcome_of(wide, [2, 5]).ranks == [1]
    assert outcome_of(wide, [2, 5]).offered == [2, 1]
    assert outcome_of(wide, [4]) == Outcome([], [2], 1, 4, 2)


# Who may learn from whom --------------------------------------------------------------------------


learning = controllers(costs(0.2))


def draft_arms() -> dict[str, Proposer]:
    return {"head": DraftModelProposer(draft(), TreeOptions(8, 3, 1)), "copy": NgramProposer()}


def test_under_rejection_a_sequence_depends_on_no_other_and_no_earlier_call() -> None:
    proposer = AdaptiveProposer(draft_arms(), learning)
    options: dict[str, Any] = {"rule": "rejection", "sampling": SAMPLED, "stop": NO_END}

    def first_of(*others: list[int]) -> list[int]:
        prompts = [PROMPTS[2], *others]
        found = speculative_generate(target(), proposer, prompts, max_new_tokens=30, **options)
        return found.sequences[0]

    alike = first_of([20] * 11, [20] * 12)
    assert first_of([3, 9], [44, 12, 60]) == alike
    assert first_of([20] * 11, [20] * 12) == alike
    assert not proposer.estimates and len(proposer.made) > 3


def test_where_it_is_allowed_calls_and_sequences_learn_together() -> None:
    proposer = AdaptiveProposer(draft_arms(), learning)
    decode(target(), proposer)
    first = proposer.estimates["head"].table()
    decode(target(), proposer)
    assert proposer.estimates["head"].table() != first
    assert len({id(c.estimates["head"]) for c in proposer.deciding.lasting.values()}) == 1  # type: ignore


# Confidence ---------------------------------------------------------------------------------------


@dataclass
class Expensive(Scripted):
    """A rate so high that no draft is worth its row."""

    rate: float = 1e9


@pytest.mark.parametrize("name", ["dspark", "eagle3"])
def test_confidence_cuts_chosen_chains_to_what_pays(name: str) -> None:
    family, config = HEADS[name]
    head = block_head(target(), family, **(config | {"confidence_head": True}))
    script = [Choice("head", 3, 1, 4, 1.0, 1.0)]
    for chooser, sizes in ((Scripted, {4}), (Expensive, {1})):
        proposer = AdaptiveProposer(
            {"head": build_proposer(head, CHAIN)},
            lambda arms, shared, kind=chooser: kind(  # type: ignore[misc]
                arms, random.Random(0), rate=1e-9 if kind is Scripted else 1e9, script=script
            ),
            costs(),
            {"head"},
        )
        found = decode(target(), proposer, record_rounds=True)
        assert found.sequences == plain(target(), GREEDY)
        early = [done.tree.num_nodes for done in found.rounds if done.row == 2][:-5]
        assert set(early) == sizes


def test_confidence_never_cuts_what_was_drawn() -> None:
    """Only the threshold on what is not drawn yet acts, and costs here say that all pays."""
    head = block_head(target(), "dspark", markov_rank=8, confidence_head=True)
    script = [Choice("head", 3, 1, 4, 1.0, 1.0)]
    free = CostTable(KEY, {(1, 0, 1): 1.0, (16, 0, 1): 1.0}, {("head", 1, 1, 1): 0.1})
    proposer = AdaptiveProposer(
        {"head": build_proposer(head, CHAIN)},
        lambda arms, shared: Scripted(arms, random.Random(0), rate=1e9, script=script),
        free,
        {"head"},
    )
    found = decode(target(), proposer, rule="rejection", sampling=SAMPLED, record_rounds=True)
    drawn = [done.tree for done in found.rounds if done.tree.proposal is Proposal.DENSE]
    assert drawn and all(tree.num_nodes >= 2 for tree in drawn)
    assert max(tree.num_nodes for tree in drawn) == 4


# Refused ------------------------------------------------------------------------------------------


def test_arms_are_described_by_their_options() -> None:
    assert describe("copy", NgramProposer(9, 4, 2)) == Arm("copy", 4, 2, 9, copies=True)
    assert describe("head", head_arm("eagle3")) == Arm("head", 3, 3, 8)
    assert describe("head", head_arm("eagle3", CHAIN)) == Arm("head", 3)
    medusa = head_arm("medusa", TreeOptions(12))
    assert describe("head", medusa).size == 12


def test_arms_that_have_one_size_only_are_refused() -> None:
    copy = NgramProposer()
    with pytest.raises(ValueError, match="one arm at least"):
        AdaptiveProposer({}, anything())
    with pytest.raises(ValueError, match="given twice"):
        AdaptiveProposer({"one": copy, "other": copy}, anything())
    composed = ComposedProposer(copy, SuffixProposer(), size=9)
    with pytest.raises(ValueError, match="ComposedProposer cannot be an arm"):
        AdaptiveProposer({"both": composed}, anything())
    with pytest.raises(ValueError, match="DraftModelProposer cannot be an arm"):
        AdaptiveProposer({"tree": DraftModelProposer(draft(), TREE)}, anything())
    with pytest.raises(ValueError, match="a confidence output"):
        AdaptiveProposer({"head": head_arm("eagle3")}, anything(), costs(), {"head"})
