"""The diagnosis: static checks, then hypotheses on text, the best one first.

While some reading of the head beats the present one by a wide margin, the best is taken as a fault
and the search goes on from there, so that two faults in one head are both found.

Legend: n places.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from drafters import Drafter, TargetModel
from recipes.diagnosis.evidence import Evidence, Score, View, gain, wins
from recipes.diagnosis.files import LoadedHead
from recipes.diagnosis.findings import FAULT, Finding, fault, fine, in_order, unknown
from recipes.diagnosis.hypotheses import Hypothesis, hypotheses, reading
from recipes.diagnosis.static import (
    Serving,
    check_rope,
    check_sampler,
    check_target,
    check_tensors,
)
from recipes.parity import ParityError, check_parity
from training.data.chat import TokenizedRow
from training.objectives import ObjectiveOptions, build_objective

MAX_FAULTS = 3
NEARLY = 0.9
"""A hypothesis explains a head as well as the best one with this part of its gain."""
EXPLAINED = 0.25
"""A leak explains a head that has at most this part of the skill it has with the leak."""
PROMPT_SKILL, PROMPT_Z = 0.1, 4.0
"""How much more skill on prompts than on answers, and at how many standard errors, says that the
mask was wrong."""
COVERAGE = 0.6
"""Share of the target's tokens that a draft vocabulary should cover."""

_ENOUGH = ("fingerprint", "tensors", "dtype", "vocabulary")
"""Faults that explain a head that drafts nothing, without a word about its training."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        findings: in the order of ``CHECKS``.
        overlap: mean overlap by depth as the head is, empty where it was not measured.
        agreement: share of drafts whose best token is the target's, by depth.
        constant: overlap of the best single law.
        positions: places measured at depth 0.
        readings: hypotheses tried.
        fixed: mean overlap at depth 0 with what was found undone.
    """

    findings: list[Finding]
    overlap: list[float]
    agreement: list[float]
    constant: float
    positions: int
    readings: int
    fixed: float

    @property
    def faults(self) -> list[Finding]:
        """Those that need mending."""
        return [finding for finding in self.findings if finding.verdict == FAULT]


