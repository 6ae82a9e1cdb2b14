"""`size: auto`: cost tables measured on an engine, and the proposer that decides by them.

Letters: B sequences, N rows, P committed tokens.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inference.engine import Engine
from inference.proposers.adaptive import AdaptiveProposer
from inference.proposers.arms import describe
from inference.proposers.base import Proposer, RowState, Session
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.heads import HeadProposer
from inference.proposers.ngram import NgramProposer
from inference.proposers.suffix import SuffixProposer
from inference.scheduling.accounts import Remembered
from inference.scheduling.batch_controller import batch_controllers
from inference.scheduling.controller import controllers
from inference.scheduling.cost_calibration import CostGrid, calibrate_costs
from inference.scheduling.costs import (
    CostTable,
    MachineKey,
    check_writable,
    costs_path,
    current_costs,
    machine_key,
)
from inference.scheduling.pace import PacedCosts
from inference.scheduling.priors import Memory
from inference.scheduling.round_parts import ABSORBED, WIDTHS, Calibration
from inference.scheduling.schedule import Arm, RoundCosts
from inference.scheduling.survival import Prior
from inference.scheduling.watch import RoundBegun, Watch
from inference.tree import TokenTree

CONTEXTS = (128, 1024)
BUDGET = 20.0
"""Seconds that a calibration may take, warming up and forced repeats excepted."""


def cost_grid(
    arms: Sequence[Arm],
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = (1,),
    buckets: tuple[int, ...] = (),
) -> CostGrid:
    """What to measure for some arms.

    Args:
        arms: that may draft.
        contexts: P.
        batches: B.
        buckets: widths that the engine runs, in order; () if it runs any.
    """
    largest = max(arm.size for arm in arms)
    if buckets:  # all that trees of these sizes run in, and no others
        buckets = buckets[: 1 + sum(bucket < largest for bucket in buckets)]
        widths = list(buckets)
    else:
        widths = [width for width in WIDTHS if width < largest] + [largest]
    drafts = {
        (arm.name, depth, top_k)
        for arm in arms
        if not arm.copies
        for depth in {1, arm.depth}
        for top_k in {1, arm.top_k}
    }
    return CostGrid(widths, contexts, batches, sorted(drafts), buckets)


def measured_costs(
    engine: Engine,
    arms: Mapping[str, Proposer],
    path: Path | None = None,
    *,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = (1,),
    budget_seconds: float = BUDGET,
    say: Callable[[str], None] = lambda line: None,
) -> CostTable:
    """The cost table of an engine: from disk where it is of this machine, measured otherwise.

    Args:
        engine: that will decode.
        arms: proposers by name.
        path: file, or folder of a head, where the table is kept; None keeps none.
        contexts: P to measure at; should fit the target's positions.
        batches: B to measure.
        budget_seconds: of measuring.
        say: called with lines about what is done.

    Raises:
        ValueError: the table cannot be saved there.
    """
    key = key_of(engine, engine.name, arms)
    buckets = () if engine.widths is None else engine.widths
    grid = cost_grid([describe(*arm) for arm in arms.items()], contexts, batches, buckets)
    if path is not None:
        found, reasons = current_costs(path, key)
        if found is not None and not missing(found, grid):
            return found
        for reason in reasons or ["it does not cover what may be drafted"]:
            say(f"costs are measured anew: {reason}")
        check_writable(path)
    start = time.perf_counter()
    calibration = Calibration(engine, arms)
    heads = {name: arm for name, arm in arms.items() if isinstance(arm, HeadProposer)}
    own = {name: head.options for name, head in heads.items()}
    try:
        with torch.inference_mode():
            table = calibrate_costs(
                key, grid, calibration.verify, calibration.draft, budget_seconds, calibration.rest
            )
            absorbing = {
                (name, positions): calibration.absorb(name, positions)
                for name in drafting_arms(grid)
                for positions in ABSORBED
                if positions <= max(ABSORBED[0], *contexts)
            }
        table = replace(table, absorb_points=absorbing)
    finally:
        for name, head in heads.items():
            head.options = own[name]
    if path is not None:
        table.save(path)
    where = "not saved" if path is None else f"saved as {costs_path(path)}"
    say(f"costs measured in {time.perf_counter() - start:.0f} s, {where}")
    for line in table.lines():
        say(line)
    return table


def key_of(engine: Engine, name: str, arms: Mapping[str, Proposer]) -> MachineKey:
    """The key of a cost table of an engine in this process.

    Args:
        engine: that will decode.
        name: of what is measured of it.
        arms: proposers by name.
    """
    target, drafters = engine.target, drafters_hash(arms)
    return machine_key(
        target.device, target.dtype, target.fingerprint(), name, drafters, engine.pages
    )


def drafters_hash(arms: Mapping[str, Proposer]) -> str:
    """What tells the costs of two sets of arms apart: their kinds, and the shapes of networks.

    Args:
        arms: proposers by name.
    """
    parts = []
    for name, arm in sorted(arms.items()):
        networks: list[nn.Module] = []
        if isinstance(arm, HeadProposer):
            networks = [arm.drafter]
        elif isinstance(arm, DraftModelProposer):
            networks = [arm.draft.model]
        shapes = [
            (key, tuple(value.shape), str(value.dtype))
            for network in networks
            for key, value in network.named_parameters()
        ]
        parts.append((name, type(arm).__name__, shapes))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def acceptance_hashes(arms: Mapping[str, Proposer]) -> dict[str, str]:
    """By arm, what tells drafts apart that are not accepted alike: of a head its weights (the first
    values of each, in bfloat16, as in `drafters.fingerprint`) and how it draws, of copies how they
    are looked up.

    Args:
        arms: proposers by name.
    """
    found = {}
    for name, arm in arms.items():
        parts: list[Any] = [type(arm).__name__]
        if isinstance(arm, HeadProposer):
            options = arm.options
            parts += [arm.draws, options.sharpness, options.draft_temperature]
            for key, value in arm.drafter.named_parameters():
                sample = value.detach().flatten()[:64].to(torch.bfloat16).view(torch.int16)
                parts += [key, tuple(value.shape), sample.tolist()]
        elif isinstance(arm, DraftModelProposer):
            parts.append(arm.draft.fingerprint())
        elif isinstance(arm, NgramProposer):
            hidden_by = arm.max_ngram + 1 if arm.max_ngram < arm.indices.max_ngram else None
            parts += [arm.max_ngram, arm.min_ngram, arm.occurrence, arm.branch, hidden_by]
        elif isinstance(arm, SuffixProposer):
            parts += [arm.max_match, arm.factor, arm.offset, arm.min_probability, arm.own_weight]
        found[name] = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return found


def drafting_arms(grid: CostGrid) -> list[str]:
    """Arms that take in what is committed; those that copy text do not."""
    return sorted({name for name, _, _ in grid.drafts})


def missing(table: CostTable, grid: CostGrid) -> bool:
    """Whether a table lacks something of a grid."""
    points = {(n, p, b) for n in grid.widths for p in grid.contexts for b in grid.batches}
    drafts = {(*draft, b) for draft in grid.drafts for b in grid.batches}
    known = points <= table.verify_points.keys() and drafts <= table.draft_points.keys()
    absorbing = {name for name, _ in table.absorb_points}
    as_run = table.buckets[: len(grid.buckets)] if grid.buckets else table.buckets
    return not (known and as_run == grid.buckets and absorbing >= set(drafting_arms(grid)))


SOON = 8
"""Positions more than a round has that are taken in for about what the cost table says."""


class AutoProposer(AdaptiveProposer):
    """Lets a cost table and the acceptance so far decide how much to draft, and with what.

    Args:
        arms: proposers by name; heads whose confidence output was calibrated are cut by it.
        costs: of the engine that will decode.
        priors: by arm, what is known beforehand of its acceptance.
        memory: where what is learnt is kept from run to run; reading it is the caller's.
        clock: whether rounds are watched, and decided about by what they really take
            (`inference.scheduling.pace`). Without it a run repeats choice for choice.
    """

    def __init__(
        self,
        arms: Mapping[str, Proposer],
        costs: CostTable,
        priors: Mapping[str, Prior] | None = None,
        memory: Memory | None = None,
        clock: bool = True,
    ) -> None:
        confident = [name for name, arm in arms.items() if _is_confident(arm)]
        self.paced, table = PacedCosts(costs), Remembered(costs)
        known: RoundCosts = self.paced if clock else table
        super().__init__(
            arms,
            controllers(known, priors, cut_arms=confident),
            costs,
            confident,
            batch_controllers(known, priors, cut_arms=confident),
            controllers(table, priors, cut_arms=confident),
            known,
        )
        self.costs, self.priors, self.memory = costs, dict(priors or {}), memory
        self._watch = Watch(self.paced) if clock else None
        self._seconds = self._plain_seconds = 0.0

    def start(self, session: Session) -> None:
        """Start all arms, and the watch."""
        super().start(session)
        if self._watch is not None:
            self._watch.start(session.timer)

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """As decided; what is expected of the round is added up."""
        if self._watch is not None:
            self._watch.over()
        tokens, seconds = self.expected_tokens, self.expected_seconds
        trees = super().propose(states)
        lengths = [len(state.tokens) for state in states if state is not None]
        rows, context = len(lengths), sum(lengths) / len(lengths)
        self._seconds += (self.expected_seconds - seconds) / rows
        plain = self.paced.plain(context, rows)
        self._plain_seconds += (self.expected_tokens - tokens) / rows * plain
        if self._watch is not None:
            drafts, networks = self._priced(rows), bool(self.drafting())
            self._watch.begun(RoundBegun(self._width, context, rows, drafts, networks))
        return trees

    def _priced(self, batch: int) -> dict[str, float]:
        """By the arm whose network drafted in this round what that takes by the cost table; nothing
        where several did, where one had much to catch up, or was stopped by its confidence.
        """
        found: dict[str, float] = {}
        for choice, tree in self.drafting():
            assert choice.arm is not None
            seconds = self.costs.draft(choice.arm, choice.depth, choice.top_k, batch)
            if self.arms[choice.arm].together:
                found[choice.arm] = max(found.get(choice.arm, 0.0), seconds)
            else:
                found[choice.arm] = found.get(choice.arm, 0.0) + seconds / batch
            if self._late > SOON or (choice.arm in self.confident and tree.depth < choice.depth):
                return {}
        if len(found) != 1 or min(found.values()) <= 0.0:
            return {}
        return {
            name: seconds + self.costs.absorb(name, self._late) for name, seconds in found.items()
        }

    @property
    def predicted(self) -> Predicted:
        """Of all rounds so far, in which sequences of a batch share the seconds."""
        seconds = self._seconds + self.absorbed
        return Predicted(self.drafted, self.expected_tokens, seconds, self._plain_seconds)

    def keep(self, say: Callable[[str], None]) -> None:
        """Leave what was learnt to the next run. At the end of one: nothing reads it before.

        Args:
            say: called with a line if that cannot be done.
        """
        if self.memory is None or not self.memory.law.teaches or not self.estimates:
            return
        learnt = {name: one.counts() for name, one in self.estimates.items()}
        self.memory.write(learnt, say)

    def fresh(self) -> AutoProposer:
        """One with the same arms that has decoded nothing yet."""
        clock = self._watch is not None
        return AutoProposer(self.proposers, self.costs, self.priors, self.memory, clock)


@dataclass(frozen=True)
class Predicted:
    """What the cost table and the acceptance so far say of some rounds.

    Attributes:
        drafted: sequences whose drafts a network made.
        tokens: of all sequences.
        seconds: of the rounds.
        plain_seconds: of plain decoding for as many tokens.
    """

    drafted: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    plain_seconds: float = 0.0

    def __add__(self, more: Predicted) -> Predicted:
        """Of both."""
        return Predicted(
            *(own + new for own, new in zip(astuple(self), astuple(more), strict=True))
        )

    def __sub__(self, less: Predicted) -> Predicted:
        """Of the rounds in between."""
        return Predicted(
            *(own - old for own, old in zip(astuple(self), astuple(less), strict=True))
        )


def _is_confident(proposer: Proposer) -> bool:
    if not isinstance(proposer, HeadProposer):
        return False
    config = proposer.drafter.config
    return proposer.drafter.confidence is not None and config.confidence_temperatures is not None
