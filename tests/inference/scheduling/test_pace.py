"""A cost table that is corrected by what rounds take."""

import random

import pytest

from inference.scheduling.batch_controller import BatchController, Situation
from inference.scheduling.controller import Controller, ControllerSettings
from inference.scheduling.pace import FADING, KNOWN, Mean, PacedCosts, RoundSeconds
from inference.scheduling.schedule import Arm
from inference.scheduling.survival import Outcome, Prior
from inference.scheduling.watch import RoundBegun, Watch
from inference.timing import PhaseTimer
from tests.inference.scheduling.costs import cost_table

TABLE = cost_table({1: 1.0, 2: 1.1, 4: 1.3, 8: 2.0}, step=0.2, rest=0.05, slope=0.5)


def seconds(width: int, factor: float, host: float = 0.05, batch: int = 1) -> RoundSeconds:
    """A round that took so much of what the table says."""
    return RoundSeconds(width, 100, batch, factor * TABLE.verify(width, 100, batch), host)


def test_a_mean_is_drawn_towards_what_is_expected_and_forgets() -> None:
    mean = Mean()
    assert mean.value(3.0) == 3.0
    mean.add(5.0)
    assert mean.value(3.0) == pytest.approx((KNOWN * 3.0 + 5.0) / (KNOWN + 1.0))
    for _ in range(9000):
        mean.fade()
        mean.add(7.0)
    assert mean.weight == pytest.approx(1.0 / (1.0 - FADING))
    share = KNOWN / (KNOWN + mean.weight)
    assert mean.value(3.0) == pytest.approx(share * 3.0 + (1.0 - share) * 7.0)


def test_unwatched_it_is_the_table() -> None:
    paced = PacedCosts(TABLE)
    for width in (1, 2, 3, 8):
        assert paced.verify(width, 100) == TABLE.verify(width, 100)
    assert paced.draft("head", 3, 8) == TABLE.draft("head", 3, 8) and paced.draft("head", 0) == 0.0
    assert paced.rest(1) == TABLE.rest(1) and paced.widest() == 8 and paced.widths() == [1, 2, 4, 8]
    assert paced.absorb("head", 3) == TABLE.absorb("head", 3)
    assert paced.plain(100) == TABLE.verify(1, 100) + TABLE.rest()


def test_rounds_of_a_width_tell_of_that_width_most() -> None:
    """Four rows are slower than they were and single ones are not; others are like the four."""
    paced = PacedCosts(TABLE)
    for _ in range(300):
        paced.observe(seconds(1, 1.0))
        paced.observe(seconds(4, 1.3))
    found = {width: paced.verify(width, 100) / TABLE.verify(width, 100) for width in (1, 4, 8)}
    assert found[1] == pytest.approx(1.0, abs=0.02) and found[4] == pytest.approx(1.3, abs=0.02)
    assert 1.2 < found[8] < 1.3


def test_the_host_is_known_by_who_drafts() -> None:
    paced, at = PacedCosts(TABLE), TABLE.verify(4, 100)
    for _ in range(300):
        paced.observe(seconds(1, 1.0, host=0.10))
        paced.observe(seconds(4, 1.0, host=0.12))
        paced.observe(RoundSeconds(4, 100, 1, at, 0.17, {"head": (0.3, 0.2)}, networks=True))
    near = {"abs": 0.005}
    assert paced.rest() == pytest.approx(0.10, **near)
    assert paced.verify(4, 100) + paced.rest() == pytest.approx(at + 0.12, **near)
    drafting = paced.draft("head", 1)
    assert drafting == pytest.approx(1.5 * TABLE.draft("head", 1) + 0.05, abs=0.01)
    assert paced.plain(100) == pytest.approx(TABLE.verify(1, 100) + TABLE.rest(), **near)


def test_sequences_of_a_batch_share_the_host() -> None:
    paced = PacedCosts(TABLE)
    for _ in range(300):
        paced.observe(seconds(1, 1.0, host=TABLE.rest(8) + 0.8, batch=8))
    assert paced.rest(4) == pytest.approx(TABLE.rest(4) + 0.4, abs=0.02)


def test_a_round_that_was_paused_tells_nothing_unless_all_are() -> None:
    paced = PacedCosts(TABLE)
    for width in (1, 4, 8):  # each is compiled at its first round
        paced.observe(seconds(width, 1000.0, host=1000.0))
    for factor in (1.0, 1000.0, 1.0):
        paced.observe(seconds(4, factor, host=factor))
    assert paced.verify(4, 100) + paced.rest() < 1.5 * TABLE.verify(4, 100)
    for _ in range(30):
        paced.observe(seconds(4, 5.0))
    assert paced.verify(4, 100) > 4.0 * TABLE.verify(4, 100)


def test_what_became_too_dear_is_forgotten_in_time() -> None:
    paced = PacedCosts(TABLE)
    for _ in range(30):
        paced.observe(seconds(4, 3.0, host=0.5))
    assert paced.verify(4, 100) > 2.5 * TABLE.verify(4, 100)
    for _ in range(6000):
        paced.observe(seconds(1, 1.0))
    assert paced.verify(4, 100) == pytest.approx(TABLE.verify(4, 100), rel=0.01)


