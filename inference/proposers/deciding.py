"""Who decides for which sequence of a call, and learns from whom.

`inference.scheduling.schedule.may_look` says who may look at others. Sequences that may are decided
for together, where there are several and somebody who does it
(`inference.scheduling.batch_controller`). Each of the others has a controller of its own, takes the
others of the batch to be like itself, and starts from the priors in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from inference.proposers.base import RowState, Session
from inference.scheduling.batch_controller import BatchController, Situation
from inference.scheduling.schedule import Arm, Choice, may_look
from inference.scheduling.survival import Outcome, SurvivalEstimator
from inference.tree import Proposal


class Chooser(Protocol):
    """What decides for one sequence; `inference.scheduling.controller.Controller` does."""

    @property
    def rate(self) -> float:
        """Tokens per second that are earned otherwise."""
        ...

    def choose(
        self,
        context: float,
        batch: float = 1,
        depth: int | None = None,
        limits: Mapping[str, tuple[int, int]] | None = None,
        behind: Mapping[str, float] | None = None,
    ) -> Choice:
        """What to do in the next round."""
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """What became of the last choice."""
        ...

    def note(self, arm: str, outcome: Outcome) -> None:
        """What would have become of the drafts of another arm."""
        ...


Estimates = dict[str, SurvivalEstimator]
NewChooser = Callable[[Sequence[Arm], Estimates], Chooser]
"""Arms and the estimates to learn into, which may be shared -> what decides for one sequence."""
NewBatchChooser = Callable[[Sequence[Arm], Estimates], BatchController]
"""The same -> what decides for all sequences of a batch."""


@dataclass(frozen=True)
class Heard:
    """What became of the last round of one sequence.

    Attributes:
        outcome: of what was done.
        others: of copied drafts that were not chosen, by arm.
    """

    outcome: Outcome
    others: Mapping[str, Outcome] = field(default_factory=dict)


class Deciding:
    """Decides for all sequences of a call.

    Args:
        arms: that may draft.
        new_chooser: builds what decides for one sequence.
        new_batch: builds what decides for several at once; None leaves each to itself.
        new_alone: builds what decides for a sequence that may look at nothing but its own rounds;
            None is ``new_chooser``.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        new_chooser: NewChooser,
        new_batch: NewBatchChooser | None,
        new_alone: NewChooser | None = None,
    ) -> None:
        self.arms, self._new_chooser, self._new_batch = list(arms), new_chooser, new_batch
        self._new_alone = new_alone or new_chooser
        self.shared: Estimates = {}
        self.lasting: dict[int, Chooser] = {}
        self.together: BatchController | None = None
        self._choosers: dict[int, Chooser] = {}
        self._session: Session

    def start(self, session: Session) -> None:
        """Other texts."""
        self._session, self._choosers = session, {}
        if self.together is not None:
            self.together.start()

    def is_shared(self, state: RowState) -> bool:
        """Whether a sequence is decided for together with others."""
        return (
            self._new_batch is not None and self._session.batch_size > 1 and self.sees_others(state)
        )

    def batch(self, state: RowState) -> int:
        """Sequences that a round is priced for: those that still run, where others may be looked
        at.
        """
        session = self._session
        return len(session.live) if self.sees_others(state) else session.batch_size

    def learn(self, states: Mapping[int, RowState], heard: Mapping[int, Heard], width: int) -> None:
        """What became of the last round.

        Args:
            states: of the sequences, by row.
            heard: of those that were drafted for.
            width: rows per sequence that were verified.
        """
        outcomes = {}
        for row, one in heard.items():
            if self.is_shared(states[row]):
                outcomes[row] = one.outcome
                for name, outcome in one.others.items():
                    self._batch_chooser().note(row, name, outcome)
                continue
            chooser = self.chooser(row, states[row])
            chooser.observe([one.outcome])
            for name, outcome in one.others.items():
                chooser.note(name, outcome)
        if outcomes:
            self._batch_chooser().observe(outcomes, width)

    def choose(
        self, states: Mapping[int, RowState], situations: Mapping[int, Situation]
    ) -> dict[int, Choice]:
        """What every sequence does in the next round.

        Args:
            states: of the sequences, by row.
            situations: of the same.
        """
        alone: dict[int, Choice] = {}
        shared: dict[int, Situation] = {}
        for row, state in states.items():
            one = situations[row]
            if self.is_shared(state):
                shared[row] = one
            else:
                alone[row] = self.chooser(row, state).choose(
                    one.context, self.batch(state), one.depth, one.limits, one.behind
                )
        found = self._batch_chooser().choose(shared, alone) if shared else {}
        return {row: found[row] if row in found else alone[row] for row in states}

    def rate(self, row: int, state: RowState) -> float:
        """Tokens per second of one sequence that are earned otherwise; of those decided for
        together their mean.
        """
        if self.is_shared(state):
            return self._batch_chooser().rate / len(self._session.live)
        return self.chooser(row, state).rate

    def chooser(self, row: int, state: RowState) -> Chooser:
        """The row's own, or one that has learnt from other rows and calls where that is allowed."""
        if row not in self._choosers:
            if self.sees_others(state):
                if row not in self.lasting:
                    self.lasting[row] = self._new_chooser(self.arms, self.shared)
                self._choosers[row] = self.lasting[row]
            else:
                self._choosers[row] = self._new_alone(self.arms, {})
        return self._choosers[row]

    def sees_others(self, state: RowState) -> bool:
        """Whether what a sequence does may depend on others, and on the clock: whatever is drafted
        for it, it emits the same.
        """
        temperature = state.sampling.temperature
        return may_look(self._session.rule, Proposal.ONE_HOT, temperature).others

    def _batch_chooser(self) -> BatchController:
        """Of all sequences that may look at each other, in this call and the next."""
        if self.together is None:
            assert self._new_batch is not None, "see is_shared"
            self.together = self._new_batch(self.arms, self.shared)
        return self.together
