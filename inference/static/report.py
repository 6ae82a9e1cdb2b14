"""What a round tells the host: one small tensor, and what it says once it has been read.

Legend: B sequences, N tree nodes, D depth of the trees of a round.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from inference.scheduling.survival import Outcome
from inference.static.accept import Acceptance
from inference.static.tree import DraftTree


class Report(NamedTuple):
    """What became of one sequence in a round.

    Attributes:
        accepted: drafts that reached the output.
        ended: how the text stands, see `inference.static.accept`.
        depth: of the tree, without padding.
        drafted: nodes of the tree, without padding and root.
        tokens: that were emitted.
        ranks: of each accepted draft among its siblings.
        offered: children of the root and of each accepted draft.
    """

    accepted: int
    ended: int
    depth: int
    drafted: int
    tokens: list[int]
    ranks: list[int]
    offered: list[int]

    @property
    def outcome(self) -> Outcome:
        """For the estimates of acceptance; of a text that goes on."""
        offered = self.offered if self.offered[-1] else self.offered[:-1]
        return Outcome(self.ranks, offered, len(self.tokens), self.drafted + 1, self.depth)


def report(tree: DraftTree, depths: Tensor, found: Acceptance) -> Tensor:
    """(B, 3D + 6): accepted, how the text stands, depth and draft tokens of the tree, D + 1 emitted
    tokens with -1 behind them, D ranks, D + 1 numbers of children.

    Args:
        tree: that was verified.
        depths: (B, N) of its nodes.
        found: what was accepted.
    """
    drafted = tree.valid.sum(1) - 1
    deepest = torch.where(tree.valid, depths, 0).amax(1)
    node = torch.arange(tree.tokens.shape[1], device=depths.device)
    below = tree.parents[:, None] == found.path[..., None]  # (B, D + 1, N)
    ranks = (below[:, :-1] & (node < found.path[:, 1:, None])).sum(-1)
    columns = [found.packed[:, :2], deepest[:, None], drafted[:, None], found.packed[:, 2:]]
    return torch.cat([*columns, ranks, below.sum(-1)], dim=1)


def read(row: list[int]) -> Report:
    """One sequence's row of what `report` made."""
    accepted, ended, depth, drafted, *rest = row
    most = len(rest) // 3  # D
    tokens = [token for token in rest[: most + 1] if token >= 0]
    ranks, offered = rest[most + 1 : 2 * most + 1], rest[2 * most + 1 :]
    return Report(
        accepted,
        ended,
        depth,
        drafted,
        tokens,
        ranks[:accepted],
        offered[: accepted + 1],
    )
