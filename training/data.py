"""Rows to packed batches: loading, packing, collation, and an order that a resumed run repeats
exactly.

Legend: B batch, T sequence length.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor

from drafters.vocab import count_tokens
from training.chat import TokenizedRow


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


def load_rows(source: str, split: str = "train", limit: int | None = None) -> list[dict[str, Any]]:
    """Rows of a hub dataset, a JSONL/JSON/parquet file, or a ``save_to_disk`` folder.

    Args:
        source: hub id, file or folder.
        split: split of a hub dataset.
        limit: keep the first ``limit`` rows.

    Raises:
        ValueError: the source cannot be read or is empty.
    """
    path = Path(source)
    if path.is_file() and path.stat().st_size < 8 and path.read_bytes().strip() in (b"", b"[]"):
        raise ValueError(f"data: {source!r} is empty")
    try:
        if path.suffix in (".jsonl", ".json"):
            loaded = datasets.load_dataset("json", data_files=str(path), split="train")
        elif path.suffix == ".parquet":
            loaded = datasets.load_dataset("parquet", data_files=str(path), split="train")
        elif path.is_dir():
            loaded = datasets.load_from_disk(str(path))
            loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            loaded = datasets.load_dataset(source, split=split)
    except IndexError as error:  # what datasets raises on a saved dataset without shards
        raise ValueError(f"data: {source!r} is empty") from error
    except Exception as error:  # datasets raises its own, pyarrow's and fsspec's errors
        if "corresponds to no data" in str(error):
            raise ValueError(f"data: {source!r} is empty") from error
        raise ValueError(f"data: cannot read {source!r}: {error}") from error
    if limit is not None:
        loaded = loaded.select(range(min(limit, len(loaded))))
    if not len(loaded):
        raise ValueError(f"data: {source!r} is empty")
    return [{key: value for key, value in row.items() if value is not None} for row in loaded]


def pack(rows: Iterable[TokenizedRow], length: int) -> list[list[TokenizedRow]]:
    """First-fit packing in the given order.

    Args:
        rows: longer ones are cut at ``length``; those left with nothing supervised are dropped.
        length: T.

    Returns:
        Groups of rows, each at most ``length`` tokens together.

    Raises:
        ValueError: nothing is left.
    """
    groups: list[list[TokenizedRow]] = []
    room: list[int] = []
    for cut in _usable(rows, length):
        size = len(cut.ids)
        slot = next((i for i in range(max(0, len(room) - 64), len(room)) if room[i] >= size), None)
        if slot is None:
            groups.append([])
            room.append(length)
            slot = len(groups) - 1
        groups[slot].append(cut)
        room[slot] -= size
    return groups


def _usable(rows: Iterable[TokenizedRow], length: int) -> list[TokenizedRow]:
    """Rows cut at ``length``, without those that have nothing supervised left.

    Raises:
        ValueError: nothing is left.
    """
    cut = [replace(row, ids=row.ids[:length], supervised=row.supervised[:length]) for row in rows]
    usable = [row for row in cut if any(row.supervised)]
    if not usable:
        raise ValueError(
            "data: no row has a supervised token within data.max_length: nothing to train on"
        )
    return usable


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


class PackedDataset:
    """Packed sequences in a deterministic order.

    The order depends on (seed, epoch) alone, and a global batch on its step alone, so a run resumed
    at any step, on any number of processes, sees what it would have seen.

    Args:
        rows: tokenised conversations.
        length: T.
        batch_size: sequences per optimizer step over all processes.
        seed: order seed.
        packed: False puts each row in a sequence of its own.
    """

    def __init__(
        self,
        rows: Sequence[TokenizedRow],
        length: int,
        batch_size: int,
        seed: int = 0,
        packed: bool = True,
    ) -> None:
        self.groups = pack(rows, length) if packed else [[row] for row in _usable(rows, length)]
        self.num_unusable = len(rows) - sum(len(group) for group in self.groups)
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self._epoch: tuple[int, Tensor] | None = None

    @cached_property
    def digest(self) -> str:
        """Hash of all token ids and masks: what a resumed run must find again."""
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

    def token_counts(self, vocab_size: int) -> Tensor:
        """(V,) occurrences of each token among the supervised ones."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for group in self.groups:
            for row in group:
                ids = torch.tensor(row.ids)[torch.tensor(row.supervised)]
                counts += count_tokens(ids, vocab_size)
        return counts

    def step_indices(self, step: int) -> list[int]:
        """Which sequences make up optimizer step ``step`` (from 0), over all processes."""
        epoch, within = divmod(step, self.steps_per_epoch)
        order = self._order(epoch)
        start = within * self.batch_size
        return [int(order[(start + i) % len(self.groups)]) for i in range(self.batch_size)]

    def _order(self, epoch: int) -> Tensor:
        """The order of one epoch, kept until another is asked for."""
        if self._epoch is None or self._epoch[0] != epoch:
            seeded = torch.Generator().manual_seed(self.seed * 100_003 + epoch)
            self._epoch = (epoch, torch.randperm(len(self.groups), generator=seeded))
        return self._epoch[1]

    def micro_batches(self, step: int, rank: int, world: int, micro_size: int) -> Iterator[Batch]:
        """This process's share of step ``step``, ``micro_size`` sequences at a time."""
        mine = self.step_indices(step)[rank::world]
        first = self.seed * 1_000_000_007 + step * self.batch_size
        draws = list(range(first, first + self.batch_size))[rank::world]
        for start in range(0, len(mine), micro_size):
            part = slice(start, start + micro_size)
            groups = [self.groups[i] for i in mine[part]]
            yield collate(groups, self.length, mine[part], draws[part])
