"""Acceptance statistics: what one number hides and several runs can pool.

Pure: the standard library. Words as in the literature: a draft is one round of speculation, its
draft tokens are verified by one target forward, the bonus (or recovered) token is the one that
the target adds. Both conventions of acceptance length are kept: with the bonus (tokens emitted
per target forward) and without (draft tokens accepted per target forward).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class AcceptanceStats:
    """Counts over rounds; add rounds as they happen, merge the counts of several runs.

    Attributes:
        num_drafts: rounds, which is target forwards after the prefill.
        num_draft_tokens: tokens proposed.
        num_accepted_tokens: of these, accepted.
        num_emitted: tokens emitted by the rounds, bonus included; the prefill's token is not.
        accepted_histogram: accepted tokens -> rounds.
        proposed_by_depth: depth -> rounds whose draft reached it; depth 1 is the first draft token.
        reached_by_depth: depth -> of these, rounds that had accepted all depths before it.
        accepted_by_depth: depth -> of these, rounds that accepted it too.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted: int = 0
    accepted_histogram: Counter[int] = field(default_factory=Counter)
    proposed_by_depth: Counter[int] = field(default_factory=Counter)
    reached_by_depth: Counter[int] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)

    def add_round(
        self, tree_depth: int, num_draft_tokens: int, accepted: int, emitted: int
    ) -> None:
        """Count one round.

        Args:
            tree_depth: depth of the deepest draft token; 0 without drafts.
            num_draft_tokens: nodes of the tree, root excluded.
            accepted: draft tokens accepted.
            emitted: tokens that reached the output; less than accepted + 1 if it ended inside.
        """
        assert 0 <= accepted <= tree_depth <= num_draft_tokens
        assert 0 <= emitted <= accepted + 1
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += accepted
        self.num_emitted += emitted
        self.accepted_histogram[accepted] += 1
        for depth in range(1, tree_depth + 1):
            self.proposed_by_depth[depth] += 1
        for depth in range(1, min(tree_depth, accepted + 1) + 1):
            self.reached_by_depth[depth] += 1
        for depth in range(1, accepted + 1):
            self.accepted_by_depth[depth] += 1

    def merge(self, other: AcceptanceStats) -> AcceptanceStats:
        """The pooled counts of both, as a new object."""
        return AcceptanceStats(
            num_drafts=self.num_drafts + other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + other.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + other.num_accepted_tokens,
            num_emitted=self.num_emitted + other.num_emitted,
            accepted_histogram=self.accepted_histogram + other.accepted_histogram,
            proposed_by_depth=self.proposed_by_depth + other.proposed_by_depth,
            reached_by_depth=self.reached_by_depth + other.reached_by_depth,
            accepted_by_depth=self.accepted_by_depth + other.accepted_by_depth,
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target forward, bonus included, pooled; NaN without rounds."""
        return _ratio(self.num_emitted, self.num_drafts)

    @property
    def accepted_per_round(self) -> float:
        """Draft tokens accepted per target forward, bonus excluded; NaN without rounds."""
        return _ratio(self.num_accepted_tokens, self.num_drafts)

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the draft tokens; low by design for wide trees. NaN without drafts."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def survival(self) -> list[float]:
        """Per depth from 1: share of all rounds that accepted it. Sums to accepted_per_round."""
        return [self.accepted_by_depth[d] / self.num_drafts for d in self._depths]

    @property
    def conditional(self) -> list[float]:
        """Per depth from 1: accepted, given that a draft was there and all before it accepted."""
        return [_ratio(self.accepted_by_depth[d], self.reached_by_depth[d]) for d in self._depths]

    @property
    def _depths(self) -> range:
        return range(1, max(self.proposed_by_depth, default=0) + 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for a JSON line; None where there is nothing to divide by."""
        return {
            "acceptance_length": _none_if_nan(self.acceptance_length),
            "accepted_per_round": _none_if_nan(self.accepted_per_round),
            "acceptance_rate": _none_if_nan(self.acceptance_rate),
            "acceptance_by_position": {
                "conditional": [_none_if_nan(rate) for rate in self.conditional],
                "survival": self.survival,
            },
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_emitted": self.num_emitted,
            "proposed_by_depth": [self.proposed_by_depth[depth] for depth in self._depths],
            "accepted_histogram": [
                self.accepted_histogram[n]
                for n in range(max(self.accepted_histogram, default=-1) + 1)
            ],
        }


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else math.nan


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
