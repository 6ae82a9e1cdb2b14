"""One fault that a head may have, stated as a reading of the head that would undo it."""

from dataclasses import dataclass

from drafters import Drafter
from recipes.diagnosis import variants
from recipes.diagnosis.evidence import View
from recipes.diagnosis.variants import Change


@dataclass(frozen=True)
class Hypothesis:
    """One fault, and what would undo it.

    Attributes:
        check: a key of ``findings.CHECKS``.
        message: what is wrong if this is right.
        fix: what to do then.
        view: what the head should have been handed; None leaves it.
        change: of the head; None leaves it.
        depth: from which depth on it shows.
        alone: it shows at that depth alone.
        everywhere: it shows in every head: a reading that is worse in one of them is not it.
        leaks: the reading hands the head what it is to foretell, or what the target knows. A good
            head may profit from that too, so it must explain a bad one almost wholly.
        telling: of a leak, that no good head drafts its second token better with it.
        subtle: a likely fault that may cost little, for which a sure gain is enough.
    """

    check: str
    message: str
    fix: str
    view: View | None = None
    change: Change | None = None
    depth: int = 0
    alone: bool = False
    everywhere: bool = False
    leaks: bool = False
    telling: bool = False
    subtle: bool = False


def reading(head: Drafter, view: View, hypothesis: Hypothesis) -> tuple[Drafter, View] | None:
    """The head and the view under a hypothesis; None where it changes nothing."""
    other = head if hypothesis.change is None else variants.changed(head, hypothesis.change)
    if other is None:
        return None
    return other, view if hypothesis.view is None else hypothesis.view
