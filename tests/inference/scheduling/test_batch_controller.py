"""The controller of a batch on simulated targets: near the best static assignment of all.

What assignments are worth is computed from the true rates, so that only what the controller sees is
random. Sequences differ in how good their drafts are.
"""

import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from inference.scheduling.batch_controller import BatchController
from inference.scheduling.batch_round import Situation
from inference.scheduling.controller import Controller, ControllerSettings
from inference.scheduling.costs import CostTable
from inference.scheduling.schedule import Arm, Choice, chain_tokens
from inference.scheduling.survival import Outcome, Prior
from tests.inference.scheduling.costs import KEY
from tests.inference.scheduling.test_controller import EAGER, FAIR, GOOD, PACKED, USELESS

HEAD = Arm("head", 6)
STEEP = {1: 0.05, 2: 0.06, 4: 0.085, 8: 0.15, 16: 0.29}
COSTS = {"eager": EAGER, "packed": PACKED, "steep": STEEP}
MIXES = {
    "alike": [GOOD, GOOD, GOOD],
    "mixed": [GOOD, FAIR, USELESS],
    "one good": [GOOD, USELESS, USELESS],
    "useless": [USELESS, USELESS, USELESS],
}


def costs_of(name: str, step: float = 0.004) -> CostTable:
    """Of batches of 1 and 3: drafting is by sequence, a forward grows less than the batch."""
    verify = {
        (width, 0, batch): seconds * (0.5 + 0.5 * batch)
        for width, seconds in COSTS[name].items()
        for batch in (1, 3)
    }
    drafts = {("head", deep, 1, b): step * deep * b for deep in (1, 6) for b in (1, 3)}
    return CostTable(KEY, verify, drafts, {1: 0.002, 3: 0.006})


