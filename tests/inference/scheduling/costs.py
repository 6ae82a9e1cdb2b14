"""Cost tables for tests."""

from collections.abc import Mapping

from inference.scheduling.costs import CostTable, MachineKey

KEY = MachineKey("cpu model", 1, "cpu", "2.13", "float32", "weights:1", "eager")


def cost_table(
    verify: Mapping[int, float],
    step: float = 0.0,
    depth: int = 8,
    rest: float = 0.0,
    slope: float = 0.0,
    name: str = "head",
) -> CostTable:
    """A table of batch 1 for one head that drafts step by step.

    Args:
        verify: rows -> seconds.
        step: seconds of a draft step.
        depth: longest drafts.
        rest: seconds of everything else.
        slope: share by which a context of 1000 tokens is dearer.
        name: of the head.
    """
    points = {
        (width, context, 1): seconds * (1.0 + slope * context / 1000)
        for width, seconds in verify.items()
        for context in (0, 8000)
    }
    drafts = {(name, deep, width, 1): step * deep for deep in (1, depth) for width in (1, 8)}
    return CostTable(KEY, points, drafts, {1: rest})
