"""A whole round on the device: draft, verify, accept, commit, with one copy to the host at its end.

The state of all sequences lies in buffers that never move, and a round is a function of them that
reads nothing on the host and has the same shapes every time. On CUDA it is therefore captured in
one graph, after two rounds that ran eagerly and made everything that is made at first use. What the
host is told arrives in one pinned buffer, and waiting for it is the only time that it waits.
`inference.decoding` is the readable twin, and serves what cannot be a tensor.

Sequences that have ended stay in the batch: they draft and verify along and change nothing.

Letters: B sequences, N tree nodes, D depth, R = D + 1 rows committed at most, L layers, H key-value
heads, S columns, F·W captured features, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from inference.static.accept import Acceptance, Ends, Noise, accept
from inference.static.attention import TreeRows, as_bias
from inference.static.cache import StaticCache
from inference.static.draft_base import Committed, StaticDrafter
from inference.static.engine import StaticEngine
from inference.static.graphs import Capture
from inference.static.laws import Warpers
from inference.static.tree import DraftTree, take
from inference.static.words import WORD, tree_words

EAGER_ROUNDS = 2
"""Rounds before a graph is captured: kernels are compiled and draft caches made in them."""


@dataclass(frozen=True)
class Rule:
    """How drafts are accepted.

    Attributes:
        name: one of `inference.static.accept.STATIC_RULES`.
        warpers: of the target's law.
        children: most children of a node.
        vocab: (Vd,) absolute ids of the columns of drawn drafts' laws, or None for all.
    """

    name: str
    warpers: Warpers
    children: int
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
        features: (B, N, F·W), or None if the head reads none.
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
        drafter: grows the trees; its law and limits are buffers of ``state``.
        state: of the batch.
        rule: of acceptance.
        capture: makes rounds repeatable (`inference.static.graphs`) once `EAGER_ROUNDS` have run;
            None runs all of them operation by operation.
    """

    def __init__(
        self,
        engine: StaticEngine,
        cache: StaticCache,
        drafter: StaticDrafter,
        state: RoundState,
        rule: Rule,
        capture: Capture | None = None,
    ) -> None:
        self.engine, self.cache, self.drafter = engine, cache, drafter
        self.state, self.rule, self.capture = state, rule, capture
        self.committed: Committed | None = None
        self._replay: Callable[[], Tensor] | None = None
        self._host: Tensor | None = None
        self._done = 0

    @property
    def depth(self) -> int:
        """D."""
        return len(self.drafter.growth.widths)

    def restart(self, seeds: Tensor, ends: Tensor) -> None:
        """Forget all text; buffers and graph stay.

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
        counts = torch.where(state.remaining > 0, committed.counts, 0)
        committed = committed._replace(counts=counts)
        if self.committed is None:
            features = committed.features
            self.committed = Committed(
                committed.tokens.clone(),
                committed.counts.clone(),
                committed.hidden.clone(),
                None if features is None else features.clone(),
            )
        else:
            self._keep(committed)

    def run(self) -> list[list[int]]:
        """One round of every sequence.

        Returns:
            Per sequence: accepted drafts, how the text stands, depth and draft tokens of the tree,
            and D + 1 emitted tokens with -1 behind them.
        """
        if self.capture is not None and self._replay is None and self._done == EAGER_ROUNDS:
            start = time.perf_counter()
            self._replay = self.capture(self._round)
            self.engine.warm_up_seconds += time.perf_counter() - start
        told = self._round() if self._replay is None else self._replay()
        self._done += 1
        return self._on_host(told).tolist()

    def _on_host(self, told: Tensor) -> Tensor:
        """What the host is told, once the device has come so far."""
        if told.device.type != "cuda":
            return told
        if self._host is None:
            self._host = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
        self._host.copy_(told, non_blocking=True)
        torch.cuda.current_stream(told.device).synchronize()
        return self._host

    def _round(self) -> Tensor:
        """Read the buffers, write them, and (B, D + 5) what the host is told."""
        return self.settle(self.verify(self.draft()))

    def draft(self) -> DraftTree:
        """The first part of a round: trees of what was committed last."""
        assert self.committed is not None
        self.state.max_depth.copy_(self.state.remaining - 1)
        return self.drafter.draft(self.committed)

    def verify(self, tree: DraftTree) -> Verified:
        """The second part: the target's forward."""
        words, depths = tree_words(tree.parents, self.depth)
        rows = target_rows(self.cache, self.state.lengths, words, depths)
        positions = self.state.lengths[:, None] + depths
        out = self.engine.run(tree.tokens, positions, rows, self.drafter.feature_layers)
        return Verified(tree, depths, out.logits, out.last_hidden, out.features)

    def settle(self, verified: Verified) -> Tensor:
        """The last part: accept, commit, and (B, D + 5) what the host is told."""
        state, rule = self.state, self.rule
        found = accept(
            verified.tree,
            verified.logits,
            rule.warpers,
            Noise(state.seeds, state.lengths),
            Ends(state.ends, state.remaining),
            rule=rule.name,
            depth=self.depth,
            children=rule.children,
            draft_vocab=rule.vocab,
        )
        move_paths(self.cache.kv, state.lengths, found.path)
        features = verified.features
        features = None if features is None else take(features, found.path)
        self._keep(self._committed(found, take(verified.hidden, found.path), features))
        self._advance(found)
        return report(verified.tree, verified.depths, found)

    def _committed(self, found: Acceptance, hidden: Tensor, features: Tensor | None) -> Committed:
        """The accepted path of each sequence that goes on."""
        counts = torch.where(found.ended == 0, found.accepted + 1, 0)
        tokens = found.packed[:, 2:].clamp_min(0)
        return Committed(tokens, counts, hidden, features)

    def _keep(self, new: Committed) -> None:
        assert self.committed is not None
        for buffer, value in zip(self.committed, new, strict=True):
            if buffer is not None and value is not None:
                buffer.copy_(value)

    def _advance(self, found: Acceptance) -> None:
        state, goes_on = self.state, found.ended == 0
        state.lengths.add_(torch.where(goes_on, found.accepted + 1, 0))
        state.remaining.copy_(torch.where(goes_on, state.remaining - found.emitted, 0))


