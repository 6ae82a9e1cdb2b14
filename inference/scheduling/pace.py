"""Seconds as they come about: a cost table, corrected by the clock while decoding.

A table is measured once, by one process that does nothing else. Decoding takes other seconds: the
machine is warm, or shared, and the host has more to do in a round than a calibration sees. What
rounds really take is known as soon as they are over, so the table is what is expected at first, and
counts for `KNOWN` rounds afterwards.

* Forwards are corrected by a factor: of more than one row, drawn towards that of one, and of just
  so many rows, drawn towards that of all those. That of one is drawn towards 1, or towards that of
  more rows if it is less. So plain steps that have not been seen are taken to be as fast as they
  might be: where that is wrong it is found out, as they are done then; the opposite mistake would
  stay.
* Drafting is corrected by a factor of each proposer.
* The host's part is a sum: of rounds without drafts, of copied ones, and of those of networks.

All of it is forgotten in time, whether such rounds come or not: what became too dear is tried
again.

Who may look at the clock is not decided here (`inference.proposers.deciding`).

Letters: N rows per sequence, B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from inference.scheduling.accounts import Remembered
from inference.scheduling.schedule import RoundCosts

KNOWN = 4.0
"""Rounds that what is expected counts for beside those that were measured."""
TABLE = 0.25
"""The same for plain steps, which everything is compared with: a few of them settle it."""
PLAIN = 2.9
"""Plain steps that should have been watched, older ones counting less: three at first."""
FADING = 0.998
"""Of the weight of a measured round, with each that follows: about five hundred are remembered."""
MOST = 4.0
"""A round that takes so much longer than expected compiles something or is paused, unless the one
of as many rows before it did too."""


@dataclass(frozen=True)
class RoundSeconds:
    """What one round took.

    Attributes:
        width: N, of the widest tree.
        context: committed tokens, the mean of the sequences.
        batch: B.
        forward: seconds of the target.
        host: seconds of everything but networks.
        drafts: by proposer, seconds that its networks took and seconds that a table gives for them.
            Only what the table has a price for.
        networks: whether any drafted.
    """

    width: int
    context: float
    batch: int
    forward: float
    host: float
    drafts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    networks: bool = False


@dataclass
class Mean:
    """A mean of numbers, older ones fading, drawn towards what is expected of it.

    Attributes:
        weight: of the numbers.
        total: of the numbers, by weight.
    """

    weight: float = 0.0
    total: float = 0.0

    def add(self, number: float) -> None:
        """One more."""
        self.weight += 1.0
        self.total += number

    def fade(self) -> None:
        """A round has passed."""
        self.weight *= FADING
        self.total *= FADING

    def value(self, expected: float, known: float = KNOWN) -> float:
        """The mean, in which what is expected counts for so many numbers."""
        return (known * expected + self.total) / (known + self.weight)


class PacedCosts:
    """A cost table with the seconds of this decoding. It is looked up as `RoundCosts`.

    Args:
        table: what is expected.
    """

    def __init__(self, table: RoundCosts) -> None:
        self.table = Remembered(table)
        self._wide = Mean()
        self._widths: dict[int, Mean] = {1: Mean()}
        self._drafts: dict[str, Mean] = {}
        self._plain, self._copied, self._drafted = Mean(), Mean(), Mean()  # more than in the table
        self._factors: dict[int, float] = {}
        self._host = (0.0, 0.0, 0.0)
        self._paused: set[int] = set()

    # What a round costs ---------------------------------------------------------------------------

    def verify(self, width: int, context: float, batch: float = 1) -> float:
        """Seconds of the target's forward, and of what the host has more to do behind copies."""
        seconds = self.table.verify(width, context, batch) * self._factor(width)
        return seconds if width == 1 else seconds + batch * self._host[1]

    def draft(self, name: str, depth: int, width: int = 1, batch: float = 1) -> float:
        """Seconds of drafting, and of what the host has more to do than behind copies."""
        seconds = self.table.draft(name, depth, width, batch)
        if depth == 0:
            return seconds
        if name in self._drafts:
            seconds *= self._drafts[name].value(1.0)
        return seconds + batch * self._host[2]

    def absorb(self, name: str, positions: int) -> float:
        """Seconds of taking in committed positions; nobody has measured others."""
        return self.table.absorb(name, positions)

    def rest(self, batch: float = 1) -> float:
        """Seconds of the host in a round without drafts."""
        return max(self.table.rest(batch) + batch * self._host[0], 0.0)

    def widest(self, batch: float = 1) -> int:
        """The most rows that are known."""
        return self.table.widest(batch)

    def widths(self, batch: float = 1) -> list[int]:
        """Sizes of trees that are worth trying."""
        return self.table.widths(batch)

    def knows_plain(self) -> bool:
        """Whether enough plain steps were done to tell what they cost: everything is compared with
        them, and only where they are done now and then it is known how fast they are here.
        """
        return self._widths[1].weight >= PLAIN

    def plain(self, context: float, batch: float = 1) -> float:
        """Seconds of a round of somebody who does not decide anything.

        Args:
            context: committed tokens.
            batch: B.
        """
        return self.verify(1, context, batch) + self.table.rest(batch)

    def _factor(self, width: int) -> float:
        if width not in self._factors:
            more = self._wide.value(self._widths[1].value(1.0, TABLE))
            found = self._widths[1].value(min(more, 1.0), TABLE) if width == 1 else more
            if width > 1 and width in self._widths:
                found = self._widths[width].value(found)
            self._factors[width] = found
        return self._factors[width]

    def _host_parts(self) -> tuple[float, float, float]:
        """Seconds per sequence: of the host more than in the table, of copies more than that, and
        of networks more than that.
        """
        plain = self._plain.value(0.0, TABLE)
        copied = max(self._copied.value(plain) - plain, 0.0)
        drafted = max(self._drafted.value(plain + copied) - plain - copied, 0.0)
        return plain, copied, drafted

    # What rounds took -----------------------------------------------------------------------------

    def observe(self, took: RoundSeconds) -> None:
        """One more round is over."""
        forward = self.table.verify(took.width, took.context, took.batch)
        expected = self._factor(took.width) * forward + self.table.rest(took.batch)
        paused = took.forward + took.host > MOST * expected
        if paused and took.width not in self._paused:
            self._paused.add(took.width)
            return
        self._paused.discard(took.width)
        host = self._plain if took.width == 1 else self._copied
        host = self._drafted if took.networks else host
        for mean in self._all():
            mean.fade()
        factor = min(took.forward / forward, MOST * self._factor(took.width))
        self._widths.setdefault(took.width, Mean()).add(factor)
        if took.width > 1:
            self._wide.add(factor)
        for name, (seconds, usual) in took.drafts.items():
            self._drafts.setdefault(name, Mean()).add(min(seconds / usual, MOST))
        spent = min(took.host, MOST * expected)
        host.add((spent - self.table.rest(took.batch)) / took.batch)
        self._factors.clear()
        self._host = self._host_parts()

    def _all(self) -> list[Mean]:
        """What is forgotten in time."""
        host = [self._plain, self._copied, self._drafted]
        return [*host, self._wide, *self._widths.values(), *self._drafts.values()]