@dataclass
class Course:
    """What a batch did: expected tokens and seconds, and what was chosen."""

    tokens: float = 0.0
    seconds: float = 0.0
    predicted: float = 0.0
    choices: list[dict[int, Choice]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def round_seconds(costs: CostTable, depths: Sequence[int]) -> float:
    """Of a round: padded to the deepest, drafts by those that draft."""
    batch = len(depths)
    drafting = sum(costs.draft("head", depth, 1, batch) / batch for depth in depths)
    return costs.verify(max(depths) + 1, 0, batch) + drafting + costs.rest(batch)


def drawn(source: random.Random, chances: Sequence[float]) -> int:
    """Accepted drafts of a chain."""
    accepted = 0
    while accepted < len(chances) and source.random() < chances[accepted]:
        accepted += 1
    return accepted


def outcome(accepted: int, choice: Choice) -> Outcome:
    offered = [1] * min(choice.depth, accepted + 1)
    return Outcome([0] * accepted, offered, accepted + 1, choice.size, choice.depth)


Choose = Callable[[int], dict[int, Choice]]
Observe = Callable[[dict[int, Outcome], int], None]


def follow(
    choose: Choose,
    observe: Observe,
    costs: CostTable,
    rates: Callable[[int], list[list[float]]],
    rounds: int,
    seed: int = 0,
) -> Course:
    source, course = random.Random(seed), Course()
    for number in range(rounds):
        choices = choose(number)
        chances = [rates(number)[row][: choices[row].depth] for row in choices]
        course.tokens += sum(chain_tokens(one)[-1] for one in chances)
        course.seconds += round_seconds(costs, [choice.depth for choice in choices.values()])
        course.predicted += choices[0].seconds
        course.choices.append(choices)
        heard = {
            row: outcome(drawn(source, one), choices[row])
            for row, one in zip(choices, chances, strict=True)
        }
        observe(heard, max(choice.size for choice in choices.values()))
    return course


def together(controller: BatchController, rows: int = 3) -> tuple[Choose, Observe]:
    where = {row: Situation(100, 99) for row in range(rows)}
    return lambda number: controller.choose(where), controller.observe


def each_for_itself(costs: CostTable, rows: int = 3) -> tuple[Choose, Observe]:
    controllers = [Controller([HEAD], costs) for _ in range(rows)]

    def choose(number: int) -> dict[int, Choice]:
        return {row: one.choose(100, rows, 99) for row, one in enumerate(controllers)}

    def observe(heard: Mapping[int, Outcome], width: int) -> None:
        for row, one in heard.items():
            controllers[row].observe([one])

    return choose, observe


@functools.cache
def best_static(name: str, mix: str) -> tuple[float, tuple[int, ...]]:
    """Of all assignments of depths to sequences: the tokens per second of the best."""
    costs = costs_of(name)
    tokens = [chain_tokens(rates) for rates in MIXES[mix]]

    def rate(depths: tuple[int, ...]) -> float:
        return sum(own[depth] for own, depth in zip(tokens, depths, strict=True)) / round_seconds(
            costs, depths
        )

    best = max(itertools.product(range(HEAD.depth + 1), repeat=3), key=rate)
    return rate(best), best


@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("name", list(COSTS))
def test_it_converges_to_the_best_static_assignment(name: str, mix: str) -> None:
    """Over the whole text, learning included; and where it knows the drafts on the whole."""
    costs, (best, _) = costs_of(name), best_static(name, mix)
    course = follow(
        *together(BatchController([HEAD], costs)), costs, lambda _: MIXES[mix], 600, seed=1
    )
    assert course.rate >= 0.97 * best
    assert course.predicted == pytest.approx(course.seconds, rel=1e-9)


def test_the_best_assignments_differ_by_sequence() -> None:
    """The test above can fail: what is best for one is not for another."""
    found = {best_static(name, mix)[1] for name in COSTS for mix in MIXES}
    assert (0, 0, 0) in found
    assert any(len(set(depths)) > 1 for depths in found)
    assert any(min(depths) > 2 for depths in found)


@pytest.mark.parametrize("mix", ["mixed", "one good"])
@pytest.mark.parametrize("name", list(COSTS))
def test_it_is_no_slower_than_each_for_itself(name: str, mix: str) -> None:
    costs = costs_of(name)
    rates = MIXES[mix]
    course = follow(*together(BatchController([HEAD], costs)), costs, lambda _: rates, 500)
    alone = follow(*each_for_itself(costs), costs, lambda _: rates, 500)
    assert course.rate >= 0.995 * alone.rate
    if (name, mix) == ("steep", "one good"):  # the deep chain of one makes all pay
        assert course.rate > 1.05 * alone.rate


def test_useless_drafts_cost_little_and_are_looked_at_again() -> None:
    costs = costs_of("steep")

    def rates(number: int) -> list[list[float]]:
        return [USELESS, USELESS, GOOD if number > 600 else USELESS]

    course = follow(*together(BatchController([HEAD], costs)), costs, rates, 1200)
    early = course.choices[:600]
    spent = sum(round_seconds(costs, [c.depth for c in choices.values()]) for choices in early)
    assert spent <= 1.03 * 600 * round_seconds(costs, [0, 0, 0])
    assert sum(choices[2].depth > 0 for choices in course.choices[-100:]) > 80
    assert sum(choices[0].depth > 0 for choices in course.choices[-100:]) < 20


def test_nothing_is_lost_beyond_the_allowance_even_if_it_was_told_wrong() -> None:
    costs = costs_of("eager")
    wrong = {"head": Prior([[0.99]] * 6, [[1000.0]] * 6)}
    slow = {}
    for allowance in (6.0, 1e9):
        settings = ControllerSettings(allowance=allowance)
        controller = BatchController([HEAD], costs, wrong, settings)
        course = follow(*together(controller), costs, lambda _: [[0.0] * 6] * 3, 400)
        slow[allowance] = course.seconds / (400 * round_seconds(costs, [0, 0, 0]))
    assert slow[6.0] <= 1.03 < slow[1e9]


def test_what_is_learnt_on_the_whole_is_kept_and_of_single_texts_is_not() -> None:
    controller = BatchController([HEAD], costs_of("packed"))
    follow(*together(controller), costs_of("packed"), lambda _: MIXES["mixed"], 300)
    tables = [controller.of_row(row)["head"].table()[0][0] for row in range(3)]
    assert tables[0] > tables[1] > tables[2]
    assert tables[0] - tables[2] > 0.5
    controller.start()
    fresh = [controller.of_row(row)["head"].table()[0][0] for row in range(3)]
    assert fresh[0] == fresh[1] == fresh[2]
    assert tables[2] + 0.1 < fresh[0] < tables[0]


def test_the_same_rounds_give_the_same_choices() -> None:
    costs = costs_of("eager")
    runs = [
        follow(*together(BatchController([HEAD], costs)), costs, lambda _: MIXES["mixed"], 100)
        for _ in range(2)
    ]
    assert runs[0].choices == runs[1].choices


# Single rounds ------------------------------------------------------------------------------------


def known(rate: float) -> dict[str, Prior]:
    return {"head": Prior([[rate]] * 6, [[1000.0]] * 6)}


SURE = ControllerSettings(trials=0.0, first_trials=-1.0, allowance=1e3)


def test_sequences_that_decided_are_taken_as_they_are() -> None:
    """Their rows are paid whatever the others do."""
    costs = costs_of("steep")
    alone = BatchController([HEAD], costs, known(0.5), SURE)
    narrow = alone.choose({0: Situation(0, 99), 1: Situation(0, 99)})
    wide = Choice("head", 5, 1, 6, 2.0, 1.0)
    beside = BatchController([HEAD], costs, known(0.5), SURE)
    found = beside.choose({0: Situation(0, 99), 1: Situation(0, 99)}, {2: wide})
    assert set(found) == {0, 1}
    assert narrow[0].depth < found[0].depth == found[1].depth
    assert found[0].seconds == pytest.approx(
        round_seconds(costs, [found[0].depth, found[1].depth, 5])
    )


def test_a_text_that_ends_drafts_no_deeper() -> None:
    controller = BatchController([HEAD], costs_of("packed"), known(0.9), SURE)
    found = controller.choose({0: Situation(0, 99), 1: Situation(0, 1), 2: Situation(0, 0)})
    assert found[0].depth > 3
    assert (found[1].depth, found[2].arm) == (1, None)


def test_an_arm_that_drafts_for_all_in_one_pass_costs_what_the_longest_costs() -> None:
    costs = costs_of("packed", step=0.02)
    by_row = BatchController([HEAD], costs, known(0.7), SURE)
    whole = BatchController([Arm("head", 6, together=True)], costs, known(0.7), SURE)
    rows = {row: Situation(0, 99) for row in range(3)}
    assert len({choice.same for choice in whole.choose(rows).values()}) == 1
    short = {0: Situation(0, 99), 1: Situation(0, 0), 2: Situation(0, 0)}
    depth = whole.choose(short)[0].depth
    assert whole.choose(short)[0].seconds == pytest.approx(
        costs.verify(depth + 1, 0, 3) + costs.draft("head", depth, 1, 3) + costs.rest(3)
    )
    assert by_row.choose(short)[0].depth > depth  # one cannot pay for a pass of three


def test_a_pass_for_all_is_as_deep_as_those_go_that_have_decided() -> None:
    """The others draft along for nothing, and cannot make it shorter."""
    costs, arm = costs_of("packed", step=0.2), Arm("head", 6, together=True)
    deep = Choice("head", 5, 1, 6, 2.0, 1.0)
    controller = BatchController([arm], costs, known(0.7), SURE)
    found = controller.choose({0: Situation(0, 99), 1: Situation(0, 2)}, {2: deep})
    assert (found[0].depth, found[1].depth) == (5, 2)
    assert found[0].seconds == pytest.approx(
        costs.verify(6, 0, 3) + costs.draft("head", 5, 1, 3) + costs.rest(3)
    )


def test_catching_up_is_spread_over_the_rounds_to_come() -> None:
    costs = costs_of("eager")
    rows = {row: Situation(0, 99) for row in range(3)}

    def choose(seconds: float, depth: int = 99) -> Choice:
        late = {"head": seconds}
        controller = BatchController([HEAD], costs, known(0.7), SURE)
        return controller.choose({row: Situation(0, depth, behind=late) for row in rows})[0]

    free = choose(0.0)
    assert free.depth > 0
    assert choose(0.3).seconds == pytest.approx(free.seconds + 3 * 0.3 / 64)
    assert choose(0.3, depth=3).arm is None  # there are not that many
    assert choose(100.0).arm is None
