"""Which cause is named first, by the evidence."""

import pytest

from inference.prediction.alarms import Agreement, Decoded, agreement_of, compare, warnings_of
from inference.prediction.predict import Prediction, Setting
from inference.prediction.text import Answer, Look
from inference.sampling import SamplingParams

M = 30


def predicted(
    rule: str = "match", temperature: float = 0.0, proposal: str = "one_hot", count: int = 8
) -> Prediction:
    """Texts of which every other position accepts one draft."""
    looks = []
    for number in range(count):
        survival = [[float(place % 3 != 2)] for place in range(M)]
        looks.append(
            Look(
                Answer([1], [2] * (M + 1), 99, SamplingParams(temperature), str(number)),
                survival=survival,
                depths=[1.0] * M,
                rows=[2.0] * M,
                chains=survival,
                alone=survival,
                ranks=[[0]] * M,
                measures={name: survival for name in ("overlap", "p_of_draft", "agreement")},
                surprise=30.0,
                entropy=30.0,
                variance=10.0,
                best=M,
            )
        )
    setting = Setting("eagle3", rule, temperature, proposal, "chain", 2, 1, 1, False)
    return Prediction(setting, looks)


def rounds_of(pattern: list[int]) -> list[int]:
    """Rounds of a text of M tokens that repeat a pattern."""
    found: list[int] = []
    while sum(found) < M:
        found.append(min(pattern[len(found) % len(pattern)], M - sum(found)))
    return found


REPLAYED = rounds_of([2, 1])
"""Starts at 0 and accepts, at 2 and does not, at 3 and accepts, ..."""


def decode(pattern: list[int], count: int = 8, token: int = 2) -> list[Decoded]:
    return [Decoded(str(n), [token] * (M + 1), rounds_of(pattern)) for n in range(count)]


def causes(
    prediction: Prediction, texts: list[Decoded], identical: bool | None = None
) -> list[str]:
    return [one["cause"] for one in compare(prediction, texts, identical)["warnings"]]


def test_rounds_as_replayed_raise_nothing() -> None:
    prediction = predicted()
    found = compare(prediction, decode([2, 1]), True)
    assert found["within"] and found["warnings"] == [] and found["rounds_agree"] == 1.0
    assert found["gap"]["value"] == 0.0 and prediction.comparison is found
    assert prediction.point.measured == pytest.approx(1.5)
    assert warnings_of(prediction, decode([2, 1])) == []


def test_a_fault_from_the_first_round_on() -> None:
    found = causes(predicted(), decode([1]), True)
    assert found[0] == "parity"


def test_a_fault_behind_commits() -> None:
    late = [Decoded(str(n), [2] * (M + 1), [2] + [1] * (M - 2)) for n in range(8)]
    assert causes(predicted(), late, True)[0] == "parity behind commits"


def test_errors_both_ways_are_rounding() -> None:
    mostly = Agreement(rounds=100, same=95, first=10, first_same=10, less=3)
    assert mostly.share == 0.95 and mostly.later_share == pytest.approx(85 / 90)
    texts = decode([2, 1])
    for one in texts[:4]:
        one.emitted[:2] = [1, 1]  # two rounds for what one accepts
        one.emitted.insert(1, 1)
    prediction = predicted()
    assert agreement_of(list(zip(prediction.looks, texts, strict=True))).share is not None


def test_a_changed_output_comes_first() -> None:
    assert causes(predicted(), decode([1]), False)[0] == "output"
    assert causes(predicted(), decode([2, 1]), False) == ["output"]


def test_texts_that_differ_are_named() -> None:
    found = compare(predicted(), decode([1], token=3))
    assert found["texts_differ"] == 8 and found["rounds_agree"] is None
    assert found["warnings"][0]["cause"] == "other texts"


def test_foreign_texts_are_named_without_a_gap() -> None:
    prediction = predicted()
    for look in prediction.looks:
        look.best = M // 2
    assert causes(prediction, decode([2, 1]), True) == ["texts"]
    sampled = predicted("rejection", 1.0, "dense")
    for look in sampled.looks:
        look.surprise = 60.0
    assert causes(sampled, decode([2, 1])) == ["texts"]


def test_drawn_drafts_point_to_the_sampler() -> None:
    found = causes(predicted("rejection", 1.0, "dense"), decode([1]))
    assert found[:2] == ["sampler", "parity"]
    assert causes(predicted("rejection", 1.0, "one_hot"), decode([1]))[0] == "parity"


def test_drawn_texts_may_differ_by_chance() -> None:
    texts = [
        Decoded(str(n), [2] * (M + 1), rounds_of([2, 1] if n % 2 else [1, 2, 2])) for n in range(8)
    ]
    found = compare(predicted("rejection", 1.0, "dense"), texts)
    assert found["rounds_agree"] is None and found["texts_differ"] == 0


def test_few_requests_are_mentioned() -> None:
    assert "short texts" in causes(predicted(count=3), decode([1], 3), True)


def test_requests_are_matched_by_name() -> None:
    texts = decode([2, 1])
    assert compare(predicted(), texts[::-1])["gap"]["value"] == 0.0
    with pytest.raises(ValueError, match="same id"):
        compare(predicted(), [texts[0], texts[0]])
