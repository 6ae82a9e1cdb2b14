"""Trees out of heads that draft a whole round in one pass: DFlash, JetSpec, DSpark, P-EAGLE.

A round commits what the target says about the newly accepted positions, runs one pass over the
block (always a whole one: fewer rows would change what the others predict), and grows a tree out of
its rows. DFlash's and P-EAGLE's rows are laws of one place each, whatever was drafted before
(``growth.grow_marginals``). DSpark's are finished by its Markov head along every path, so that a
node's law is the true law of its children given its path.

Legend: F frontier nodes, K drafts, n new positions, D hidden, Vd draft vocabulary.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from drafters.block import DFlashDrafter
from drafters.dspark import DSparkDrafter
from drafters.peagle import PEagleDrafter
from inference.append import PREFILL_ROWS
from inference.proposers.base import RowState
from inference.proposers.context_cache import ContextCache
from inference.proposers.growth import new_tree
from inference.proposers.heads import HeadProposer
from inference.proposers.marginals import grow_marginals
from inference.proposers.options import TreeOptions
from inference.tree import TokenTree


class BlockProposer(HeadProposer):
    """Trees out of K rows that one pass gives.

    Args:
        drafter: attached head.
        options: of the tree; deeper than K it cannot be.
    """

    drafter: DFlashDrafter | PEagleDrafter

    def __init__(
        self, drafter: DFlashDrafter | PEagleDrafter, options: TreeOptions | None = None
    ) -> None:
        super().__init__(drafter, options)
        self._caches: dict[int, ContextCache] = {}

    @property
    def default_draws(self) -> str:
        """Nothing: tokens drawn from rows that do not know each other's do not fit together."""
        return "none"

    def reset(self, batch_size: int) -> None:
        """One empty cache per sequence."""
        self._caches = {row: ContextCache(self.drafter.windows) for row in range(batch_size)}

    def finish(self, row: int, tokens: list[int]) -> None:
        """Free the cache of the sequence."""
        del self._caches[row]

    @abstractmethod
    def run(self, cache: ContextCache, state: RowState) -> Tensor:
        """Absorb newly committed positions and run one pass: its K drafting rows, (K, D)."""

    def grow(self, row: int, state: RowState) -> TokenTree:
        """A tree of the best paths over K laws."""
        depth = max(min(self.options.longest, state.max_depth), 1)
        logits, acceptance = self._laws(row, state, depth)
        config, vocab = self.drafter.config, self.drafter.draft_vocab
        return grow_marginals(
            self.options, state, self._rule, logits, acceptance, config.vocab_size, vocab
        )

    @torch.no_grad()
    def forced(self, state: RowState, tokens: list[int]) -> list[Tensor]:
        """The K laws; they do not depend on ``tokens``."""
        return list(self._laws(0, state, len(tokens) + 1)[0])

    def _laws(self, row: int, state: RowState, depth: int) -> tuple[Tensor, Tensor | None]:
        """Logits (k, Vd) of the first ``depth`` rows, as far as there are so many, and chances of
        acceptance (k,) where the head has them.
        """
        drafter = self.drafter
        with self._timer.phase("draft"):
            rows = self.run(self._caches[row], state)[:depth]
            logits = drafter.logits(rows)  # at once: the output matrix is read once
            chances = [drafter.acceptance(r, depth) for depth, r in enumerate(rows)]
        known = [chance for chance in chances if chance is not None]
        return logits, torch.stack(known) if known else None


class DFlashProposer(BlockProposer):
    """DFlash and JetSpec: trees over the marginals of one block (arXiv:2604.12989, 2606.18394)."""

    drafter: DFlashDrafter

    def run(self, cache: ContextCache, state: RowState) -> Tensor:
        """The context's keys and values, then one block at positions a, a+1, ..."""
        drafter, root = self.drafter, len(state.tokens) - 1
        features, start = _new_features(cache, state)
        device = features.device
        for first in range(0, len(features), PREFILL_ROWS):  # bounds the memory of a long prompt
            part = features[None, first : first + PREFILL_ROWS]
            positions = torch.arange(start + first, start + first + part.shape[1], device=device)
            drafter.inject(drafter.context(part), positions[None], cache.append)
        tokens = drafter.blocks(torch.tensor([state.tokens[-1]], device=device))  # (1, g)
        positions = root + torch.arange(tokens.shape[1], device=device)[None]
        attend = cache.rows(0, drafter.causal)
        return drafter.drafting(drafter(tokens, positions, attend)[0])


