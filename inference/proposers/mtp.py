"""Trees out of MTP modules that are separate for each depth (arXiv:2412.19437).

A module applied to its own output needs nothing of this: ``sequential.SequentialProposer`` serves.

With K modules every token x_j, committed or drafted, stands for one row in each of them: row
t = j-1-k of module k holds x_j and module k-1's output at t (module 0: the target's hidden state at
t). Both are known at the same time, as module k-1's output at t was made for x_{j-1}. So:

* Committed tokens go through all modules once, with committed tokens and true features only.
  Nothing is ever recomputed, which other decoders do for the last K-1 positions of each round,
  keeping either the hidden states of the whole text (transformers) or a window of them ("KV
  reversion buffer"). All that has to be kept beside keys and values is a ring of K rows: what each
  module made of the last committed token.
* A drafted token d places behind the last committed one has rows in the modules k >= d only; the
  others would need hidden states of the target that do not exist yet. Module d's row drafts the
  next token. The rows live in the tree part of the draft caches and are dropped with it.

A row that would lie before the text (t < 0) does not exist, in training either.

Legend: F nodes, n committed tokens, K modules, D hidden.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafters.layers import Attend
from drafters.mtp import MtpDrafter
from inference.append import PREFILL_ROWS
from inference.proposers.base import RowState
from inference.proposers.draft_cache import DraftCache
from inference.proposers.options import TreeOptions
from inference.proposers.sequential import SequentialProposer, StepOutput


@dataclass
class _Ring:
    """What is kept for one sequence.

    Attributes:
        caches: of each module.
        outputs: (K, D) next features of each module for the last committed token; row k is there
            once more than k tokens have gone in.
        committed: tokens that have gone in, counted without x_0.
        before: tree rows of each module that would lie before the text, so that it has none.
    """

    caches: list[DraftCache]
    outputs: Tensor
    committed: int = 0
    before: list[int] = field(default_factory=list)


class MtpProposer(SequentialProposer):
    """EAGLE-2's dynamic tree, or a static one, over K separate modules.

    The feature of a node is what all modules made of it, (K, D).

    Args:
        drafter: attached head with more than one module.
        options: of the tree.
    """

    drafter: MtpDrafter

    def __init__(self, drafter: MtpDrafter, options: TreeOptions | None = None) -> None:
        super().__init__(drafter, options)
        self._count = drafter.config.num_modules
        self._layers = drafter.config.num_layers
        assert self._count > 1, "one module drafts like any sequential head"
        self._rings: dict[int, _Ring] = {}

    def reset(self, batch_size: int) -> None:
        """Empty draft caches and an empty ring per sequence."""
        windows = self.drafter.windows[: self._layers]
        like, size = next(self.drafter.parameters()), self.drafter.config.hidden_size
        self._rings = {
            row: _Ring(
                [DraftCache(windows) for _ in range(self._count)],
                like.new_zeros(self._count, size),
            )
            for row in range(batch_size)
        }

    def finish(self, row: int, tokens: list[int]) -> None:
        """Free what is kept for the sequence."""
        del self._rings[row]

    @torch.no_grad()
    def absorb(self, row: int, state: RowState) -> StepOutput:
        """All modules on the newly committed tokens.

        Args:
            row: the sequence.
            state: of it.

        Returns:
            Module 0's logits from the last position and the whole ring, F = 1.
        """
        ring = self._rings[row]
        for cache in ring.caches:
            cache.begin_round()
        ring.before = [0] * self._count
        start, last = ring.committed, len(state.tokens) - 1
        assert len(state.hidden) == last - start, "states must cover exactly the new positions"
        tokens = torch.tensor(state.tokens[start + 1 :], device=state.hidden.device)
        with self._timer.phase("draft"):
            for first in range(0, last - start, PREFILL_ROWS):  # bounds the memory of masks
                part = slice(first, first + PREFILL_ROWS)
                hidden = self._commit(ring, state.hidden[part], tokens[part])
            return self._output(hidden, ring.outputs[None], 0)

    def _commit(self, ring: _Ring, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Rows of n committed tokens (n,), from the target's hidden states (n, D) before them.

        Returns:
            (1, D) module 0's output for the last of them.
        """
        start, count = ring.committed, len(tokens)
        positions = torch.arange(start, start + count, device=tokens.device)  # the same in all
        attend = self._attend(0, ring.caches[0].extend)
        feature = self.drafter.begin(None, hidden[None], positions[None], attend)
        last, kept = hidden, ring.outputs.clone()
        for module, cache in enumerate(ring.caches):
            rows = feature.shape[1]
            if not rows:
                break
            output, following = self.drafter(
                feature,
                tokens[None, -rows:],
                positions[None, -rows:],
                self._attend(module, cache.extend),
                module,
            )
            if module == 0:
                last = output[0, -1:]
            kept[module] = following[0, -1]
            feature = following[:, :-1]
            if module < start:  # the row before the first of these exists
                feature = torch.cat((ring.outputs[None, module, None], feature), dim=1)
        ring.outputs, ring.committed = kept, start + count
        return last

    @torch.no_grad()
    def step(
        self, row: int, feature: Tensor, tokens: Tensor, parents: Tensor, depth: int
    ) -> StepOutput:
        """All modules that have rows for nodes of this depth.

        Args:
            row: the sequence.
            feature: (F, K, D) of each node's parent.
            tokens: (F,) absolute ids of the nodes.
            parents: (F,) tree row of each parent, -1 for the root.
            depth: of the nodes, from 1 to K-1.
        """
        ring = self._rings[row]
        position = ring.committed - 1 + depth
        positions = torch.full((1, len(tokens)), position, device=tokens.device)
        hidden, kept = feature[:, 0], torch.zeros_like(feature)
        with self._timer.phase("draft"):
            for module in range(depth, self._count):
                t = position - module
                if t < 0:
                    ring.before[module] += len(tokens)
                    continue
                above = (parents - ring.before[module]).clamp_min(-1)
                attend = ring.caches[module].tree_step(above, t)
                output, following = self.drafter(
                    feature[None, :, module - 1],
                    tokens[None],
                    positions,
                    self._attend(module, attend),
                    module,
                )
                if module == depth:
                    hidden = output[0]
                kept[:, module] = following[0]
            return self._output(hidden, kept, depth)

    def _attend(self, module: int, attend: Attend) -> Attend:
        """``attend`` of one module's cache, called with the head's layer numbers."""
        return lambda layer, q, k, v: attend(layer - module * self._layers, q, k, v)
