"""What a drafted tree looks like."""

from dataclasses import dataclass

from inference.shapes.static_tree import StaticTree

DRAWS = ("all", "one", "none")
DEPTH = 5
"""Longest path where neither the options nor the head say anything."""


@dataclass(frozen=True)
class TreeOptions:
    """What a drafted tree looks like.

    Attributes:
        size: nodes the target verifies per round, root included.
        depth: longest drafted path. None takes all K tokens of a head that drafts so many, and
            `DEPTH` where nothing ends by itself. A grown tree is at most ``size`` - 1 deep.
        top_k: nodes expanded per level and children per node; 1 drafts a chain, whatever tree a
            head has.
        sharpness: see :func:`inference.proposers.growth.node_scores`.
        draft_temperature: factor on the temperature of the draft law; None takes the head's own
            calibrated one, 1 where there is none.
        draws: under ``rejection`` and ``block`` at a temperature, "all" children of a node are
            drawn, or "one" is, beside its most likely ones, or "none". None is "all" for drafts
            that know the path they continue, "none" for independent ones, of which drawn tokens do
            not fit together.
        shape: draft this tree in every round; ``size``, ``depth`` and ``top_k`` have no effect.
            None takes the head's own tree if it has one, and grows trees if not.
        grown: grow trees although the head has a tree of its own.
        min_survival: a node gets no children if these are likely to be in vain: if the chance that
            a draft behind it is accepted, and all drafts on the way to it were, is below this by
            the head's confidence output. 0 needs none.
    """

    size: int = 32
    depth: int | None = None
    top_k: int = 8
    sharpness: float = 0.8
    draft_temperature: float | None = None
    draws: str | None = None
    shape: StaticTree | None = None
    grown: bool = False
    min_survival: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot be grown."""
        if self.size < 2 or self.top_k < 1 or (self.depth is not None and self.depth < 1):
            raise ValueError(
                f"draft tree: size >= 2, depth >= 1 and top_k >= 1 are needed, got {self.size}, "
                f"{self.depth}, {self.top_k}"
            )
        if not self.sharpness > 0.0:
            raise ValueError(f"draft tree: sharpness must be above 0, got {self.sharpness}")
        if self.draft_temperature is not None and not self.draft_temperature > 0.0:
            raise ValueError(
                f"draft tree: draft_temperature must be above 0, got {self.draft_temperature}"
            )
        if self.draws is not None and self.draws not in DRAWS:
            raise ValueError(
                f"draft tree: draws must be one of {', '.join(DRAWS)}; got {self.draws!r}"
            )
        if not 0.0 <= self.min_survival < 1.0:
            raise ValueError(
                f"draft tree: min_survival must lie in [0, 1), got {self.min_survival}"
            )
        if self.shape is not None and self.shape.num_nodes < 2:
            raise ValueError("draft tree: shape has no draft token: give it one path at least")
        if self.grown and self.shape is not None:
            raise ValueError("draft tree: shape has no effect with grown: drop one of them")

    @property
    def chains(self) -> bool:
        """Whether no node has a second child."""
        return self.top_k == 1 if self.shape is None else self.shape.is_chain

    @property
    def longest(self) -> int:
        """The longest path that a tree can have."""
        if self.shape is not None:
            return self.shape.depth
        return DEPTH if self.depth is None else self.depth
