"""Paired comparison on records made by hand."""

import random
from dataclasses import replace

import pytest

from inference.measuring.pairing import (
    Contender,
    Question,
    common_questions,
    ranking,
    versus,
    winners,
)


def question(
    emitted: int,
    rounds: int = 10,
    category: str = "all",
    prompt: int = 7,
    plain: float | None = 2.0,
    turns: int = 1,
) -> Question:
    slow = None if plain is None else (emitted, plain)
    texts = ((1, 2),) * turns
    return Question(category, prompt, emitted, emitted - rounds, rounds, 1.0, slow, texts)


def made(name: str, *questions: Question) -> Contender:
    return Contender(name, 0.0, {f"q{n}": each for n, each in enumerate(questions)})


def test_counts_by_hand() -> None:
    one = made("one", question(20), question(30), question(10))
    two = made("two", question(10), question(30), question(20))
    found = versus(one, two, common_questions([one, two]))
    assert (found.wins, found.ties, found.losses) == (1, 1, 1)
    assert found.length.value == 2.0 and found.difference.value == 0.0
    assert found.speedup is not None and found.speedup.value == 2.0
    assert found.equal_texts == 3


def test_pooled_not_mean_of_means() -> None:
    """A long text counts more: 10/10 and 300/100 are 310/110, not the mean of 1 and 3."""
    own = made("own", question(10, 10), question(300, 100))
    flat = made("flat", question(10, 10), question(100, 100))
    found = versus(own, flat, ["q0", "q1"])
    assert found.length.value == pytest.approx(310 / 110)
    assert found.difference.value == pytest.approx(310 / 110 - 1.0)


def test_pairing_sees_what_unpaired_intervals_do_not() -> None:
    """Questions differ by far more than contenders do, and the lead of each is the same."""
    chance = random.Random(0)
    base = [chance.randint(20, 90) for _ in range(40)]
    one = made("one", *(question(b + 2) for b in base))
    two = made("two", *(question(b) for b in base))
    found = versus(one, two, common_questions([one, two]))
    assert found.difference.value == pytest.approx(0.2)
    assert found.difference.low is not None and found.difference.low > 0.19
    own = found.length
    assert own.low is not None and own.high is not None and own.high - own.low > 1.0


def test_no_plain_no_speedup() -> None:
    one, two = made("one", question(20, plain=None)), made("two", question(20))
    found = versus(one, two, ["q0"])
    assert found.speedup is None and found.speedup_difference is None
    assert versus(two, one, ["q0"]).speedup is not None


def test_speedups_are_of_tokens_per_second() -> None:
    """Drawn texts need not be as long as plain ones: 20 tokens in 1 s over 40 in 4 s are 2."""
    own = replace(question(20), plain=(40, 4.0))
    found = versus(made("own", own, own), made("two", question(20), question(20)), ["q0", "q1"])
    assert found.speedup is not None and found.speedup.value == pytest.approx(2.0)
    assert found.speedup_difference is not None
    assert found.speedup_difference.value == pytest.approx(0.0)
    assert found.speedup_difference.interval == pytest.approx([0.0, 0.0])


def test_questions_of_other_turns_are_left_out() -> None:
    one, two = made("one", question(20), question(20)), made("two", question(20, turns=2))
    with pytest.raises(ValueError, match="--turns"):
        common_questions([one, two])
    two = made("two", question(20, turns=2), question(20))
    assert common_questions([one, two]) == ["q1"]


def test_without_rounds_nobody_wins() -> None:
    one, two = made("one", question(0, 0)), made("two", question(0, 0))
    (found,) = winners([one, two], ["q0"])
    assert found.name == "-" and not found.clear


def test_winners_by_category() -> None:
    codes = [question(40 + n % 3, category="code") for n in range(12)]
    others = [question(20 + n % 3, category="code") for n in range(12)]
    talk = [question(20 + 9 * (n % 2), category="talk") for n in range(4)]
    chat = [question(29 - 9 * (n % 2), category="talk") for n in range(4)]
    one, two = made("one", *codes, *talk), made("two", *others, *chat)
    code, small = winners([one, two], common_questions([one, two]))
    assert (code.category, code.name, code.second, code.clear) == ("code", "one", "two", True)
    assert code.lengths == {"one": pytest.approx(4.1), "two": pytest.approx(2.1)}
    assert small.questions == 4 and not small.clear


def test_ranking_counts_ties_half() -> None:
    one, two = made("one", question(20), question(20)), made("two", question(20), question(10))
    assert ranking([two, one], ["q0", "q1"]) == [("one", 0.75), ("two", 0.25)]


def test_other_prompts_are_refused() -> None:
    one, two = made("one", question(20, prompt=7)), made("two", question(20, prompt=8))
    with pytest.raises(ValueError, match=r"7 tokens.*but 8.*template"):
        common_questions([one, two])
    with pytest.raises(ValueError, match="no question in common"):
        common_questions([one, Contender("none", 0.0, {})])
