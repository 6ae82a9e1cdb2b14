"""What a measurement found, and its numbers.

Conventions. The token of the prefill belongs to no round. The last round of a text is included and
counts only tokens that reached the text. Acceptance lengths are pooled over all rounds; the mean of
the per-request means, which gives short texts more weight, is beside them, and both come with the
bonus token and without. A request is one decoded turn; intervals resample whole conversations
(`inference.measuring.intervals`). Speeds are those of the decoding phase, after the prefill, unless
they say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, reduce
from typing import Any

from transformers import PreTrainedTokenizerBase

from inference.measuring import intervals
from inference.measuring.compare import Difference, Reference
from inference.measuring.confidence import BINS, JudgedDrafts
from inference.measuring.pieces import text_pieces
from inference.measuring.run_records import RequestRecord, RoundRecord
from inference.stats import AcceptanceStats

CONTEXTS = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Where the buckets of context length begin."""


@dataclass(frozen=True)
class Prompt:
    """What to decode.

    Attributes:
        ids: token ids.
        category: the group it is reported in.
        id: recorded with the results; turns of one conversation share it.
        turn: 0 for the first.
        follow: what is asked next, given the new tokens that answered this; None ends.
    """

    ids: list[int]
    category: str = "all"
    id: str = ""
    turn: int = 0
    follow: Callable[[Sequence[int]], Prompt] | None = None


@dataclass(frozen=True)
class Request:
    """One prompt, measured.

    Attributes:
        prompt: what was decoded.
        tokens: new tokens.
        rounds: what each target forward after the prefill did.
        judged: what a confidence output predicted, and what happened; empty without one.
        seconds: "prefill", "target", "draft" ("round" where whole rounds run on the device), and
            "total" of the decoding; in a batch, an equal share of its time.
        reference: None if none was asked for.
        difference: from the reference, where the same tokens were promised.
    """

    prompt: Prompt
    tokens: list[int]
    rounds: list[RoundRecord]
    judged: JudgedDrafts
    seconds: dict[str, float]
    reference: Reference | None
    difference: Difference | None

    @property
    def emitted(self) -> list[int]:
        """How many tokens each round gave."""
        return [len(each.emitted) for each in self.rounds]

    @cached_property
    def stats(self) -> AcceptanceStats:
        """Acceptance over the rounds."""
        return count_rounds(self.rounds)

    def record(self, cell: int, tokenizer: PreTrainedTokenizerBase) -> RequestRecord:
        """Its line of a run's records."""
        difference, reference = None, None
        if self.difference is not None:
            near = self.difference.near_tie
            difference = {**asdict(self.difference), "near_tie": near}
        if self.reference is not None:
            reference = {"prefill": self.reference.prefill, "total": self.reference.decoding}
        return RequestRecord(
            cell,
            self.prompt.id,
            self.prompt.category,
            self.prompt.turn,
            len(self.prompt.ids),
            self.tokens,
            text_pieces(tokenizer, self.tokens),
            self.seconds,
            reference,
            difference,
            None if self.reference is None else len(self.reference.tokens),
        )


