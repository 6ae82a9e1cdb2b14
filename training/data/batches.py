"""Rows to packed batches: collation, and an order that a resumed run repeats exactly.

Legend: B batch, T sequence length.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import compress
from typing import Any, Protocol

import torch
from torch import Tensor

from drafters.vocab import count_tokens
from training.data.chat import TokenizedRow
from training.data.packing import pack, size_of

_SEED_STRIDE = 1_000_000_007


@dataclass(frozen=True)
class Batch:
    """Packed sequences.

    Attributes:
        input_ids: (B, T).
        position_ids: (B, T), restarting at 0 with each document.
        document_ids: (B, T), counting from 0 in each sequence, -1 at padding.
        supervised: (B, T) bool, true where the *target* produced the token.
        index: (B,) which sequence of the dataset each row is, -1 where that is not known.
        draw: (B,) global number of this use of the sequence, the key of everything that training
            draws afresh for it (see ``training.draws``).
    """

    input_ids: Tensor
    position_ids: Tensor
    document_ids: Tensor
    supervised: Tensor
    index: Tensor
    draw: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The same batch on ``device``."""
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))

    def row(self, number: int) -> "Batch":
        """One sequence alone, B = 1."""
        part = slice(number, number + 1)
        return Batch(*(getattr(self, field.name)[part] for field in fields(self)))


class Dataset(Protocol):
    """Sequences in an order that depends on nothing but seed and step.

    Attributes:
        length: T, the longest sequence.
    """

    length: int

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch.

        Raises:
            ValueError: nobody has counted the rows.
        """

    def micro_batches(self, step: int, rank: int, world: int, micro_size: int) -> Iterator[Batch]:
        """The share of process ``rank`` of step ``step`` (from 0), ``micro_size`` sequences at a
        time. All sequences of a step have one length, over all processes.
        """

    def step_indices(self, step: int) -> list[int]:
        """Which sequences make up a step, over all processes."""

    def rows_of(self, index: int) -> list[int]:
        """``TokenizedRow.number`` of the documents in a sequence, to name them in errors."""

    def head(self, count: int) -> list[list[TokenizedRow]]:
        """Up to ``count`` sequences, for checks before training."""

    def token_counts(self, vocab_size: int) -> Tensor:
        """(V,) occurrences of each token among the supervised ones."""

    def identity(self) -> dict[str, Any]:
        """What a resumed run must find again, as JSON."""

    def state(self) -> dict[str, Any]:
        """The position behind the last step that was read, as JSON; {} where the step says it."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` returned."""


def collate(
    groups: Sequence[Sequence[TokenizedRow]],
    length: int,
    index: Sequence[int] | None = None,
    draw: Sequence[int] | None = None,
    pad_id: int = 0,
) -> Batch:
    """Packed groups to one (B, T) batch;

    Padding is a document of its own that nothing is supervised in.
    """
    shape = (len(groups), length)
    ids = torch.full(shape, pad_id, dtype=torch.int64)
    documents = torch.full(shape, -1, dtype=torch.int64)
    positions = torch.zeros(shape, dtype=torch.int64)
    supervised = torch.zeros(shape, dtype=torch.bool)
    for number, group in enumerate(groups):
        start = 0
        for document, row in enumerate(group):
            span = slice(start, start + len(row.ids))
            ids[number, span] = torch.tensor(row.ids)
            documents[number, span] = document
            positions[number, span] = torch.arange(len(row.ids))
            supervised[number, span] = torch.tensor(row.supervised)
            start = span.stop
        positions[number, start:] = torch.arange(length - start)
    indices = torch.tensor(index or [-1] * len(groups))
    draws = torch.tensor(draw or [0] * len(groups))
    return Batch(ids, positions, documents, supervised, indices, draws)


def draw_numbers(seed: int, step: int, batch_size: int) -> list[int]:
    """``Batch.draw`` of the sequences of one step: no two uses of a run, or of runs with other
    seeds, share one.
    """
    first = seed * _SEED_STRIDE + step * batch_size
    return list(range(first, first + batch_size))


def share_of(
    groups: Sequence[Sequence[TokenizedRow]],
    length: int,
    index: Sequence[int],
    draw: Sequence[int],
    micro_size: int,
) -> Iterator[Batch]:
    """One process's sequences of a step, ``micro_size`` at a time."""
    for start in range(0, len(groups), micro_size):
        part = slice(start, start + micro_size)
        yield collate(groups[part], length, index[part], draw[part])