def test_single_rows_are_taken_to_be_as_fast_as_they_might_be() -> None:
    for factor, believed in ((3.0, 1.0), (0.5, 0.55)):
        paced = PacedCosts(TABLE)
        for _ in range(40):
            paced.observe(seconds(4, factor))
        assert paced.verify(1, 100) == pytest.approx(believed * TABLE.verify(1, 100), rel=0.02)
        for _ in range(300):
            paced.observe(seconds(1, factor))
        assert paced.verify(1, 100) == pytest.approx(factor * TABLE.verify(1, 100), rel=0.03)


def test_drafts_that_are_dearer_than_calibrated_are_given_up() -> None:
    """By the table four rows cost little; in truth they cost as much as four steps."""
    paced, source = PacedCosts(TABLE), random.Random(1)
    arm = Arm("copy", 3, copies=True)
    settings = ControllerSettings()
    deciding = Controller([arm], paced, {"copy": Prior.measured([[0.5]] * 3)}, settings)
    chosen = []
    for _ in range(400):
        choice = deciding.choose(100)
        chosen.append(choice.size)
        accepted = 0
        while accepted < choice.depth and source.random() < 0.5:
            accepted += 1
        offered = [1] * min(choice.depth, accepted + 1)
        factor = 1.0 if choice.size == 1 else choice.size / TABLE.verify(choice.size, 100)
        paced.observe(seconds(choice.size, factor))
        deciding.observe([Outcome([0] * accepted, offered, accepted + 1, choice.size)])
    assert max(chosen[:20]) > 1 and chosen[200:].count(1) > 180


def test_the_watch_reads_rounds_off_the_phases() -> None:
    paced, timer = PacedCosts(TABLE), PhaseTimer()
    told: list[RoundSeconds] = []
    paced.observe = told.append  # type: ignore[method-assign]
    watch = Watch(paced)
    watch.start(timer)
    timer.seconds["prefill"] = 9.0
    watch.over()
    assert not told  # nothing was begun
    watch.begun(RoundBegun(4, 100.0, 1, {"head": 0.2}, networks=True))
    for phase, spent in {"draft": 0.3, "build": 0.1, "target": 1.5, "accept": 0.2}.items():
        timer.seconds[phase] += spent
    watch.over()
    watch.begun(RoundBegun(1, 102.0, 1))
    timer.seconds["target"] += 1.25
    timer.seconds["commit"] += 0.5
    watch.over()
    first, second = told
    assert (first.width, first.context, first.networks) == (4, 100.0, True)
    assert first.forward == 1.5 and first.host == pytest.approx(0.3)
    assert first.drafts == {"head": (0.3, 0.2)}
    assert (second.forward, second.host, second.drafts) == (1.25, 0.5, {})
    watch.begun(RoundBegun(1, 103.0, 1))
    watch.start(PhaseTimer())  # the text has ended: nobody knows what its last round took
    watch.over()
    assert len(told) == 2


class Unwatched(PacedCosts):
    """Its plain steps are twice as fast as the table has them, and four rows are not."""

    def told(self, width: int) -> None:
        self.observe(seconds(width, 0.5 if width == 1 else 1.0))


def test_plain_steps_are_tried_now_and_then() -> None:
    """By the table drafts pay. Who never does a plain step never learns that they do not."""
    arm, prior = Arm("copy", 3, copies=True), {"copy": Prior.measured([[0.6]] * 3)}
    chosen: dict[bool, list[int]] = {}
    for watched in (True, False):
        paced, source = Unwatched(TABLE), random.Random(1)
        deciding = Controller([arm], paced if watched else TABLE, prior)
        chosen[watched] = []
        for _ in range(400):
            choice = deciding.choose(100)
            chosen[watched].append(choice.size)
            accepted = 0
            while accepted < choice.depth and source.random() < 0.6:
                accepted += 1
            offered = [1] * min(choice.depth, accepted + 1)
            paced.told(choice.size)
            deciding.observe([Outcome([0] * accepted, offered, accepted + 1, choice.size)])
    assert chosen[False].count(1) == 0 < chosen[True][:20].count(1)
    assert chosen[True][200:].count(1) > 180


def test_what_trials_of_plain_steps_cost_is_bounded() -> None:
    """Drafts are always right, so plain steps cost most of a round."""
    paced = PacedCosts(TABLE)
    arm = Arm("copy", 7, copies=True)
    deciding = Controller([arm], paced, {"copy": Prior.measured([[0.95]] * 7)})
    plain = 0
    for number in range(2000):
        choice = deciding.choose(100)
        plain += choice.size == 1
        paced.observe(seconds(choice.size, 1.0))
        deciding.observe(
            [Outcome([0] * choice.depth, [1] * choice.depth, choice.depth + 1, choice.size)]
        )
        if number == 100:
            assert 0 < plain <= 6
    assert plain <= 6 + 0.01 * 2 * 1900


def test_a_batch_tries_plain_rounds_too() -> None:
    paced = PacedCosts(TABLE)
    arm, prior = Arm("copy", 3, copies=True), {"copy": Prior.measured([[0.9]] * 3)}
    plain: dict[bool, int] = {}
    for watched in (True, False):
        deciding = BatchController([arm], paced if watched else TABLE, prior)
        plain[watched] = 0
        for _ in range(60):
            choices = deciding.choose({row: Situation(100, 20) for row in range(2)})
            width = max(choice.size for choice in choices.values())
            plain[watched] += width == 1
            paced.observe(seconds(width, 1.0, batch=2))
            outcome = Outcome([0] * (width - 1), [1] * (width - 1), width, width)
            deciding.observe(dict.fromkeys(choices, outcome), width)
    assert plain[False] == 0 and 1 <= plain[True] <= 6
