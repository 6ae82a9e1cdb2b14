"""What `--size auto` is compared with, over the same records: every fixed size, and a bound.

A fixed size does the same in every round: a chain or a tree of a head, or a copy of so many tokens
where there is something to copy. The bound knows beforehand what every size would accept: the
fewest seconds in which rounds of any kinds get through a text, taking in text for nothing.

Letters: m tokens that the rounds of a text emit.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from drafters import TargetModel
from inference.engine import EagerEngine
from inference.prediction.drafts import RULE, Order
from inference.prediction.recording import Recorded
from inference.prediction.replay import Played, Same, absorbing, followed, round_seconds
from inference.proposers import HeadProposer, Proposer, Session
from inference.proposers.arms import as_chosen
from inference.scheduling.schedule import Arm, Choice, RoundCosts, menu
from inference.timing import PhaseTimer

PLAIN: Same = (None, 0, 1, 1)
COPIES = "copies"
"""Stands for all arms that copy text: of these just one has a draft at a position."""


@dataclass(frozen=True)
class Step:
    """What a round of some size would do at a position.

    Attributes:
        accepted: drafts.
        nodes: to verify, root included.
        levels: depths that a head drafts.
    """

    accepted: int
    nodes: int
    levels: int = 0


NOTHING = Step(0, 1)


def sizes_of(arms: Sequence[Arm], costs: RoundCosts) -> list[Same]:
    """Every fixed size that `--size auto` may choose from, plain steps first.

    Args:
        arms: that may draft.
        costs: with the sizes of trees that are tried.
    """
    found: dict[Same, None] = {PLAIN: None}
    for arm in arms:
        for choice in menu(arm, [[0.0] * arm.top_k] * arm.depth, costs, 0):
            name = COPIES if arm.copies else arm.name
            found[name, choice.depth, choice.top_k, choice.size] = None
    return list(found)


def label(does: Same) -> str:
    """As it is shown."""
    arm, depth, top_k, size = does
    if arm is None:
        return "plain"
    return f"{arm}: chain {depth}" if top_k == 1 else f"{arm}: tree {size}, depth {depth}"


def look_up(
    target: TargetModel,
    arms: Mapping[str, Proposer],
    sizes: Sequence[Same],
    records: Sequence[Recorded],
) -> list[list[dict[Same, Step]]]:
    """What every size would do at every position of every text.

    Args:
        target: of the texts.
        arms: of the sizes, which are left alone.
        sizes: of `sizes_of`.
        records: the texts.
    """
    heads = {name: arm for name, arm in arms.items() if isinstance(arm, HeadProposer)}
    copying = [copy.deepcopy(arm) for name, arm in arms.items() if name not in heads]
    session = Session(EagerEngine(target), None, 1, PhaseTimer(), RULE, [0])
    found = []
    for recorded in records:
        for proposer in copying:
            proposer.start(session)
        answer = recorded.answer
        places = range(len(answer.tokens) - 1)
        found.append([_steps(recorded, place, heads, copying, sizes) for place in places])
        for proposer in copying:
            proposer.finish(0, [*answer.prompt, *answer.tokens])
    return found


def _steps(
    recorded: Recorded,
    place: int,
    heads: Mapping[str, HeadProposer],
    copying: Sequence[Proposer],
    sizes: Sequence[Same],
) -> dict[Same, Step]:
    """What every size would do at one position."""
    state, following = recorded.state(place), recorded.answer.tokens[place + 1 :]
    trees = [tree for proposer in copying for tree in proposer.propose([state]) if tree is not None]
    drafted = [tree for tree in trees if tree.num_nodes > 1]
    orders: dict[tuple[str, int], list[Order]] = {}
    for name, head in heads.items():
        for top_k in {1, head.options.top_k}:
            options = replace(head.options, top_k=top_k, min_survival=0.0)
            drafts = recorded.drafts[name][place : place + 1]
            orders[name, top_k] = drafts[0].orders(options, state, following) if drafts else []
    found: dict[Same, Step] = {}
    for does in sizes:
        arm, depth, top_k, size = does
        if arm is None or (arm == COPIES and not drafted):
            found[does] = NOTHING
        elif arm == COPIES:
            tree = as_chosen(drafted[0], Choice(arm, depth, top_k, size, 0.0, 0.0))
            found[does] = Step(followed(tree, following), tree.num_nodes)
        else:
            own = orders[arm, top_k][:depth]  # shallower where the text may not go on so far
            accepted, nodes = own[-1].of_size(size) if own else (0, 1)
            found[does] = Step(accepted, nodes, max(len(own), 1))
    return found


def play_fixed(
    recorded: Recorded, steps: Sequence[Mapping[Same, Step]], does: Same, costs: RoundCosts
) -> list[Played]:
    """The rounds of a text that all do the same.

    Args:
        recorded: the text.
        steps: by position.
        does: in every round.
        costs: of rounds.
    """
    place, new, rounds = 0, len(recorded.answer.prompt), []
    while place < len(steps):
        step = steps[place][does]
        seconds = step_seconds(costs, does, step, len(recorded.answer.prompt) + place + 1)
        if does[0] not in (None, COPIES):
            seconds += absorbing(costs, str(does[0]), new)
        emitted = min(step.accepted + 1, len(steps) - place)
        rounds.append(Played(does, step.accepted, emitted, step.nodes, seconds))
        place, new = place + emitted, emitted
    return rounds


def step_seconds(costs: RoundCosts, does: Same, step: Step, context: int) -> float:
    """Of a round, without taking in text.

    Args:
        costs: of rounds.
        does: that is done.
        step: what comes of it.
        context: committed tokens.
    """
    return round_seconds(costs, does, step.levels, step.nodes, context)


def least_seconds(
    recorded: Recorded, steps: Sequence[Mapping[Same, Step]], costs: RoundCosts
) -> float:
    """In which a text could be decoded, if in every round it were known what each size brings.

    Args:
        recorded: the text.
        steps: by position.
        costs: of rounds.
    """
    start, m = len(recorded.answer.prompt) + 1, len(steps)
    left = [0.0] * (m + 1)  # from each position to the end
    for place in reversed(range(m)):
        left[place] = min(
            step_seconds(costs, does, step, start + place) + left[min(place + step.accepted + 1, m)]
            for does, step in steps[place].items()
        )
    return left[0]
