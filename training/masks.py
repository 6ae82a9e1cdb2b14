"""Training attention masks from row attributes. Pure functions.

Every family's mask is a rule on attributes of the query row and the key row (position, document,
draft step). Here are the rules in use; ``build_mask`` applies one to all pairs. The dense masks are
the definition that fast paths are tested against; only the causal one is built at training size.

Legend: B batch, Q query rows, S key rows, T sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Attributes of attention rows, each (B, rows) int64.

    Attributes:
        position: row index in the sequence.
        document: document id, -1 for padding.
        step: training-time-test step that produced the row, 0 for the first.
    """

    position: Tensor
    document: Tensor
    step: Tensor


Rule = Callable[[Rows, Rows], Tensor]


def causal(query: Rows, key: Rows) -> Tensor:
    """A row sees itself and earlier rows."""
    return key.position <= query.position


def training_time_test(query: Rows, key: Rows) -> Tensor:
    """EAGLE-3's step mask (arXiv:2503.01840).

    Step-0 keys are causal; of every later step up to its own, a row sees only the key of its own
    position.
    """
    own = (key.step >= 1) & (key.step <= query.step) & (key.position == query.position)
    return ((key.step == 0) & (key.position <= query.position)) | own


def build_mask(query: Rows, key: Rows, rule: Rule) -> Tensor:
    """(B, Q) and (B, S) attributes -> (B, Q, S) bool, true where attention is allowed.

    Rows of different documents never see each other; padding sees only its own row, so that no
    softmax is empty.
    """
    q = Rows(*(value[:, :, None] for value in (query.position, query.document, query.step)))
    k = Rows(*(value[:, None, :] for value in (key.position, key.document, key.step)))
    allowed = rule(q, k) & (q.document == k.document) & (k.document >= 0)
    padding = (q.document < 0) & (q.position == k.position) & (q.step == k.step)
    return allowed | padding


def sequence_rows(document_ids: Tensor, step: int = 0) -> Rows:
    """Attributes of one pass over a (B, T) batch of packed documents."""
    position = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(
        document_ids
    )
    return Rows(position, document_ids, torch.full_like(document_ids, step))


def causal_mask(document_ids: Tensor) -> Tensor:
    """(B, T) document ids -> (B, T, T) bool, causal within each document."""
    rows = sequence_rows(document_ids)
    return build_mask(rows, rows, causal)


def unrolled_mask(document_ids: Tensor, steps: int) -> Tensor:
    """The whole (B, T·steps, T·steps) training-time-test mask: the slow twin, for tests only."""
    parts = [sequence_rows(document_ids, step) for step in range(steps)]
    rows = Rows(
        *(
            torch.cat([getattr(p, f) for p in parts], dim=1)
            for f in ("position", "document", "step")
        )
    )
    return build_mask(rows, rows, training_time_test)
