"""The search for faults: hypotheses on text, the best one first.

While some reading of the head beats the present one by a wide margin, the best is taken as a fault
and the search goes on from there, so that two faults in one head are both found.
"""

from collections.abc import Callable
from dataclasses import dataclass

from drafters import Drafter
from recipes.diagnosis.evidence import STEPS, Evidence, Score, View, gain, hopeless, pooled, wins
from recipes.diagnosis.findings import Finding, fault, unknown
from recipes.diagnosis.hypotheses import hypotheses
from recipes.diagnosis.hypothetical import Hypothesis, reading

MAX_FAULTS = 3
NEARLY, WORSE_Z = 0.9, 3.0
"""A hypothesis explains a head as well as the best one with this part of its gain, unless it is so
many standard errors worse."""
DEPTHS = 3
"""Depths of a block that are looked at together: what is wrong with a block shows in all of it."""
EXPLAINED, NOTHING_Z = 0.1, 3.0
"""A leak explains a head that has at most this part of the skill it has with the leak, or none that
is sure: a head that starts by repeating the row it is given has much of the former while it is
little trained."""
COPIED = 0.8
"""Skill of a copy of what was leaked. Several heads that each start by repeating the row they are
given have it too before they are trained; of heads that were trained with the leak the second one
then drafts better as well."""
LEANS, FURTHER = 1.6, 3.0
"""With so many times its skill a head leans on a leak: one that was trained with it, or one that
has learnt little. A subtle fault is not named beside a leak that adds so many times as much."""
LITTLE = 0.12
"""Skill below which a head is called weak. Readings of such a head are not worth small gains: it is
near its start still, and likes what its start would have liked."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Explanation:
    """A hypothesis that raises the agreement.

    Attributes:
        hypothesis: which.
        head, view: the reading.
        better, base: agreement with it and without, over the depths at which it shows.
        whole, raised: agreement with it over the depths that all hypotheses are compared at, and
            the overlap that it adds there.
    """

    hypothesis: Hypothesis
    head: Drafter
    view: View
    better: Score
    base: Score
    whole: Score
    raised: float


class Search:
    """Hypotheses, tried one after the other.

    Attributes:
        head, view: the reading so far, with the faults found undone.
        first: agreement by depth of the head as it is.
        scores: of the reading so far.
        found: what was wrong.
        leaning: on a leak that does not explain it for sure.
        tried: readings measured.
    """

    def __init__(self, head: Drafter, view: View, evidence: Evidence, say: Progress) -> None:
        self.head, self.view, self.evidence, self.say = head, view, evidence, say
        self.first = self.scores = evidence.measure(head, view)
        self.found: list[Finding] = []
        self.leaning: Explanation | None = None
        self.tried = 0
        self.constant = evidence.constant()

    def go_on(self, head: Drafter, view: View) -> None:
        """Search from another reading of the head."""
        if head is not self.head or view != self.view:
            self.head, self.view, self.scores = head, view, self.evidence.measure(head, view)

    def run(self) -> list[Finding]:
        """Find faults until no hypothesis wins, or one that only explains."""
        while len(self.found) < MAX_FAULTS and (best := self._best()):
            hypothesis = best.hypothesis
            raised, z = gain(best.better, best.base)
            self.found.append(
                fault(
                    hypothesis.check,
                    hypothesis.message,
                    hypothesis.fix,
                    overlap=best.base.mean,
                    overlap_undone=best.base.mean + raised,
                    standard_errors=z,
                )
            )
            self.go_on(best.head, best.view)
            if hypothesis.leaks:  # the head is not as it was in training: nothing more to learn
                break
        return self.found + self._suspicion()

    def _suspicion(self) -> list[Finding]:
        """A pairing that may be wrong."""
        lean = self.leaning
        if lean is None or any(finding.check == lean.hypothesis.check for finding in self.found):
            return []
        message = (
            f"{lean.hypothesis.message}? So read it drafts far better: it was trained so, or it "
            "has learnt little, as heads start near the row that they are given"
        )
        numbers = {"overlap": lean.base.mean, "overlap so read": lean.better.mean}
        return [unknown(lean.hypothesis.check, message, **numbers)]

    def _best(self) -> Explanation | None:
        """The first of those that explain the head about as well as the best one."""
        won: list[Explanation] = []
        few, self.leaning = self.evidence.beginning(), None
        first = few.measure(self.head, self.view)
        for hypothesis in hypotheses(self.head, self.view):
            other = reading(self.head, self.view, hypothesis)
            if other is None or hypothesis.depth >= min(len(first), other[0].num_drafts or STEPS):
                continue
            self.say(f"{hypothesis.check}: {hypothesis.message}")
            self.tried += 1
            depths = None if hypothesis.everywhere else hypothesis.depth + self._depths
            if hypothesis.leaks and depths is not None:
                depths = max(depths, 2)
            look = few.measure(*other, depths=depths)
            if hopeless(*self._pair(hypothesis, look, first), hypothesis.subtle):
                continue
            scores = self.evidence.measure(*other, depths=depths)
            pair = self._pair(hypothesis, scores, self.scores)
            found = Explanation(hypothesis, *other, *pair, *self._compared(scores, pair))
            subtle = hypothesis.subtle and self.skill(scores[0]) >= LITTLE
            if not wins(found.better, found.base, subtle):
                continue
            if self._explains(found, scores):
                won.append(found)
            elif hypothesis.leaks and self._leans(found):
                self.leaning = max(found, self.leaning or found, key=lambda each: each.raised)
        won = [found for found in won if self._stands(found)]
        if not won:
            return None
        best = max(won, key=lambda each: each.raised)
        good = (one for one in won if one.raised >= NEARLY * best.raised)
        return next(one for one in good if gain(best.whole, one.whole)[1] < WORSE_Z)

    def _compared(self, scores: list[Score], pair: tuple[Score, Score]) -> tuple[Score, float]:
        """``whole`` and ``raised`` of a reading: a block's first depths, or else its ``pair``."""
        end = min(self._depths, len(scores), len(self.scores))
        if end > 1:
            pair = pooled(scores[:end]), pooled(self.scores[:end])
        return pair[0], gain(*pair)[0]

    @property
    def _depths(self) -> int:
        return DEPTHS if self.head.shape == "block" else 1

    def _pair(
        self, hypothesis: Hypothesis, better: list[Score], base: list[Score]
    ) -> tuple[Score, Score]:
        """Both over the depths at which a fault shows, as far as both have them."""
        depths = 1 if hypothesis.alone else self._depths
        end = min(hypothesis.depth + depths, len(better), len(base))
        return pooled(better[hypothesis.depth : end]), pooled(base[hypothesis.depth : end])

    def _explains(self, found: Explanation, scores: list[Score]) -> bool:
        """Whether a gain is that of a fault undone, and not what a good head has too."""
        hypothesis = found.hypothesis
        above, below = self._beyond_constant(found)
        if above <= 0:
            return False
        if hypothesis.everywhere and any(
            gain(other, own)[1] <= -WORSE_Z for other, own in zip(scores, self.scores, strict=False)
        ):
            return False
        if not hypothesis.leaks:
            return True
        behind = len(scores) > 1 and len(self.scores) > 1 and wins(scores[1], self.scores[1])
        if hypothesis.everywhere:
            return behind and self.skill(found.better) >= COPIED
        if hypothesis.telling and behind and above >= LEANS * below:
            return True
        return below <= max(EXPLAINED * above, NOTHING_Z * found.base.error)

    def _leans(self, found: Explanation) -> bool:
        above, below = self._beyond_constant(found)
        return above >= LEANS * below

    def _beyond_constant(self, found: Explanation) -> tuple[float, float]:
        """Overlap beyond one law for all places, with the hypothesis and without."""
        return found.better.mean - self.constant, found.base.mean - self.constant

    def _stands(self, found: Explanation) -> bool:
        """Whether a fault is to be named beside the leak that the head leans on."""
        if self.leaning is None or wins(found.better, found.base):
            return True
        return self.leaning.raised < FURTHER * found.raised

    def skill(self, score: Score) -> float:
        """The way from one law for all places to certainty, and how much of it a score has gone."""
        return (score.mean - self.constant) / (1 - self.constant)