def diagnose(
    loaded: LoadedHead,
    target: TargetModel,
    evidence: Evidence,
    serving: Serving | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Find out what is wrong with a head.

    Args:
        loaded: from :func:`~recipes.diagnosis.files.load_head`.
        target: that it is to be used with.
        evidence: text of that target.
        serving: how it is to be used, for the sampler check.
        progress: told what is being done.
    """
    say = progress or (lambda text: None)
    longest = max(len(seen.document.ids) for seen in evidence.seen)
    findings = [*loaded.findings, *check_target(loaded, target), *check_tensors(loaded)]
    findings += check_rope(loaded, target, longest)
    findings += check_sampler(loaded, serving or Serving())
    if not all(bool(weight.isfinite().all()) for weight in loaded.head.parameters()):
        findings += [
            unknown(name, "not measured: the head is not finite") for name in ("parity", "trained")
        ]
        return Diagnosis(in_order(_completed(findings, False)), [], [], 0.0, 0, 0, 0.0)
    say("parity of the training and the decode pass")
    findings.append(check_passes(loaded.head, target, evidence))
    search = Search(loaded.head, View(loaded.layers), evidence, say)
    findings += search.run()
    findings += check_coverage(search.head, evidence)
    explained = any(found.verdict == FAULT and found.check in _ENOUGH for found in findings)
    findings += check_learned(search, evidence, explained)
    scores = search.first
    return Diagnosis(
        in_order(_completed(findings, True)),
        [score.mean for score in scores],
        [score.agree.double().mean().item() for score in scores],
        evidence.constant(),
        len(scores[0].overlap),
        search.tried,
        search.scores[0].mean,
    )


class Search:
    """Hypotheses, tried one after the other.

    Attributes:
        head, view: the reading so far, with the faults found undone.
        first: agreement by depth of the head as it is.
        scores: of the reading so far.
        found: what was wrong.
        tried: readings measured.
    """

    def __init__(self, head: Drafter, view: View, evidence: Evidence, say: Progress) -> None:
        self.head, self.view, self.evidence, self.say = head, view, evidence, say
        self.first = self.scores = evidence.measure(head, view)
        self.found: list[Finding] = []
        self.tried = 0
        self.constant = evidence.constant()

    def run(self) -> list[Finding]:
        """Find faults until no hypothesis wins, or one that only explains."""
        while len(self.found) < MAX_FAULTS and (best := self._best()):
            hypothesis, scores, (head, view) = best
            depth = hypothesis.depth
            raised, z = gain(scores[depth], self.scores[depth])
            self.found.append(
                fault(
                    hypothesis.check,
                    hypothesis.message,
                    hypothesis.fix,
                    overlap=self.scores[depth].mean,
                    overlap_undone=self.scores[depth].mean + raised,
                    standard_errors=z,
                )
            )
            self.head, self.view, self.scores = head, view, self.evidence.measure(head, view)
            if hypothesis.leaks:  # the head is not as it was in training: nothing more to learn
                break
        return self.found

    def _best(self) -> tuple[Hypothesis, list[Score], tuple[Drafter, View]] | None:
        won = []
        for hypothesis in hypotheses(self.head, self.view):
            other = reading(self.head, self.view, hypothesis)
            if other is None:
                continue
            self.say(f"{hypothesis.check}: {hypothesis.message}")
            scores = self.evidence.measure(*other, depths=hypothesis.depth + 1)
            self.tried += 1
            pair = (scores[hypothesis.depth], self.scores[hypothesis.depth])
            if wins(*pair, hypothesis.subtle) and self._explains(hypothesis, pair):
                won.append((gain(*pair)[0], hypothesis, scores, other))
        if not won:
            return None
        most = max(raised for raised, *_ in won)
        return next((h, s, o) for raised, h, s, o in won if raised >= NEARLY * most)

    def _explains(self, hypothesis: Hypothesis, pair: tuple[Score, Score]) -> bool:
        better, base = (score.mean - self.constant for score in pair)
        return better > 0 and (not hypothesis.leaks or base <= EXPLAINED * better)


def check_passes(head: Drafter, target: TargetModel, evidence: Evidence) -> Finding:
    """The project's own parity check on the longest document."""
    longest = max((seen.document.ids for seen in evidence.seen), key=len)
    objective = build_objective(head, ObjectiveOptions())
    if len(longest) < objective.depths + 6:
        return unknown("parity", f"the longest text has only {len(longest)} tokens")
    try:
        report = check_parity(target, objective, TokenizedRow(longest, [True] * len(longest)))
    except ParityError as error:
        fix = "decoding computes something else than training: report it with this head's config"
        return fault("parity", str(error), fix)
    return fine("parity", error=report.error, positions=report.positions)


def check_coverage(head: Drafter, evidence: Evidence) -> list[Finding]:
    """Whether the draft vocabulary has what the target says here."""
    vocab = head.draft_vocab
    if vocab is None:
        return []
    if int(vocab.min()) < 0 or int(vocab.max()) >= evidence.target.vocab_size:
        return [
            fault("vocabulary", "draft_vocab leads out of the target's vocabulary", "export again")
        ]
    if vocab.unique().numel() < vocab.numel():
        return [fault("vocabulary", "draft_vocab has a token twice", "export again")]
    laws = torch.cat([seen.law[evidence.roots(seen, "answer")] for seen in evidence.seen])
    inside = torch.isin(laws.argmax(-1), vocab).double().mean().item()
    mass = laws[:, vocab].sum(-1).double().mean().item()
    if inside < COVERAGE:
        return [
            fault(
                "vocabulary",
                "the draft vocabulary lacks what the target says on this text",
                "choose it from counts of answers like these (draft_vocab_coverage), or serve "
                "prompts like those of training",
                covered=inside,
                mass=mass,
            )
        ]
    return [fine("vocabulary", covered=inside, mass=mass)]


def check_learned(search: Search, evidence: Evidence, explained: bool) -> list[Finding]:
    """Whether the head, with its faults undone, drafts better than one law for all places, and
    where it learned that. ``explained``: by a fault that is known already.
    """
    score, constant = search.scores[0], search.constant
    error = score.overlap.double().std().item() / math.sqrt(len(score.overlap))
    numbers: dict[str, Any] = {"overlap": score.mean, "one law for all": constant}
    found = []
    untrained = score.mean < constant + 3 * error
    prompts = evidence.measure(search.head, search.view, "prompt")
    if not prompts or len(prompts[0].overlap) < 20:
        found.append(unknown("mask", "too little text of prompts to tell"))
    else:
        found.append(_compare_parts(score, prompts[0], constant, evidence.constant("prompt")))
    if untrained and (explained or found[0].verdict == FAULT):
        found.append(unknown("trained", "the faults above explain what it drafts", **numbers))
    elif untrained:
        found.append(
            fault(
                "trained",
                "no better than one and the same law everywhere, and nothing tried undoes it",
                "untrained, trained for another target, or with two faults at once",
                **numbers,
            )
        )
    else:
        found.append(fine("trained", **numbers))
    return found


def _compare_parts(answer: Score, prompt: Score, floor: float, prompt_floor: float) -> Finding:
    """Skill is the way from the constant law to certainty."""
    skill = (answer.mean - floor) / (1 - floor)
    other = (prompt.mean - prompt_floor) / (1 - prompt_floor)
    variance = answer.overlap.double().var().item() / len(answer.overlap)
    variance += prompt.overlap.double().var().item() / len(prompt.overlap)
    z = (other - skill) / max(math.sqrt(variance), 1e-9)
    numbers: dict[str, Any] = {"skill on answers": skill, "skill on prompts": other}
    if other - skill >= PROMPT_SKILL and z >= PROMPT_Z:
        return fault(
            "mask",
            "it drafts prompts better than answers: prompts were supervised, answers were not",
            "look at the masks (scripts.inspect_mask) and train again",
            **numbers,
        )
    return fine("mask", **numbers)


def _completed(findings: list[Finding], measured: bool) -> list[Finding]:
    """With an "ok", or where nothing was measured an "unknown", for checks that said nothing."""
    said = {finding.check for finding in findings}
    static = {"tensors", "transposed", "dtype"}
    rest = (
        "tensors",
        "transposed",
        "dtype",
        "vocabulary",
        "layer ids",
        "concat",
        "norm",
        "heads",
        "mask token",
        "pairing",
        "mask",
    )
    silent = [name for name in rest if name not in said]
    return [
        *findings,
        *(fine(n) if measured or n in static else unknown(n, "not measured") for n in silent),
    ]
