"""Which static drafter serves which head, and what its trees look like."""

from collections.abc import Callable

from torch import Tensor

from drafters import Drafter
from drafters.dspark import DSparkDrafter
from drafters.mtp import MtpDrafter
from inference.proposers.build import build_proposer
from inference.proposers.options import TreeOptions
from inference.static.draft_base import StaticDrafter
from inference.static.draft_mtp import MtpDraft
from inference.static.draft_parallel import DFlashDraft, DSparkDraft, MedusaDraft, PEagleDraft
from inference.static.draft_sequential import SequentialDraft
from inference.static.drawn import DrawnGrowth, DrawnShapeGrowth
from inference.static.growth import DraftLaw, DynamicGrowth, Growth
from inference.static.paths import PathsGrowth, ShapeGrowth
from inference.tree import DRAWN_KINDS

STATIC_DRAFTERS: dict[str, Callable[..., StaticDrafter]] = {
    "medusa": MedusaDraft,
    "hydra": SequentialDraft,
    "eagle1": SequentialDraft,
    "eagle3": SequentialDraft,
    "mtp": SequentialDraft,
    "peagle": PEagleDraft,
    "dflash": DFlashDraft,
    "dspark": DSparkDraft,
}


def independent(drafter: Drafter) -> bool:
    """Whether the laws of a round do not depend on the path, so that the best paths can be told."""
    if isinstance(drafter, DSparkDrafter):
        return drafter.markov_head is None
    return drafter.shape != "sequential"


def new_growth(
    drafter: Drafter, options: TreeOptions, law: DraftLaw, max_depth: Tensor | None = None
) -> Growth:
    """How trees of a head grow.

    Args:
        drafter: attached head.
        options: of the trees, as resolved by the head's proposer.
        law: of the drafts.
        max_depth: (B,) int64 longest path that the rest of each text has room for, or None.
    """
    columns, drawn = drafter.config.draft_vocab_size, law.kind in DRAWN_KINDS
    assert columns is not None
    if options.shape is not None:
        if drawn:
            return DrawnShapeGrowth(options, law, max_depth, columns)
        return ShapeGrowth(options, law, max_depth)
    if drawn:
        return DrawnGrowth(options, law, max_depth, columns)
    kind = PathsGrowth if independent(drafter) else DynamicGrowth
    return kind(options, law, max_depth, columns)


def build_static_drafter(
    drafter: Drafter,
    options: TreeOptions | None,
    law: DraftLaw,
    capacity: int,
    *,
    max_depth: Tensor | None = None,
    new_rows: int | None = None,
) -> StaticDrafter:
    """The static drafter of a head's family.

    Args:
        drafter: attached head.
        options: of the trees; what they leave open is the head's own, as for its proposer.
        law: of the drafts, for as many sequences as there will be. Its tensors are read in every
            round: write the roots' positions into them.
        capacity: longest text, in tokens.
        max_depth: (B,) int64 longest path that the rest of each text has room for, or None.
        new_rows: most positions that are committed at once; None is one more than trees are deep.
    """
    resolved = build_proposer(drafter, options).options
    growth = new_growth(drafter, resolved, law, max_depth)
    kind = STATIC_DRAFTERS[drafter.family]
    if isinstance(drafter, MtpDrafter) and drafter.config.num_modules > 1:
        kind = MtpDraft
    return kind(drafter, growth, len(law.positions), capacity, new_rows)
