"""Batched drafts of fixed shape for MTP modules that are separate for each depth.

The twin of ``proposers.mtp``, which explains the rows: token x_j has one row in each of K modules,
t = j-1-k in module k, made of module k-1's output for x_{j-1}. What a round needs of those before,
beside keys and values, is a ring of K vectors per sequence: what each module made of the last
committed token. It is overwritten in place and never grows, so a round is a function of tensors of
fixed shape; the "KV reversion" of other decoders, over a window of the text, is not needed.

Only a text of fewer than K tokens has rows that would lie before it, t < 0. They are run and seen
by nobody.

Legend: B sequences, R new rows, F nodes of a level, K modules, L layers per module, D hidden, W
words.
"""

import torch
from torch import Tensor

from drafters.layers import Attend
from drafters.mtp import MtpDrafter
from inference.static.draft_base import Committed, StaticDrafter
from inference.static.draft_cache import first_bits
from inference.static.draft_sequential import SequentialDraft, Step, chain_rows
from inference.static.growth import Growth
from inference.static.tree import take
from inference.static.words import word_count


class MtpDraft(SequentialDraft):
    """Trees over K separate modules. The feature of a node is what all modules made of it, (K, D).

    Args:
        drafter: attached head with more than one module.
        growth: of the trees.
        batch: B.
        capacity: longest text.
        new_rows: R.
    """

    drafter: MtpDrafter

    def __init__(
        self,
        drafter: MtpDrafter,
        growth: Growth,
        batch: int,
        capacity: int,
        new_rows: int | None = None,
    ) -> None:
        super().__init__(drafter, growth, batch, capacity, new_rows)
        count, size = drafter.config.num_modules, drafter.config.hidden_size
        assert count > 1, "one module drafts like any sequential head"
        like = next(drafter.parameters())
        self._ring = like.new_zeros(batch, count, size)
        self._committed = torch.zeros(batch, dtype=torch.int64, device=self.device)
        starts = torch.tensor([*self._tree.before, self._tree.total], device=self.device)
        self._starts = starts  # of each level's rows, from depth 1

    def windows(self) -> list[list[int | None]]:
        """One cache for each module: they have rows of their own."""
        config = self.drafter.config
        return [self.drafter.windows[: config.num_layers]] * config.num_modules

    def adopt(self, other: StaticDrafter) -> None:
        """The ring, too."""
        assert isinstance(other, MtpDraft)
        super().adopt(other)
        self._ring, self._committed = other._ring, other._committed

    def pretend(self, count: int) -> None:
        """The ring, too."""
        super().pretend(count)
        self._committed.fill_(count)

    def reset(self) -> None:
        """Forget all text."""
        super().reset()
        self._committed.zero_()

    def select(self, rows: Tensor) -> None:
        """Keep these sequences only."""
        super().select(rows)
        self._ring, self._committed = self._ring[rows], self._committed[rows]

    def absorb_text(self, new: Committed, before: int) -> None:
        """All modules on a stretch of a prompt."""
        self._commit(new, [cache.text(before) for cache in self.caches])

    def absorb(self, new: Committed) -> Step:
        """All modules on the newly committed tokens.

        Returns:
            Module 0's logits from the last position and the whole ring, F = 1.
        """
        output = self._commit(new, [chain_rows(cache, new) for cache in self.caches])
        seen = new.tokens.new_zeros(len(output), 1, self._tree.words)
        return self.made(output, self._ring[:, None], seen, 0)

    def absorb_rows(self, new: Committed) -> None:
        """All modules on newly committed tokens."""
        self._commit(new, [chain_rows(cache, new) for cache in self.caches])

    def _commit(self, new: Committed, attends: list[Attend]) -> Tensor:
        """Rows of newly committed tokens in all modules, and the ring they leave.

        Returns:
            (B, 1, D) module 0's output for the last of them.
        """
        start, tokens, counts = self._committed, new.tokens, new.counts
        positions = start[:, None] + torch.arange(tokens.shape[1], device=self.device)
        feature = self.drafter.begin(None, new.hidden, positions, attends[0])
        first, made = feature[:, :1], []
        for module, cache in enumerate(self.caches):
            attend = self._attend(module, attends[module])
            output, following = self.drafter(feature, tokens, positions, attend, module)
            cache.advance(counts)
            last = counts - 1
            if module == 0:
                first = take(output, last[:, None])
            kept = take(following, last)
            made.append(torch.where((counts > 0)[:, None], kept, self._ring[:, module]))
            # The row before the first of these exists if the text is long enough; otherwise the
            # first token has no row in the next module, and all move up by one.
            there = (start > module)[:, None]
            shifted = torch.cat((self._ring[:, module, None], following[:, :-1]), dim=1)
            feature = torch.where(there[..., None], shifted, following)
            moved = torch.cat((tokens[:, 1:], tokens[:, -1:]), dim=1)
            tokens = torch.where(there, tokens, moved)
            positions = torch.where(there, positions, positions + 1)
            counts = torch.where(there[:, 0], counts, (counts - 1).clamp_min(0))
        self._ring.copy_(torch.stack(made, dim=1))
        self._committed.add_(new.counts)
        return first

    def step(self, above: Step, tokens: Tensor, parents: Tensor, depth: int) -> Step:
        """All modules that have rows for nodes of this depth.

        Args:
            above: the step that made their parents' features, (B, F, K, D).
            tokens: (B, F) absolute ids of the nodes.
            parents: (B, F) row of each parent in that step.
            depth: of the nodes, from 1 to K-1.
        """
        words, depths = self._tree.level(depth, take(above.words, parents))
        pending, count = self._tree.before[depth - 1], word_count(depths.shape[1])
        positions = (self._committed + (depth - 1))[:, None].expand_as(tokens)
        feature, made = take(above.feature, parents), []
        first, own = feature[:, :, 0], words & ~take(above.words, parents)
        for module in range(depth, len(self.caches)):
            cache = self.caches[module]
            missing = (module - self._committed).clamp(0, depth)  # levels before the text
            hidden = first_bits(self._starts[missing], self._tree.words)[:, None]
            seen = (words & ~hidden | own)[..., :count]
            attend = self._attend(module, cache.rows(seen, depths, pending))
            output, following = self.drafter(
                feature[:, :, module - 1], tokens, positions, attend, module
            )
            if module == depth:
                first = output
            made.append(following)
        unused = torch.zeros_like(made[0])
        kept = torch.stack([*[unused] * depth, *made], dim=2)
        return self.made(first, kept, words, depth)

    def _attend(self, module: int, attend: Attend) -> Attend:
        """``attend`` of one module's cache, called with the head's layer numbers."""
        first = module * self.drafter.config.num_layers
        return lambda layer, q, k, v: attend(layer - first, q, k, v)
