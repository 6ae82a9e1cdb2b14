"""Hidden states for training: online, from the frozen target in the loop.

Legend: B batch, T sequence, D hidden, F captured layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters import TargetModel
from training.data import Batch


@dataclass(frozen=True)
class TargetBatch:
    """A batch together with what the target says about it.

    Attributes:
        batch: tokens, documents, supervision.
        features: (B, T, F·D) captured layers, or None for heads that read the last hidden state only.
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
    out = target.forward(batch.input_ids, position_ids=batch.position_ids, feature_layers=layers, logits_to_keep=1)
    return TargetBatch(batch, out.features, out.last_hidden)


@torch.no_grad()
def check_packing(target: TargetModel, batch: Batch, layers: Sequence[int], tolerance: float = 1e-2) -> float:
    """Features of a packed document must equal those of the document alone.

    Catches attention that leaks between documents or padding, whatever the model's own mask code does.

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
            f"target {target.name!r}: features of a packed document differ from the document alone by {error:.3g}; "
            "this model's attention leaks across packed documents, set data.pack=false"
        )
    return error
