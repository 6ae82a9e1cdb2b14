"""Runs the parts of a round on an engine, to measure their seconds for a cost table.

Letters: B sequences, N rows, P committed tokens, F·D captured features, D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from inference.append import append_text, stretches
from inference.engine import Engine
from inference.laws import tree_laws
from inference.processors import Sampler
from inference.proposers.arms import NEW
from inference.proposers.base import Proposer, RowState, Session
from inference.proposers.heads import HeadProposer
from inference.sampling import SamplingParams
from inference.scheduling.cost_calibration import REPEATS
from inference.static.cache import StaticCache
from inference.timing import PhaseTimer
from inference.tree import TokenTree
from inference.verify import verify

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
REST_ROWS = 6
"""Nodes of the tree whose acceptance and commit are timed."""
ABSORBED = (64, 512)
"""Positions more than a round has that an arm takes in, where that is measured; the second where
contexts are that long."""


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
        """Seconds of drafting one round for B sequences, behind a forward: by then the target's
        weights have driven the head's out of the processor's caches.
        """
        drafting = self._drafting(name, batch)
        drafting.limit(depth, top_k)
        self.verify(1, self._shortest, batch)
        return self._seconds(drafting.round)

    def absorb(self, name: str, more: int) -> float:
        """Seconds of taking in so many committed positions more than a round has."""
        drafting = self._drafting(name, 1)
        drafting.limit(1, 1)
        found = []
        for _ in range(REPEATS):
            usual = self._seconds(drafting.round)
            drafting.go_on(more)
            found.append(self._seconds(drafting.round) - usual)
        return max(median(found), 0.0)

    def _drafting(self, name: str, batch: int) -> _Drafting:
        """Rounds of one proposer, begun."""
        drafting = self._drafts.get(name)
        if drafting is None or drafting.batch != batch:
            drafting = self._drafts[name] = _Drafting(self.engine, self.arms[name], batch)
        return drafting

    def rest(self, batch: int) -> float:
        """Seconds of what else a round does: the target's law, the walk, the commit."""
        cache = self._cache(self._shortest, batch)
        vocab = self.engine.target.vocab_size
        tokens = torch.arange(REST_ROWS) % vocab
        logits = torch.zeros(REST_ROWS, vocab, device=self.engine.target.device)
        logits[:, 1] = 1.0  # the chain is accepted up to its second token
        start = time.perf_counter()
        for _ in range(batch):
            sampler = Sampler(SamplingParams(), 1, frozenset(), logits.device)
            tree = TokenTree.chain(tokens)
            laws = tree_laws(sampler, tree, logits, [0], "match")
            verify(tree, laws.law, "match", 0, 0, draw=laws.draw)
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
        """Of a part; there may be more forms to measure than captures are kept, and making one anew
        is not what a round takes.
        """
        timer, before = PhaseTimer(self.engine.target.device), self.engine.captured_seconds
        with timer.phase("part"):
            run()
        return timer.seconds["part"] - (self.engine.captured_seconds - before)

    @property
    def _shortest(self) -> int:
        """The least P that verifying was measured behind."""
        return min(context for context, _ in self._caches)

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
        proposer.start(Session(engine, cache, batch, timer, "match", list(range(batch))))
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
        self.new = 0
        self.go_on(NEW)

    def go_on(self, count: int) -> None:
        """So many tokens more are committed."""
        self.tokens = self.tokens + [7] * count
        self.new += count