class DSparkProposer(DFlashProposer):
    """DSpark: level by level, the Markov head run along every path (arXiv:2607.05147)."""

    drafter: DSparkDrafter

    @property
    def default_draws(self) -> str:
        """All, where the Markov head knows the path."""
        return "none" if self.drafter.markov_head is None else "all"

    def grow(self, row: int, state: RowState) -> TokenTree:
        """A tree that is grown as a sequential head's is, out of one block's rows."""
        drafter = self.drafter
        if drafter.markov_head is None:
            return super().grow(row, state)
        with self._timer.phase("draft"):
            rows = self.run(self._caches[row], state)  # (K, D)
        vocab, device = drafter.draft_vocab, rows.device
        tree = new_tree(self.options, state, self._rule, device, drafter.config.vocab_size, vocab)
        frontier = torch.zeros(1, dtype=torch.int64, device=device)
        memory = {0: drafter.begin_path(rows[:1])[0]}  # the path state of each node's parent
        while len(frontier) and tree.levels < tree.depth:
            nodes = frontier.tolist()
            states = torch.stack([memory[node] for node in nodes])
            tokens = tree.candidates.tokens[frontier]
            logits, acceptance, states = self._next(rows[tree.levels], tokens, states, tree.levels)
            first = len(tree.candidates.tokens)
            tree.add_children(frontier, logits, acceptance)
            following = dict(zip(nodes, states, strict=True))
            parents = tree.candidates.parents[first:].tolist()
            memory = {first + place: following[parent] for place, parent in enumerate(parents)}
            frontier = tree.frontier()
        return tree.finish()[0]

    def _next(
        self, hidden: Tensor, tokens: Tensor, states: Tensor, depth: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The laws behind some nodes of one depth.

        Args:
            hidden: (D,) the pass's row of the depth.
            tokens: (F,) absolute ids of the nodes.
            states: (F, state size) of the paths that end before them.
            depth: of their children, from 0.

        Returns:
            Logits (F, Vd), chances of acceptance (F,) or None, and the states behind the nodes.
        """
        with self._timer.phase("draft"):
            rows, states = self.drafter.advance(hidden.expand(len(tokens), -1), tokens, states)
            logits = self.drafter.logits(rows, depth)
            return logits, self.drafter.acceptance(rows, depth), states

    @torch.no_grad()
    def forced(self, state: RowState, tokens: list[int]) -> list[Tensor]:
        """The laws along one path."""
        rows = self.run(self._caches[0], state)
        states = self.drafter.begin_path(rows[:1])
        found = []
        for depth, token in enumerate([state.tokens[-1], *tokens][: len(rows)]):
            previous = torch.tensor([token], device=rows.device)
            logits, _, states = self._next(rows[depth], previous, states, depth)
            found.append(logits[0])
        return found


class PEagleProposer(BlockProposer):
    """P-EAGLE: newly committed rows and K-1 mask rows in one causal pass (arXiv:2602.01469)."""

    drafter: PEagleDrafter

    def run(self, cache: ContextCache, state: RowState) -> Tensor:
        """Rows of positions ..., a-1 (which drafts first), and mask rows behind them."""
        drafter, masks = self.drafter, self.drafter.num_drafts - 1
        features, start = _new_features(cache, state)
        device, count = features.device, len(features)
        tokens = torch.tensor(state.tokens[start + 1 :], device=device)[None]
        positions = torch.arange(start, start + count + masks, device=device)[None]
        causal = [True] * len(drafter.windows)
        last = (count - 1) // PREFILL_ROWS * PREFILL_ROWS  # where the last stretch begins
        for first in range(0, last, PREFILL_ROWS):
            part = slice(first, first + PREFILL_ROWS)
            rows = drafter.text_rows(features[None, part], tokens[:, part])
            drafter.run(rows, positions[:, part], cache.rows(PREFILL_ROWS, causal))
        text = drafter.text_rows(features[None, last:], tokens[:, last:])
        both = [
            torch.cat(pair, dim=1) for pair in zip(text, drafter.mask_rows(1, masks), strict=True)
        ]
        attend = cache.rows(count - last, causal)
        hidden = drafter.run((both[0], both[1]), positions[:, last:], attend)
        return hidden[0, -masks - 1 :]


def _new_features(cache: ContextCache, state: RowState) -> tuple[Tensor, int]:
    """The captured layers (n, F·D) not yet absorbed, and the position of the first."""
    start, root = cache.length, len(state.tokens) - 1
    assert state.features is not None
    assert len(state.features) == root - start, "features must cover exactly the new positions"
    return state.features, start
