"""Which arms draft in a round, and how much, decided for all sequences of a batch at once.

Pure: the standard library. What `inference.scheduling.controller` is for one sequence: what every
sequence could do is predicted from rates of acceptance that are learnt online, and the assignment
with the most tokens per second of the whole round is done (`inference.scheduling.batch_round`,
`inference.scheduling.admission`). Verifying costs what the widest tree costs, for all sequences
together; drafting costs by sequence, or by the longest where an arm drafts for all in one pass; no
drafts at all is one assignment.

Each sequence's rates are its own where it has been watched, and those of all sequences so far where
it has not. The two accounts, of trials and of what is lost against plain decoding, are the batch's.

It is for sequences that may look at each other (`inference.scheduling.schedule.may_look`). Others
decide before, and are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from inference.scheduling.accounts import Account, Ratio
from inference.scheduling.admission import Plan
from inference.scheduling.batch_round import BatchRound, Options, Seen, Situation
from inference.scheduling.controller import ControllerSettings, add_estimates
from inference.scheduling.schedule import Arm, Choice, RoundCosts, Table
from inference.scheduling.survival import Outcome, Prior, SurvivalEstimator

TEXT = 6.0
"""Rounds that what was seen of other texts counts for: about what makes texts as different."""
WORTH_LOOKING = 0.03
"""Share of a round; with less to spend trials are not looked for, which takes time itself."""
TINY = 1e-3
"""Share of a round; trials that cost less are equally cheap."""


@dataclass
class _Decision:
    """The last round.

    Attributes:
        round: that it was.
        choices: by sequence, by the estimates alone.
        plan: of all sequences.
        best: plan by the estimates, corrected.
        width: rows per sequence that were planned.
        beyond: seconds of catching up that are not in the plan's.
        plain: seconds of a round without drafts.
        look: whether it was done without drafts to find out what that costs.
    """

    round: BatchRound
    choices: dict[int, Choice]
    plan: Plan
    best: Plan
    width: int
    beyond: float
    plain: float
    look: bool


@dataclass
class BatchController:
    """Chooses for all sequences of a batch.

    Attributes:
        arms: that may draft.
        costs: of this machine.
        priors: by arm, what is known beforehand.
        settings: how it learns.
        cut_arms: whose drafts are cut by a confidence output after or while they are made.
        estimates: by arm; what is learnt about drafts on the whole.
    """

    arms: Sequence[Arm]
    costs: RoundCosts
    priors: Mapping[str, Prior] = field(default_factory=dict)
    settings: ControllerSettings = field(default_factory=ControllerSettings)
    cut_arms: frozenset[str] = frozenset()
    estimates: dict[str, SurvivalEstimator] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Nothing is known yet, but what is shared."""
        add_estimates(self.estimates, self.arms, self.priors, self.settings.half_life)
        self.passed = 0.0
        """Seconds of all rounds, by the cost table."""
        self._trials, self._looks = Account(self.settings.trials), Account(self.settings.trials)
        self._losses = Account(self.settings.losses)
        self._seen = Seen()
        self._own: dict[int, dict[str, SurvivalEstimator]] = {}
        self._news: set[str] = set()
        self._held: dict[int, tuple] = {}
        self._last: _Decision | None = None

    def start(self) -> None:
        """Other texts: what was learnt about single sequences no longer holds."""
        self._own, self._held, self._last = {}, {}, None

    @property
    def rate(self) -> float:
        """Tokens per second of the whole batch that the best of the last round was to earn."""
        assert self._last is not None, "rate before choose()"
        return self._last.best.rate

    def of_row(self, row: int) -> dict[str, SurvivalEstimator]:
        """Estimates of one sequence, by arm, drawn towards those of all."""
        if row not in self._own:
            self._own[row] = {
                name: SurvivalEstimator(
                    one.depths,
                    one.ranks,
                    one.of_others(TEXT),
                    self.settings.half_life,
                    prior_strength=0.0,
                )
                for name, one in self.estimates.items()
            }
        return self._own[row]

    # Choosing -------------------------------------------------------------------------------------

    def choose(
        self, rows: Mapping[int, Situation], decided: Mapping[int, Choice] | None = None
    ) -> dict[int, Choice]:
        """What to do in the next round.

        Args:
            rows: by sequence, one at least.
            decided: what sequences do that may look at themselves only.

        Returns:
            A choice for each of ``rows``, with the tokens of that sequence and the seconds of the
            round.
        """
        half_life = self.settings.half_life
        this = BatchRound(self.arms, self.costs, self._seen, rows, decided or {}, half_life)
        options = this.options(self._tables)
        plain = this.plan([0] * len(options), options)
        best = self._held_or(this.best(options), this, options)
        if not self._safe(best, plain, this, options):
            best = plain
        plan = best
        least = WORTH_LOOKING * plain.seconds
        narrow = all(choice.size == 1 for choice in (decided or {}).values())
        look = narrow and self._plain_is_tried(best, plain, this)
        if look:
            plan = plain
        elif self._trials.affords(least, self._first_trials(this, best), self.passed):
            plan = self._trial(best, plain, this, options)
        chosen = {
            row: own[place]
            for row, own, place in zip(rows, options, plan.chosen, strict=False)  # not the decided
        }
        self._held = {
            row: own[place][0].same
            for row, own, place in zip(rows, options, best.chosen, strict=False)
        }
        self._last = _Decision(
            this,
            {row: choice for row, (choice, _) in chosen.items()},
            plan,
            best,
            max(own[place][0].size for own, place in zip(options, plan.chosen, strict=True)),
            this.beyond(plan, options),
            plain.seconds,
            look,
        )
        return {
            row: choice._replace(tokens=offer.tokens, seconds=plan.seconds)
            for row, (choice, offer) in chosen.items()
        }

    def _tables(self, row: int, arm: str) -> Table:
        return self.of_row(row)[arm].table()

    def _hopes(self, row: int, arm: str) -> Table:
        return self.of_row(row)[arm].optimistic()

    def _held_or(self, best: Plan, this: BatchRound, options: Options) -> Plan:
        """What was done so far, unless another plan is better by more than the margin."""
        chosen = list(best.chosen)
        for number, row in enumerate(this.rows):
            sames = [choice.same for choice, _ in options[number]]
            if self._held.get(row) not in sames:
                return best
            chosen[number] = sames.index(self._held[row])
        held = this.plan(chosen, options)
        return held if best.rate <= held.rate * (1.0 + self.settings.margin) else best

    def _safe(self, plan: Plan, plain: Plan, this: BatchRound, options: Options) -> bool:
        """Whether it could fail without losing too much against plain decoding."""
        more = plan.seconds + this.beyond(plan, options) - plain.seconds
        allowance = self.settings.allowance * plain.seconds
        return plan.chosen == plain.chosen or self._losses.affords(more, allowance, self.passed)

    def _first_trials(self, this: BatchRound, best: Plan) -> float:
        """Seconds that trials may cost on top of their share."""
        return self.settings.first_trials * this.batch / best.rate

    def _plain_is_tried(self, best: Plan, plain: Plan, this: BatchRound) -> bool:
        """Whether a round without drafts is done to find out what it costs."""
        if best.chosen == plain.chosen or self.costs.knows_plain():
            return False
        loss = plain.seconds - plain.tokens / best.rate
        return self._looks.affords(loss, self._first_trials(this, best), self.passed)

    def _trial(self, best: Plan, plain: Plan, this: BatchRound, options: Options) -> Plan:
        """What has most to be hoped for what it is expected to cost, if it can be paid; else the
        best.
        """
        hoped = this.options(self._hopes, corrected=False)
        allowance = self._first_trials(this, best)
        found, most = best, 0.0
        for chosen in this.trials(hoped, best):
            plan = this.plan(chosen, options)
            seconds = plan.seconds + this.beyond(plan, options) - this.beyond(best, options)
            tokens = sum(own[place][1].tokens for own, place in zip(hoped, chosen, strict=True))
            loss = seconds - plan.tokens / best.rate
            worth = (tokens - best.rate * seconds) / max(loss, TINY * plan.seconds)
            if (
                worth > most
                and self._trials.affords(loss, allowance, self.passed)
                and self._safe(plan, plain, this, options)
            ):
                found, most = plan, worth
        return found

    # Learning -------------------------------------------------------------------------------------

    def observe(self, outcomes: Mapping[int, Outcome], width: int) -> None:
        """What became of the last choices.

        Args:
            outcomes: by sequence; of those that still run.
            width: rows per sequence that were verified.
        """
        last = self._last
        assert last is not None, "observe() before choose()"
        for estimates in (self.estimates, *self._own.values()):
            for estimate in estimates.values():
                estimate.tick()
        planned, really = last.round.verify(last.width), last.round.verify(width)
        self._seen.seconds.setdefault(last.width, Ratio()).add(1.0, really / planned)
        if not outcomes:
            return
        for row, outcome in outcomes.items():
            self._learn(row, last.choices[row], outcome)
        self._tell_all()
        emitted = sum(outcome.emitted for outcome in outcomes.values()) / len(outcomes)
        seconds = last.plan.seconds + last.beyond + really - planned
        self.passed += seconds
        self._losses.book(seconds - emitted * last.plain, -self.settings.credit * last.plain)
        if last.plan.chosen != last.best.chosen:
            account = self._looks if last.look else self._trials
            account.book(seconds - emitted * last.round.batch / last.best.rate, 0.0)

    def _learn(self, row: int, choice: Choice, outcome: Outcome) -> None:
        if choice.arm is None:
            return
        self.note(row, choice.arm, outcome)
        if choice.top_k > 1 or choice.arm in self.cut_arms:  # others are predicted as counted
            ratio = self._seen.tokens.setdefault(choice.same, Ratio())
            ratio.add(choice.tokens - 1.0, outcome.emitted - 1.0)

    def note(self, row: int, arm: str, outcome: Outcome) -> None:
        """What became of the drafts of an arm, or would have if they had been chosen."""
        self.of_row(row)[arm].observe(outcome)
        self.estimates[arm].observe(outcome)
        self._news.add(arm)

    def _tell_all(self) -> None:
        """What is known of all sequences, to each of them."""
        for name in sorted(self._news):
            known = self.estimates[name].of_others(TEXT)
            for own in self._own.values():
                own[name].tell(known)
        self._news.clear()


def batch_controllers(
    costs: RoundCosts,
    priors: Mapping[str, Prior] | None = None,
    settings: ControllerSettings | None = None,
    cut_arms: Collection[str] = (),
) -> Callable[[Sequence[Arm], dict[str, SurvivalEstimator]], BatchController]:
    """What `AdaptiveProposer` takes for batches: builds a controller for arms and the estimates to
    learn into.

    Args:
        costs, priors, settings, cut_arms: see `BatchController`.
    """

    def new(arms: Sequence[Arm], estimates: dict[str, SurvivalEstimator]) -> BatchController:
        how = settings or ControllerSettings()
        return BatchController(arms, costs, priors or {}, how, frozenset(cut_arms), estimates)

    return new
