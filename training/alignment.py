"""The one place that says which row predicts which token, for every family.

State of the art's most frequent silent bug is an off-by-one here, so everything is stated from the
predicted token:

    label position  j        token x_j, supervised if the *target* produced it
    teacher row     j-1      the target's row whose logits predict x_j
    draft row       j-2-i    the row that drafts x_j at depth i (EAGLE-3 step i, Medusa head i):
                             it holds the target's hidden state of position j-2-i, and at depth 0
                             the embedding of the token after it, x_{j-1}

A label is valid at depth i if its draft row lies in the same document. Pure functions.

Legend: B batch, T sequence, n supervised labels in the batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Labels:
    """The supervised tokens of a batch, as indices into rows flattened over (B, T).

    Attributes:
        positions: (n,) flat index of each label j.
        ids: (n,) token ids x_j.
        column: (n,) j within its sequence.
    """

    positions: Tensor
    ids: Tensor
    column: Tensor

    @property
    def teacher_rows(self) -> Tensor:
        """(n,) flat index of the target row that predicts each label."""
        return self.positions - 1


def supervised_labels(input_ids: Tensor, document_ids: Tensor, supervised: Tensor) -> Labels:
    """Labels of a batch: supervised tokens that have a predecessor in their own document.

    Args:
        input_ids: (B, T).
        document_ids: (B, T), -1 at padding.
        supervised: (B, T) bool.
    """
    same = torch.zeros_like(supervised)
    same[:, 1:] = (document_ids[:, 1:] == document_ids[:, :-1]) & (document_ids[:, 1:] >= 0)
    flat = (supervised & same).flatten().nonzero().squeeze(-1)
    return Labels(flat, input_ids.flatten()[flat], flat % input_ids.shape[1])


def draft_rows(labels: Labels, document_ids: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Rows that draft each label at ``depth``.

    Args:
        labels: see :func:`supervised_labels`.
        document_ids: (B, T).
        depth: i, from 0.

    Returns:
        ``(rows, valid)``: (n,) flat indices, 0 where there is none, and (n,) bool.
    """
    reach = 2 + depth
    rows = (labels.positions - reach).clamp_min(0)
    documents = document_ids.flatten()
    valid = (labels.column >= reach) & (documents[rows] == documents[labels.positions])
    return torch.where(valid, rows, 0), valid


def shifted_tokens(input_ids: Tensor, shift: int) -> Tensor:
    """(B, T) ids moved left:

    Row t holds x_{t+shift}; the tail repeats the last token and is never supervised.
    """
    tail = input_ids[:, -1:].expand(-1, shift)
    return torch.cat((input_ids[:, shift:], tail), dim=1)[:, : input_ids.shape[1]]
