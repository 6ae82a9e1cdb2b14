"""Training attention masks from row attributes. Pure functions.

Every family's mask is a rule on attributes of the query row and the key row. Here are the rules in
use; ``build_mask`` applies one to all pairs. The dense masks are the definition that fast paths are
tested against; at training size only those of a block's or rollout's own rows are built
(``objectives.spans`` has what is seen of the text).

    family                              rule
    plain decoders, MTP's own modules   causal
    EAGLE, MTP, HASS                    training_time_test
    P-EAGLE                             parallel
    DFlash, DSpark                      block
    JetSpec                             causal_block
    with sliding windows                windowed(rule, W)

Legend: B batch, Q query rows, S key rows, T sequence, g rows per block.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

CONTEXT = -1
"""The block of rows that stand for committed text."""


@dataclass(frozen=True)
class Rows:
    """Attributes of attention rows, each (B, rows) int64.

    Attributes:
        position: place in the sequence. Rows of :func:`unrolled_mask` keep that of step 0.
        document: document id, -1 for padding.
        step: draft step or depth that produced the row, 0 for the first.
        anchor: the place its draft hangs from: of a rollout the first row, of a block the root.
        block: which block it is drafted in, ``CONTEXT`` for rows of the text itself.
    """

    position: Tensor
    document: Tensor
    step: Tensor
    anchor: Tensor
    block: Tensor


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


def parallel(query: Rows, key: Rows) -> Tensor:
    """P-EAGLE's mask over (anchor, depth) rows (arXiv:2602.01469).

    Depth-0 keys are causal in the anchor; of deeper keys a row sees those of its own rollout up to
    its own depth. With the row as anchor this is :func:`training_time_test`.
    """
    own = (key.anchor == query.anchor) & (key.step <= query.step)
    return ((key.step == 0) & (key.anchor <= query.anchor)) | own


def block(query: Rows, key: Rows) -> Tensor:
    """DFlash's mask (arXiv:2602.06036).

    A row sees the text strictly before its anchor, whose own target feature is not there yet, and
    all of its block.
    """
    return _before_anchor(query, key) | (key.block == query.block)


def causal_block(query: Rows, key: Rows) -> Tensor:
    """JetSpec's mask (arXiv:2606.18394): as :func:`block`, but causal inside the block."""
    own = (key.block == query.block) & (key.position <= query.position)
    return _before_anchor(query, key) | own


def _before_anchor(query: Rows, key: Rows) -> Tensor:
    return (key.block == CONTEXT) & (key.position < query.anchor)


def windowed(rule: Rule, window: int | None) -> Rule:
    """The rule, of keys less than ``window`` positions back; None changes nothing."""
    if window is None:
        return rule

    def near(query: Rows, key: Rows) -> Tensor:
        return rule(query, key) & (query.position - key.position < window)

    return near


def build_mask(query: Rows, key: Rows, rule: Rule) -> Tensor:
    """(B, Q) and (B, S) attributes -> (B, Q, S) bool, true where attention is allowed.

    Rows of different documents never see each other; padding sees only its own row, so that no
    softmax is empty.
    """
    q = Rows(*(getattr(query, field.name)[:, :, None] for field in fields(Rows)))
    k = Rows(*(getattr(key, field.name)[:, None, :] for field in fields(Rows)))
    allowed = rule(q, k) & (q.document == k.document) & (k.document >= 0)
    same = (q.position == k.position) & (q.step == k.step) & (q.block == k.block)
    return allowed | ((q.document < 0) & same)


def join(*parts: Rows) -> Rows:
    """Rows of several kinds, one behind the other."""
    return Rows(*(torch.cat([getattr(p, f.name) for p in parts], dim=1) for f in fields(Rows)))


def sequence_rows(document_ids: Tensor, step: int = 0) -> Rows:
    """Attributes of one pass over a (B, T) batch of packed documents."""
    position = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(
        document_ids
    )
    constant = torch.full_like(document_ids, step)
    return Rows(position, document_ids, constant, position, torch.full_like(constant, CONTEXT))


def rollout_rows(document_ids: Tensor, anchors: Tensor, steps: Tensor) -> Rows:
    """Attributes of P-EAGLE's mask rows.

    Args:
        document_ids: (B, T).
        anchors: (B, Q) the first row of each one's rollout, -1 for padding.
        steps: (B, Q) or (Q,) its depth, from 1.
    """
    document = _documents(document_ids, anchors)
    steps = steps.expand_as(anchors)
    return Rows(anchors + steps, document, steps, anchors, torch.full_like(anchors, CONTEXT))


def block_rows(document_ids: Tensor, roots: Tensor, size: int) -> Rows:
    """Attributes of blocks drafted from some roots.

    Args:
        document_ids: (B, T).
        roots: (B, A) column of each block's first row, -1 for padding.
        size: g.

    Returns:
        A·g rows, block after block; a block may reach beyond the end of its document.
    """
    shape = (*roots.shape, size)
    slot = torch.arange(size, device=roots.device)
    number = torch.arange(roots.shape[1], device=roots.device)
    position = roots[..., None] + slot
    document = _documents(document_ids, roots)[..., None].expand(shape)
    anchor = roots[..., None].expand(shape)
    block = number[:, None].expand(shape)
    step = torch.zeros_like(position)
    return Rows(*(x.flatten(1) for x in (position, document, step, anchor, block)))


def _documents(document_ids: Tensor, columns: Tensor) -> Tensor:
    """Documents of some columns of each sequence, -1 where the column is."""
    found = document_ids.gather(1, columns.clamp_min(0))
    return torch.where(columns >= 0, found, -1)


def causal_mask(document_ids: Tensor) -> Tensor:
    """(B, T) document ids -> (B, T, T) bool, causal within each document: the slow twin, for tests
    only.
    """
    rows = sequence_rows(document_ids)
    return build_mask(rows, rows, causal)


def unrolled_mask(document_ids: Tensor, steps: int) -> Tensor:
    """The whole (B, T·steps, T·steps) training-time-test mask: the slow twin, for tests only."""
    rows = join(*(sequence_rows(document_ids, step) for step in range(steps)))
    return build_mask(rows, rows, training_time_test)
