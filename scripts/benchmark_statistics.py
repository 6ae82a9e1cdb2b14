"""What `scripts.benchmark` makes of its measurements: speeds, ratios and their intervals.

Pure: the standard library. Conventions: the tokens and the seconds of the prefill are left out of
decoding speeds and of the acceptance length, and are part of "whole" ones. Acceptance length τ is
tokens per target forward after the prefill, the bonus token included, pooled over all forwards. A
ratio compares two contenders on the same batch, and what is reported is the median over batches.
"""

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

PARTS = ("draft", "build", "verify", "accept", "commit", "round", "host")
"""Parts of a step, in the order of the tables; a decoder reports those that it tells apart. "round"
is all that a device does at once."""


@dataclass(frozen=True)
class Measured:
    """One contender on one batch of prompts.

    Attributes:
        category: of the prompts.
        tokens: new tokens of all of them.
        first: of these, known at the end of the prefill.
        seconds: of the whole call.
        prefill: until the first tokens were known.
        parts: seconds of the decoding by part of the step; empty if they are not told apart.
        rounds: target forwards after the prefill, by sequence; None if they are not told.
        emitted: tokens that the rounds emitted.
    """

    category: str
    tokens: int
    first: int
    seconds: float
    prefill: float
    parts: dict[str, float] = field(default_factory=dict)
    rounds: int | None = None
    emitted: int = 0

    @property
    def decoding(self) -> float:
        """Seconds after the prefill."""
        return self.seconds - self.prefill

    @property
    def speed(self) -> float | None:
        """Tokens per second of decoding; None if nothing came after the prefill."""
        later = self.tokens - self.first
        return later / self.decoding if later > 0 and self.decoding > 0 else None

    @property
    def possible_speed(self) -> float | None:
        """Tokens per second if a step cost only its models' forwards; None if not told apart."""
        later = self.tokens - self.first
        forwards = self.parts.get("draft", 0.0) + self.parts.get("verify", 0.0)
        return later / forwards if later > 0 and forwards > 0 else None

    @property
    def whole_speed(self) -> float:
        """Tokens per second of the whole call."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Ratio:
    """A median over batches, and how far it can be trusted.

    Attributes:
        median: of the batches' ratios.
        low: end of the 95 % bootstrap interval; None for fewer than three batches.
        high: its other end.
        count: batches.
    """

    median: float
    low: float | None
    high: float | None
    count: int


def median_interval(
    values: Sequence[float], level: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of a median.

    Args:
        values: one of each batch.
        level: of confidence.
        draws: resamples.
        seed: of the resampling.

    Returns:
        None for fewer than three values, of which no interval says anything.
    """
    if len(values) < 3:
        return None
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(draws))
    cut = round((1 - level) / 2 * (draws - 1))
    return medians[cut], medians[draws - 1 - cut]


def ratio(own: Iterable[float | None], other: Iterable[float | None]) -> Ratio | None:
    """Median of the ratios own / other, of the batches where both are known.

    Args:
        own: speeds of one contender, batch by batch.
        other: of the one it is compared with, in the same order.

    Returns:
        None where no batch has both.
    """
    pairs = zip(own, other, strict=True)
    values = [mine / theirs for mine, theirs in pairs if mine is not None and theirs is not None]
    if not values:
        return None
    low, high = median_interval(values) or (None, None)
    return Ratio(statistics.median(values), low, high, len(values))


def acceptance_length(found: Sequence[Measured]) -> float | None:
    """Tokens per target forward after the prefill, pooled; None where it is not told."""
    told = [each for each in found if each.rounds is not None]
    rounds = sum(each.rounds or 0 for each in told)
    return sum(each.emitted for each in told) / rounds if rounds else None


def split(found: Sequence[Measured]) -> dict[str, float]:
    """Shares of the decoding time by part of the step; they sum to 1. Empty if not told apart."""
    told = [each for each in found if each.parts]
    total = sum(each.decoding for each in told)
    if total <= 0:
        return {}
    names = [name for name in PARTS if any(name in each.parts for each in told)]
    return {name: sum(each.parts.get(name, 0.0) for each in told) / total for name in names}


def predicted_speed(tokens: float, seconds: float) -> float | None:
    """Tokens per second by a cost table; None if nothing was decoded.

    Args:
        tokens: emitted by the rounds.
        seconds: that the table gives for them.
    """
    return tokens / seconds if tokens and seconds > 0 else None


def summarise(own: Sequence[Measured], other: Sequence[Measured] | None) -> dict[str, Any]:
    """All figures of one contender, over one category or all.

    Args:
        own: its batches.
        other: the same batches by the baseline; None for no ratios.
    """
    later = sum(each.tokens - each.first for each in own)
    decoding, seconds = sum(each.decoding for each in own), sum(each.seconds for each in own)
    speeds, possible = [each.speed for each in own], [each.possible_speed for each in own]
    reached = ratio(speeds, possible)
    record: dict[str, Any] = {
        "batches": len(own),
        "tokens": sum(each.tokens for each in own),
        "tokens_per_second": later / decoding if later and decoding > 0 else None,
        "whole_tokens_per_second": sum(each.tokens for each in own) / seconds,
        "prefill_seconds": statistics.median(each.prefill for each in own),
        "acceptance_length": acceptance_length(own),
        "split": split(own),
        "reached": None if reached is None else reached.median,
    }
    if other is None:
        return record
    theirs = [each.speed for each in other]
    most = ratio(possible, theirs)
    whole = ratio([each.whole_speed for each in own], [each.whole_speed for each in other])
    return {
        **record,
        "ratio": _plain(ratio(speeds, theirs)),
        "whole_ratio": _plain(whole),
        "possible_ratio": None if most is None else most.median,
    }


def _plain(found: Ratio | None) -> dict[str, Any] | None:
    """As plain values for JSON."""
    if found is None:
        return None
    interval = None if found.low is None else [found.low, found.high]
    return {"median": found.median, "interval": interval, "count": found.count}
