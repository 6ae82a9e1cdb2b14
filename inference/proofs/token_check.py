"""Is speculative output the very text of plain decoding? Token for token, alone and in a batch.

Where a text differs, rounding must be told from error: the text is run through the target at once
(teacher forcing), and from the first difference on every token must be the target's own choice or
fall short of it by rounding only (`inference.proofs.audit`). That is `NEAR_TIE` in the scores for
float32 and float64, where texts are expected to be equal, and `max_ulp` units in the last place in
16 bits, where two correct runs often differ.

Plain decoding's texts are audited, too. Where one of them misses the target's choice by more than
`max_ulp`, rounding is larger than that, and the other texts may miss it by as much. What misses it
by up to `DOUBTFUL` times as much neither passes nor refutes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from tqdm.auto import tqdm

from drafters import TargetModel
from inference.engine import Engine
from inference.generate import speculative_generate
from inference.measuring.compare import NEAR_TIE, explain_difference, reference_text
from inference.measuring.evaluation import Prompt
from inference.proofs.audit import Audit, Miss, audit_text
from inference.proofs.verdicts import INCONCLUSIVE, LOSSLESS, NOT_LOSSLESS
from inference.proposers.base import Proposer
from inference.sampling import SamplingParams
from inference.stats import AcceptanceStats

MAX_ULP = 2.0
"""Units in the last place that are put down to rounding in 16 bits."""
DOUBTFUL = 4.0
"""Times what is put down to rounding, from which on a miss refutes."""


@dataclass(frozen=True)
class TokenReport:
    """Outcome of one check of one rule.

    Attributes:
        check: its name.
        rule: of acceptance.
        verdict: "lossless", "not lossless" or "inconclusive".
        reason: why it is not "lossless"; empty otherwise.
        texts: decoded alone.
        batched: decoded as rows of a batch.
        num_accepted_tokens: draft tokens accepted.
        near_ties: texts that differ from plain decoding's by rounding only.
        differences: of each text that differs: prompt, seed, whether it was in a batch, the first
            difference, and "ulp", the largest miss from there on; None if it is infinite.
        tokens: audited, of all texts.
        exact: how many of them are the audit's own choice.
        worst_ulp: the largest miss, in units in the last place; None if it is infinite.
        plain_ulp: the same of plain decoding's own texts, in this check and those before it.
    """

    check: str
    rule: str
    verdict: str
    reason: str
    texts: int
    batched: int
    num_accepted_tokens: int
    near_ties: int
    differences: list[dict[str, Any]]
    tokens: int
    exact: int
    worst_ulp: float | None
    plain_ulp: float | None


@dataclass
class _Found:
    """What the texts of one check of one rule showed."""

    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    differences: list[dict[str, Any]] = field(default_factory=list)
    audits: list[Audit] = field(default_factory=list)
    texts: int = 0
    batched: int = 0


class TokenChecker:
    """Compares drafted texts with plain ones, which it decodes and audits once.

    Args:
        target: the model.
        proposer: where drafts come from.
        prompts: to continue.
        max_new_tokens: the most for each prompt. In a batch the first rows get fewer, so that they
            leave it before others.
        max_ulp: see the head of this file.
        engine: that decodes with drafts; None is "eager". Plain texts are always decoded by
            transformers' own forward over its own cache.
    """

    def __init__(
        self,
        target: TargetModel,
        proposer: Proposer,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        max_ulp: float = MAX_ULP,
        engine: Engine | None = None,
    ) -> None:
        self.engine = engine
        self.target, self.proposer, self.prompts = target, proposer, list(prompts)
        self.max_new_tokens, self.max_ulp = max_new_tokens, max_ulp
        self.narrow = target.dtype in (torch.bfloat16, torch.float16)
        self.plain_ulp = 0.0
        self._plain: dict[tuple[int, SamplingParams], list[int]] = {}
        self._audits: dict[tuple[int, SamplingParams, tuple[int, ...]], Audit] = {}

    def run(
        self, name: str, rule: str, sampling: SamplingParams, turns: int = 1, progress: bool = False
    ) -> TokenReport:
        """Decode every prompt alone, and all of them together where there are several.

        Args:
            name: of the check.
            rule: of acceptance; must promise the tokens of plain decoding with `sampling`.
            sampling: of all texts. Above temperature 0 each text has a seed of its own.
            turns: times to decode each prompt.
            progress: show a progress bar on a terminal.
        """
        found, count = _Found(), len(self.prompts)
        limits = [self.max_new_tokens] * count
        early = [math.ceil(self.max_new_tokens * (1 + row / count) / 2) for row in range(count)]
        jobs = list(itertools.product(range(turns), (False, True) if count > 1 else (False,)))
        for turn, together in tqdm(
            jobs, desc=f"{name}, {rule}", unit="turn", disable=None if progress else True
        ):
            samplings = [self._seeded(sampling, turn * count + row) for row in range(count)]
            if together:
                self._decode(found, rule, range(count), samplings, early)
            else:
                for row in range(count):
                    self._decode(found, rule, [row], samplings, limits)
        return self._report(name, rule, found)

    def _seeded(self, sampling: SamplingParams, number: int) -> SamplingParams:
        if sampling.temperature == 0:
            return sampling
        return replace(sampling, seed=sampling.seed + number)

    def _decode(
        self,
        found: _Found,
        rule: str,
        rows: Sequence[int],
        samplings: Sequence[SamplingParams],
        limits: Sequence[int],
    ) -> None:
        """Decode some prompts in one call and compare each with plain decoding."""
        result = speculative_generate(
            self.target,
            self.proposer,
            [self.prompts[row].ids for row in rows],
            max_new_tokens=[limits[row] for row in rows],
            sampling=[samplings[row] for row in rows],
            rule=rule,
            engine=self.engine,
        )
        found.stats = found.stats.merge(result.stats)
        if len(rows) > 1:
            found.batched += len(rows)
        else:
            found.texts += 1
        for row, tokens in zip(rows, result.sequences, strict=True):
            self._compare(found, row, samplings[row], limits[row], tokens, len(rows) > 1)

    def _compare(
        self,
        found: _Found,
        row: int,
        sampling: SamplingParams,
        limit: int,
        tokens: list[int],
        batched: bool,
    ) -> None:
        prompt = self.prompts[row]
        plain = self._plain_text(row, sampling)[:limit]
        self.plain_ulp = max(self.plain_ulp, self._audit(row, sampling, plain).worst_ulp)
        audit = self._audit(row, sampling, tokens)
        found.audits.append(audit)
        difference = explain_difference(self.target, prompt.ids, plain, tokens, sampling)
        if difference is None:
            return
        ulp = 0.0 if self._well_ended(tokens, limit) else math.inf
        for miss in audit.misses:
            if miss.position >= difference.position and not self._is_tie(miss):
                ulp = max(ulp, miss.ulp)
        named = {"id": prompt.id, "seed": sampling.seed, "batched": batched}
        found.differences.append({**named, **asdict(difference), "ulp": ulp})

    def _plain_text(self, row: int, sampling: SamplingParams) -> list[int]:
        """Plain decoding's text of a prompt at its full length."""
        key = (row, sampling)
        if key not in self._plain:
            prompt = self.prompts[row].ids
            self._plain[key] = reference_text(
                self.target, prompt, self.max_new_tokens, sampling
            ).tokens
        return self._plain[key]

    def _audit(self, row: int, sampling: SamplingParams, tokens: list[int]) -> Audit:
        key = (row, sampling, tuple(tokens))
        if key not in self._audits:
            self._audits[key] = audit_text(self.target, self.prompts[row].ids, tokens, sampling)
        return self._audits[key]

    def _well_ended(self, tokens: list[int], limit: int) -> bool:
        """Whether a text stops at its first end-of-sequence token or else at its limit."""
        ends = set(self.target.eos_token_ids)
        inside = any(token in ends for token in tokens[:-1])
        return not inside and (tokens[-1] in ends or len(tokens) == limit)

    def _is_tie(self, miss: Miss) -> bool:
        return not self.narrow and miss.gap < NEAR_TIE

    def _report(self, name: str, rule: str, found: _Found) -> TokenReport:
        worst = max((audit.worst_ulp for audit in found.audits), default=0.0)
        allowed = max(self.max_ulp, _finite(self.plain_ulp) or 0.0)
        missed = max((difference["ulp"] for difference in found.differences), default=0.0)
        verdict, reason = judge(missed, allowed, found.stats.num_accepted_tokens)
        differences = [
            {**one, "ulp": _finite(one["ulp"]), "near_tie": one["ulp"] <= allowed}
            for one in found.differences
        ]
        return TokenReport(
            name,
            rule,
            verdict,
            reason,
            found.texts,
            found.batched,
            found.stats.num_accepted_tokens,
            sum(difference["near_tie"] for difference in differences),
            differences,
            sum(audit.tokens for audit in found.audits),
            sum(audit.exact for audit in found.audits),
            _finite(worst),
            _finite(self.plain_ulp),
        )


def judge(missed: float, allowed: float, num_accepted_tokens: int) -> tuple[str, str]:
    """Verdict on texts that should be plain decoding's, and why it is not `lossless`.

    Args:
        missed: the largest miss, in units in the last place, of texts that differ; 0 if there is
            none, infinite for what no rounding can do.
        allowed: what counts as rounding.
        num_accepted_tokens: draft tokens accepted meanwhile.
    """
    if missed > DOUBTFUL * allowed:
        return NOT_LOSSLESS, "the output differs from the target's by more than rounding"
    if missed > allowed:
        return INCONCLUSIVE, (
            f"a text misses the target's choice by {missed:.3g} ulp, of which {allowed:.3g} can be "
            "put down to rounding: raise --max-ulp, or use float32"
        )
    if num_accepted_tokens == 0:
        return INCONCLUSIVE, (
            "no draft token was ever accepted, so nothing that drafts could change was tried: take "
            "more prompts, more new tokens or a head that is trained"
        )
    return LOSSLESS, ""


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
