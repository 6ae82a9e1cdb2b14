"""Batched draft loops of fixed shape for heads that draft step by step: EAGLE-1/3, Hydra, recursive
MTP.

The twin of ``proposers.sequential``: newly committed positions go through step 0 with the target's
true features, then every level of the tree is one draft step on as many nodes of every sequence,
whether a sequence has so many or not. A node that does not exist is run and counts for nothing.

Legend: B sequences, R new rows, F nodes of a level, M tree rows of a round, W words, Vd draft
vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from drafters.base import SequentialDrafter
from drafters.layers import Attend
from inference.static.draft_base import Committed, StaticDrafter
from inference.static.draft_cache import StaticDraftCache, chain_words
from inference.static.growth import Growth
from inference.static.tree import DraftTree, take
from inference.static.words import own_bits, word_count


class Step(NamedTuple):
    """One draft step on F nodes of every sequence.

    Attributes:
        logits: (B, F, Vd) of each node's children.
        acceptance: (B, F) chance that a child drafted from each is accepted; None without a
            confidence head.
        feature: (B, F, ...) for the next step.
        words: (B, F, W) tree rows that a child of each node sees: its own and its ancestors'.
    """

    logits: Tensor
    acceptance: Tensor | None
    feature: Tensor
    words: Tensor


class TreeRows:
    """Where the nodes that are run lie behind the committed rows: level after level.

    Args:
        widths: F of each level from depth 1.
        device: of the words.

    Attributes:
        before: rows before each level's, from depth 1.
        total: M.
        words: W.
        own: (1, M, W) each row's own bit.
        depths: (1, M) of each row, 0 for the first level.
    """

    def __init__(self, widths: list[int], device: torch.device) -> None:
        self.before = [sum(widths[:level]) for level in range(len(widths))]
        self.total = sum(widths)
        self.words = word_count(self.total)
        self.own = own_bits(torch.arange(self.total, device=device), self.words)[None]
        counts = torch.tensor(widths, dtype=torch.int64)
        levels = torch.arange(len(widths)).repeat_interleave(counts)
        self.depths = levels.to(device)[None]

    def level(self, depth: int, above: Tensor) -> tuple[Tensor, Tensor]:
        """Words of the rows of one level.

        Args:
            depth: of the nodes, from 1.
            above: (B, F, W) rows that their parents' children see.

        Returns:
            The words (B, F, W), and the depths (B, m + F) of all rows so far.
        """
        first, count = self.before[depth - 1], above.shape[1]
        words = above | self.own[:, first : first + count]
        return words, self.depths[:, : first + count].expand(len(above), -1)


def chain_rows(cache: StaticDraftCache, new: Committed) -> Attend:
    """Attention of new rows of text behind what is committed, causal.

    Args:
        cache: that keeps them.
        new: of R rows.
    """
    batch, count = new.tokens.shape
    places = torch.arange(count, device=new.tokens.device).expand(batch, -1)
    words = chain_words(count, new.tokens.device)
    return cache.rows(words.expand(batch, -1, -1), places)


class SequentialDraft(StaticDrafter):
    """Trees over a head's draft steps.

    Args:
        drafter: attached head.
        growth: of the trees.
        batch: B.
        capacity: longest text.
        new_rows: R.
    """

    drafter: SequentialDrafter

    def __init__(
        self,
        drafter: SequentialDrafter,
        growth: Growth,
        batch: int,
        capacity: int,
        new_rows: int | None = None,
    ) -> None:
        super().__init__(drafter, growth, batch, capacity, new_rows)
        self._tree = TreeRows(growth.widths[1:], self.device)
        self.caches = [self.new_cache(windows) for windows in self.windows()]

    def windows(self) -> list[list[int | None]]:
        """Of the layers of each cache."""
        return [self.drafter.windows]

    def absorb_text(self, new: Committed, before: int) -> None:
        """Step 0 on a stretch of a prompt, for the sake of its keys and values."""
        [cache] = self.caches
        if cache.windows:
            attend = cache.text(before)
            positions = cache.positions(new.tokens.shape[1])
            feature = self.drafter.begin(new.features, new.hidden, positions, attend)
            self.drafter(feature, new.tokens, positions, attend)
        cache.advance(new.counts)

    def draft(self, new: Committed) -> DraftTree:
        """Absorb what was committed and grow a tree, level by level."""
        growth, step = self.growth, self.absorb(new)
        grown = growth.add(growth.start(new.roots), step.logits, step.acceptance)
        for depth in range(1, len(growth.widths)):
            step = self.step(step, *growth.frontier(grown), depth)
            grown = growth.add(grown, step.logits, step.acceptance)
        return growth.finish(grown)

    def absorb(self, new: Committed) -> Step:
        """Step 0 on the newly committed positions.

        Returns:
            The last position's step, F = 1.
        """
        output, following = self._take_in(new)
        last = new.last[:, None]
        words = new.tokens.new_zeros(len(last), 1, self._tree.words)
        return self.made(take(output, last), take(following, last), words, 0)

    def absorb_rows(self, new: Committed) -> None:
        """Step 0, for the sake of its keys and values."""
        [cache] = self.caches
        if cache.windows:
            self._take_in(new)
        else:
            cache.advance(new.counts)

    def _take_in(self, new: Committed) -> tuple[Tensor, Tensor]:
        """Step 0 on newly committed positions: outputs and features (B, R, ...)."""
        [cache] = self.caches
        positions, attend = cache.positions(new.tokens.shape[1]), chain_rows(cache, new)
        feature = self.drafter.begin(new.features, new.hidden, positions, attend)
        output, following = self.drafter(feature, new.tokens, positions, attend)
        cache.advance(new.counts)
        return output, following

    def step(self, above: Step, tokens: Tensor, parents: Tensor, depth: int) -> Step:
        """One draft step on nodes of the same depth.

        Args:
            above: the step that made their parents' features.
            tokens: (B, F) absolute ids of the nodes.
            parents: (B, F) row of each parent in that step.
            depth: of the nodes, from 1.
        """
        words, depths = self._tree.level(depth, take(above.words, parents))
        pending = self._tree.before[depth - 1]
        seen = words[..., : word_count(depths.shape[1])]
        [cache] = self.caches
        attend = cache.rows(seen, depths, pending)
        positions = (cache.lengths + (depth - 1))[:, None].expand_as(tokens)
        feature = take(above.feature, parents)
        output, following = self.drafter(feature, tokens, positions, attend, depth)
        return self.made(output, following, words, depth)

    def made(self, output: Tensor, following: Tensor, words: Tensor, depth: int) -> Step:
        """The step whose rows (B, F, output_size) these are."""
        drafter = self.drafter
        logits = drafter.logits(output, depth)
        return Step(logits, drafter.acceptance(output, depth), following, words)
