"""Batched drafts of fixed shape for heads that draft a round in one pass: Medusa, DFlash, JetSpec,
P-EAGLE, DSpark.

The twin of ``proposers.medusa`` and ``proposers.block``. A pass runs over as many rows of every
sequence, whatever it has committed; rows behind what it has are padding that nobody sees. DSpark's
rows are finished by its Markov head along every path, level by level.

Legend: B sequences, R new rows, K drafts, g rows per block, F nodes of a level, W words, D hidden,
Vd draft vocabulary.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from drafters import MedusaDrafter
from drafters.block import DFlashDrafter
from drafters.dspark import DSparkDrafter
from drafters.layers import Attend
from drafters.peagle import PEagleDrafter
from inference.static.draft_base import Committed, StaticDrafter
from inference.static.draft_cache import StaticDraftCache, first_bits
from inference.static.draft_sequential import chain_rows
from inference.static.growth import Growth
from inference.static.tree import DraftTree, take
from inference.static.words import MOST_ROWS, word_count


class ParallelDraft(StaticDrafter):
    """Trees out of K laws that do not depend on the path."""

    @abstractmethod
    def rows(self, new: Committed) -> Tensor:
        """Absorb what was committed and run one pass: the K drafting rows, (B, K, D)."""

    def draft(self, new: Committed) -> DraftTree:
        """Absorb what was committed and grow a tree of the best paths, or fill the shape."""
        growth, rows = self.growth, self.rows(new)
        grown, depths = growth.start(new.roots), len(growth.widths)
        for depth, logits in enumerate(self.logits(rows[:, :depths]).split(1, dim=1)):
            chances = self.drafter.acceptance(rows[:, depth, None], depth)
            grown = growth.add(grown, logits, chances)
        return growth.finish(grown)

    @abstractmethod
    def logits(self, rows: Tensor) -> Tensor:
        """The first k rows (B, k, D) -> draft logits (B, k, Vd)."""


class MedusaDraft(ParallelDraft):
    """Medusa's independent heads; nothing is kept between rounds."""

    drafter: MedusaDrafter

    def absorb_text(self, new: Committed, before: int) -> None:
        """Nothing is kept of a prompt."""

    def absorb_rows(self, new: Committed) -> None:
        """Nor of what follows it."""

    def rows(self, new: Committed) -> Tensor:
        """What each head makes of the last committed position."""
        hidden = take(new.hidden, new.last).to(next(self.drafter.blocks.parameters()).dtype)
        return self.drafter(hidden).transpose(0, 1)

    def logits(self, rows: Tensor) -> Tensor:
        """Each row's own head."""
        if self.drafter.lm_heads is None:
            return self.drafter.logits(rows, 0)
        heads = range(rows.shape[1])
        return torch.stack([self.drafter.logits(rows[:, head], head) for head in heads], dim=1)


class DFlashDraft(ParallelDraft):
    """DFlash and JetSpec: the context's keys and values, then one block behind them.

    Args:
        drafter: attached head.
        growth: of the trees.
        batch: B.
        capacity: longest text.
        new_rows: R.
    """

    drafter: DFlashDrafter

    def __init__(
        self,
        drafter: DFlashDrafter,
        growth: Growth,
        batch: int,
        capacity: int,
        new_rows: int | None = None,
    ) -> None:
        super().__init__(drafter, growth, batch, capacity, new_rows)
        size = drafter.config.block_size
        self._places = torch.arange(size, device=self.device)[None]
        words = word_count(size)
        whole = torch.full_like(self._places, size)
        self._seen = {  # by whether a layer is causal, (1, g, W)
            False: first_bits(whole, words),
            True: first_bits(self._places + 1, words),
        }
        self.caches = [self.new_cache(drafter.windows)]

    def absorb_text(self, new: Committed, before: int) -> None:
        """Keys and values of the context."""
        self.absorb_rows(new)

    def absorb_rows(self, new: Committed) -> None:
        """The same: they see nothing."""
        assert new.features is not None
        [cache], context = self.caches, self.drafter.context(new.features)
        self.drafter.inject(context, cache.positions(context.shape[1]), cache.store)
        cache.advance(new.counts)

    def rows(self, new: Committed) -> Tensor:
        """One block at positions a, a+1, ..."""
        self.absorb_rows(new)
        batch, [cache] = len(new.tokens), self.caches
        tokens = self.drafter.blocks(new.roots)  # (B, g)
        attend = self._attend(cache, batch)
        return self.drafter.drafting(self.drafter(tokens, cache.positions(tokens.shape[1]), attend))

    def _attend(self, cache: StaticDraftCache, batch: int) -> Attend:
        """Of the block's rows, in each layer as it is causal or not."""
        causal, places = self.drafter.causal, self._places.expand(batch, -1)
        of = {
            kind: cache.rows(seen.expand(batch, -1, -1), places)
            for kind, seen in self._seen.items()
        }
        return lambda layer, q, k, v: of[causal[layer]](layer, q, k, v)

    def logits(self, rows: Tensor) -> Tensor:
        """By the target's matrix."""
        return self.drafter.logits(rows)


