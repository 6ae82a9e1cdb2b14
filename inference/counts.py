"""What a round did, in numbers: all that every engine can tell of it, trees or not."""

from __future__ import annotations

from dataclasses import dataclass

from inference.decoding import Round


@dataclass(frozen=True)
class RoundCounts:
    """One target forward of one sequence.

    Attributes:
        row: sequence in the batch.
        context: tokens committed before it, prompt included.
        draft_tokens: nodes of the tree without its root.
        depth: of the deepest of them; 0 without drafts.
        accepted: draft tokens that reached the output.
        emitted: tokens that it added: those, and the target's own unless the text ended before.
        all_accepted: the walk ended at a leaf, so the target's own token is a bonus rather than a
            recovered one.
    """

    row: int
    context: int
    draft_tokens: int
    depth: int
    accepted: int
    emitted: list[int]
    all_accepted: bool

    @property
    def width(self) -> int:
        """Rows of the tree that were verified; padding is not counted."""
        return self.draft_tokens + 1

    @property
    def ended(self) -> bool:
        """Whether the text ended with a draft, so that the target added no token of its own."""
        return len(self.emitted) == self.accepted


def counts_of(done: Round, length: int) -> RoundCounts:
    """The numbers of a round that was recorded with its tree.

    Args:
        done: the round.
        length: tokens of the text after it.
    """
    return RoundCounts(
        done.row,
        length - len(done.emitted),
        done.tree.num_draft_tokens,
        done.tree.depth,
        len(done.accepted),
        done.emitted,
        done.all_accepted,
    )