def target_rows(cache: StaticCache, lengths: Tensor, words: Tensor, depths: Tensor) -> TreeRows:
    """What attention needs of trees whose lengths are on the device.

    On a CPU they can be read for nothing, and one bias serves all layers.

    Args:
        cache: of the target.
        lengths: (B,).
        words: (B, N, W).
        depths: (B, N).
    """
    windows, nodes = cache.shape.windows, words.shape[1]
    columns = lengths[:, None] + torch.arange(nodes, device=lengths.device)
    rows = TreeRows(cache.kv, columns, windows, lengths=lengths, words=words, depths=depths)
    if lengths.device.type == "cpu":
        rows.bias, rows.window_bias = word_biases(cache, lengths, words, depths)
    return rows


def word_biases(
    cache: StaticCache, lengths: Tensor, words: Tensor, depths: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Biases (B, 1, N, C) for the layers without and with a window; arguments as above."""
    nodes = depths.shape[1]
    places = torch.arange(int(lengths.max()) + nodes)
    behind = places - lengths[:, None]  # (B, C) tree row of each column; below 0: committed
    row = behind.clamp(0, nodes - 1)
    word = words.gather(2, (row // WORD)[:, None].expand(-1, nodes, -1))
    seen = (word >> (row % WORD)[:, None]) & 1  # (B, N, C)
    seen = torch.where(behind[:, None] < 0, 1, seen.masked_fill(behind[:, None] >= nodes, 0))
    bias = as_bias(seen.bool(), cache.shape.dtype)[:, None]
    window = next((window for window in cache.shape.windows if window is not None), None)
    if window is None:
        return bias, None
    positions = torch.where(behind < 0, places, lengths[:, None] + depths.gather(1, row))
    distance = (lengths[:, None] + depths)[..., None] - positions[:, None]
    return bias, as_bias(seen.bool() & (distance < window), cache.shape.dtype)[:, None]


def move_paths(kv: Tensor, lengths: Tensor, path: Tensor) -> None:
    """Move the rows of a path to the front of the tree's, in all layers at once.

    Args:
        kv: (L, 2, B, H, S, d), changed in place.
        lengths: (B,) column of each root.
        path: (B, R) nodes, the root first; what is moved for repeated ones has no meaning.
    """
    shape = (*kv.shape[:4], path.shape[1], kv.shape[5])
    sources = (lengths[:, None] + path)[None, None, :, None, :, None]
    places = torch.arange(path.shape[1], device=path.device)
    targets = (lengths[:, None] + places)[None, None, :, None, :, None]
    kv.scatter_(4, targets.expand(shape), kv.gather(4, sources.expand(shape)))


def report(tree: DraftTree, depths: Tensor, found: Acceptance) -> Tensor:
    """(B, D + 5): accepted, how the text stands, depth and draft tokens, emitted tokens."""
    drafted = tree.valid.sum(1) - 1
    deepest = torch.where(tree.valid, depths, 0).amax(1)
    return torch.cat(
        [found.packed[:, :2], deepest[:, None], drafted[:, None], found.packed[:, 2:]], dim=1
    )
