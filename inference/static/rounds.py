"""A whole round on the device: draft, verify, accept, commit, with one copy to the host at its end.

The state of all sequences lies in buffers that never move, and a round is a function of them that
reads nothing on the host and has the same shapes every time. On CUDA it is therefore captured in
one graph, after two rounds that ran eagerly and made everything that is made at first use. What the
host is told arrives in one pinned buffer, and waiting for it is the only time that it waits.
`inference.decoding` is the readable twin, and serves what cannot be a tensor.

Rounds come in kinds that share all buffers: one for every drafter that is given, each with trees of
its own, and the plain step, which drafts nothing. Each is a graph, and the host runs any of them
next. A head takes in what was committed when it drafts, so plain steps leave that waiting: W rows
of it, behind which one more graph has the head absorb them, all but the last. That is one pass of
the head's first step per W - 1 plain steps, instead of one in each.

Sequences that have ended stay in the batch: they draft and verify along and change nothing.

Letters: B sequences, N tree nodes, D depth, R rows that a drafter takes in (one more than the
deepest tree has levels), W rows that may wait, F captured features, V vocabulary.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from inference.proposers.options import TreeOptions
from inference.static.accept import RUNNING, Acceptance, Ends, Noise, accept
from inference.static.cache import StaticCache, move_paths
from inference.static.draft_base import Committed, StaticDrafter
from inference.static.engine import StaticEngine
from inference.static.graphs import Capture
from inference.static.inputs import target_rows
from inference.static.laws import Warpers
from inference.static.report import Report, read, report
from inference.static.tree import DraftTree, take
from inference.static.words import tree_words

EAGER_ROUNDS = 2
"""Rounds of a kind before its graph is captured: kernels are compiled and draft caches made in
them."""
WAITING = 16
"""W, or R if that is more."""
Kind = int | None
"""The number of a drafter, or None for a plain step."""


@dataclass(frozen=True)
class Rule:
    """How drafts are accepted.

    Attributes:
        name: one of `inference.static.accept.STATIC_RULES`.
        warpers: of the target's law.
        vocab: (Vd,) absolute ids of the columns of drawn drafts' laws, or None for all.
    """

    name: str
    warpers: Warpers
    vocab: Tensor | None


@dataclass
class RoundState:
    """What rounds read and write, in place.

    Attributes:
        lengths: (B,) int64 committed tokens, which is the position of each root.
        remaining: (B,) int64 tokens that each text has room for; 0 for one that has ended.
        max_depth: (B,) int64 longest useful path.
        seeds: (B,) int64 of the noise.
        ends: (E,) int64 tokens that end a text.
    """

    lengths: Tensor
    remaining: Tensor
    max_depth: Tensor
    seeds: Tensor
    ends: Tensor

    @classmethod
    def empty(cls, batch: int, ends: int, device: torch.device) -> RoundState:
        """Before any prompt.

        Args:
            batch: B.
            ends: E.
            device: of the target.
        """
        sizes = [batch, batch, batch, batch, ends]
        return cls(*(torch.zeros(n, dtype=torch.int64, device=device) for n in sizes))


class Verified(NamedTuple):
    """Trees and what the target says about them.

    Attributes:
        tree: drafted.
        depths: (B, N) of its nodes.
        logits: (B, N, V).
        hidden: (B, N, D) last hidden states.
        features: (B, N, F), or None if the head reads none.
    """

    tree: DraftTree
    depths: Tensor
    logits: Tensor
    hidden: Tensor
    features: Tensor | None


class Rounds:
    """Rounds of a batch.

    Args:
        engine: runs the target.
        cache: of the target, with room for the longest text and a tree.
        drafters: grow the trees of one kind of round each; of one head, with the same R. Their laws
            and limits are buffers of ``state``. From now on they share what they keep.
        state: of the batch.
        rule: of acceptance.
        capture: makes rounds repeatable (`inference.static.graphs`) once `EAGER_ROUNDS` of a kind
            have run; None runs all of them operation by operation.
    """

    def __init__(
        self,
        engine: StaticEngine,
        cache: StaticCache,
        drafters: Sequence[StaticDrafter],
        state: RoundState,
        rule: Rule,
        capture: Capture | None = None,
    ) -> None:
        self.engine, self.cache, self.drafters = engine, cache, list(drafters)
        self.state, self.rule, self.capture = state, rule, capture
        self.new_rows = self.drafter.new_rows
        for other in self.drafters[1:]:
            assert other.new_rows == self.new_rows, "drafters take in the same rows"
            other.adopt(self.drafter)
        self.committed: Committed | None = None
        self._waiting = 0  # rows that the head has not taken in, of the sequence with the most
        self._replays: dict[Kind | str, Callable[[], Tensor]] = {}
        self._done: Counter[Kind | str] = Counter()
        self._host: dict[Kind, Tensor] = {}

    @property
    def drafter(self) -> StaticDrafter:
        """The first, which takes in prompts for all."""
        return self.drafters[0]

    @property
    def waiting_rows(self) -> int:
        """W."""
        return max(WAITING, self.new_rows)

    def depth(self, kind: Kind) -> int:
        """D of the trees of a kind of round."""
        return 0 if kind is None else len(self.drafters[kind].growth.widths)

    def restart(self, seeds: Tensor, ends: Tensor) -> None:
        """Forget all text; buffers and graphs stay.

        Args:
            seeds: (B,) of the next texts.
            ends: (E,) their end tokens.
        """
        self.drafter.reset()
        self.cache.restart()
        self.state.seeds.copy_(seeds)
        self.state.ends.copy_(ends)

    def begin(self, committed: Committed, lengths: Sequence[int], remaining: Sequence[int]) -> None:
        """Start from prompts that target and drafter have taken in.

        Args:
            committed: what `StaticDrafter.prefill` gave.
            lengths: tokens of each prompt.
            remaining: tokens that each text has room for, behind the first new one.
        """
        state = self.state
        state.lengths.copy_(torch.tensor(lengths))
        state.remaining.copy_(torch.tensor(remaining))
        if self.committed is None:
            self.committed = self._buffers(committed)
        counts = torch.where(state.remaining > 0, committed.counts, 0)
        self._keep(committed._replace(counts=counts))
        self._waiting = 1

    def _buffers(self, like: Committed) -> Committed:
        """Of W rows, that never move."""

        def room(rows: Tensor) -> Tensor:
            return rows.new_zeros(len(rows), self.waiting_rows, *rows.shape[2:])

        features = None if like.features is None else room(like.features)
        counts = torch.zeros_like(like.counts)
        return Committed(room(like.tokens), counts, room(like.hidden), features)

    def run(self, kind: Kind = 0) -> list[Report]:
        """One round of every sequence.

        Args:
            kind: which drafter drafts, or none.

        Returns:
            What became of each sequence.
        """
        if self._waiting > (self.waiting_rows - 1 if kind is None else self.new_rows):
            self.absorb()
        told = self._on_host(kind, self._do(kind, lambda: self._round(kind)))
        found = [read(row) for row in told.tolist()]
        if kind is None:
            self._waiting += 1
        else:
            running = [one.accepted + 1 for one in found if one.ended == RUNNING]
            self._waiting = max(running, default=0)
        return found

    def absorb(self) -> None:
        """Have the head take in all that waits but the last row of each sequence."""
        self._do("absorb", self._absorb)
        self._waiting = 1

    def _do(self, name: Kind | str, function: Callable[[], Tensor]) -> Tensor:
        """Run a function of the buffers, by its graph if it is time for one."""
        new = name not in self._replays and self._done[name] == EAGER_ROUNDS
        if self.capture is not None and new:
            start = time.perf_counter()
            self._replays[name] = self.capture(function)
            self.engine.warm_up_seconds += time.perf_counter() - start
        self._done[name] += 1
        return self._replays.get(name, function)()

    def _on_host(self, kind: Kind, told: Tensor) -> Tensor:
        """What the host is told, once the device has come so far."""
        if told.device.type != "cuda":
            return told
        if kind not in self._host:
            self._host[kind] = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
        self._host[kind].copy_(told, non_blocking=True)
        torch.cuda.current_stream(told.device).synchronize()
        return self._host[kind]

    # Functions of the buffers --------------------------------------------------------------------

    def _round(self, kind: Kind) -> Tensor:
        """Read the buffers, write them, and (B, 3D + 6) what the host is told."""
        return self.settle(self.verify(self.draft(kind), kind), kind)

    def _absorb(self) -> Tensor:
        kept = self.committed
        assert kept is not None
        self.drafter.absorb_rows(kept._replace(counts=kept.last.clamp_min(0)))
        for rows in (kept.tokens, kept.hidden, kept.features):
            if rows is not None:
                rows[:, 0].copy_(take(rows, kept.last))
        return kept.counts.clamp_max_(1)

    def draft(self, kind: Kind = 0) -> DraftTree:
        """The first part of a round: trees of what was committed last."""
        assert self.committed is not None
        if kind is None:
            return lone_roots(self.committed.roots, self.engine.least_rows)
        self.state.max_depth.copy_(self.state.remaining - 1)
        return self.drafters[kind].draft(self.committed.part(0, self.new_rows))

    def verify(self, tree: DraftTree, kind: Kind = 0) -> Verified:
        """The second part: the target's forward."""
        words, depths = tree_words(tree.parents, self.depth(kind))
        rows = target_rows(self.cache, self.state.lengths, words, depths)
        positions = self.state.lengths[:, None] + depths
        out = self.engine.run(tree.tokens, positions, rows, self.drafter.feature_layers)
        return Verified(tree, depths, out.logits, out.last_hidden, out.features)

    def settle(self, verified: Verified, kind: Kind = 0) -> Tensor:
        """The last part: accept, commit, and (B, 3D + 6) what the host is told."""
        state, rule = self.state, self.rule
        found = accept(
            verified.tree,
            verified.logits,
            rule.warpers,
            Noise(state.seeds, state.lengths),
            Ends(state.ends, state.remaining),
            rule=rule.name,
            depth=self.depth(kind),
            children=0 if kind is None else most_children(self.drafters[kind].growth.options),
            draft_vocab=rule.vocab,
        )
        features = verified.features
        features = None if features is None else take(features, found.path)
        new = self._committed(found, take(verified.hidden, found.path), features)
        if kind is None:
            self._append(new)
        else:
            move_paths(self.cache.kv, state.lengths, found.path)
            self._keep(new)
        self._advance(found)
        return report(verified.tree, verified.depths, found)

    def _committed(self, found: Acceptance, hidden: Tensor, features: Tensor | None) -> Committed:
        """The accepted path of each sequence that goes on."""
        counts = torch.where(found.ended == RUNNING, found.accepted + 1, 0)
        tokens = found.packed[:, 2:].clamp_min(0)
        return Committed(tokens, counts, hidden, features)

    def _keep(self, new: Committed) -> None:
        """In place of what waited; the head has taken it in."""
        kept, rows = self.committed, new.tokens.shape[1]
        assert kept is not None
        kept.counts.copy_(new.counts)
        for buffer, value in _rows(kept, new):
            buffer[:, :rows].copy_(value)

    def _append(self, new: Committed) -> None:
        """One row behind what waits."""
        kept = self.committed
        assert kept is not None
        for buffer, value in _rows(kept, new):
            places = kept.counts.reshape(-1, *[1] * (value.dim() - 1)).expand_as(value)
            buffer.scatter_(1, places, value)
        kept.counts.copy_(torch.where(new.counts > 0, kept.counts + 1, 0))

    def _advance(self, found: Acceptance) -> None:
        state, goes_on = self.state, found.ended == RUNNING
        state.lengths.add_(torch.where(goes_on, found.accepted + 1, 0))
        state.remaining.copy_(torch.where(goes_on, state.remaining - found.emitted, 0))


def _rows(kept: Committed, new: Committed) -> list[tuple[Tensor, Tensor]]:
    """Buffers and what is written to them, but the counts."""
    found = [(kept.tokens, new.tokens), (kept.hidden, new.hidden)]
    if kept.features is not None and new.features is not None:
        found.append((kept.features, new.features))
    return found


def most_children(options: TreeOptions) -> int:
    """Of a node of such trees."""
    return options.top_k if options.shape is None else max(map(len, options.shape.children))


def lone_roots(roots: Tensor, width: int) -> DraftTree:
    """Trees of roots (B,) and nothing else, N filled up to ``width``, at least 1."""
    tokens = F.pad(roots[:, None], (0, width - 1))
    valid = torch.arange(width, device=roots.device) == 0
    return DraftTree(tokens, torch.full_like(tokens, -1), valid.expand_as(tokens))
