"""`size: auto`: cost tables measured on an engine, and the proposer that decides by them.

Letters: B sequences, N rows, P committed tokens, F·D captured features, D hidden.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from inference.append import append_text, stretches
from inference.controller import controllers
from inference.cost_calibration import CostGrid, calibrate_costs
from inference.costs import CostTable, check_writable, costs_path, current_costs, machine_key
from inference.engine import Engine
from inference.laws import tree_laws
from inference.processors import Sampler
from inference.proposers.adaptive import AdaptiveProposer, describe
from inference.proposers.base import Proposer, RowState, Session
from inference.proposers.heads import HeadProposer
from inference.sampling import SamplingParams
from inference.schedule import Arm
from inference.static.cache import StaticCache
from inference.timing import PhaseTimer
from inference.tree import TokenTree
from inference.verify import verify

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
CONTEXTS = (128, 1024)
BUDGET = 20.0
"""Seconds that a calibration may take, warming up and forced repeats excepted."""
REST_ROWS = 6
"""Nodes of the tree whose acceptance and commit are timed."""
NEW = 2
"""Positions that are committed between two rounds of measured drafting."""


@dataclass
class Calibration:
    """Runs the parts of a round on an engine and tells their seconds.

    Args:
        engine: to measure; at its warm-up.
        arms: proposers by name, as in the table.
    """

    engine: Engine
    arms: Mapping[str, Proposer]
    _caches: dict[tuple[int, int], Any] = field(default_factory=dict)
    _drafts: dict[str, _Drafting] = field(default_factory=dict)

    def verify(self, width: int, context: int, batch: int) -> float:
        """Seconds of a forward of N rows behind P tokens, in B sequences."""
        cache = self._cache(context, batch)
        nodes, vocab = torch.arange(width), self.engine.target.vocab_size
        seen = torch.ones(width, width, dtype=torch.bool).tril()
        layers = self.feature_layers
        seconds = self._seconds(
            lambda: self.engine.append(
                cache,
                [nodes % vocab] * batch,
                [nodes] * batch,
                [seen] * batch,
                feature_layers=layers,
            )
        )
        cache.revert()
        return seconds

    def draft(self, name: str, depth: int, top_k: int, batch: int) -> float:
        """Seconds of drafting one round for B sequences."""
        drafting = self._drafts.get(name)
        if drafting is None or drafting.batch != batch:
            drafting = self._drafts[name] = _Drafting(self.engine, self.arms[name], batch)
        drafting.limit(depth, top_k)
        return self._seconds(drafting.round)

    def rest(self, batch: int) -> float:
        """Seconds of what else a round does: the target's law, the walk, the commit."""
        cache = self._cache(min(key[0] for key in self._caches), batch)
        vocab = self.engine.target.vocab_size
        tokens = torch.arange(REST_ROWS) % vocab
        logits = torch.zeros(REST_ROWS, vocab, device=self.engine.target.device)
        logits[:, 1] = 1.0  # the chain is accepted up to its second token
        start = time.perf_counter()
        for _ in range(batch):
            sampler = Sampler(SamplingParams(), 1, frozenset(), logits.device)
            tree = TokenTree.chain(tokens)
            laws = tree_laws(sampler, tree, logits, [0], "match")
            verify(tree, laws.law, "match", 0, 0)
        seconds = time.perf_counter() - start
        return seconds + self._commit(cache, batch)

    def _commit(self, cache: Any, batch: int) -> float:
        """Seconds of committing two rows that have to be moved, taken back afterwards."""
        nodes = torch.arange(REST_ROWS) % self.engine.target.vocab_size
        seen = torch.ones(REST_ROWS, REST_ROWS, dtype=torch.bool).tril()
        self.engine.append(cache, [nodes] * batch, [nodes] * batch, [seen] * batch)
        before = list(cache.lengths)
        seconds = self._seconds(lambda: cache.commit([[0, 2]] * batch))
        cache.lengths[:] = before
        return seconds

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """All that the arms read."""
        layers = (layer for arm in self.arms.values() for layer in arm.feature_layers)
        return tuple(dict.fromkeys(layers))

    def _seconds(self, run: Callable[[], Any]) -> float:
        timer = PhaseTimer(self.engine.target.device)
        with timer.phase("part"):
            run()
        return timer.seconds["part"]

    def _cache(self, context: int, batch: int) -> Any:
        """A cache of P tokens; which ones does not matter."""
        if (context, batch) not in self._caches:
            cache = self.engine.new_cache(batch, context + WIDTHS[-1] + 1)
            if isinstance(cache, StaticCache):
                cache.lengths[:] = [context] * batch
            else:
                target = self.engine.target
                for part in stretches(target, context):
                    text = [number % target.vocab_size for number in range(context)][part]
                    append_text(target, cache, [text] * batch, (), self.engine.append)
            self._caches[context, batch] = cache
        return self._caches[context, batch]


