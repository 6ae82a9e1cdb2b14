"""One round of a batch: what every sequence could do, what it would cost, and the best of it.

Pure: the standard library. See `inference.scheduling.batch_controller`, which learns what drafts
are worth.

Letters: B sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from inference.scheduling.accounts import Ratio
from inference.scheduling.admission import Offer, Plan, assign, by_width, plan_of
from inference.scheduling.controller import CONTEXT_STEP, rounds_ahead
from inference.scheduling.schedule import Arm, Choice, RoundCosts, Table, menu, plain_step


@dataclass(frozen=True)
class Situation:
    """One sequence before a round.

    Attributes:
        context: committed tokens.
        depth: deepest path that makes sense.
        limits: by arm the depth and the nodes, root included, that it has in this round; arms that
            are not named have all of theirs.
        behind: by arm the seconds that it would need to catch up with the text, once.
    """

    context: int
    depth: int
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    behind: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Seen:
    """What became of predictions, by what was predicted.

    Attributes:
        tokens: accepted drafts of a choice (`Choice.same`).
        seconds: of verifying so many rows; fewer where drafts were cut.
    """

    tokens: dict[tuple, Ratio] = field(default_factory=dict)
    seconds: dict[int, Ratio] = field(default_factory=dict)


Options = list[list[tuple[Choice, Offer]]]
"""Of each sequence what it could do, the plain step first, and what that comes to in a batch."""
Tables = Callable[[int, str], Table]
"""(sequence, arm) -> rates of acceptance."""


class BatchRound:
    """One round of a batch.

    Args:
        arms: that may draft.
        costs: of this machine.
        seen: what became of predictions so far.
        rows: sequences that are decided for.
        decided: what other sequences do.
        half_life: rounds for which catching up is worth its seconds, at most.

    Attributes:
        batch: B.
        context: mean of the committed tokens.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        costs: RoundCosts,
        seen: Seen,
        rows: Mapping[int, Situation],
        decided: Mapping[int, Choice],
        half_life: float,
    ) -> None:
        self.arms, self._costs, self._seen = arms, costs, seen
        self.rows, self._decided, self._half_life = rows, decided, half_life
        self._by_row: frozenset[str | None] = frozenset(
            arm.name for arm in arms if not arm.copies and not arm.together
        )
        self.batch = len(rows) + len(decided)
        self._late = any(row.behind for row in rows.values())
        context = sum(row.context for row in rows.values()) / len(rows)
        self.context = context // CONTEXT_STEP * CONTEXT_STEP

    # What could be done ---------------------------------------------------------------------------

    def options(self, tables: Tables, corrected: bool = True) -> Options:
        """What every sequence could do; those that have decided have one option.

        Args:
            tables: what drafts are worth.
            corrected: with tokens as they came about so far.
        """
        plain = plain_step(self._costs, self.context, self.batch)
        found: Options = []
        for row, situation in self.rows.items():
            own = [(plain, Offer(1.0, 1))]
            for arm in self.arms:
                late = situation.behind.get(arm.name, 0.0) / self._ahead(situation)
                depth, size = situation.limits.get(arm.name, (arm.depth, arm.size))
                depth = min(depth, situation.depth)
                if depth < 1 or size < 2:
                    continue
                choices = menu(
                    arm,
                    tables(row, arm.name),
                    self._costs,
                    self.context,
                    self.batch,
                    depth,
                    size,
                )
                own += [(choice, self._offer(choice, late, corrected)) for choice in choices]
            found.append(own)
        return found + [[(choice, self._offer(choice))] for choice in self._decided.values()]

    def _offer(self, choice: Choice, late: float = 0.0, corrected: bool = False) -> Offer:
        """What a choice comes to, with so many seconds of catching up."""
        seconds, tokens = late, choice.tokens
        if choice.arm is not None and choice.arm in self._by_row:
            drafting = self._costs.draft(choice.arm, choice.depth, choice.top_k, self.batch)
            seconds += drafting / self.batch
        if corrected and self._seen.tokens:
            ratio = self._seen.tokens.get(choice.same)
            tokens = tokens if ratio is None else 1.0 + (tokens - 1.0) * ratio.value()
        return Offer(tokens, choice.size, seconds)

    def _ahead(self, situation: Situation) -> float:
        return rounds_ahead(self._half_life, situation.depth)

    # What it costs --------------------------------------------------------------------------------

    def verify(self, width: int) -> float:
        """Seconds of a forward of so many rows per sequence."""
        return self._costs.verify(width, self.context, self.batch)

    def plan(self, chosen: Sequence[int], options: Options) -> Plan:
        """An assignment, priced.

        Args:
            chosen: per sequence the place of its option.
            options: of all sequences.
        """
        done = [own[place] for own, place in zip(options, chosen, strict=True)]
        deepest = {arm.name: 0 for arm in self.arms if arm.together}
        for choice, _ in done:
            if choice.arm in deepest:
                deepest[choice.arm] = max(deepest[choice.arm], choice.depth)
        seconds = sum(self._costs.draft(a, depth, 1, self.batch) for a, depth in deepest.items())
        return plan_of([offer for _, offer in done], chosen, self._price(seconds))

    def beyond(self, plan: Plan, options: Options) -> float:
        """Seconds of catching up in this round that its price leaves to later ones.

        Args:
            plan: of the round.
            options: of all sequences.
        """
        found = 0.0
        if not self._late:
            return found
        for situation, own, place in zip(self.rows.values(), options, plan.chosen, strict=False):
            arm = own[place][0].arm
            if arm is not None:
                found += situation.behind.get(arm, 0.0) * (1.0 - 1.0 / self._ahead(situation))
        return found

    def _price(self, fixed: float = 0.0) -> Callable[[int], float]:
        """Seconds of a round by its rows, without what sequences draft by themselves.

        Args:
            fixed: of drafting for all in one pass.
        """

        def seconds(width: int) -> float:
            verify = self.verify(width)
            if width in self._seen.seconds:
                verify *= self._seen.seconds[width].value()
            return verify + self._costs.rest(self.batch) + fixed

        return seconds

    # What is best ---------------------------------------------------------------------------------

    def best(self, options: Options) -> Plan:
        """The assignment with the most tokens per second.

        Args:
            options: of all sequences.
        """
        plans = []
        for caps, fixed in self._passes():
            kept = [
                [place for place, (choice, _) in enumerate(own) if _within(choice, caps)]
                for own in options
            ]
            offers = [
                [own[place][1] for place in places]
                for own, places in zip(options, kept, strict=True)
            ]
            plan = assign(offers, self._price(fixed))
            chosen = [places[n] for places, n in zip(kept, plan.chosen, strict=True)]
            plans.append(replace(plan, chosen=tuple(chosen)))
        return max(plans, key=lambda plan: plan.rate)

    def trials(self, hoped: Options, best: Plan) -> Iterator[tuple[int, ...]]:
        """Assignments that would tell something: at each width what is best if hopes come true, for
        all sequences, and for one of them beside what the others do.

        Args:
            hoped: what all sequences could do, if all goes well.
            best: what is known to be best.
        """
        found = {best.chosen}
        for _, _, assignment in by_width(_offers(hoped), best.rate):
            chosen = assignment()
            beside = [
                (*best.chosen[:row], chosen[row], *best.chosen[row + 1 :])
                for row in range(len(self.rows))
            ]
            for one in (chosen, *beside):
                if one not in found:
                    found.add(one)
                    yield one

    def _passes(self) -> Iterator[tuple[dict[str | None, int], float]]:
        """How deep arms that draft for all in one pass may go, and what that costs. What sequences
        have decided they do.
        """
        together = [arm for arm in self.arms if arm.together]
        decided = self._decided.values()
        least = {
            arm.name: max((one.depth for one in decided if one.arm == arm.name), default=0)
            for arm in together
        }
        for depths in itertools.product(
            *(range(least[arm.name], arm.depth + 1) for arm in together)
        ):
            caps: dict[str | None, int] = {}
            fixed = 0.0
            for arm, depth in zip(together, depths, strict=True):
                caps[arm.name] = depth
                fixed += self._costs.draft(arm.name, depth, 1, self.batch)
            yield caps, fixed


def _offers(options: Options) -> list[list[Offer]]:
    return [[offer for _, offer in own] for own in options]


def _within(choice: Choice, caps: Mapping[str | None, int]) -> bool:
    """Whether an arm that drafts for all in one pass goes no deeper than it may."""
    return choice.arm not in caps or choice.depth <= caps[choice.arm]
