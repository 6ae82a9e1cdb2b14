"""What arms can do in a round, predicted: kept from round to round as long as it is the same.

Pure: the standard library. There are some dozens of choices, and a decoding thread has few of its
objects in the processor's caches behind a forward, so what is not looked at anew saves time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from inference.scheduling.schedule import Arm, Choice, RoundCosts, best_choice
from inference.scheduling.survival import SurvivalEstimator

REFRESHED = 8
"""Rounds after which what an idle arm can do is predicted anew."""
PACE_STEPS = 20
"""Where plain steps take a twentieth more or less, all is predicted anew."""
LATE_STEP = 0.002
"""Catching up is priced in multiples of so many plain steps a round."""


@dataclass(frozen=True)
class Where:
    """A round before it is chosen for.

    Attributes:
        context: committed tokens.
        batch: B.
        depth: deepest path that makes sense; None if all do.
        limits: by arm the depth and the nodes, root included, that it has in this round; arms that
            are not named have all of theirs.
        late: by arm the seconds of catching up, a round.
        plain: seconds of a plain step.
    """

    context: float
    batch: float
    depth: int | None
    limits: Mapping[str, tuple[int, int]]
    late: Mapping[str, float]
    plain: float


@dataclass(frozen=True)
class Menu:
    """What an arm can do in a round.

    Attributes:
        made_for: what it follows from.
        raw: choices, one at least, as rates of acceptance and costs predict them.
        best: of them, with tokens and seconds as they came about so far.
    """

    made_for: tuple
    raw: list[Choice]
    best: Choice


class Menus:
    """The menus of all arms.

    Args:
        arms: that may draft.
        costs: of this machine.
        estimates: by arm.
        corrected: a choice, with tokens and seconds as they came about so far.
        offers: what an arm can do, called like `inference.scheduling.schedule.menu`.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        costs: RoundCosts,
        estimates: Mapping[str, SurvivalEstimator],
        corrected: Callable[[Choice], Choice],
        offers: Callable[..., list[Choice]],
    ) -> None:
        self.arms, self.costs, self.estimates = arms, costs, estimates
        self._corrected, self._offers = corrected, offers
        self._kept: dict[str, Menu] = {}

    def current(self, where: Where, rounds: int) -> list[Menu]:
        """Of all arms that have anything. What is known of an arm changes little as long as nothing
        is heard of it, so its menu is kept for some rounds.

        Args:
            where: the round.
            rounds: that there were before it.
        """
        found = []
        for arm, depth, size in self._available(where):
            estimate, late = self.estimates[arm.name], self._late(arm, where)
            turn = rounds // REFRESHED
            pace = round(PACE_STEPS * math.log(where.plain))
            made_for = (turn, pace, estimate.seen, where.context, where.batch, depth, size, late)
            kept = self._kept.get(arm.name)
            if kept is None or kept.made_for != made_for:
                raw = self._raw(arm, estimate.table(), where, depth, size, late)
                if not raw:
                    continue
                best = best_choice([self._corrected(choice) for choice in raw])
                kept = self._kept[arm.name] = Menu(made_for, raw, best)
            found.append(kept)
        return found

    def hopes(self, where: Where) -> list[Choice]:
        """What all arms might do, for all that is known.

        Args:
            where: the round.
        """
        found = []
        for arm, depth, size in self._available(where):
            table = self.estimates[arm.name].optimistic()
            found += self._raw(arm, table, where, depth, size, self._late(arm, where))
        return found

    def raw(self, wanted: Choice) -> Choice:
        """A choice of the last round, uncorrected.

        Args:
            wanted: that does the same.
        """
        assert wanted.arm is not None, "plain steps are on no menu"
        found = _same(self._kept[wanted.arm].raw, wanted)
        assert found is not None, "chosen from the menu"
        return found

    def again(self, held: Choice, menus: Sequence[Menu]) -> Choice | None:
        """What was done before, corrected, if it is on the menu.

        Args:
            held: that was done.
            menus: of this round.
        """
        for menu in menus:
            if menu.raw[0].arm == held.arm:
                found = _same(menu.raw, held)
                return None if found is None else self._corrected(found)
        return None

    def _available(self, where: Where) -> Iterator[tuple[Arm, int, int]]:
        """Arms that have anything, with the depth and the nodes that they have."""
        for arm in self.arms:
            deepest, size = where.limits.get(arm.name, (arm.depth, arm.size))
            deepest = deepest if where.depth is None else min(deepest, where.depth)
            if deepest >= 1 and size >= 2:  # otherwise a text that stands nowhere else
                yield arm, deepest, size

    def _late(self, arm: Arm, where: Where) -> float:
        step = LATE_STEP * where.plain
        return where.late.get(arm.name, 0.0) // step * step

    def _raw(
        self,
        arm: Arm,
        table: list[list[float]],
        where: Where,
        depth: int,
        size: int,
        late: float,
    ) -> list[Choice]:
        found = self._offers(arm, table, self.costs, where.context, where.batch, depth, size)
        if not late:
            return found
        return [choice._replace(seconds=choice.seconds + late) for choice in found]


def _same(choices: Sequence[Choice], wanted: Choice) -> Choice | None:
    """The one that does the same."""
    same = wanted.same
    return next((choice for choice in choices if choice.same == same), None)
