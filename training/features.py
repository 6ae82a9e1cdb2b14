"""Hidden states for training: online, from the frozen target in the loop.

Legend: B batch, T sequence, D hidden, F captured layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from drafters import TargetModel
from training.data.batches import Batch


@dataclass(frozen=True)
class TargetBatch:
    """A batch together with what the target says about it.

    Attributes:
        batch: tokens, documents, supervision.
        features: (B, T, F·D) captured layers, or None for heads that read the last hidden state
            only.
        last_hidden: (B, T, D) after the final norm; the teacher's logits are its projection.
    """

    batch: Batch
    features: Tensor | None
    last_hidden: Tensor


@torch.no_grad()
def run_target(target: TargetModel, batch: Batch, layers: Sequence[int]) -> TargetBatch:
    """One forward pass of the frozen target over packed documents, which do not see each other.

    Args:
        target: the teacher.
        batch: on the target's device.
        layers: ``hidden_states`` indices to capture.
    """
    out = target.forward(
        batch.input_ids, position_ids=batch.position_ids, feature_layers=layers, logits_to_keep=1
    )
    return TargetBatch(batch, out.features, out.last_hidden)


class Features(Protocol):
    """Where the hidden states of a batch come from."""

    def of(self, layers: Sequence[int]) -> Callable[[Batch], TargetBatch]:
        """For a head that reads ``layers`` (``hidden_states`` indices)."""

    def ahead(self, sequences: Sequence[int]) -> None:
        """These sequences of the dataset come next: whoever can may fetch them meanwhile."""


class OnlineFeatures:
    """The frozen target in the loop, optionally remembering what it said.

    With a memory, the hidden states of each sequence are computed once and kept on the CPU for
    later epochs, until the memory is full. Sequences then go through the target one at a time, so
    that a value never depends on which batch it was first seen in and a resumed run stays
    bit-identical.

    Args:
        target: the teacher.
        layers: ``hidden_states`` indices to capture.
        memory_gb: gigabytes to keep; 0 computes every time.
    """

    def __init__(self, target: TargetModel, layers: Sequence[int], memory_gb: float = 0.0) -> None:
        self.target, self.layers = target, tuple(layers)
        self._room = int(memory_gb * 1e9)
        self._remember = memory_gb > 0
        self._kept: dict[int, tuple[Tensor | None, Tensor]] = {}

    def of(self, layers: Sequence[int]) -> Callable[[Batch], TargetBatch]:
        """The same hidden states and memory, seen by a head that reads some of the layers only.

        Args:
            layers: some of those captured, in order.

        Raises:
            ValueError: a layer that is not captured.
        """
        if missing := sorted(set(layers) - set(self.layers)):
            raise ValueError(f"features: layers {missing} are not among those captured")
        size = self.target.hidden_size
        places = [self.layers.index(layer) for layer in layers]

        def chosen(batch: Batch) -> TargetBatch:
            data = self(batch)
            if not layers or data.features is None:
                return replace(data, features=None)
            parts = data.features.split(size, dim=-1)
            return replace(data, features=torch.cat([parts[place] for place in places], dim=-1))

        return chosen

    def ahead(self, sequences: Sequence[int]) -> None:
        """The target is run when its turn comes."""

    def __call__(self, batch: Batch) -> TargetBatch:
        """Hidden states for a batch of a :class:`~training.data.batches.PackedDataset`."""
        if not self._remember:
            return run_target(self.target, batch, self.layers)
        rows = [self._row(batch, row) for row in range(len(batch.input_ids))]
        device = batch.input_ids.device
        features = [f.to(device) for f, _ in rows if f is not None]
        return TargetBatch(
            batch,
            torch.cat(features) if features else None,
            torch.cat([hidden.to(device) for _, hidden in rows]),
        )

    def _row(self, batch: Batch, row: int) -> tuple[Tensor | None, Tensor]:
        index = int(batch.index[row])
        if index in self._kept:
            return self._kept[index]
        data = run_target(self.target, batch.row(row), self.layers)
        found = (None if data.features is None else data.features.cpu(), data.last_hidden.cpu())
        size = sum(x.numel() * x.element_size() for x in found if x is not None)
        if index >= 0 and size <= self._room:
            self._room -= size
            self._kept[index] = found
        return found


@torch.no_grad()
def check_packing(
    target: TargetModel, batch: Batch, layers: Sequence[int], tolerance: float = 1e-2
) -> float:
    """Features of a packed document must equal those of the document alone.

    Catches attention that leaks between documents or padding, whatever the model's own mask code
    does.

    Returns:
        Largest difference, relative to the largest value.

    Raises:
        ValueError: above ``tolerance``.
    """
    last_document = batch.document_ids[0].max()
    keep = batch.document_ids[0] == last_document
    packed = run_target(target, batch, layers).last_hidden[0, keep]
    alone = target.forward(batch.input_ids[:1, keep]).last_hidden[0]
    error = ((packed - alone).abs().max() / alone.abs().max()).item()
    if not error <= tolerance:
        raise ValueError(
            f"target {target.name!r}: features of a packed document differ from the document "
            f"alone by {error:.3g}; this model's attention leaks across packed documents, set "
            "data.pack=false"
        )
    return error
