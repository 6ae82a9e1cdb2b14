"""Which arm drafts in a round and how much, learnt while decoding; a plain step is always possible.

Pure: the standard library. The rate of every choice of every arm is predicted from its rates of
acceptance, which are estimated online, and a cost table. The best is done. Two accounts in seconds
keep learning cheap and mistakes small:

* What is lost by trials. An arm that is not used tells nothing about itself. Where it might be
  better than the best, for all that is known (`SurvivalEstimator.optimistic`), it is tried, first
  what has most to be hoped for what it is expected to cost: one draft tells whether an arm is worth
  more of them. What trials have cost beside the best choice stays below a share of all seconds. So
  speculation that was turned off comes back when the text changes.
* What is lost against plain decoding, by trials or by wrong estimates. Nothing is speculated whose
  failure would take it beyond an allowance and a share of all seconds: after n tokens at most about
  allowance / n + share slower than plain, whatever the drafts are worth (a conservative bandit,
  arXiv:1602.04282), as far as the cost table is right.

What a choice may depend on is the caller's to see to (`inference.scheduling.schedule.may_look`):
where it may look at no other sequences, each has a controller of its own. A choice depends on
nothing but counts of earlier rounds and on the costs. A sequence whose text would depend on the
choices is given costs that no clock changes, so that a seed gives one text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from inference.scheduling.accounts import Account, Ratio
from inference.scheduling.menus import Menu, Menus, Where
from inference.scheduling.schedule import Arm, Choice, RoundCosts, best_choice, menu, plain_step
from inference.scheduling.survival import NOTHING, Outcome, Prior, SurvivalEstimator

CONTEXT_STEP = 64
"""Seconds are looked up at multiples of so many tokens."""
LEAST_LOSS = 0.01
"""Share of a round; trials that are expected to cost less are equally cheap: choices that come
close to the best by their estimates are often those that these flatter."""


@dataclass(frozen=True)
class ControllerSettings:
    """How a controller learns.

    Attributes:
        trials: share of all seconds that trials may cost, and as much plain steps that are tried.
        losses: share of all seconds that decoding may be slower than plain.
        allowance: plain steps that may be lost on top of the share.
        first_trials: tokens, at the best rate, that trials may cost on top of their share.
        credit: plain steps gained that losses are set off against, at most.
        margin: relative; by how much another choice must be better than the one before.
        half_life: see `SurvivalEstimator`.
    """

    trials: float = 0.005
    losses: float = 0.01
    allowance: float = 6.0
    first_trials: float = 2.0
    credit: float = 50.0
    margin: float = 0.01
    half_life: float = 64.0


@dataclass
class _Decision:
    """The last choice, and what it was compared with.

    Attributes:
        choice: that was made.
        raw: the same without corrections.
        plain: step.
        best: choice by the estimates.
        context, batch: that it was made for.
    """

    choice: Choice
    raw: Choice
    plain: Choice
    best: Choice
    context: float
    batch: float


@dataclass
class Controller:
    """Chooses for one sequence, or one for all of a batch.

    Attributes:
        arms: that may draft.
        costs: of this machine.
        priors: by arm, what is known beforehand.
        settings: how it learns.
        cut_arms: whose drafts are cut by a confidence output after or while they are made.
        estimates: by arm; shared with the controllers of other sequences where that is allowed.
        offers: what an arm can do, called like `menu`.
    """

    arms: Sequence[Arm]
    costs: RoundCosts
    priors: Mapping[str, Prior] = field(default_factory=dict)
    settings: ControllerSettings = field(default_factory=ControllerSettings)
    cut_arms: frozenset[str] = frozenset()
    estimates: dict[str, SurvivalEstimator] = field(default_factory=dict)
    offers: Callable[..., list[Choice]] = menu

    def __post_init__(self) -> None:
        """Nothing is known yet, but what is shared."""
        add_estimates(self.estimates, self.arms, self.priors, self.settings.half_life)
        self.passed = 0.0
        """Seconds of all rounds, by the costs."""
        self._trials, self._looks = Account(self.settings.trials), Account(self.settings.trials)
        self._losses = Account(self.settings.losses)
        self._ratios: dict[tuple, tuple[Ratio, Ratio]] = {}
        self._beyond: dict[str, float] = {}
        self._menus = Menus(self.arms, self.costs, self.estimates, self._corrected, self.offers)
        self._rounds = 0
        self._held: Choice | None = None
        self._last: _Decision | None = None

    @property
    def rate(self) -> float:
        """Tokens per second that the best choice of the last round was expected to earn."""
        assert self._last is not None, "rate before choose()"
        return self._last.best.rate

    @property
    def trial(self) -> bool:
        """Whether the last choice was a trial."""
        return self._last is not None and self._last.choice.same != self._last.best.same

    def choose(
        self,
        context: float,
        batch: float = 1,
        depth: int | None = None,
        limits: Mapping[str, tuple[int, int]] | None = None,
        behind: Mapping[str, float] | None = None,
    ) -> Choice:
        """What to do in the next round.

        Args:
            context: committed tokens.
            batch: B.
            depth: deepest path that makes sense; None if all do.
            limits: by arm the depth and the nodes, root included, that it has in this round; arms
                that are not named have all of theirs.
            behind: by arm the seconds that it would need to catch up with the text, once. They are
                spread over the rounds that it is likely to be used for; a trial, which is one
                round, has to be worth all of them.
        """
        context = context // CONTEXT_STEP * CONTEXT_STEP
        plain = plain_step(self.costs, context, batch)
        late = behind or {}
        rounds = rounds_ahead(self.settings.half_life, depth)
        spread = {arm: seconds / rounds for arm, seconds in late.items()}
        self._beyond = {arm: late[arm] - share for arm, share in spread.items()}
        where = Where(context, batch, depth, limits or {}, spread, plain.seconds)
        menus = self._menus.current(where, self._rounds)
        best = self._best(plain, menus)
        if not self._safe(best, plain):
            best = plain
        choice = best
        if self._plain_is_tried(best, plain):
            choice = plain
        elif self._may_try(best, plain):
            known = {one.same: one for each in menus for one in each.raw} | {plain.same: plain}
            choice = self._trial(best, plain, self._menus.hopes(where), known)
        self._held = best
        raw = plain if choice.arm is None else self._menus.raw(choice)
        self._last = _Decision(choice, raw, plain, best, context, batch)
        return choice

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """What became of the last choice.

        Args:
            outcomes: of the sequences that it was made for; none if nothing is known.
        """
        last = self._last
        assert last is not None, "observe() before choose()"
        self._rounds += 1
        for estimate in self.estimates.values():
            estimate.tick()
        if not outcomes:
            return
        choice, plain, seconds = last.choice, last.plain.seconds, last.plain.seconds
        emitted = sum(outcome.emitted for outcome in outcomes) / len(outcomes)
        if choice.arm is not None:
            for outcome in outcomes:
                self.estimates[choice.arm].observe(outcome)
            rows = max(outcome.size for outcome in outcomes)
            seconds = last.raw.seconds + self._beyond.get(choice.arm, 0.0)
            seconds += self.costs.verify(rows, last.context, last.batch)
            seconds -= self.costs.verify(choice.size, last.context, last.batch)
            if self._is_corrected(choice):
                tokens, spent = self._ratios.setdefault(choice.same, (Ratio(), Ratio()))
                tokens.add(last.raw.tokens - 1.0, emitted - 1.0)
                spent.add(1.0, (seconds - self._beyond.get(choice.arm, 0.0)) / last.raw.seconds)
        self.passed += seconds
        self._losses.book(seconds - emitted * plain, -self.settings.credit * plain)
        if choice.same != last.best.same:
            account = self._looks if choice.arm is None else self._trials
            account.book(seconds - emitted / last.best.rate, 0.0)

    def note(self, arm: str, outcome: Outcome) -> None:
        """What would have become of the drafts of an arm that was not chosen: copied text can be
        compared with what was emitted (arXiv:2510.20064).
        """
        self.estimates[arm].observe(outcome)

    def _best(self, plain: Choice, menus: Sequence[Menu]) -> Choice:
        """The best of all menus, or what was done so far where that is about as good."""
        offers, held = [plain, *(each.best for each in menus)], self._held
        again = None if held is None else self._menus.again(held, menus)
        return best_choice(offers + ([] if again is None else [again]), held, self.settings.margin)

    def _is_corrected(self, choice: Choice) -> bool:
        """Chains that are never cut are predicted by what is counted; others are not quite."""
        return choice.top_k > 1 or choice.arm in self.cut_arms

    def _corrected(self, choice: Choice) -> Choice:
        """With tokens and seconds as they came about so far."""
        if choice.same not in self._ratios:
            return choice
        tokens, spent = self._ratios[choice.same]
        return choice._replace(
            tokens=1.0 + (choice.tokens - 1.0) * tokens.value(),
            seconds=choice.seconds * spent.value(),
        )

    def _safe(self, choice: Choice, plain: Choice) -> bool:
        """Whether it could fail without losing too much against plain decoding."""
        allowance = self.settings.allowance * plain.seconds
        return choice.arm is None or self._losses.affords(
            choice.seconds + self._beyond.get(choice.arm, 0.0) - plain.seconds,
            allowance,
            self.passed,
        )

    def _first_trials(self, best: Choice) -> float:
        """Seconds that trials may cost on top of their share."""
        return self.settings.first_trials / best.rate

    def _may_try(self, best: Choice, plain: Choice) -> bool:
        """Whether there is anything to spend on trials, before it is looked for one."""
        return self._trials.affords(0.0, self._first_trials(best), self.passed)

    def _plain_is_tried(self, best: Choice, plain: Choice) -> bool:
        """Whether a plain step is done to find out what it costs."""
        if best.arm is None or self.costs.knows_plain():
            return False
        allowance = self._first_trials(best)
        return self._looks.affords(plain.seconds - plain.tokens / best.rate, allowance, self.passed)

    def _trial(
        self, best: Choice, plain: Choice, hoped: Sequence[Choice], raw: Mapping[tuple, Choice]
    ) -> Choice:
        """The choice with most to be hoped for what it is expected to cost, if there is something
        to be hoped and it can be paid; else the best.

        Args:
            best: choice, by the estimates.
            plain: step.
            hoped: what all choices might be.
            raw: what they are expected to be, by what is done.
        """
        allowance = self._first_trials(best)
        found, most = best, 0.0
        for hope in hoped:
            expected = self._corrected(raw[hope.same])
            seconds = expected.seconds
            if hope.arm is not None and hope.arm != best.arm:
                seconds += self._beyond.get(hope.arm, 0.0)
            loss = seconds - expected.tokens / best.rate
            worth = (hope.tokens - best.rate * seconds) / max(loss, LEAST_LOSS * seconds)
            if (
                worth > most
                and self._trials.affords(loss, allowance, self.passed)
                and self._safe(hope, plain)
            ):
                found, most = expected, worth
        return found


def add_estimates(
    estimates: dict[str, SurvivalEstimator],
    arms: Sequence[Arm],
    priors: Mapping[str, Prior],
    half_life: float,
) -> None:
    """An estimate for each arm that has none.

    Args:
        estimates: by arm, added to.
        arms: that may draft.
        priors: by arm, what is known beforehand.
        half_life: see `SurvivalEstimator`.

    Raises:
        ValueError: no arms, two of one name, or priors of none of them.
    """
    if not arms or len({arm.name for arm in arms}) < len(arms):
        raise ValueError("Controller: arms with a name each are needed, one at least")
    for name in priors:
        if name not in {arm.name for arm in arms}:
            raise ValueError(f"Controller: priors of {name!r}, which is no arm")
    for arm in arms:
        if arm.name not in estimates:
            estimates[arm.name] = SurvivalEstimator(
                arm.depth, arm.top_k, priors.get(arm.name, NOTHING), half_life
            )


def rounds_ahead(half_life: float, depth: int | None) -> float:
    """Rounds that an arm is likely to be used for once it is: as long as a passage is remembered,
    or to the end of the text.

    Args:
        half_life: of what is remembered of a passage.
        depth: tokens that the text has left; None if it is not known to end.
    """
    return half_life if depth is None else min(half_life, depth + 1.0)


def controllers(
    costs: RoundCosts,
    priors: Mapping[str, Prior] | None = None,
    settings: ControllerSettings | None = None,
    cut_arms: Collection[str] = (),
) -> Callable[[Sequence[Arm], dict[str, SurvivalEstimator]], Controller]:
    """What `AdaptiveProposer` takes: builds a controller for arms and the estimates to learn into.

    Args:
        costs, priors, settings, cut_arms: see `Controller`.
    """

    def new(arms: Sequence[Arm], estimates: dict[str, SurvivalEstimator]) -> Controller:
        how = settings or ControllerSettings()
        return Controller(arms, costs, priors or {}, how, frozenset(cut_arms), estimates)

    return new