class _Drafting:
    """Rounds of one proposer on texts that do not matter."""

    def __init__(self, engine: Engine, proposer: Proposer, batch: int) -> None:
        self.target, self.proposer, self.batch = engine.target, proposer, batch
        self.tokens = [number % engine.target.vocab_size for number in range(64)]
        self.new = len(self.tokens) - 1
        self.depth = 1
        timer = PhaseTimer()
        cache = engine.new_cache(batch, 256)
        proposer.start(Session(engine.target, cache, batch, timer, "match", list(range(batch))))
        if isinstance(proposer, HeadProposer):
            engine.prepare(proposer.drafter)
        self.round()  # takes in the text

    def limit(self, depth: int, top_k: int) -> None:
        """What the next rounds draft."""
        self.depth = depth
        if isinstance(self.proposer, HeadProposer):
            size = depth + 1 if top_k == 1 else depth * top_k + 1
            options = replace(self.proposer.options, shape=None, grown=True, size=size)
            self.proposer.options = replace(options, depth=depth, top_k=top_k)

    def round(self) -> None:
        """Absorb what is new, and draft."""
        target, count = self.target, self.new
        width = len(self.proposer.feature_layers) * target.hidden_size
        kind: dict[str, Any] = {"dtype": target.dtype, "device": target.device}
        features = torch.ones(count, width, **kind) if width else None
        hidden = torch.ones(count, target.hidden_size, **kind)
        state = RowState(self.tokens, 1, features, hidden, self.depth, SamplingParams())
        self.proposer.propose([state] * self.batch)
        self.tokens = self.tokens + [7] * NEW
        self.new = NEW


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
        buckets: widths that the engine runs; () if it runs any.
    """
    largest = max(arm.size for arm in arms)
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
    target = engine.target
    key = machine_key(
        target.device, target.dtype, target.fingerprint(), engine.name, drafters_hash(arms)
    )
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


def drafters_hash(arms: Mapping[str, Proposer]) -> str:
    """What tells the costs of two sets of arms apart: their kinds, and the heads' shapes.

    Args:
        arms: proposers by name.
    """
    parts = []
    for name, arm in sorted(arms.items()):
        shapes = []
        if isinstance(arm, HeadProposer):
            weights = arm.drafter.named_parameters()
            shapes = [(key, tuple(value.shape), str(value.dtype)) for key, value in weights]
        parts.append((name, type(arm).__name__, shapes))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def missing(table: CostTable, grid: CostGrid) -> bool:
    """Whether a table lacks something of a grid."""
    points = {(n, p, b) for n in grid.widths for p in grid.contexts for b in grid.batches}
    drafts = {(*draft, b) for draft in grid.drafts for b in grid.batches}
    return not (points <= table.verify_points.keys() and drafts <= table.draft_points.keys())


def auto_proposer(
    engine: Engine,
    arms: Mapping[str, Proposer],
    costs: CostTable,
    priors: Mapping[str, Sequence[Sequence[float]]] | None = None,
) -> AdaptiveProposer:
    """Lets the cost table and the acceptance so far decide how much to draft, and with what.

    Args:
        engine: that will decode.
        arms: proposers by name; heads whose confidence output was calibrated are cut by it.
        costs: of this engine.
        priors: by arm, (K, R) rates of acceptance measured beforehand.
    """
    confident = [name for name, arm in arms.items() if _is_confident(arm)]
    new = controllers(costs, priors, cut_arms=confident)
    return AdaptiveProposer(arms, new, costs, confident)


def _is_confident(proposer: Proposer) -> bool:
    if not isinstance(proposer, HeadProposer):
        return False
    config = proposer.drafter.config
    return proposer.drafter.confidence is not None and config.confidence_temperatures is not None
