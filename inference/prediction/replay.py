"""`--size auto` replayed: the decoder's own choices over recorded drafts, with a table's seconds.

At temperature 0 a text is what it is, whatever is drafted, and drafts are a function of the text so
far. So a round can be replayed from the text and what was recorded there: what it drafts, how far
the text follows, where the next round starts. The proposer is the one that decodes
(`inference.scheduling.auto`): costs, rates of acceptance, controller, cuts by confidence and copies
are its own, and only the trees of heads are taken from records instead of a network
(`inference.prediction.drafts`). Seconds are those of a cost table for what each round really did,
so nothing of a machine's noise is in them but what the table has of it.

Letters: n positions committed since the last round.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drafters import TargetModel
from inference.engine import EagerEngine
from inference.prediction.drafts import RULE
from inference.prediction.recording import Recorded
from inference.proposers import HeadProposer, Proposer, RowState, Session
from inference.proposers.arms import NEW, describe
from inference.scheduling.auto import AutoProposer
from inference.scheduling.costs import CostTable
from inference.scheduling.schedule import RoundCosts
from inference.scheduling.survival import Prior
from inference.timing import PhaseTimer
from inference.tree import TokenTree

Same = tuple[str | None, int, int, int]
"""Arm or None, depth, children per node, nodes: what is done, as `Choice.same`."""


@dataclass(frozen=True)
class Played:
    """One round.

    Attributes:
        does: that was chosen.
        accepted: drafts.
        emitted: tokens.
        nodes: that were verified, root included.
        seconds: by the cost table.
        expected_tokens, expected_seconds: by whoever chose.
    """

    does: Same
    accepted: int
    emitted: int
    nodes: int
    seconds: float
    expected_tokens: float = 0.0
    expected_seconds: float = 0.0


class RecordedProposer(HeadProposer):
    """A head whose drafts were recorded.

    Args:
        head: that was recorded; its network does not run.
        name: of its arm.

    Attributes:
        levels: depths that the last tree took drafting.
    """

    def __init__(self, head: HeadProposer, name: str) -> None:
        super().__init__(head.drafter, head.options)
        self.options, self.name, self.levels = head.options, name, 0
        self._recorded: Recorded

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """None: nothing of the target is looked at."""
        return ()

    def follow(self, recorded: Recorded) -> None:
        """Draft along this text from now on."""
        self._recorded = recorded

    def reset(self, batch_size: int) -> None:
        """Nothing is kept between rounds."""

    def grow(self, row: int, state: RowState) -> TokenTree:
        """The tree that the head would grow here."""
        drafts = self._recorded.drafts[self.name][len(state.tokens) - state.prompt_length - 1]
        tree, self.levels = drafts.tree(self.options, state)
        return tree

    def forced(self, state: RowState, tokens: list[int]) -> list:
        """Not recorded."""
        raise NotImplementedError("drafts along a given path are not recorded")


@dataclass
class Player:
    """Decodes recorded texts, one after the other, with what is learnt from text to text.

    Attributes:
        target: for its name only: it does not run.
        proposer: that decides.
        heads: by arm, whose trees come from records.
        costs: of rounds.
    """

    target: TargetModel
    proposer: AutoProposer
    heads: Mapping[str | None, RecordedProposer]
    costs: RoundCosts

    def play(self, recorded: Recorded) -> list[Played]:
        """The rounds of one text."""
        answer, place, new = recorded.answer, 0, len(recorded.answer.prompt)
        engine = EagerEngine(self.target)
        self.proposer.start(Session(engine, None, 1, PhaseTimer(), RULE, [0]))
        for head in self.heads.values():
            head.follow(recorded)
        rounds = []
        while place < len(answer.tokens) - 1:
            done = self._round(recorded, place, new)
            rounds.append(done)
            place, new = place + done.emitted, done.emitted
        self.proposer.finish(0, [*answer.prompt, *answer.tokens])
        return rounds

    def _round(self, recorded: Recorded, place: int, new: int) -> Played:
        proposer, state = self.proposer, recorded.state(place, new)
        made, absorbed = proposer.made.copy(), proposer.absorbed
        tokens, seconds = proposer.expected_tokens, proposer.expected_seconds
        [tree] = proposer.propose([state])
        assert tree is not None, "no tree for a running sequence"
        [does] = proposer.made - made
        following = recorded.answer.tokens[place + 1 :]
        accepted = followed(tree, following)
        levels = self.heads[does[0]].levels if does[0] in self.heads else 0
        spent = round_seconds(self.costs, does, levels, tree.num_nodes, len(state.tokens)) + (
            proposer.absorbed - absorbed
        )
        return Played(
            does,
            accepted,
            min(accepted + 1, len(following)),
            tree.num_nodes,
            spent,
            proposer.expected_tokens - tokens,
            proposer.expected_seconds - seconds,
        )


def player(
    target: TargetModel,
    arms: Mapping[str, Proposer],
    costs: CostTable,
    priors: Mapping[str, Prior] | None = None,
) -> Player:
    """One that has decoded nothing yet.

    Args:
        target: of the texts.
        arms: as they would decode, which are left alone; of heads drafts must be recorded.
        costs: of rounds, for choices and seconds alike.
        priors: by arm, what is known beforehand.

    Raises:
        ValueError: an arm that is neither a head nor copies text.
    """
    heads: dict[str | None, RecordedProposer] = {}
    in_order: dict[str, Proposer] = {}
    for name, arm in arms.items():
        if isinstance(arm, HeadProposer):
            in_order[name] = heads[name] = RecordedProposer(arm, name)
        elif describe(name, arm).copies:
            in_order[name] = copy.deepcopy(arm)
        else:
            raise ValueError(
                f"replay: drafts of {name!r} cannot be recorded: it takes trained heads and copies"
            )
    return Player(target, AutoProposer(in_order, costs, priors, clock=False), heads, costs)


def followed(tree: TokenTree, following: Sequence[int]) -> int:
    """How many drafts a text accepts: at temperature 0 those that it goes on with."""
    node, count = 0, 0
    for token in following:
        child = tree.child_with_token(node, token)
        if child is None:
            break
        node, count = child, count + 1
    return count


def round_seconds(costs: RoundCosts, does: Same, levels: int, nodes: int, context: int) -> float:
    """Of a round, without taking in text.

    Args:
        costs: of rounds.
        does: that is done.
        levels: depths that a head drafted; 0 if none did.
        nodes: that were verified.
        context: committed tokens.
    """
    arm, _, top_k, _ = does
    drafting = 0.0
    if arm is not None and levels:
        drafting = costs.draft(arm, levels, top_k)
    return drafting + costs.verify(nodes, context) + costs.rest()


def absorbing(costs: RoundCosts, arm: str, new: int) -> float:
    """Seconds of a head taking in so many positions, beside drafting."""
    return costs.absorb(arm, max(new - NEW, 0))
