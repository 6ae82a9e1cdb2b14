"""The diagnosis: the file, what was recorded with it, hypotheses on text, and what the head is
worth with its faults undone.

Legend: n places.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from drafters import Drafter, TargetModel
from drafters.config import default_feature_layers, spread_feature_layers
from recipes.diagnosis.evidence import Evidence, Score, View, training_pass
from recipes.diagnosis.files import LoadedHead
from recipes.diagnosis.findings import FAULT, Finding, fault, fine, in_order, unknown, weak
from recipes.diagnosis.recorded import check_altered, compare_recorded
from recipes.diagnosis.search import LITTLE, NOTHING_Z, Progress, Search
from recipes.diagnosis.static import (
    Serving,
    check_rope,
    check_sampler,
    check_target,
    check_tensors,
)
from recipes.parity import ParityError, check_parity
from training.data.chat import TokenizedRow

PROMPT_SKILL, PROMPT_Z = 0.1, 4.0
"""How much skill on prompts, and how much more than on answers, at how many standard errors, says
that the mask was wrong."""
KNOWS_GAIN, KNOWS_Z = 0.003, 5.0
"""How much better drafts fit their own place than another one, and at how many standard errors, in
a head that has learned something."""
FREQUENCIES = 0.8
"""Part of the overlap of the best single law that a head has at least, if it has learned how
frequent tokens are."""
COVERAGE = 0.6
"""Share of the target's tokens that a draft vocabulary should cover."""

_ENOUGH = ("fingerprint", "tensors", "dtype", "vocabulary")
"""Faults that explain a head that drafts nothing, without a word about its training."""


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
    compared = compare_recorded(loaded, findings)
    search = Search(loaded.head, View(loaded.layers), evidence, say)
    search.go_on(compared.head, compared.view)
    findings += compared.findings + search.run()
    findings += check_altered(compared, loaded, search.head)
    if not compared.fits and not any(found.check == "layer ids" for found in findings):
        findings += check_neighbours(search)
    findings += check_coverage(search.head, evidence)
    explained = any(found.verdict == FAULT and found.check in _ENOUGH for found in findings)
    findings += check_learned(search, evidence, explained)
    scores = search.first
    return Diagnosis(
        in_order(_completed(findings, True)),
        [score.mean for score in scores],
        [score.agree.nanmean().item() for score in scores],
        evidence.constant(),
        scores[0].places,
        search.tried,
        search.scores[0].mean,
    )


def check_passes(head: Drafter, target: TargetModel, evidence: Evidence) -> Finding:
    """The project's own parity check on the longest document."""
    longest = max((seen.document.ids for seen in evidence.seen), key=len)
    objective = training_pass(head)
    if len(longest) < objective.depths + 6:
        return unknown("parity", f"the longest text has only {len(longest)} tokens")
    try:
        report = check_parity(target, objective, TokenizedRow(longest, [True] * len(longest)))
    except ParityError as error:
        fix = "decoding computes something else than training: report it with this head's config"
        return fault("parity", str(error), fix)
    return fine("parity", error=report.error, positions=report.positions)


def check_neighbours(search: Search) -> list[Finding]:
    """Layers that are all one beside the usual ones: two conventions differ so, and neighbouring
    layers of a deep target are too much alike for text to tell.
    """
    layers, count = search.view.layers, search.head.target.num_layers
    usual = []
    if count >= 4 and len(layers) > 1:
        usual.append(spread_feature_layers(count, len(layers)))
    if len(layers) == 3:
        usual.append(default_feature_layers(count))
    for side, by in (("above", 1), ("below", -1)):
        moved = [layer - by for layer in layers]
        if moved in usual and list(layers) not in usual:
            other = replace(search.view, layers=tuple(moved))
            numbers = {
                "overlap": search.scores[0].mean,
                "overlap as usual": search.evidence.measure(search.head, other)[0].mean,
            }
            message = (
                f"each of {list(layers)} is one {side} the usual {moved}: taken from a file of the "
                "other convention? (SGLang's are one lower.) On this text it hardly matters"
            )
            return [unknown("layer ids", message, **numbers)]
    return []


def check_coverage(head: Drafter, evidence: Evidence) -> list[Finding]:
    """Whether the draft vocabulary has what the target says here."""
    vocab = head.draft_vocab
    if vocab is None:
        return []
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
    numbers: dict[str, Any] = {"overlap": score.mean, "one law for all": constant}
    found = []
    untrained = score.mean < constant + NOTHING_Z * score.error
    prompts = evidence.measure(search.head, search.view, "prompt")
    if not prompts or prompts[0].places < 20:
        found.append(unknown("mask", "too little text of prompts to tell"))
    else:
        found.append(_compare_parts(score, prompts[0], constant, evidence.constant("prompt")))
    found.append(_verdict(search, evidence, numbers, untrained, explained or _faulty(found)))
    return found


def _verdict(
    search: Search, evidence: Evidence, numbers: dict[str, Any], untrained: bool, explained: bool
) -> Finding:
    """What a head's drafts are worth, ``untrained`` ones being no better than one law for all."""
    if untrained and explained:
        return unknown("trained", "the faults above explain what it drafts", **numbers)
    if not untrained:
        if search.skill(search.scores[0]) >= LITTLE:
            return fine("trained", **numbers)
        return weak("trained", "little better than one and the same law everywhere", **numbers)
    more, z = evidence.knowledge(search.head, search.view)
    numbers |= {"own place over another": more}
    if more >= KNOWS_GAIN and z >= KNOWS_Z:
        return weak(
            "trained",
            "it knows its places apart, and yet is no better than one and the same law everywhere: "
            "little trained; what costs less than it knows cannot be seen",
            **numbers,
        )
    if search.scores[0].mean >= FREQUENCIES * search.constant:
        return weak(
            "trained",
            "it has learned how frequent tokens are and nothing of their places: hardly trained, "
            "or with more than one fault; whatever is wrong with it cannot be seen",
            **numbers,
        )
    return fault(
        "trained",
        "no better than one and the same law everywhere, and nothing tried undoes it",
        "untrained, trained for another target, or with two faults at once",
        **numbers,
    )


def _faulty(findings: list[Finding]) -> bool:
    return any(finding.verdict == FAULT for finding in findings)


def _compare_parts(answer: Score, prompt: Score, floor: float, prompt_floor: float) -> Finding:
    """Skill is the way from the constant law to certainty."""
    skill = (answer.mean - floor) / (1 - floor)
    other = (prompt.mean - prompt_floor) / (1 - prompt_floor)
    z = (other - skill) / max(math.hypot(answer.error, prompt.error), 1e-9)
    numbers: dict[str, Any] = {"skill on answers": skill, "skill on prompts": other}
    if min(other, other - skill) >= PROMPT_SKILL and z >= PROMPT_Z:
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
    static = {"config", "tensors", "transposed", "dtype"}
    rest = (
        "config",
        "tensors",
        "transposed",
        "dtype",
        "vocabulary",
        "embedding",
        "layer ids",
        "concat",
        "order",
        "norm",
        "heads",
        "window",
        "mask token",
        "block size",
        "causality",
        "anchor",
        "pairing",
        "mask",
    )
    silent = [name for name in rest if name not in said]
    return [
        *findings,
        *(fine(n) if measured or n in static else unknown(n, "not measured") for n in silent),
    ]