class DSparkDraft(DFlashDraft):
    """DSpark: one block, and the Markov head along every path of the tree."""

    drafter: DSparkDrafter

    def draft(self, new: Committed) -> DraftTree:
        """Absorb what was committed and grow a tree, level by level, out of one block's rows."""
        drafter = self.drafter
        if drafter.markov_head is None:
            return super().draft(new)
        growth, rows = self.growth, self.rows(new)
        grown, states = growth.start(new.roots), drafter.begin_path(rows[:, 0])[:, None]
        for depth in range(len(growth.widths)):
            tokens, parents = growth.frontier(grown)
            states = take(states, parents)
            hidden = rows[:, depth, None].expand(*tokens.shape, -1)
            made, states = drafter.advance(
                hidden.flatten(0, 1), tokens.flatten(), states.flatten(0, 1)
            )
            made, states = made.unflatten(0, tokens.shape), states.unflatten(0, tokens.shape)
            grown = growth.add(grown, drafter.logits(made, depth), drafter.acceptance(made, depth))
        return growth.finish(grown)


class PEagleDraft(ParallelDraft):
    """P-EAGLE: newly committed rows and K-1 mask rows in one pass.

    Args:
        drafter: attached head.
        growth: of the trees.
        batch: B.
        capacity: longest text.
        new_rows: R.

    Raises:
        ValueError: more rows in a pass than words tell apart.
    """

    drafter: PEagleDrafter

    def __init__(
        self,
        drafter: PEagleDrafter,
        growth: Growth,
        batch: int,
        capacity: int,
        new_rows: int | None = None,
    ) -> None:
        super().__init__(drafter, growth, batch, capacity, new_rows)
        text, total = self.new_rows, self.new_rows + drafter.num_drafts - 1
        if total > MOST_ROWS:
            raise ValueError(
                f"new_rows: a pass of P-EAGLE has new_rows + {drafter.num_drafts - 1} mask rows, "
                f"at most {MOST_ROWS} in all; got new_rows {text}"
            )
        self._places = torch.arange(total, device=self.device)[None]
        self._seen = first_bits(self._places + 1, word_count(total))  # (1, R + K-1, W)
        self._text = first_bits(torch.full_like(self._places[:, :1], text), word_count(total))
        self.caches = [self.new_cache(drafter.windows)]

    def absorb_text(self, new: Committed, before: int) -> None:
        """Rows of the text, causal."""
        [cache] = self.caches
        self._take_in(new, cache.text(before))

    def absorb_rows(self, new: Committed) -> None:
        """The same, by words."""
        [cache] = self.caches
        self._take_in(new, chain_rows(cache, new))

    def _take_in(self, new: Committed, attend: Attend) -> None:
        assert new.features is not None
        [cache] = self.caches
        rows = self.drafter.text_rows(new.features, new.tokens)
        self.drafter.run(rows, cache.positions(new.tokens.shape[1]), attend)
        cache.advance(new.counts)

    def rows(self, new: Committed) -> Tensor:
        """Rows of positions ..., a-1 (which drafts first), and mask rows behind them."""
        assert new.features is not None
        drafter, (batch, text), [cache] = self.drafter, new.tokens.shape, self.caches
        counts, masks = new.counts[:, None], drafter.num_drafts - 1
        given = drafter.text_rows(new.features, new.tokens)
        empty = drafter.mask_rows(batch, masks)
        both = (torch.cat((given[0], empty[0]), dim=1), torch.cat((given[1], empty[1]), dim=1))
        # A mask row stands behind the last committed one and does not see the padding between.
        committed = first_bits(counts, self._seen.shape[-1])  # (B, 1, W)
        behind = self._seen[:, text:] & ~self._text | committed
        words = torch.cat((self._seen[:, :text].expand(batch, -1, -1), behind), dim=1)
        places = self._places.expand(batch, -1)
        depths = torch.cat((places[:, :text], places[:, :masks] + counts), dim=1)
        positions = cache.lengths[:, None] + depths
        hidden = drafter.run(both, positions, cache.rows(words, depths))
        cache.advance(new.counts)
        return torch.cat((take(hidden, new.last[:, None]), hidden[:, text:]), dim=1)

    def logits(self, rows: Tensor) -> Tensor:
        """By the head's own matrix."""
        return self.drafter.logits(rows)
