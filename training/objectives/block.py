"""Objectives of heads that draft a whole round in one pass: DFlash, JetSpec, DSpark, P-EAGLE.

Legend: B batch, T sequence, A rounds per sequence, R rounds in the batch, g rows per block, K
depths.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.block import DFlashDrafter
from drafters.peagle import PEagleDrafter
from training.alignment import shifted_tokens
from training.data.batches import Batch
from training.features import TargetBatch
from training.masks import block, causal_block
from training.objectives.base import Drafts, Objective
from training.objectives.block_attention import BlockAttention, RolloutAttention
from training.objectives.rounds import (
    Rounds,
    as_drafts,
    draw_rounds,
    kept_rounds,
    possible_roots,
    ranked_rounds,
)


class BlockObjective(Objective):
    """DFlash and JetSpec (arXiv:2602.06036, 2606.18394), DSpark (arXiv:2607.05147).

    At most ``anchors`` roots of each sequence are drawn, afresh each time it is seen, and a block
    is drafted from each. A block sees the target's features before its root and nothing of other
    blocks. DSpark's Markov head gets the document's own token before each draft.
    """

    drafter: DFlashDrafter

    def count(self, batch: Batch) -> Tensor:
        """The rounds drafted, at most ``anchors`` per sequence."""
        return possible_roots(batch).sum(1).clamp_max(self._most).sum()

    @property
    def _most(self) -> int:
        assert self.options.anchors is not None
        return self.options.anchors

    def drafts(self, data: TargetBatch) -> Drafts | None:
        """K drafts from every root drawn; while not training, roots are spread evenly."""
        rounds = draw_rounds(data.batch, self._most, fresh=self.training)
        if not rounds.roots.numel():
            return None
        return as_drafts(self._unroll(data, rounds), rounds, data.batch)

    def forced(self, data: TargetBatch, roots: Tensor) -> list[Tensor]:
        """Blocks from the given roots."""
        return self._unroll(data, Rounds(roots[None]))

    def _unroll(self, data: TargetBatch, rounds: Rounds) -> list[Tensor]:
        """K tensors (R, output_size)."""
        assert data.features is not None
        batch, drafter, config = data.batch, self.drafter, self.drafter.config
        attend = BlockAttention(
            batch.document_ids,
            rounds.roots,
            config.block_size,
            [causal_block if causal else block for causal in drafter.causal],
            drafter.windows,
        )
        drafter.inject(drafter.context(data.features), batch.position_ids, attend.store)
        columns = rounds.roots.clamp_min(0)
        slots = torch.arange(config.block_size, device=columns.device)
        tokens = drafter.blocks(batch.input_ids.gather(1, columns))  # (B, A, g)
        positions = batch.position_ids.gather(1, columns)[..., None] + slots
        rows = drafter(tokens.flatten(1), positions.flatten(1), attend)
        rows = drafter.drafting(rows.unflatten(1, (-1, config.block_size)))  # (B, A, K, D)
        return self._paths(rows[rounds.used], batch, rounds)

    def _paths(self, hidden: Tensor, batch: Batch, rounds: Rounds) -> list[Tensor]:
        """(R, K, D) rows of the pass -> K tensors (R, output_size), along the true tokens."""
        length, tokens = batch.input_ids.shape[1], batch.input_ids.flatten()
        state = self.drafter.begin_path(hidden[:, 0])
        found = []
        for depth in range(self.depths):
            previous = tokens[rounds.flat(depth, length)]
            rows, state = self.drafter.advance(hidden[:, depth], previous, state)
            found.append(rows)
        return found

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """(..., output_size) -> (..., Vd)."""
        return self.drafter.logits(hidden, depth)


class ParallelObjective(Objective):
    """P-EAGLE (arXiv:2602.01469).

    Depth 0 is drafted from every root. Of the mask rows behind them, depth d keeps
    max(cod_rate^d, cod_floor) of the roots, each of them one that depth d-1 kept.
    """

    drafter: PEagleDrafter

    def count(self, batch: Batch) -> Tensor:
        """All rounds."""
        return possible_roots(batch).sum()

    def drafts(self, data: TargetBatch) -> Drafts | None:
        """One draft from every root at depth 0, and fewer at each further depth."""
        rounds = ranked_rounds(data.batch, fresh=self.training)
        if not rounds.roots.numel():
            return None
        kept = self._kept(rounds)
        reach = kept[1:].sum(-1).amax(-1).tolist()
        hidden = self._unroll(data, rounds, reach)
        return as_drafts(hidden, rounds, data.batch, kept[:, rounds.used])

    def _kept(self, rounds: Rounds) -> Tensor:
        """(K, B, A) bool: the first so many of each sequence's rounds."""
        rate, floor = self.options.cod_rate, self.options.cod_floor
        assert rate is not None and floor is not None
        counts = rounds.used.sum(1).tolist()
        kept = [
            [kept_rounds(count, depth, rate, floor) for count in counts]
            for depth in range(self.depths)
        ]
        limit = torch.tensor(kept, device=rounds.roots.device)  # (K, B)
        rank = torch.arange(rounds.roots.shape[1], device=rounds.roots.device)
        return rank < limit[..., None]

    def forced(self, data: TargetBatch, roots: Tensor) -> list[Tensor]:
        """All depths from the given roots."""
        reach = [len(roots)] * (self.depths - 1)
        return self._unroll(data, Rounds(roots[None]), reach)

    def _unroll(self, data: TargetBatch, rounds: Rounds, reach: list[int]) -> list[Tensor]:
        """K tensors (R, D); rows of depths that a round does not reach are zero.

        Args:
            data: of the batch.
            rounds: in order of rank.
            reach: of how many rounds of a sequence each depth from 1 is run.
        """
        assert data.features is not None
        batch, drafter = data.batch, self.drafter
        roots, length = rounds.roots, batch.input_ids.shape[1]
        anchors = torch.where(rounds.used, roots - 1, -1)
        attend = RolloutAttention(batch.document_ids, anchors, reach, drafter.windows)
        inputs = drafter.text_rows(data.features, shifted_tokens(batch.input_ids, 1))
        text = drafter.run(inputs, batch.position_ids, attend.text)
        found = [text.flatten(0, 1)[rounds.flat(-1, length)]]
        start = batch.position_ids.gather(1, anchors.clamp_min(0)[:, attend.rollout])
        masks = drafter.mask_rows(len(roots), start.shape[1])
        rows = drafter.run(masks, start + attend.depth, attend)  # (B, Q, D)
        for part in rows.split(reach, dim=1):
            whole = F.pad(part, (0, 0, 0, roots.shape[1] - part.shape[1]))
            found.append(whole[rounds.used])
        return found

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """(..., D) -> (..., Vd)."""
        return self.drafter.logits(hidden, depth)