def count_supervised(rows: Iterable[TokenizedRow], vocab_size: int) -> Tensor:
    """(V,) occurrences of each token among the supervised ones."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    ids: list[int] = []
    for row in rows:
        ids += compress(row.ids, row.supervised)
        if len(ids) > 1 << 20:
            counts += count_tokens(torch.tensor(ids), vocab_size)
            ids = []
    return counts + count_tokens(torch.tensor(ids, dtype=torch.int64), vocab_size)


class PackedDataset:
    """Packed sequences in a deterministic order, all in memory.

    The order depends on (seed, epoch) alone, and a global batch on its step alone, so a run resumed
    at any step, on any number of processes, sees what it would have seen. An epoch leaves out the
    few sequences that do not fill a step; they are drawn anew each time.

    Args:
        rows: tokenised conversations; those without a number are numbered by their place.
        length: T.
        batch_size: sequences per optimizer step over all processes.
        seed: order seed.
        packed: False puts each row in a sequence of its own.
        buckets: lengths that sequences are padded to, ascending and ending with ``length``; those
            of a step share one. Empty pads all to ``length``.

    Attributes:
        groups: the documents of each sequence.
        padded: the bucket of each sequence.
        num_unusable: rows with nothing supervised within ``length``.
    """

    def __init__(
        self,
        rows: Sequence[TokenizedRow],
        length: int,
        batch_size: int,
        seed: int = 0,
        packed: bool = True,
        buckets: Sequence[int] = (),
    ) -> None:
        assert not buckets or buckets[-1] == length, "the longest bucket holds every sequence"
        numbered = [
            row if row.number >= 0 else replace(row, number=place) for place, row in enumerate(rows)
        ]
        self.groups = pack(numbered, length, packed)
        self.num_unusable = len(rows) - sum(len(group) for group in self.groups)
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.buckets = list(buckets) or [length]
        sizes = map(size_of, self.groups)
        self.padded = [next(b for b in self.buckets if b >= size) for size in sizes]
        self._epoch: tuple[int, list[list[int]]] | None = None

    @cached_property
    def digest(self) -> str:
        """Hash of all token ids and masks."""
        digest = hashlib.sha256()
        for group in self.groups:
            for row in group:
                digest.update(str(row.ids).encode() + bytes(row.supervised))
        return digest.hexdigest()[:16]

    @property
    def supervised_tokens(self) -> int:
        """Supervised tokens in one epoch."""
        return sum(sum(row.supervised) for group in self.groups for row in group)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch (at least one: a small set wraps around)."""
        return max(1, len(self.groups) // self.batch_size)

    @property
    def padding(self) -> float:
        """Part of the first epoch's tokens that is padding."""
        used = whole = 0
        for step in range(self.steps_per_epoch):
            indices = self.step_indices(step)
            used += sum(size_of(self.groups[i]) for i in indices)
            whole += self.step_length(step) * len(indices)
        return 1 - used / whole

    def token_counts(self, vocab_size: int) -> Tensor:
        """(V,) occurrences of each token among the supervised ones."""
        return count_supervised((row for group in self.groups for row in group), vocab_size)

    def head(self, count: int) -> list[list[TokenizedRow]]:
        """The first ``count`` sequences as they were packed."""
        return self.groups[:count]

    def rows_of(self, index: int) -> list[int]:
        """Numbers of the documents in a sequence."""
        return [row.number for row in self.groups[index]]

    def identity(self) -> dict[str, Any]:
        """What a resumed run must find again."""
        return {
            "data.max_length": self.length,
            "data.buckets": self.buckets,
            "sequences": len(self.groups),
            "supervised tokens": self.supervised_tokens,
            "token ids": self.digest,
        }

    def state(self) -> dict[str, Any]:
        """Nothing: the step says the position."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Nothing: the step says the position."""

    def step_indices(self, step: int) -> list[int]:
        """Which sequences make up optimizer step ``step`` (from 0), over all processes."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return self._steps(epoch)[within]

    def step_length(self, step: int) -> int:
        """The bucket that the sequences of a step are padded to."""
        return max(self.padded[i] for i in self.step_indices(step))

    def _steps(self, epoch: int) -> list[list[int]]:
        """The steps of one epoch, kept until another is asked for."""
        if self._epoch is None or self._epoch[0] != epoch:
            seeded = torch.Generator().manual_seed(self.seed * 100_003 + epoch)
            order = torch.randperm(len(self.groups), generator=seeded).tolist()
            size = self.batch_size
            order = [order[i % len(order)] for i in range(self.steps_per_epoch * size)]
            # Bucket after bucket: what does not fill a step of its own goes to the next longer one.
            order.sort(key=self.padded.__getitem__)
            steps = [order[start : start + size] for start in range(0, len(order), size)]
            if len(self.buckets) > 1:
                places = torch.randperm(len(steps), generator=seeded).tolist()
                steps = [steps[place] for place in places]
            self._epoch = (epoch, steps)
        return self._epoch[1]

    def micro_batches(self, step: int, rank: int, world: int, micro_size: int) -> Iterator[Batch]:
        """This process's share of step ``step``, ``micro_size`` sequences at a time."""
        mine = self.step_indices(step)[rank::world]
        draws = draw_numbers(self.seed, step, self.batch_size)[rank::world]
        groups = [self.groups[i] for i in mine]
        return share_of(groups, self.step_length(step), mine, draws, micro_size)
