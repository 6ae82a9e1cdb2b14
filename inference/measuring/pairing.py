"""Contenders that decoded the same questions, compared question by question.

Pure: torch and the standard library, over the records of `inference.measuring.run_records`. What is
resampled is the question with all its turns and rounds, in both contenders at once: what makes a
question easy is common to them and leaves the difference.

Letters: n questions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from torch import Tensor

from inference.measuring.intervals import Estimate, figure, gap, ratio
from inference.measuring.run_records import Run

SAME = 1e-9
"""Acceptance lengths closer than this are a tie."""


@dataclass(frozen=True)
class Question:
    """What one contender made of one question, all turns together.

    Attributes:
        category: of the question.
        prompt: tokens of the first turn's prompt.
        emitted: tokens of the rounds.
        accepted: draft tokens that were accepted.
        rounds: target forwards after the prefills.
        seconds: of decoding after the prefills.
        plain: tokens of plain decoding behind the prefills' own, and the seconds they took; None if
            that was not measured, or not alike.
        tokens: of every turn.
    """

    category: str
    prompt: int
    emitted: int
    accepted: int
    rounds: int
    seconds: float
    plain: tuple[int, float] | None
    tokens: tuple[tuple[int, ...], ...]

    @property
    def length(self) -> float:
        """Tokens per target forward, bonus included; 1 for a text without a round."""
        return self.emitted / self.rounds if self.rounds else 1.0


@dataclass(frozen=True)
class Contender:
    """One cell of one run.

    Attributes:
        name: shown.
        temperature: of the cell; only equal ones are compared.
        questions: by id.
    """

    name: str
    temperature: float
    questions: dict[str, Question]


def contender(run: Run, cell: int, name: str) -> Contender:
    """The questions of one cell.

    Args:
        run: as read.
        cell: index of the cell.
        name: to show.
    """
    fair = run.cells[cell]["speedup"] is not None
    found: dict[str, Question] = {}
    for request in sorted(run.requests_of(cell), key=lambda each: each.turn):
        rounds = run.rounds_of(request)
        plain = None
        if fair and request.plain_seconds is not None and request.plain_tokens is not None:
            plain = (request.plain_tokens - 1, request.plain_seconds["total"])
        new = Question(
            request.category,
            request.prompt_tokens,
            sum(len(each.emitted) for each in rounds),
            sum(each.accepted for each in rounds),
            len(rounds),
            request.seconds["total"],
            plain,
            (tuple(request.tokens),),
        )
        before = found.get(request.id)
        found[request.id] = new if before is None else _together(before, new)
    return Contender(name, float(run.cells[cell]["temperature"]), found)


def _together(first: Question, then: Question) -> Question:
    """Two turns of one question."""
    plain = None
    if first.plain is not None and then.plain is not None:
        plain = (first.plain[0] + then.plain[0], first.plain[1] + then.plain[1])
    return Question(
        first.category,
        first.prompt,
        first.emitted + then.emitted,
        first.accepted + then.accepted,
        first.rounds + then.rounds,
        first.seconds + then.seconds,
        plain,
        first.tokens + then.tokens,
    )


def common_questions(contenders: Sequence[Contender]) -> list[str]:
    """Ids that all of them decoded, with as many turns, in the order of the first.

    Raises:
        ValueError: there is none, or one of them had another prompt or category.
    """
    first = contenders[0]
    ids = [each for each in first.questions if all(each in c.questions for c in contenders)]
    for other in contenders[1:]:
        for name in ids:
            one, two = first.questions[name], other.questions[name]
            if (one.prompt, one.category) != (two.prompt, two.category):
                raise ValueError(
                    f"question {name!r} is {one.prompt} tokens of {one.category!r} in {first.name} "
                    f"but {two.prompt} of {two.category!r} in {other.name}: other prompts or "
                    "another chat template"
                )
    turns = {name: {len(c.questions[name].tokens) for c in contenders} for name in ids}
    ids = [name for name in ids if len(turns[name]) == 1]
    if not ids:
        raise ValueError(
            f"{', '.join(c.name for c in contenders)}: no question in common; evaluate them with "
            "the same --prompts and --turns"
        )
    return ids


@dataclass(frozen=True)
class Versus:
    """One contender against another on n questions.

    Attributes:
        name, baseline: who.
        questions: n.
        length: pooled acceptance length of the contender, bonus included, with its own interval.
        difference: of the pooled acceptance lengths, paired.
        wins, ties, losses: questions in which its acceptance length was larger, equal, smaller.
        speedup: tokens per second of decoding over those of plain decoding in the same run; None
            if not measured.
        speedup_difference: of the two speed-ups, paired; None if one was not measured.
        equal_texts: questions whose tokens are the same in both.
    """

    name: str
    baseline: str
    questions: int
    length: Estimate
    difference: Estimate
    wins: int
    ties: int
    losses: int
    speedup: Estimate | None
    speedup_difference: Estimate | None
    equal_texts: int


def versus(own: Contender, baseline: Contender, ids: Sequence[str]) -> Versus:
    """Compare two contenders.

    Args:
        own: the one asked about.
        baseline: it is compared with.
        ids: n questions that both decoded.
    """
    mine, theirs = _questions(own, ids), _questions(baseline, ids)
    gaps = [one.length - two.length for one, two in zip(mine, theirs, strict=True)]
    speeds = (_speeds(mine), _speeds(theirs))
    both_speeds = [*speeds[0], *speeds[1]] if speeds[0] and speeds[1] else None
    return Versus(
        own.name,
        baseline.name,
        len(ids),
        ratio(*_lengths(mine)),
        gap(_lengths(mine), _lengths(theirs)),
        sum(each > SAME for each in gaps),
        sum(abs(each) <= SAME for each in gaps),
        sum(each < -SAME for each in gaps),
        figure(speeds[0], _speedup) if speeds[0] else None,
        figure(both_speeds, lambda s: _speedup(s) - _speedup(s[:, 4:])) if both_speeds else None,
        sum(one.tokens == two.tokens for one, two in zip(mine, theirs, strict=True)),
    )


@dataclass(frozen=True)
class Winner:
    """Who is best in one category: nobody, "-", where no text has a round.

    Attributes:
        category: of the questions.
        questions: how many.
        name: of the contender with the largest pooled acceptance length.
        length: of it, bonus included.
        second: the next one.
        lead: of the winner over the second, paired.
        lengths: of all contenders, by name.
    """

    category: str
    questions: int
    name: str
    length: float
    second: str
    lead: Estimate
    lengths: dict[str, float]

    @property
    def clear(self) -> bool:
        """The interval of the lead leaves out zero."""
        return self.lead.low is not None and self.lead.low > 0


def winners(contenders: Sequence[Contender], ids: Sequence[str]) -> list[Winner]:
    """The best contender of every category, in the order of the questions.

    Args:
        contenders: two at least, with distinct names.
        ids: questions that all decoded.
    """
    groups: dict[str, list[str]] = {}
    for name in ids:
        groups.setdefault(contenders[0].questions[name].category, []).append(name)
    found = []
    for category, names in groups.items():
        lengths = {c.name: ratio(*_lengths(_questions(c, names))).value for c in contenders}
        ranked = sorted(lengths, key=lambda name: -lengths[name])
        who = {c.name: c for c in contenders}
        best, second = ranked[:2] if not any(map(math.isnan, lengths.values())) else ("-", "-")
        lead = Estimate(math.nan)
        if best != "-":
            lead = versus(who[best], who[second], names).difference
        length = lengths.get(best, math.nan)
        found.append(Winner(category, len(names), best, length, second, lead, lengths))
    return found


def ranking(contenders: Sequence[Contender], ids: Sequence[str]) -> list[tuple[str, float]]:
    """Share of its duels that each contender wins, over all questions and opponents; ties half.

    Args:
        contenders: two at least.
        ids: questions that all decoded.

    Returns:
        Names and shares in [0, 1], the best first.
    """
    points: dict[str, list[float]] = {each.name: [] for each in contenders}
    for one, two in combinations(contenders, 2):
        for name in ids:
            lead = one.questions[name].length - two.questions[name].length
            won = 0.5 if abs(lead) <= SAME else float(lead > 0)
            points[one.name].append(won)
            points[two.name].append(1.0 - won)
    return sorted(((name, fmean(won)) for name, won in points.items()), key=lambda each: -each[1])


def _questions(own: Contender, ids: Sequence[str]) -> list[Question]:
    return [own.questions[name] for name in ids]


def _lengths(questions: Sequence[Question]) -> tuple[list[float], list[float]]:
    """Emitted tokens and rounds."""
    return [float(q.emitted) for q in questions], [float(q.rounds) for q in questions]


def _speeds(questions: Sequence[Question]) -> list[list[float]] | None:
    """Tokens and seconds with drafts, and without; None if the latter were not measured."""
    plain = [q.plain for q in questions if q.plain is not None]
    if len(plain) < len(questions):
        return None
    fast = [[float(q.emitted) for q in questions], [q.seconds for q in questions]]
    return [*fast, [float(tokens) for tokens, _ in plain], [seconds for _, seconds in plain]]


def _speedup(sums: Tensor) -> Tensor:
    """Of sums of `_speeds`: texts with drafts may be longer or shorter than those without."""
    return sums[:, 0] / sums[:, 1] * sums[:, 3] / sums[:, 2]
