"""Trees out of heads that draft step by step: EAGLE-1/3, Hydra, recursive MTP.

Legend: F frontier nodes, Vd draft vocabulary, n committed rows.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafters.base import SequentialDrafter
from inference.append import PREFILL_ROWS
from inference.proposers.base import RowState
from inference.proposers.draft_cache import DraftCache
from inference.proposers.growth import new_tree
from inference.proposers.heads import HeadProposer
from inference.proposers.options import TreeOptions
from inference.tree import TokenTree


@dataclass
class StepOutput:
    """One draft step on some rows.

    Attributes:
        logits: (F, Vd) of each row's children.
        acceptance: (F,) chance that a child drafted from each row is accepted; None without a
            confidence head.
        feature: (F, width) for the next step.
    """

    logits: Tensor
    acceptance: Tensor | None
    feature: Tensor


@dataclass
class _Sequence:
    """What is kept for one sequence: its draft cache and how many positions went into it."""

    cache: DraftCache
    committed: int = 0


@dataclass
class _Level:
    """Where the nodes of the newest level are.

    Attributes:
        place: candidate -> row of ``feature``.
        rows: candidate -> row in the cache's tree, -1 for the root.
        feature: (F, width) the nodes' next features.
    """

    feature: Tensor
    place: dict[int, int] = field(default_factory=lambda: {0: 0})
    rows: dict[int, int] = field(default_factory=lambda: {0: -1})


class SequentialProposer(HeadProposer):
    """EAGLE-2's dynamic tree (arXiv:2406.16858), or a static one, over a head's draft steps.

    Each level runs the best ``top_k`` nodes of the level before, every one of them proposes
    ``top_k`` children, and at the end the best ``size`` of all are kept; see ``growth`` for drawn
    and for static trees. Committed positions go through step 0 with the target's true features, so
    what the head made up in one round is never seen in the next.

    Args:
        drafter: attached head.
        options: of the tree.
    """

    drafter: SequentialDrafter

    def __init__(self, drafter: SequentialDrafter, options: TreeOptions | None = None) -> None:
        super().__init__(drafter, options)
        self._sequences: dict[int, _Sequence] = {}

    def reset(self, batch_size: int) -> None:
        """One empty draft cache per sequence."""
        self._sequences = {
            row: _Sequence(DraftCache(self.drafter.windows)) for row in range(batch_size)
        }

    def finish(self, row: int, tokens: list[int]) -> None:
        """Free the draft cache of the sequence."""
        del self._sequences[row]

    @torch.no_grad()
    def absorb(self, row: int, state: RowState) -> StepOutput:
        """Step 0 on the newly committed positions.

        Args:
            row: the sequence.
            state: of it.

        Returns:
            The last position's step, F = 1.
        """
        own = self._sequences[row]
        own.cache.begin_round()
        start, last = own.committed, len(state.tokens) - 1
        assert len(state.hidden) == last - start, "states must cover exactly the new positions"
        device, drafter = state.hidden.device, self.drafter
        dtype = next(drafter.parameters()).dtype
        tokens = torch.tensor(state.tokens[start + 1 :], device=device)[None]  # token t+1 of row t
        positions = torch.arange(start, last, device=device)[None]
        features = None if state.features is None else state.features[None].to(dtype)
        hidden = state.hidden[None].to(dtype)
        with self._timer.phase("draft"):
            for first in range(0, last - start, PREFILL_ROWS):  # bounds the memory of masks
                part = slice(first, first + PREFILL_ROWS)
                feature = drafter.begin(
                    None if features is None else features[:, part],
                    hidden[:, part],
                    positions[:, part],
                    own.cache.extend,
                )
                output, following = drafter(
                    feature, tokens[:, part], positions[:, part], own.cache.extend
                )
            own.committed = last
            return self._output(output[0, -1:], following[0, -1:], 0)

    @torch.no_grad()
    def step(
        self, row: int, feature: Tensor, tokens: Tensor, parents: Tensor, depth: int
    ) -> StepOutput:
        """One draft step on nodes of the same depth.

        Args:
            row: the sequence.
            feature: (F, width) next feature of each node's parent.
            tokens: (F,) absolute ids of the nodes.
            parents: (F,) tree row of each parent, -1 for the root.
            depth: of the nodes, from 1.
        """
        own = self._sequences[row]
        position = own.committed - 1 + depth
        positions = torch.full((1, len(tokens)), position, device=tokens.device)
        with self._timer.phase("draft"):
            attend = own.cache.tree_step(parents, position)
            output, following = self.drafter(feature[None], tokens[None], positions, attend, depth)
            return self._output(output[0], following[0], depth)

    def _output(self, hidden: Tensor, following: Tensor, depth: int) -> StepOutput:
        logits = self.drafter.logits(hidden, depth)
        return StepOutput(logits, self.drafter.acceptance(hidden, depth), following)

    def grow(self, row: int, state: RowState) -> TokenTree:
        """One tree, level by level."""
        found = self.absorb(row, state)
        drafter, device = self.drafter, found.logits.device
        tree = new_tree(
            self.options,
            state,
            self._rule,
            device,
            drafter.config.vocab_size,
            drafter.draft_vocab,
        )
        tree.add_children(
            torch.zeros(1, dtype=torch.int64, device=device), found.logits, found.acceptance
        )
        level = _Level(found.feature)
        for depth in range(1, tree.depth):
            frontier = tree.frontier()
            if not len(frontier):
                break
            nodes = frontier.tolist()
            parents = tree.candidates.parents[frontier].tolist()
            above = torch.tensor([level.rows[parent] for parent in parents], device=device)
            inputs = level.feature[[level.place[parent] for parent in parents]]
            found = self.step(row, inputs, tree.candidates.tokens[frontier], above, depth)
            first = max(level.rows.values()) + 1
            level = _Level(
                found.feature,
                {node: place for place, node in enumerate(nodes)},
                {node: first + place for place, node in enumerate(nodes)},
            )
            tree.add_children(frontier, found.logits, found.acceptance)
        return tree.finish()[0]

    @torch.no_grad()
    def forced(self, state: RowState, tokens: list[int]) -> list[Tensor]:
        """Draft steps along ``tokens``, as one chain of the tree."""
        found = self.absorb(0, state)
        logits = [found.logits[0]]
        most = len(tokens) if self.drafter.num_drafts is None else self.drafter.num_drafts - 1
        for depth, token in enumerate(tokens[:most], start=1):
            device = found.logits.device
            above = torch.tensor([depth - 2], device=device)  # -1 at depth 1
            node = torch.tensor([token], device=device)
            found = self.step(0, found.feature, node, above, depth)
            logits.append(found.logits[0])
        return logits
