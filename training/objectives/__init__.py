"""The loss of each family. A new family adds one line to ``OBJECTIVES``."""

from drafters import Drafter
from training.objectives.base import AlignedObjective, Drafts, Objective
from training.objectives.block import BlockObjective, ParallelObjective
from training.objectives.independent import MedusaObjective
from training.objectives.options import ObjectiveOptions
from training.objectives.sequential import StepAttention, UnrolledObjective

OBJECTIVES: dict[str, type[Objective]] = {
    "medusa": MedusaObjective,
    "hydra": UnrolledObjective,
    "eagle1": UnrolledObjective,
    "eagle3": UnrolledObjective,
    "mtp": UnrolledObjective,
    "peagle": ParallelObjective,
    "dflash": BlockObjective,
    "dspark": BlockObjective,
}


def build_objective(drafter: Drafter, options: ObjectiveOptions) -> Objective:
    """The objective of a head's family.

    Raises:
        ValueError: an option that has no effect on it.
    """
    return OBJECTIVES[drafter.family](drafter, options)


__all__ = [
    "OBJECTIVES",
    "AlignedObjective",
    "BlockObjective",
    "Drafts",
    "Objective",
    "ObjectiveOptions",
    "ParallelObjective",
    "StepAttention",
    "UnrolledObjective",
    "build_objective",
]
