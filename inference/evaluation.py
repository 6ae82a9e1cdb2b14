"""Measuring a proposer: how much is accepted, how fast it is, and whether the output is unchanged.

Each batch of prompts is decoded by the reference (plain decoding, or transformers' `generate`) and
then speculatively, so that noise of the machine hits both alike.

Conventions. The token of the prefill belongs to no round. The last round of a text is included and
counts only tokens that reached the text. Acceptance length is pooled over all rounds; the mean of
the per-request means, which gives short texts more weight, is beside it. Speeds are those of the
decoding phase, after the prefill, unless they say otherwise.

Letters: B batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from typing import Any

from tqdm.auto import tqdm

from drafters import TargetModel
from inference.compare import (
    Difference,
    Reference,
    check_reference,
    explain_difference,
    reference_text,
)
from inference.confidence import JudgedDrafts
from inference.engine import Engine
from inference.generate import Round, speculative_generate
from inference.processors import fresh
from inference.proposers.base import Proposer
from inference.sampling import SamplingParams
from inference.stats import AcceptanceStats
from inference.verify import SAME_TOKENS


@dataclass(frozen=True)
class Prompt:
    """What to decode.

    Attributes:
        ids: token ids.
        category: the group it is reported in.
        id: recorded with the results.
    """

    ids: list[int]
    category: str = "all"
    id: str = ""


@dataclass(frozen=True)
class Request:
    """One prompt, measured.

    Attributes:
        prompt: what was decoded.
        tokens: new tokens.
        emitted: how many of them each round gave.
        stats: acceptance over the rounds.
        judged: what a confidence output predicted, and what happened; empty without one.
        seconds: "prefill", "target", "draft", and "total" of the decoding; in a batch, an equal
            share of its time.
        reference: None if none was asked for.
        difference: from the reference, where the same tokens were promised.
    """

    prompt: Prompt
    tokens: list[int]
    emitted: list[int]
    stats: AcceptanceStats
    judged: JudgedDrafts
    seconds: dict[str, float]
    reference: Reference | None
    difference: Difference | None


@dataclass(frozen=True)
class Report:
    """What `measure` found.

    Attributes:
        greedy: the temperature was 0.
        comparable: there was a reference, and the rule promises its very tokens.
        batch_size: prompts decoded together.
        skipped: prompts too long for the target.
        requests: the others, in the order of decoding.
    """

    greedy: bool
    comparable: bool
    batch_size: int
    skipped: list[Prompt]
    requests: list[Request] = field(default_factory=list)

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
            {"id": r.prompt.id, **asdict(r.difference), "near_tie": r.difference.near_tie}
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
        stats = reduce(AcceptanceStats.merge, (r.stats for r in requests), AcceptanceStats())
        judged = reduce(JudgedDrafts.merge, (r.judged for r in requests), JudgedDrafts())
        means = [r.stats.acceptance_length for r in requests if r.stats.num_drafts]
        return {
            **stats.to_dict(),
            "acceptance_length_per_request": _ratio(sum(means), len(means)),
            **judged.to_dict(),
            "num_prompts": len(requests),
            **self._speed(requests),
        }

    def _speed(self, requests: list[Request]) -> dict[str, Any]:
        seconds = {
            name: sum(request.seconds.get(name, 0.0) for request in requests)
            for name in ("prefill", "target", "draft", "total")
        }
        seconds["other"] = seconds["total"] - seconds["target"] - seconds["draft"]
        tokens = sum(len(request.tokens) for request in requests)
        first = len(requests)  # tokens that the prefill gave
        fast = _ratio(tokens - first, seconds["total"])
        fast_whole = _ratio(tokens, seconds["total"] + seconds["prefill"])
        texts = [request.reference for request in requests if request.reference is not None]
        decoding = sum(text.decoding for text in texts)
        prefill = sum(text.prefill for text in texts)
        plain_tokens = sum(len(text.tokens) for text in texts)
        plain = _ratio(plain_tokens - len(texts), decoding)
        plain_whole = _ratio(plain_tokens, decoding + prefill)
        alone = self.batch_size == 1  # the reference runs alone: a batch would compare unlikes
        return {
            "tokens_per_second": fast,
            "plain_tokens_per_second": plain,
            "speedup": _ratio(fast, plain) if alone else None,
            "speedup_with_prefill": _ratio(fast_whole, plain_whole) if alone else None,
            "seconds": seconds,
            "other_share": _ratio(seconds["other"], seconds["total"]),
        }


def measure(
    target: TargetModel,
    proposer: Proposer,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    rule: str = "match",
    compare: str | None = "plain",
    batch_size: int = 1,
    progress: bool = False,
    engine: Engine | None = None,
) -> Report:
    """Decode every prompt speculatively, and by a reference to compare with.

    Args:
        target: the model.
        proposer: where drafts come from.
        prompts: those that do not fit the target's positions are skipped and counted.
        max_new_tokens: per prompt.
        sampling: None is greedy.
        rule: of acceptance. At a temperature only those of `SAME_TOKENS` promise the tokens and not
            the law alone; with others the texts are not compared.
        compare: "plain", "generate" (greedy only), or None for no reference.
        batch_size: B, prompts of one category decoded together.
        progress: show a progress bar on a terminal.
        engine: runs the target, for "plain" references too; None is "eager".

    Raises:
        ValueError: no prompt is left, or an argument is out of range.
    """
    run = _Measurement(
        target, proposer, max_new_tokens, sampling or SamplingParams(), rule, compare, engine
    )
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    fits = [target.has_room(len(prompt.ids), max_new_tokens) for prompt in prompts]
    fitting = [prompt for prompt, fit in zip(prompts, fits, strict=True) if fit]
    if not fitting:
        raise ValueError(
            f"prompts: none of {len(prompts)} leaves room for max_new_tokens={max_new_tokens} in "
            f"the target's {target.max_length} positions; lower it or give shorter prompts"
        )
    report = Report(
        greedy=run.sampling.temperature == 0,
        comparable=run.comparable,
        batch_size=batch_size,
        skipped=[prompt for prompt, fit in zip(prompts, fits, strict=True) if not fit],
    )
    run.warm_up(fitting[0])
    with tqdm(total=len(fitting), unit="prompt", disable=None if progress else True) as bar:
        for batch in _batches(fitting, batch_size):
            report.requests.extend(run.batch(batch))
            bar.update(len(batch))
    return report


@dataclass(frozen=True)
class _Measurement:
    """The arguments that all batches of one `measure` share."""

    target: TargetModel
    proposer: Proposer
    max_new_tokens: int
    sampling: SamplingParams
    rule: str
    compare: str | None
    engine: Engine | None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.compare is not None:
            check_reference(self.compare, self.sampling)

    @property
    def comparable(self) -> bool:
        """Whether the reference's very tokens are promised."""
        promised = self.sampling.temperature == 0 or self.rule in SAME_TOKENS
        return promised and self.compare is not None

    def warm_up(self, prompt: Prompt) -> None:
        """A few tokens that are not measured: first calls are slow."""
        replace(self, max_new_tokens=min(4, self.max_new_tokens)).batch([prompt])

    def batch(self, prompts: list[Prompt]) -> list[Request]:
        """Measure one batch: the reference first, then the drafts."""
        references = [self.reference(prompt) for prompt in prompts]
        rounds: list[list[Round]] = [[] for _ in prompts]
        result = speculative_generate(
            self.target,
            self.proposer,
            [prompt.ids for prompt in prompts],
            max_new_tokens=self.max_new_tokens,
            sampling=[fresh(self.sampling) for _ in prompts],
            rule=self.rule,
            engine=self.engine,
            on_round=lambda done: rounds[done.row].append(done),
        )
        seconds = {name: value / len(prompts) for name, value in result.seconds.items()}
        return [
            Request(
                prompt,
                tokens,
                [len(done.emitted) for done in mine],
                _count(mine),
                _judge(mine),
                seconds,
                reference,
                self.difference(prompt, reference, tokens),
            )
            for prompt, tokens, mine, reference in zip(
                prompts, result.sequences, rounds, references, strict=True
            )
        ]

    def difference(
        self, prompt: Prompt, reference: Reference | None, tokens: list[int]
    ) -> Difference | None:
        """From the reference, if its tokens are promised."""
        if reference is None or not self.comparable:
            return None
        return explain_difference(self.target, prompt.ids, reference.tokens, tokens, self.sampling)

    def reference(self, prompt: Prompt) -> Reference | None:
        """Decode without drafts."""
        if self.compare is None:
            return None
        return reference_text(
            self.target, prompt.ids, self.max_new_tokens, self.sampling, self.compare, self.engine
        )


def _count(rounds: list[Round]) -> AcceptanceStats:
    stats = AcceptanceStats()
    for done in rounds:
        tree = done.tree
        depth = int(tree.depths.max())
        stats.add_round(depth, tree.num_draft_tokens, len(done.accepted), len(done.emitted))
    return stats


def _judge(rounds: list[Round]) -> JudgedDrafts:
    judged = JudgedDrafts()
    for done in rounds:
        judged.add_round(done.tree, done.accepted, ended=done.next_token is None)
    return judged


def _batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Batches of one category each, so that their time belongs to it."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return [
        group[start : start + size]
        for group in groups.values()
        for start in range(0, len(group), size)
    ]


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None
