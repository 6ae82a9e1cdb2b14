"""Prediction beside decode, and what a gap between them may come from.

Where the decoder must go through the replayed rounds, the rounds themselves are compared: a head
that is fed something else while decoding accepts less in round after round, and one look tells
whether this begins with the first round (what comes out of the prompt) or behind it (what commits
and the draft cache leave). Where it draws texts of its own, only averages can be compared, and the
interval of their gap decides. It is a 99 % interval: about one false alarm in a hundred cells.

Letters: m tokens that the rounds of a text emit, S survival as in `inference.prediction.rounds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inference.measuring.intervals import Estimate, Pair, gap, gap_by_t, ratio
from inference.prediction.predict import Prediction
from inference.prediction.text import Look

LEAST = 0.01
"""Of the acceptance length: a smaller gap is no gap where rounds are replayed."""
AGREE, SAME = 0.9, 0.98
"""Share of rounds as replayed: below the first something is wrong, above the second nothing is."""
MISFIT, ARGMAX = 4.0, 0.97
"""Standard errors, and share of argmax tokens at temperature 0, from which texts are in doubt."""
FEW, CUT = 5, 0.25
"""Requests, and share of rounds that the end of a text cuts, from which texts are too short."""


@dataclass(frozen=True)
class Decoded:
    """One text as it was decoded with drafts.

    Attributes:
        id: of the request, as in `Answer`.
        tokens: new tokens.
        emitted: of them, by round; the prefill's belongs to none.
        turn: of the conversation.
    """

    id: str
    tokens: list[int]
    emitted: list[int]
    turn: int = 0


@dataclass(frozen=True)
class Warned:
    """A likely cause.

    Attributes:
        cause: short name.
        message: what points to it, and what to do.
        weight: how strongly the evidence points to it, in [0, 1].
    """

    cause: str
    message: str
    weight: float


@dataclass(frozen=True)
class Agreement:
    """Decoded rounds beside replayed ones.

    Attributes:
        rounds: compared.
        same: emitted as many tokens as replayed.
        first: first rounds of texts.
        first_same: of these, emitted as many as replayed.
        less: emitted fewer.
    """

    rounds: int
    same: int
    first: int
    first_same: int
    less: int

    @property
    def share(self) -> float | None:
        """Of all rounds; None without any."""
        return self.same / self.rounds if self.rounds else None

    @property
    def first_share(self) -> float:
        """Of first rounds."""
        return self.first_same / self.first if self.first else 1.0

    @property
    def later_share(self) -> float:
        """Of the others."""
        later = self.rounds - self.first
        return (self.same - self.first_same) / later if later else 1.0


def compare(
    prediction: Prediction, decoded: Sequence[Decoded], identical: bool | None = None
) -> dict[str, Any]:
    """Set a decode beside its prediction, which keeps the result as ``comparison``.

    Args:
        prediction: of the same requests.
        decoded: their texts; those that were not predicted are left out.
        identical: whether the output is plain decoding's but for near ties; None if unknown.

    Returns:
        "tau": interval of the measured acceptance length. "gap": interval of measured less
        predicted, over the same requests (of those with the same text, where rounds are replayed).
        "alarm": the same at 99 %; a gap that it keeps from zero raises a warning where rounds are
        drawn. "within": whether nothing is wrong with the gap. "rounds_agree": share of rounds as
        replayed, None where rounds are drawn. "texts_differ": requests with another text than
        predicted from, 0 where texts are drawn. "warnings": {"cause", "message"}, the likeliest
        first.

    Raises:
        ValueError: the decode is of other requests.
    """
    matched = _matched(prediction, decoded)
    exact = prediction.setting.exact
    differ = [exact and one.tokens != look.answer.tokens for look, one in matched]
    alike = [both for both, other in zip(matched, differ, strict=True) if not other]
    compared = alike if exact and alike else matched
    predicted, measured = _pairs(prediction, compared)
    found = gap(measured, predicted)
    agreement = agreement_of(alike) if exact else None
    wide = gap_by_t(measured, predicted)
    within = _within(wide, predicted, agreement)
    warned = _causes(prediction, found, within, agreement, identical, sum(differ) / len(matched))
    record = {
        "tau": ratio(*_pairs(prediction, matched)[1]).to_dict(),
        "gap": found.to_dict(),
        "alarm": wide.to_dict(),
        "within": within,
        "rounds_agree": None if agreement is None else agreement.share,
        "texts_differ": sum(differ),
        "warnings": [{"cause": one.cause, "message": one.message} for one in warned],
    }
    prediction.comparison = record
    return record


def warnings_of(
    prediction: Prediction, decoded: Sequence[Decoded], identical: bool | None = None
) -> list[str]:
    """What may be wrong, the likeliest first; empty if nothing seems to be.

    Args:
        prediction: of the same requests.
        decoded: their texts.
        identical: as for `compare`.
    """
    return [one["message"] for one in compare(prediction, decoded, identical)["warnings"]]


def agreement_of(matched: Sequence[tuple[Look, Decoded]]) -> Agreement:
    """Compare rounds one by one, each with what is replayed at the position where it started.

    Args:
        matched: texts that are the same.
    """
    rounds = same = first = first_same = less = 0
    for look, one in matched:
        place, m = 0, len(look.survival)
        for number, emitted in enumerate(one.emitted):
            expected = min(round(sum(look.survival[place])) + 1, m - place)
            rounds += 1
            same += emitted == expected
            less += emitted < expected
            first += number == 0
            first_same += number == 0 and emitted == expected
            place += emitted
    return Agreement(rounds, same, first, first_same, less)


def _matched(prediction: Prediction, decoded: Sequence[Decoded]) -> list[tuple[Look, Decoded]]:
    known = {(one.id, one.turn): one for one in decoded}
    if len(known) < len(decoded):
        raise ValueError("decoded: two texts of the same id and turn: give each request its own id")
    looks = {(look.answer.id, look.answer.turn): look for look in prediction.looks}
    found = [
        (look, known[key]) for key, look in looks.items() if key in known and known[key].emitted
    ]
    if not found:
        raise ValueError("decoded: none of these requests was predicted: compare the same prompts")
    return found


def _pairs(prediction: Prediction, matched: Sequence[tuple[Look, Decoded]]) -> tuple[Pair, Pair]:
    """Tokens and rounds by request, predicted and measured."""
    rounds = {
        (look.answer.id, look.answer.turn): one.rounds
        for look, one in zip(prediction.looks, prediction.walks, strict=True)
    }
    sums: dict[str, list[float]] = {}
    for look, one in matched:
        row = sums.setdefault(one.id, [0.0] * 4)
        own = (
            float(len(look.survival)),
            rounds[one.id, one.turn],
            float(sum(one.emitted)),
            float(len(one.emitted)),
        )
        for place, value in enumerate(own):
            row[place] += value
    columns = [list(column) for column in zip(*sums.values(), strict=True)]
    return (columns[0], columns[1]), (columns[2], columns[3])


def _within(found: Estimate, predicted: Pair, agreement: Agreement | None) -> bool:
    if agreement is None:
        return found.holds(0.0)
    if agreement.share is not None and agreement.share < AGREE:
        return False
    return abs(found.value) <= LEAST * ratio(*predicted).value or found.holds(0.0)


def _causes(
    prediction: Prediction,
    found: Estimate,
    within: bool,
    agreement: Agreement | None,
    identical: bool | None,
    differ: float,
) -> list[Warned]:
    """The likeliest first; what makes the prediction itself void is said without a gap, too."""
    causes = [*_void(prediction, identical)]
    if not within:
        if agreement is None:
            causes += _drawn(prediction, found)
        else:
            causes += _replayed(agreement, found, differ)
        causes += _short(prediction)
    return sorted(causes, key=lambda one: -one.weight)


def _void(prediction: Prediction, identical: bool | None) -> list[Warned]:
    causes = []
    if identical is False:
        message = (
            "the decoded texts are not plain decoding's: verification, cache or engine is wrong, "
            "and no acceptance length means anything; run scripts.verify_lossless first"
        )
        causes.append(Warned("output", message, 1.0))
    text = prediction.text()
    z, share = text["z"], text["argmax_share"]
    assert share is not None
    temperature = prediction.setting.temperature
    if temperature == 0 and share < ARGMAX:
        off = f"only {share:.0%} of their tokens are its likeliest"
    elif z is not None and abs(z) > MISFIT:
        off = f"-log p of their tokens is {z:+.1f} standard errors from what draws would give"
    else:
        return causes
    message = (
        f"the texts predicted from are not this target's at temperature {temperature:g}: {off}; "
        "another temperature, chat template, tokenizer or model made them"
    )
    return [*causes, Warned("texts", message, 0.95)]


def _replayed(agreement: Agreement, found: Estimate, differ: float) -> list[Warned]:
    """Rounds that had to go as replayed did not."""
    share = agreement.share
    rounds = "no round could be compared" if share is None else f"{share:.0%} of rounds as replayed"
    causes = []
    if share is not None and share < SAME:
        wrong = agreement.rounds - agreement.same
        fewer = agreement.less / wrong if wrong else 0.0
        if agreement.first_share >= AGREE:
            message = (
                f"{rounds}, but {agreement.first_share:.0%} of first rounds: what the head is fed "
                "behind a commit differs from the text's (hidden states of accepted tokens, its "
                "draft cache, positions); run scripts.diagnose (parity)"
            )
            causes.append(Warned("parity behind commits", message, 0.9))
        else:
            message = (
                f"{rounds}, first rounds included: while decoding the head is fed other hidden "
                "states than the text's (pairing of states and tokens, layer ids, norm); run "
                "scripts.diagnose (parity, pairing)"
            )
            causes.append(Warned("parity", message, 0.9))
        if share >= AGREE and 0.25 <= fewer <= 0.75:
            message = f"{rounds}, with errors both ways: rounding of a low precision"
            causes.append(Warned("rounding", message, 0.92))
    if differ > 0.2:
        message = (
            f"{differ:.0%} of the texts are other ones than predicted from: near ties of a low "
            "precision, another seed, or other prompts"
        )
        causes.append(Warned("other texts", message, 0.97 if share is None else 0.5))
    if not causes:
        message = (
            f"{rounds}, yet the lengths differ by {found.value:+.3f}: rounds that few texts decide"
        )
        causes.append(Warned("few rounds", message, 0.3))
    return causes


def _drawn(prediction: Prediction, found: Estimate) -> list[Warned]:
    """Averages of drawn texts are further apart than chance allows."""
    drafted = prediction.setting.proposal in ("dense", "mixed")
    less = found.value < 0
    how = f"decoding gives {abs(found.value):.2f} tokens per round {'less' if less else 'more'}"
    causes = []
    if drafted:
        message = (
            f"{how}: the law that drafts are drawn from, or judged by, is not the one stated "
            "(temperature, warpers, draft temperature, draft vocabulary, shared coins)"
        )
        causes.append(Warned("sampler", message, 0.8 if less else 0.9))
    message = (
        f"{how}: the head is fed other hidden states while decoding; evaluate at temperature 0, "
        "where rounds are replayed one by one, and run scripts.diagnose (parity)"
    )
    causes.append(Warned("parity", message, 0.7 if drafted else 0.85))
    message = (
        f"{how}: the decoded texts are of another kind than those predicted from (other prompts, "
        "chat template or seeds)"
    )
    causes.append(Warned("other texts", message, 0.5))
    return causes


def _short(prediction: Prediction) -> list[Warned]:
    requests = len(prediction.requests)
    cut, rounds = 0.0, 0.0
    for one in prediction.walks:
        m = one.tokens
        rounds += one.rounds
        cut += sum(one.visits[max(m - prediction.setting.depth, 0) :])
    if requests >= FEW and cut <= CUT * rounds:
        return []
    message = (
        f"texts too short: {requests} requests, {cut / rounds:.0%} of rounds start so near the end "
        "of a text that it cuts their drafts; decode more and longer texts"
    )
    return [Warned("short texts", message, 0.6 if requests < FEW else 0.4)]
