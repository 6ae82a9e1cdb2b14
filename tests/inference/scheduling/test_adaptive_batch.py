"""The adaptive proposer where all sequences of a batch are decided for at once."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from inference.generate import speculative_generate
from inference.proposers import Proposer, TreeOptions, build_proposer
from inference.proposers.adaptive import AdaptiveProposer
from inference.proposers.arms import NEW, Backlog, describe
from inference.proposers.base import RowState
from inference.proposers.confident import Cuts
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.ngram import NgramProposer
from inference.sampling import SamplingParams
from inference.scheduling.batch_controller import batch_controllers
from inference.scheduling.batch_round import Situation
from inference.scheduling.controller import controllers
from inference.scheduling.costs import CostTable
from inference.scheduling.schedule import Arm, Choice
from inference.scheduling.survival import Outcome
from inference.tree import Proposal, TokenTree
from tests.blocks import block_head
from tests.inference.drafting import GREEDY, NO_END, PROMPTS, SAMPLED, WARPED, decode, plain
from tests.inference.scheduling.costs import KEY
from tests.inference.scheduling.test_adaptive import CHAIN, HEADS, Anything, arms_of, draft, target


def costs(slope: float = 0.02, absorb: float = 0.0) -> CostTable:
    points = {(width, 0, batch): 1.0 + slope * width for width in (1, 16) for batch in (1, 3)}
    drafts = {
        (name, deep, width, batch): 0.01 * deep * batch
        for name in ("head", "draft")
        for deep in (1, 8)
        for width in (1, 3)
        for batch in (1, 3)
    }
    return CostTable(KEY, points, drafts, absorb_points={("head", 1): absorb})


@dataclass
class AnythingForAll:
    """Makes any choices that may be made, and keeps what it hears."""

    arms: list[Arm]
    source: random.Random
    rate: float = 1.0
    asked: list[tuple[set[int], set[int]]] = field(default_factory=list)
    heard: list[tuple[dict[int, Outcome], int]] = field(default_factory=list)
    noted: list[tuple[int, str, Outcome]] = field(default_factory=list)
    starts: int = 0

    def start(self) -> None:
        self.starts += 1

    def choose(
        self, rows: Mapping[int, Situation], decided: Mapping[int, Choice]
    ) -> dict[int, Choice]:
        self.asked.append((set(rows), set(decided)))
        one = Anything(self.arms, self.source)
        return {row: one.choose(s.context, 1, s.depth, s.limits) for row, s in rows.items()}

    def observe(self, outcomes: Mapping[int, Outcome], width: int) -> None:
        self.heard.append((dict(outcomes), width))

    def note(self, row: int, arm: str, outcome: Outcome) -> None:
        self.noted.append((row, arm, outcome))


def deciding_for_all(
    arms: Mapping[str, Proposer], **options: Any
) -> tuple[AdaptiveProposer, list[AnythingForAll]]:
    kept: list[AnythingForAll] = []

    def new(known: Any, estimates: Any) -> Any:
        kept.append(AnythingForAll(list(known), random.Random(0)))
        return kept[-1]

    alone = lambda known, estimates: Anything(known, random.Random(1))  # noqa: E731
    return AdaptiveProposer(arms, alone, new_batch=new, **options), kept


# The output ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(HEADS))
@pytest.mark.parametrize(("rule", "sampling"), [("match", GREEDY), ("coupled", WARPED)])
def test_output_is_plain_decodings_own_whatever_is_admitted(
    name: str, rule: str, sampling: SamplingParams
) -> None:
    proposer, kept = deciding_for_all(arms_of(name))
    found = decode(target(), proposer, rule=rule, sampling=sampling)
    assert found.sequences == plain(target(), sampling)
    assert len({choice for choice in proposer.made}) > 5 and len(kept) == 1


@pytest.mark.parametrize(("rule", "sampling"), [("match", GREEDY), ("match", SAMPLED)])
def test_a_controller_that_learns_gives_the_same_tokens(
    rule: str, sampling: SamplingParams
) -> None:
    arms = {"draft": DraftModelProposer(draft(), CHAIN), **arms_of("eagle3", CHAIN)}
    table = costs()
    proposer = AdaptiveProposer(arms, controllers(table), table, new_batch=batch_controllers(table))
    for _ in range(2):
        found = decode(target(), proposer, rule=rule, sampling=sampling)
        assert found.sequences == plain(target(), sampling)
    assert proposer.deciding.together is not None and not proposer.deciding.lasting
    assert {arm for arm, *_ in proposer.made} >= {"draft", "head"}
    assert proposer.estimates["draft"].counts()[1][0][0] > 5


# Who is decided for -------------------------------------------------------------------------------


def test_one_sequence_decides_for_itself() -> None:
    proposer, kept = deciding_for_all(arms_of("eagle3"))
    speculative_generate(target(), proposer, PROMPTS[:1], max_new_tokens=9, stop=NO_END)
    assert not kept and proposer.deciding.lasting


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_where_coins_are_tossed_over_drafts_nothing_is_decided_together(rule: str) -> None:
    """The text of a sequence depends on no other, nor on any earlier call, whatever is decided."""
    table = costs(0.2)
    arms = {"head": DraftModelProposer(draft(), CHAIN), "copy": NgramProposer(6, 4, 1)}
    proposer = AdaptiveProposer(arms, controllers(table), table, new_batch=batch_controllers(table))

    def first_of(*others: list[int]) -> list[int]:
        prompts = [PROMPTS[2], *others]
        options: dict[str, Any] = {"rule": rule, "sampling": SAMPLED, "stop": NO_END}
        found = speculative_generate(target(), proposer, prompts, max_new_tokens=30, **options)
        return found.sequences[0]

    assert first_of([20] * 11, [20] * 12) == first_of([3, 9], [44, 12, 60])
    assert proposer.deciding.together is None and not proposer.estimates


def test_greedy_sequences_beside_sampled_ones_are_decided_for_and_the_others_are_not() -> None:
    proposer, _ = deciding_for_all(arms_of("eagle3"))
    sampling = [GREEDY, SAMPLED, GREEDY]
    found = decode(target(), proposer, rule="rejection", sampling=sampling)
    expected = plain(target(), GREEDY)
    assert [found.sequences[row] for row in (0, 2)] == [expected[row] for row in (0, 2)]
    together = proposer.deciding.together
    assert isinstance(together, AnythingForAll)
    assert together.asked[0] == ({0, 2}, {1})
    assert {row for outcomes, _ in together.heard for row in outcomes} == {0, 2}


def by_forward(rows: list[int]) -> list[list[int]]:
    """Places of the rounds that one forward made; rows rise within a forward."""
    found: list[list[int]] = []
    for place, row in enumerate(rows):
        if not found or row <= rows[place - 1]:
            found.append([])
        found[-1].append(place)
    return found


def test_controllers_hear_what_became_of_every_round() -> None:
    proposer, _ = deciding_for_all(arms_of("medusa"))
    found = decode(target(), proposer, record_rounds=True)
    together = proposer.deciding.together
    assert isinstance(together, AnythingForAll) and together.starts == 0
    for row in range(3):
        heard = [outcomes[row].emitted for outcomes, _ in together.heard if row in outcomes]
        assert heard == [len(done.emitted) for done in found.rounds if done.row == row][:-1]
    rounds = [
        [found.rounds[place].tree.num_nodes for place in places]
        for places in by_forward([done.row for done in found.rounds])
    ]
    assert [width for _, width in together.heard] == [max(sizes) for sizes in rounds][:-1]
    assert {name for _, name, _ in together.noted} <= {"copy", "suffix"} and together.noted
    decode(target(), proposer)
    assert together.starts == 1


# Confidence ---------------------------------------------------------------------------------------


def tree_of(survival: list[float], proposal: Proposal = Proposal.ONE_HOT) -> TokenTree:
    tree = TokenTree.chain(torch.arange(len(survival) + 1))
    return replace(tree, survival=torch.tensor([1.0, *survival]), proposal=proposal)


def test_chains_of_a_batch_are_cut_to_one_width_and_others_keep_theirs() -> None:
    table = CostTable(KEY, {(1, 0, 1): 1.0, (11, 0, 1): 2.0})
    cuts = Cuts(table, {"head"})
    good, poor = tree_of([0.9, 0.8, 0.7, 0.1]), tree_of([0.3, 0.2, 0.1])
    names = {0: "head", 1: "head"}

    def widths(trees: dict[int, TokenTree], rate: float, floor: int = 1) -> list[int]:
        found = cuts.together(names | {2: "copy"}, trees, rate, 0, len(trees), floor)
        return [found[row].num_nodes for row in trees]

    assert widths({0: good, 1: poor}, 5.0) == [4, 4]  # the third drafts have 0.8, a row costs 0.5
    assert widths({0: good, 1: poor}, 9.0) == [3, 3]
    assert widths({0: good, 1: poor}, 1e9) == [1, 1]
    assert widths({0: good, 1: poor}, 1e9, 4) == [4, 4]  # paid by others
    copied = TokenTree.chain(torch.arange(3))
    assert widths({0: good, 1: poor, 2: copied}, 1e9) == [3, 3, 3]
    assert widths({2: copied}, 1e9) == [3]


def test_drawn_chains_of_a_batch_are_never_cut() -> None:
    table = CostTable(KEY, {(1, 0, 1): 1.0, (11, 0, 1): 2.0})
    chances = torch.full((5, 8), 1 / 8)
    drawn = replace(tree_of([0.4] * 4), proposal=Proposal.DENSE, draft_probs=chances)
    found = Cuts(table, {"head"}).together(
        {0: "head", 1: "head"}, {0: drawn, 1: tree_of([0.1] * 5)}, 1e9, 0, 2
    )
    assert found[0] is drawn and found[1].num_nodes == 5


def test_a_confident_head_drafts_for_a_batch() -> None:
    head = block_head(target(), "eagle3", confidence_head=True)
    table = costs(0.3)
    proposer = AdaptiveProposer(
        {"head": build_proposer(head, CHAIN)},
        controllers(table, cut_arms={"head"}),
        table,
        {"head"},
        batch_controllers(table, cut_arms={"head"}),
    )
    found = decode(target(), proposer)
    assert found.sequences == plain(target(), GREEDY)


# What idle arms have to absorb --------------------------------------------------------------------


def state_of(length: int, new: int) -> RowState:
    return RowState([7] * length, 5, torch.ones(new, 4) * length, torch.ones(new, 2), 9, GREEDY)


def test_what_an_idle_arm_missed_is_counted_and_handed_over() -> None:
    backlog = Backlog({"head": (1,)})
    backlog.add(0, state_of(6, 5))
    assert backlog.positions("head", 0, state_of(6, 5)) == 0  # a prompt is taken in by all
    taken = backlog.take("head", 0, (1, 2))
    assert taken.hidden.shape == (5, 2) and taken.features is not None
    assert taken.features.shape == (5, 2)
    for length in range(7, 27, 2):
        state = state_of(length, 2)
        backlog.add(0, state)
    assert backlog.positions("head", 0, state) == 25 - 6 - NEW
    assert len(backlog.take("head", 0, (1, 2)).hidden) == 20
    backlog.add(0, state_of(27, 2))
    assert backlog.positions("head", 0, state_of(27, 2)) == 0
    backlog.finish(0)
    assert not backlog._waiting and not backlog._told


@pytest.mark.parametrize("batch", [1, 3])
def test_what_catching_up_costs_is_told_to_whoever_chooses(batch: int) -> None:
    told: list[dict[str, float]] = []

    class Idle(AnythingForAll):
        def choose(self, rows: Any, decided: Any = None, *rest: Any) -> Any:
            if batch == 1:
                told.append(dict(rest[-1]))
                return Choice(None, 0, 1, 1, 1.0, 1.0)
            told.append(dict(rows[0].behind))
            return {row: Choice(None, 0, 1, 1, 1.0, 1.0) for row in rows}

        def observe(self, *outcomes: Any) -> None:
            return None

    def new(arms: Any, estimates: Any) -> Any:
        return Idle(list(arms), random.Random(0))

    arms = {"head": build_proposer(block_head(target(), "eagle3"), TreeOptions(8, 3, 1))}
    proposer = AdaptiveProposer(arms, new, costs(absorb=0.5), new_batch=new)
    options: dict[str, Any] = {"max_new_tokens": 9, "stop": NO_END}
    speculative_generate(target(), proposer, [PROMPTS[0]] * batch, **options)
    # The prefill emits one token, and every round one more.
    expected = [{"head": 0.5 * (done - NEW)} if done > NEW else {} for done in range(1, 9)]
    assert told == expected


def test_draft_models_draft_for_all_at_once() -> None:
    assert describe("draft", DraftModelProposer(draft(), CHAIN)) == Arm("draft", 3, together=True)