@dataclass(frozen=True)
class Report:
    """What `inference.measuring.evaluation.measure` found.

    Attributes:
        greedy: the temperature was 0.
        comparable: there was a reference, and the rule promises its very tokens.
        batch_size: prompts decoded together.
        skipped: prompts too long for the target.
        requests: the others, in the order of decoding.
        fair: speeds can be compared: references were decoded in the same batches, and drafts were
            not made from a text that was decoded before.
    """

    greedy: bool
    comparable: bool
    batch_size: int
    skipped: list[Prompt]
    requests: list[Request] = field(default_factory=list)
    fair: bool = True

    @property
    def identical(self) -> bool | None:
        """Whether every text equals the reference's but for near ties; None if not compared."""
        if not self.comparable:
            return None
        found = [r.difference for r in self.requests if r.difference is not None]
        return all(difference.near_tie for difference in found)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for a JSON line, in total and by category."""
        categories = dict.fromkeys(request.prompt.category for request in self.requests)
        differences = [
            {
                "id": r.prompt.id,
                "turn": r.prompt.turn,
                **asdict(r.difference),
                "near_tie": r.difference.near_tie,
            }
            for r in self.requests
            if r.difference is not None
        ]
        return {
            **self.summary(),
            "identical": self.identical,
            "greedy_identical": self.identical if self.greedy else None,
            "near_ties": sum(difference["near_tie"] for difference in differences),
            "differences": differences,
            "num_skipped": len(self.skipped),
            "batch_size": self.batch_size,
            "by_category": {category: self.summary(category) for category in categories},
        }

    def summary(self, category: str | None = None) -> dict[str, Any]:
        """Acceptance and speed of one category, or of all."""
        requests = [r for r in self.requests if category in (None, r.prompt.category)]
        judged = reduce(JudgedDrafts.merge, (r.judged for r in requests), JudgedDrafts())
        groups = conversations(requests)
        return {
            **acceptance(groups),
            "by_context": by_context([each for r in requests for each in r.rounds]),
            **judged.to_dict(),
            "num_prompts": len(requests),
            "num_conversations": len(groups),
            **speed(groups, self.fair),
        }

    def reliability(self) -> list[dict[str, float]] | None:
        """What confidence predicted beside what happened, in bins; None without an output."""
        return reliability_bins(
            reduce(JudgedDrafts.merge, (r.judged for r in self.requests), JudgedDrafts())
        )


Groups = list[list[Request]]
"""Requests by conversation."""


def conversations(requests: Sequence[Request]) -> Groups:
    """Turns of one conversation together; prompts without an id are one each."""
    found: dict[str | int, list[Request]] = {}
    for number, request in enumerate(requests):
        found.setdefault(request.prompt.id or number, []).append(request)
    return list(found.values())


def count_rounds(rounds: Sequence[RoundRecord]) -> AcceptanceStats:
    """Counts of rounds."""
    stats = AcceptanceStats()
    for each in rounds:
        stats.add_round(each.depth, each.draft_tokens, each.accepted, len(each.emitted))
    return stats


def acceptance(groups: Groups) -> dict[str, Any]:
    """Acceptance of some requests, every figure with its interval."""
    counts = [reduce(AcceptanceStats.merge, (r.stats for r in group)) for group in groups]
    total = reduce(AcceptanceStats.merge, counts, AcceptanceStats())
    rounds = [one.num_drafts for one in counts]
    turns = [[r.stats for r in group if r.rounds] for group in groups]
    means = [sum(one.acceptance_length for one in group) for group in turns]
    drafts = [sum(one.accepted_per_round for one in group) for group in turns]
    number = [len(group) for group in turns]
    depths = range(1, max(total.proposed_by_depth, default=0) + 1)
    found = total.to_dict()
    found["acceptance_by_position"] |= {
        "survival_interval": [
            interval([one.accepted_by_depth[depth] for one in counts], rounds) for depth in depths
        ],
        "conditional_interval": [
            interval(
                [one.accepted_by_depth[depth] for one in counts],
                [one.reached_by_depth[depth] for one in counts],
            )
            for depth in depths
        ],
    }
    emitted = [one.num_emitted for one in counts]
    accepted = [one.num_accepted_tokens for one in counts]
    return {
        **found,
        "acceptance_length_interval": interval(emitted, rounds),
        "acceptance_length_per_request": ratio(sum(means), sum(number)),
        "acceptance_length_per_request_interval": interval(means, number),
        "accepted_per_round_interval": interval(accepted, rounds),
        "accepted_per_request": ratio(sum(drafts), sum(number)),
        "accepted_per_request_interval": interval(drafts, number),
        "draft_tokens_per_round": ratio(total.num_draft_tokens, total.num_drafts),
        "verify_width": ratio(total.num_draft_tokens + total.num_drafts, total.num_drafts),
    }


def by_context(rounds: Sequence[RoundRecord]) -> list[dict[str, Any]]:
    """Acceptance by the number of tokens before the round, in the buckets of `CONTEXTS`."""
    found = []
    for start, end in zip(CONTEXTS, [*CONTEXTS[1:], None], strict=True):
        here = [each for each in rounds if start <= each.context < (end or each.context + 1)]
        if here:
            stats = count_rounds(here)
            figures = {
                "num_drafts": stats.num_drafts,
                "acceptance_length": stats.acceptance_length,
                "accepted_per_round": stats.accepted_per_round,
                "survival": stats.survival,
            }
            found.append({"from": start, "to": end, **figures})
    return found


def reliability_bins(judged: JudgedDrafts, bins: int = BINS) -> list[dict[str, float]] | None:
    """Bins of equal width that hold drafts: mean prediction, share that survived, how many."""
    if not judged.predicted:
        return None
    inside: dict[int, list[tuple[float, bool]]] = {}
    for predicted, survived in zip(judged.predicted, judged.survived, strict=True):
        place = min(int(predicted * bins), bins - 1)
        inside.setdefault(place, []).append((predicted, survived))
    return [
        {
            "predicted": sum(one for one, _ in pairs) / len(pairs),
            "observed": sum(hit for _, hit in pairs) / len(pairs),
            "count": len(pairs),
        }
        for _, pairs in sorted(inside.items())
    ]


def speed(groups: Groups, fair: bool) -> dict[str, Any]:
    """Wall-clock of some requests, against plain decoding of the same ones.

    Args:
        groups: requests by conversation.
        fair: whether speeds are compared.
    """
    requests = [request for group in groups for request in group]
    seconds = {
        name: sum(request.seconds.get(name, 0.0) for request in requests)
        for name in ("prefill", "target", "draft", "round", "total")
    }
    inside = seconds["target"] + seconds["draft"] + seconds["round"]
    seconds["other"] = seconds["total"] - inside
    sums = [[sum(column) for column in zip(*map(_times, group), strict=True)] for group in groups]
    columns = [list(column) for column in zip(*sums, strict=True)] or [[]] * 6
    tokens, total, prefill, plain_tokens, plain_total, plain_prefill = map(sum, columns)
    count, compared = len(requests), sum(r.reference is not None for r in requests)
    fast = ratio(tokens or None, total)
    fast_whole = ratio(tokens + count, total + prefill)
    plain = ratio(plain_tokens or None, plain_total)
    plain_whole = ratio(plain_tokens + compared, plain_total + plain_prefill)
    gain = intervals.figure(columns, lambda s: s[:, 0] / s[:, 1] * s[:, 4] / s[:, 3])
    return {
        "tokens_per_second": fast,
        "plain_tokens_per_second": plain,
        "speedup": ratio(fast, plain) if fair else None,
        "speedup_interval": gain.interval if fair and compared else None,
        "speedup_with_prefill": ratio(fast_whole, plain_whole) if fair else None,
        "seconds": seconds,
        "other_share": ratio(seconds["other"], seconds["total"]),
    }


def _times(request: Request) -> list[float]:
    """Tokens of the rounds, their seconds, the prefill's; and the same of the reference."""
    seconds = request.seconds
    own = [len(request.tokens) - 1, seconds.get("total", 0.0), seconds.get("prefill", 0.0)]
    plain = request.reference
    if plain is None:
        return [*own, 0.0, 0.0, 0.0]
    return [*own, len(plain.tokens) - 1, plain.decoding, plain.prefill]


def interval(above: Sequence[float], below: Sequence[float]) -> list[float] | None:
    """Of a pooled ratio: numerators and denominators of each conversation."""
    return intervals.ratio(above, below).interval


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """None where there is nothing to divide, or to divide by."""
    return numerator / denominator if numerator is not None and denominator else None
