"""Which rounds of drafting a block family is trained on.

A round starts at a root a: x_a is the last token that is known, and x_{a+1}, x_{a+2}, ... are
drafted. In decoding the target has produced x_a itself, so a root and the first token it drafts are
both supervised, and there is text before it. Its drafts count as far as supervised tokens go on
without a gap: what comes after a gap is never drafted from here.

Legend: B batch, T sequence, A rounds per sequence, R rounds in the batch, K depths.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from training.data.batches import Batch
from training.draws import generator
from training.objectives.base import Drafts

ANCHORS, DROPS = 1, 2
"""Purposes of ``training.draws``: which rounds are drafted, and how deep."""


@dataclass(frozen=True)
class Rounds:
    """Some rounds of every sequence.

    Attributes:
        roots: (B, A) columns a, -1 for padding.
    """

    roots: Tensor

    @property
    def used(self) -> Tensor:
        """(B, A) bool, false for padding."""
        return self.roots >= 0

    def columns(self, shift: int, length: int) -> Tensor:
        """(R,) columns a+shift of the used rounds, at most the last of ``length``."""
        return (self.roots[self.used] + shift).clamp(0, length - 1)

    def flat(self, shift: int, length: int) -> Tensor:
        """(R,) those columns as indices into (B·T) rows."""
        row = self.used.nonzero()[:, 0]
        return row * length + self.columns(shift, length)


def possible_roots(batch: Batch) -> Tensor:
    """(B, T) bool: where a round can start."""
    documents, supervised = batch.document_ids, batch.supervised
    found = torch.zeros_like(supervised)
    same = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    found[:, 1:-1] = same[:, :-1] & same[:, 1:] & supervised[:, 1:-1] & supervised[:, 2:]
    return found


def draw_rounds(batch: Batch, most: int, fresh: bool) -> Rounds:
    """At most so many rounds of each sequence, without repeats, in order.

    Args:
        batch: tokens, documents, supervision.
        most: per sequence.
        fresh: draw them, keyed by ``batch.draw``; otherwise they are spread evenly.
    """
    chosen = []
    for possible, draw in zip(possible_roots(batch).cpu(), batch.draw.tolist(), strict=True):
        columns = possible.nonzero().squeeze(-1)
        count = min(len(columns), most)
        if fresh:
            picked = torch.randperm(len(columns), generator=generator(draw, ANCHORS))[:count]
        else:
            picked = torch.arange(count) * len(columns) // max(count, 1)
        chosen.append(columns[picked.sort().values])
    return Rounds(_padded(chosen).to(batch.input_ids.device))


def ranked_rounds(batch: Batch, fresh: bool) -> Rounds:
    """All rounds of each sequence, in the order in which they are kept as drafts get deeper.

    Args:
        batch: tokens, documents, supervision.
        fresh: draw the order, keyed by ``batch.draw``; otherwise the first so many are always
            spread evenly.
    """
    chosen = []
    for possible, draw in zip(possible_roots(batch).cpu(), batch.draw.tolist(), strict=True):
        columns = possible.nonzero().squeeze(-1)
        if fresh:
            order = torch.randperm(len(columns), generator=generator(draw, DROPS))
        else:  # multiples of the golden ratio, modulo 1, are spread evenly however many they are
            order = (torch.arange(len(columns)).double() * 0.6180339887498949 % 1.0).argsort()
        chosen.append(columns[order])
    return Rounds(_padded(chosen).to(batch.input_ids.device))


def kept_rounds(count: int, depth: int, rate: float, floor: float) -> int:
    """How many of ``count`` rounds are drafted at a depth: max(rate^depth, floor) of them, and at
    least one (arXiv:2602.01469).
    """
    return min(count, max(1, round(count * max(rate**depth, floor))))


def as_drafts(
    hidden: list[Tensor], rounds: Rounds, batch: Batch, kept: Tensor | None = None
) -> Drafts:
    """The rows of all depths with what they draft.

    Args:
        hidden: K tensors (R, output_size): row r of depth i drafts x_{a+1+i} of round r.
        rounds: theirs.
        batch: the tokens.
        kept: (K, R) bool, drafts that were made; None for all.
    """
    depths, length = len(hidden), batch.input_ids.shape[1]
    roots = rounds.columns(0, length)
    labels = torch.stack([rounds.flat(1 + depth, length) for depth in range(depths)])  # (K, R)
    documents = batch.document_ids.flatten()
    ahead = torch.arange(1, depths + 1, device=roots.device)[:, None]
    valid = (roots + ahead < length) & (documents[labels] == documents[labels[0]])
    valid = (valid & batch.supervised.flatten()[labels]).cumprod(0).bool()
    if kept is not None:
        valid = valid & kept
    anchor = torch.arange(len(roots), device=roots.device).expand(depths, -1)
    return Drafts(hidden, labels - 1, batch.input_ids.flatten()[labels], anchor, valid)


def _padded(chosen: list[Tensor]) -> Tensor:
    """Lists of columns to one (B, A) tensor, -1 where there is none."""
    return torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-1)
