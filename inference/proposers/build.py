"""Which proposer decodes with which family; a new family adds one line."""

from collections.abc import Callable

from drafters import Drafter
from drafters.mtp import MtpDrafter
from inference.proposers.block import DFlashProposer, DSparkProposer, PEagleProposer
from inference.proposers.heads import HeadProposer
from inference.proposers.medusa import MedusaProposer
from inference.proposers.mtp import MtpProposer
from inference.proposers.options import TreeOptions
from inference.proposers.sequential import SequentialProposer


def mtp_proposer(drafter: MtpDrafter, options: TreeOptions | None = None) -> HeadProposer:
    """One module is applied recursively; separate ones have keys and values of their own."""
    if drafter.config.num_modules == 1:
        return SequentialProposer(drafter, options)
    return MtpProposer(drafter, options)


PROPOSERS: dict[str, Callable[..., HeadProposer]] = {
    "medusa": MedusaProposer,
    "hydra": SequentialProposer,
    "eagle1": SequentialProposer,
    "eagle3": SequentialProposer,
    "mtp": mtp_proposer,
    "peagle": PEagleProposer,
    "dflash": DFlashProposer,
    "dspark": DSparkProposer,
}


def build_proposer(drafter: Drafter, options: TreeOptions | None = None) -> HeadProposer:
    """The proposer of a head's family.

    Args:
        drafter: attached head.
        options: of the tree; a head that drafts K tokens is asked for no more.
    """
    return PROPOSERS[drafter.family](drafter, options)
