"""Measuring proposers: how much is accepted, how fast it is, and whether the output is unchanged.

Several ways of decoding ("cells": a proposer, a rule, sampling parameters) are measured on the same
prompts. Each batch of prompts is decoded by the reference (plain decoding, or transformers'
`generate`), once for all cells that sample alike, and then by one cell after the other, so that
noise of the machine hits all alike. Conversations go on turn after turn, with the reference's
answers in the history, so that all cells are asked the same; without a reference with their own.
What the numbers mean is said in `inference.measuring.evaluation_report`.

Letters: B batch, N tree nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tqdm.auto import tqdm

from drafters import TargetModel
from inference.counts import RoundCounts
from inference.engine import Engine
from inference.engines import DeviceEngine
from inference.generate import Round, speculative_generate
from inference.measuring.compare import (
    Difference,
    Reference,
    check_reference,
    explain_difference,
    reference_texts,
)
from inference.measuring.confidence import JudgedDrafts
from inference.measuring.evaluation_report import Prompt, Report, Request
from inference.measuring.pieces import node_pieces
from inference.measuring.run_records import RoundRecord, Trace
from inference.processors import fresh
from inference.proposers.base import Proposer
from inference.proposers.simulated import SimulatedProposer
from inference.sampling import SamplingParams
from inference.verify import SAME_TOKENS

__all__ = ["Cell", "Prompt", "Report", "Request", "measure", "measure_cells", "request_seed"]


@dataclass(frozen=True)
class Cell:
    """A way of decoding.

    Attributes:
        proposer: where drafts come from; each cell has one of its own.
        rule: of acceptance. At a temperature only those of `SAME_TOKENS` promise the tokens and not
            the law alone; with others the texts are not compared.
        sampling: of every prompt, each with a seed of its own (`request_seed`).
    """

    proposer: Proposer
    rule: str = "match"
    sampling: SamplingParams = field(default_factory=SamplingParams)


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
    """Decode every prompt in one way; see `measure_cells`, whose arguments these are."""
    (report,) = measure_cells(
        target,
        [Cell(proposer, rule, sampling or SamplingParams())],
        prompts,
        max_new_tokens=max_new_tokens,
        compare=compare,
        batch_size=batch_size,
        progress=progress,
        engine=engine,
    )
    return report


def measure_cells(
    target: TargetModel,
    cells: Sequence[Cell],
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    compare: str | None = "plain",
    batch_size: int = 1,
    progress: bool = False,
    engine: Engine | None = None,
    trace: int = 0,
) -> list[Report]:
    """Decode every prompt in every way, and by a reference to compare with.

    Args:
        target: the model.
        cells: ways of decoding.
        prompts: those that do not fit the target's positions are skipped and counted, as are later
            turns that no longer do.
        max_new_tokens: per turn.
        compare: "plain", "generate" (greedy only), or None for no reference.
        batch_size: B, prompts of one category decoded together, by the reference "plain" too.
        progress: show a progress bar on a terminal.
        engine: runs the target, for "plain" references too; None is "eager".
        trace: the first so many turns of each cell keep their trees, with the target's and the
            draft's chance of every node.

    Returns:
        One report per cell.

    Raises:
        ValueError: no prompt is left, or an argument is out of range.
    """
    run = _Measurement(target, max_new_tokens, compare, batch_size, engine, trace)
    fits = [run.has_room(prompt) for prompt in prompts]
    fitting = [prompt for prompt, fit in zip(prompts, fits, strict=True) if fit]
    if not fitting:
        raise ValueError(
            f"prompts: none of {len(prompts)} leaves room for max_new_tokens={max_new_tokens} in "
            f"the target's {target.max_length} positions; lower it or give shorter prompts"
        )
    groups = run.groups(cells)
    for group in groups:
        replace(run, max_new_tokens=min(4, max_new_tokens), trace=0).conversation(
            group, [replace(fitting[0], follow=None)]
        )  # not measured: first calls are slow
        for one in group.members:
            one.report.requests.clear()
            long = [prompt for prompt, fit in zip(prompts, fits, strict=True) if not fit]
            one.report.skipped.extend(long)
    with tqdm(total=len(fitting), unit="prompt", disable=None if progress else True) as bar:
        for batch in _batches(fitting, batch_size):
            for group in groups:
                run.conversation(group, batch)
            bar.update(len(batch))
    members = sorted((one for group in groups for one in group.members), key=lambda one: one.number)
    return [one.report for one in members]


@dataclass(frozen=True)
class _Member:
    """A cell, its place, and what was found so far."""

    number: int
    cell: Cell
    report: Report


@dataclass(frozen=True)
class _Group:
    """Cells that are asked the same and share references."""

    sampling: SamplingParams
    members: list[_Member]


@dataclass(frozen=True)
class _Measurement:
    """The arguments that all batches share."""

    target: TargetModel
    max_new_tokens: int
    compare: str | None
    batch_size: int
    engine: Engine | None
    trace: int

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def has_room(self, prompt: Prompt) -> bool:
        """Whether it fits the target's positions."""
        return self.target.has_room(len(prompt.ids), self.max_new_tokens)

    def groups(self, cells: Sequence[Cell]) -> list[_Group]:
        """Cells that sample alike share references; without any each goes its own way."""
        groups: list[_Group] = []
        for number, cell in enumerate(cells):
            if self.compare is not None:
                check_reference(self.compare, cell.sampling)
            greedy = cell.sampling.temperature == 0
            promised = greedy or cell.rule in SAME_TOKENS
            alike = self.batch_size == 1 or self.compare == "plain"
            fair = alike and not isinstance(cell.proposer, SimulatedProposer)
            comparable = promised and self.compare is not None
            report = Report(greedy, comparable, self.batch_size, [], fair=fair)
            sharing = (
                group
                for group in groups
                if self.compare is not None and group.sampling == cell.sampling
            )
            group = next(sharing, None)
            if group is None:
                group = _Group(cell.sampling, [])
                groups.append(group)
            group.members.append(_Member(number, cell, report))
        return groups

    def conversation(self, group: _Group, prompts: list[Prompt]) -> None:
        """Measure one batch, turn after turn: the reference first, then the cells."""
        while prompts:
            samplings = [_of_request(group.sampling, prompt) for prompt in prompts]
            references = self.references(prompts, samplings)
            for member in group.members:
                found = self.batch(member, prompts, samplings, references)
                member.report.requests.extend(found)
            if references[0] is not None:
                answers = [one.tokens for one in references if one is not None]
            else:
                answers = [request.tokens for request in found]  # the only member's
            asked = [
                prompt.follow(answer)
                for prompt, answer in zip(prompts, answers, strict=True)
                if prompt.follow is not None
            ]
            prompts = [prompt for prompt in asked if self.has_room(prompt)]
            for member in group.members:
                member.report.skipped.extend(one for one in asked if not self.has_room(one))

    def references(
        self, prompts: list[Prompt], samplings: list[SamplingParams]
    ) -> Sequence[Reference | None]:
        """Decode without drafts."""
        if self.compare is None:
            return [None] * len(prompts)
        ids = [prompt.ids for prompt in prompts]
        return reference_texts(
            self.target, ids, self.max_new_tokens, samplings, self.compare, self.engine
        )

    def batch(
        self,
        member: _Member,
        prompts: list[Prompt],
        samplings: list[SamplingParams],
        references: Sequence[Reference | None],
    ) -> list[Request]:
        """Measure one turn of one batch in one way."""
        counts: list[list[RoundCounts]] = [[] for _ in prompts]
        rounds: list[list[Round]] = [[] for _ in prompts]
        left = max(0, self.trace - len(member.report.requests))
        trees = not isinstance(self.engine, DeviceEngine)  # that one keeps them to itself
        result = speculative_generate(
            self.target,
            member.cell.proposer,
            [prompt.ids for prompt in prompts],
            max_new_tokens=self.max_new_tokens,
            sampling=[fresh(one) for one in samplings],
            rule=member.cell.rule,
            engine=self.engine,
            on_counts=lambda done: counts[done.row].append(done),
            on_round=(lambda done: rounds[done.row].append(done)) if trees else None,
            trace=range(min(left, len(prompts))) if trees else (),
        )
        seconds = {name: value / len(prompts) for name, value in result.seconds.items()}
        return [
            Request(
                prompt,
                tokens,
                self.records(member.number, prompt, mine, drafted),
                _judge(drafted),
                seconds,
                reference,
                self.difference(member, prompt, sampling, reference, tokens),
            )
            for prompt, tokens, mine, drafted, sampling, reference in zip(
                prompts, result.sequences, counts, rounds, samplings, references, strict=True
            )
        ]

    def difference(
        self,
        member: _Member,
        prompt: Prompt,
        sampling: SamplingParams,
        reference: Reference | None,
        tokens: list[int],
    ) -> Difference | None:
        """From the reference, if its tokens are promised."""
        if reference is None or not member.report.comparable:
            return None
        return explain_difference(self.target, prompt.ids, reference.tokens, tokens, sampling)

    def records(
        self, cell: int, prompt: Prompt, counts: list[RoundCounts], rounds: list[Round]
    ) -> list[RoundRecord]:
        """Lines of a run's records; of an engine that keeps its trees, without traces."""
        traces = [self.traced(done) for done in rounds] or [None] * len(counts)
        return [
            RoundRecord(
                cell=cell,
                id=prompt.id,
                turn=prompt.turn,
                round=number,
                context=done.context,
                draft_tokens=done.draft_tokens,
                depth=done.depth,
                width=done.width,
                accepted=done.accepted,
                emitted=list(done.emitted),
                ended=done.ended,
                trace=trace,
            )
            for number, (done, trace) in enumerate(zip(counts, traces, strict=True))
        ]

    def traced(self, done: Round) -> Trace | None:
        """The tree of a round, if it was asked for."""
        if done.chances is None:
            return None
        tokens, parents = done.tree.tokens.tolist(), done.tree.parents.tolist()
        pieces = node_pieces(self.target.tokenizer, tokens, parents)
        drafted = done.tree.draft_chances()
        return Trace(tokens, pieces, parents, done.path, done.chances, drafted)


def request_seed(seed: int, prompt: Prompt) -> int:
    """A seed for one turn of one prompt.

    Noise is a function of seed and position, so with one seed for all prompts their draws would go
    together and a mean over them would say less than it seems to. Where a prompt has no id, all
    such prompts share a seed.

    Args:
        seed: of the measurement.
        prompt: whose id and turn decide.
    """
    text = f"{seed}/{prompt.id}/{prompt.turn}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def _of_request(sampling: SamplingParams, prompt: Prompt) -> SamplingParams:
    return replace(sampling, seed=request_seed(sampling.seed, prompt))


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
