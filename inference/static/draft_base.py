"""What every static drafter is given and gives back: tensors of fixed shape, on one device.

A round of a static drafter is a function of device tensors alone. It reads nothing on the host and
has the same shapes in every round, so it can be captured in a CUDA graph or compiled whole, once it
has run eagerly a first time. Only the prompt is run in stretches of any size.
``inference.proposers`` are the readable twins: one sequence after the other, shapes as they come.

State of a round, as in ``inference.proposers.base``: committed tokens x_0..x_a, of which x_a has no
target hidden state yet. What a verifying forward leaves behind is at most R new positions per
sequence, those of the accepted path first and padding behind them.

Legend: B sequences, T prompt rows, R new rows, N tree nodes, F·D captured features, D hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters import Drafter
from inference.append import PREFILL_ROWS
from inference.static.draft_cache import StaticDraftCache
from inference.static.growth import Growth
from inference.static.tree import DraftTree, take
from inference.static.words import MOST_ROWS


class Committed(NamedTuple):
    """Positions committed since the last call, in rows 0 .. counts[b]-1; padding behind.

    A sequence with a count of 0 has ended: nothing that is kept of it changes, and what is drafted
    for it means nothing.

    Attributes:
        tokens: (B, R) int64, the token behind each position; that of the last is x_a.
        counts: (B,) int64.
        hidden: (B, R, D) the target's last hidden states at the positions.
        features: (B, R, F·D) captured layers there, or None if the head reads none.
    """

    tokens: Tensor
    counts: Tensor
    hidden: Tensor
    features: Tensor | None

    @property
    def last(self) -> Tensor:
        """(B,) the row of each sequence's last position; -1, any row, for one that has ended."""
        return self.counts - 1

    @property
    def roots(self) -> Tensor:
        """(B,) x_a."""
        return take(self.tokens, self.last)

    def part(self, first: int, size: int) -> "Committed":
        """Rows first .. first+size-1."""
        rows = slice(first, first + size)
        return Committed(
            self.tokens[:, rows],
            (self.counts - first).clamp(0, size),
            self.hidden[:, rows],
            None if self.features is None else self.features[:, rows],
        )


class StaticDrafter(ABC):
    """Grows a tree for every sequence of a batch at once.

    Args:
        drafter: attached head.
        growth: of the trees; its laws and limits may be buffers that change between rounds.
        batch: B.
        capacity: longest text, in tokens.
        new_rows: R, more than the longest path of a tree; None is one more.

    Attributes:
        capacity: longest text.
        new_rows: R.
        growth: of the trees.
        caches: what is kept between rounds.

    Raises:
        ValueError: naming the field that is out of range.
    """

    def __init__(
        self,
        drafter: Drafter,
        growth: Growth,
        batch: int,
        capacity: int,
        new_rows: int | None = None,
    ) -> None:
        least = len(growth.widths) + 1
        if batch < 1 or capacity < 1:
            raise ValueError(f"batch and capacity must be at least 1, got {batch} and {capacity}")
        if new_rows is not None and not least <= new_rows <= MOST_ROWS:
            raise ValueError(
                f"new_rows must lie in {least}..{MOST_ROWS} for trees of depth {least - 1}, got "
                f"{new_rows}"
            )
        self.drafter, self.growth = drafter, growth
        self.batch, self.capacity, self.new_rows = batch, capacity, new_rows or least
        self.device = next(drafter.parameters()).device
        self.caches: list[StaticDraftCache] = []

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers that ``Committed.features`` must hold."""
        return self.drafter.feature_layers

    def new_cache(self, windows: Sequence[int | None]) -> StaticDraftCache:
        """An empty cache, with room for the longest text and any round behind it.

        Args:
            windows: of its layers.
        """
        return StaticDraftCache(windows, self.batch, self.capacity + MOST_ROWS, self.device)

    def adopt(self, other: "StaticDrafter") -> None:
        """Keep nothing of its own: go on with what another drafter of the same head, batch and
        capacity keeps. Both may then draft, one round the one and the next round the other.

        Args:
            other: which may grow other trees.
        """
        self.caches = other.caches

    def pretend(self, count: int) -> None:
        """As if so many positions of every sequence had been taken in, for measuring time."""
        for cache in self.caches:
            cache.lengths.fill_(count)

    def reset(self) -> None:
        """Forget all text; buffers, and with them captured graphs, stay valid."""
        for cache in self.caches:
            cache.reset()

    def select(self, rows: Tensor) -> None:
        """Keep these sequences only, in this order; captured graphs become invalid.

        The law and the limits of ``growth`` are the caller's to cut down.

        Args:
            rows: (n,) int64 places in the batch.
        """
        self.batch = len(rows)
        for cache in self.caches:
            cache.select(rows)

    @torch.no_grad()
    def prefill(
        self, features: Tensor | None, hidden: Tensor, tokens: Tensor, counts: Tensor
    ) -> Committed:
        """Take in prompts, eagerly; the only part that reads the host.

        Args:
            features: (B, T, F·D) captured layers, or None if the head reads none.
            hidden: (B, T, D) last hidden states.
            tokens: (B, T) token behind each position: the prompt without x_0, and the target's
                first own token.
            counts: (B,) tokens of each prompt, at least 1; rows behind are padding.

        Returns:
            What the first :meth:`draft` takes: the last position of each prompt.

        Raises:
            ValueError: a prompt longer than ``capacity``.
        """
        longest = int(counts.max())
        if longest > self.capacity:
            raise ValueError(
                f"capacity is {self.capacity} tokens but a prompt has {longest}: make the static "
                "drafter with the length of the longest text"
            )
        text = Committed(tokens, counts - 1, hidden, features)
        for first in range(0, longest - 1, PREFILL_ROWS):
            size = min(PREFILL_ROWS, longest - 1 - first)
            self.absorb_text(text.part(first, size), first)
        last, padding = (counts - 1)[:, None], self.new_rows - 1
        rows = [F.pad(take(x, last), (0, 0, 0, padding)) for x in (tokens[..., None], hidden)]
        kept = None if features is None else F.pad(take(features, last), (0, 0, 0, padding))
        return Committed(rows[0][..., 0], torch.ones_like(counts), rows[1], kept)

    @abstractmethod
    def absorb_text(self, new: Committed, before: int) -> None:
        """Keep what later rounds need of a stretch of the prompts.

        Args:
            new: of any number of rows.
            before: rows that the longest prompt has had before.
        """

    @abstractmethod
    def absorb_rows(self, new: Committed) -> None:
        """Take in committed rows without drafting; nothing is read on the host.

        Args:
            new: of any number of rows, the same in every call that is to be captured.
        """

    @abstractmethod
    def draft(self, new: Committed) -> DraftTree:
        """Absorb what was committed and grow trees; nothing is read on the host.

        Args:
            new: of R rows.
        """
