"""Hidden states for training from a store, read ahead in the background.

Legend: B batch, T sequence, D hidden, F captured layers.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from training.data.batches import Batch, PackedDataset
from training.features import TargetBatch
from training.store.encoding import LAST
from training.store.reader import FeatureStore

Parts = dict[str, Tensor]


class StoredFeatures:
    """What the target said, from a store: the target itself is not run.

    A single thread reads, what was asked for ahead in that order and anything else behind it. Rows
    of padding, which nothing is learned from, are 0.

    Args:
        store: open.
        dataset: its rows are those that ``store.present`` left.
    """

    def __init__(self, store: FeatureStore, dataset: PackedDataset) -> None:
        self.store, self.dataset = store, dataset
        self._wanted: set[str] = {LAST}
        self._coming: dict[int, Future[Parts]] = {}
        self._asked: set[int] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feature-store")

    def of(self, layers: Sequence[int]) -> Callable[[Batch], TargetBatch]:
        """Hidden states as a head that reads these layers sees them.

        Args:
            layers: some of those stored, in any order.

        Raises:
            ValueError: a layer that is not stored.
        """
        if missing := sorted(set(layers) - set(self.store.manifest.layers)):
            raise ValueError(
                f"feature store {self.store.folder} holds the layers {self.store.manifest.layers}, "
                f"not {missing}: extract again with them into another folder, or set "
                "drafter.feature_layers"
            )
        names = [f"layer_{layer}" for layer in layers]
        self._wanted.update(names)

        def read(batch: Batch) -> TargetBatch:
            rows = [self._sequence(int(index), [*names, LAST]) for index in batch.index]
            hidden = _stack(batch, [row[LAST][:, None] for row in rows]).flatten(2)
            if not names:
                return TargetBatch(batch, None, hidden)
            captured = [torch.stack([row[name] for name in names], dim=1) for row in rows]
            return TargetBatch(batch, _stack(batch, captured).flatten(2), hidden)

        return read

    def ahead(self, sequences: Sequence[int]) -> None:
        """Start to read the sequences that this process needs next. What was asked for before the
        last call and not used is forgotten, so at most those of two calls wait in memory.

        Args:
            sequences: numbers of sequences of the dataset.
        """
        for index in self._coming.keys() - self._asked - set(sequences):
            self._coming.pop(index).cancel()
        self._asked = set(sequences)
        for index in sequences:
            if index not in self._coming:
                names = sorted(self._wanted)
                self._coming[index] = self._thread.submit(self._read, index, names)

    def _sequence(self, index: int, names: Sequence[str]) -> Parts:
        """(tokens, D) of each part of a sequence, its documents one behind the other."""
        assert index >= 0, "a batch of a dataset knows its sequences"
        coming = self._coming.pop(index, None)
        found = {} if coming is None else coming.result()
        if set(names) <= found.keys():
            return found
        return self._thread.submit(self._read, index, names).result()

    def _read(self, index: int, names: Sequence[str]) -> Parts:
        documents = [
            self.store.read(self.store.find(row.ids), len(row.ids), names)
            for row in self.dataset.groups[index]
        ]
        return {name: torch.cat([found[name] for found in documents]) for name in names}


def _stack(batch: Batch, rows: Sequence[Tensor]) -> Tensor:
    """B tensors (tokens, parts, D) -> (B, T, parts, D) on the batch's device, padded with 0."""
    shape = (*batch.input_ids.shape, *rows[0].shape[1:])
    padded = rows[0].new_zeros(shape)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded.to(batch.input_ids.device)
