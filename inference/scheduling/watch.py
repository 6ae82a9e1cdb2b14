"""What rounds took, read off the clock of a decoding call between two calls of its proposer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from inference.scheduling.pace import PacedCosts, RoundSeconds
from inference.timing import PhaseTimer

HOST = ("build", "accept", "commit")
"""Phases of a round that are no network's."""


@dataclass(frozen=True)
class RoundBegun:
    """What a round is going to do.

    Attributes:
        width: rows of the widest tree.
        context: committed tokens, the mean of the sequences.
        batch: sequences.
        drafts: by proposer, what its networks' part of the round was to take; none where it also
            did what there is no price for.
        networks: whether any drafts.
    """

    width: int
    context: float
    batch: int
    drafts: Mapping[str, float] = field(default_factory=dict)
    networks: bool = False


class Watch:
    """Tells a cost table what came about.

    Args:
        costs: to be told.
    """

    def __init__(self, costs: PacedCosts) -> None:
        self.costs = costs
        self._timer = PhaseTimer()
        self._before: dict[str, float] = {}
        self._round: RoundBegun | None = None

    def start(self, timer: PhaseTimer) -> None:
        """Another decoding call.

        Args:
            timer: of its phases.
        """
        self._timer, self._round = timer, None

    def over(self) -> None:
        """The round before is over; the next has not begun."""
        now, before, this = dict(self._timer.seconds), self._before, self._round
        self._before, self._round = now, None
        took = {name: seconds - before.get(name, 0.0) for name, seconds in now.items()}
        if this is None or "target" not in took:  # nobody has verified what was drafted
            return
        networks = took.get("draft", 0.0)
        self.costs.observe(
            RoundSeconds(
                this.width,
                this.context,
                this.batch,
                took["target"],
                sum(took.get(phase, 0.0) for phase in HOST),
                {name: (networks, expected) for name, expected in this.drafts.items()},
                this.networks,
            )
        )

    def begun(self, this: RoundBegun) -> None:
        """The next round has drafted."""
        assert len(this.drafts) <= 1, "one clock for all networks"
        self._round = this
