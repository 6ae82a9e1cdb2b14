"""Expected rounds along a text, against walking, enumeration and closed forms.

Letters: m tokens, S survival.
"""

import itertools
import random
from collections.abc import Sequence

import pytest

from inference.prediction.formulas import expected_tokens
from inference.prediction.rounds import Walk, conditional_acceptance, geometric, pooled, walk


def random_survival(m: int, depth: int, seed: int) -> list[list[float]]:
    chance = random.Random(seed)
    rows = []
    for place in range(m):
        row, value = [], 1.0
        for _ in range(min(depth, m - place)):
            value *= chance.random()
            row.append(value)
        rows.append(row)
    return rows


def value_of(survival: Sequence[Sequence[float]], start: int) -> float:
    """V by its recursion, the slow way."""
    if start >= len(survival):
        return 0.0
    chain = [1.0, *survival[start], 0.0]
    chances = [one - two for one, two in itertools.pairwise(chain)]
    return 1.0 + sum(
        chance * value_of(survival, start + count + 1) for count, chance in enumerate(chances)
    )


@pytest.mark.parametrize("seed", range(4))
def test_rounds_are_those_of_the_recursion(seed: int) -> None:
    survival = random_survival(9, 3, seed)
    found = walk(survival, [float(len(row)) for row in survival])
    assert found.rounds == pytest.approx(value_of(survival, 0), abs=1e-12)
    assert sum(found.emitted) == pytest.approx(found.rounds)
    tokens = sum(count * rounds for count, rounds in enumerate(found.emitted))
    assert tokens == pytest.approx(found.tokens) == pytest.approx(9)


def test_certain_survival_is_a_replay() -> None:
    """Rounds at 0 (accepts 2), 3 (none), 4 (accepts 1, which ends the text)."""
    survival = [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0], [0.0]]
    found = walk(survival, [2.0, 2.0, 2.0, 2.0, 1.0, 1.0])
    assert found.visits == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert found.emitted[:4] == [0.0, 1.0, 1.0, 1.0]
    assert found.accepted == [2.0, 1.0] and found.reached == [3.0, 1.0, 0.0]


def test_a_round_that_accepts_the_last_token_emits_no_more() -> None:
    found = walk([[1.0, 1.0], [1.0]], [2.0, 1.0])
    assert found.emitted == [0.0, 0.0, 1.0, 0.0] and found.rounds == 1.0


def test_a_long_text_of_equal_positions_is_the_formula() -> None:
    alpha, gamma, m = 0.6, 3, 4000
    survival = [[alpha**d for d in range(1, min(gamma, m - i) + 1)] for i in range(m)]
    found = walk(survival, [float(len(row)) for row in survival])
    assert m / found.rounds == pytest.approx(expected_tokens(alpha, gamma), abs=2e-3)
    shorter = walk(survival, [3.0] * m, longest=1)
    assert m / shorter.rounds == pytest.approx(expected_tokens(alpha, 1), abs=2e-3)


def test_rounds_start_where_drafts_are_bad() -> None:
    """Every second position is hard: the mean over positions promises more than rounds find."""
    m = 300
    survival = [[1.0 if i % 3 else 0.0] if i + 1 <= m else [] for i in range(m)]
    depths = [1.0] * m
    found = walk(survival, depths)
    one, two = conditional_acceptance(survival, depths)
    by_rounds, of_rounds = conditional_acceptance(survival, depths, found.visits)
    assert one[0] / two[0] == pytest.approx(2 / 3)
    assert by_rounds[0] / of_rounds[0] == pytest.approx(0.5)
    assert m / found.rounds == pytest.approx(1.5)


def test_simulated_rounds_have_these_means() -> None:
    survival, chance = random_survival(12, 4, 7), random.Random(1)
    found, runs = walk(survival, [4.0] * 12), 20_000
    visits, accepted = [0] * 12, [0] * 4
    for _ in range(runs):
        place = 0
        while place < 12:
            visits[place] += 1
            coin = chance.random()
            count = sum(coin < value for value in survival[place])
            for depth in range(count):
                accepted[depth] += 1
            place += count + 1
    assert [n / runs for n in visits] == pytest.approx(found.visits, abs=0.015)
    assert [n / runs for n in accepted] == pytest.approx(found.accepted, abs=0.02)


def test_pooling_pads() -> None:
    walks = [Walk([1.0], [1.0], [2.0], [0.0, 1.0]), Walk([1.0], [1.0, 3.0], [4.0], [0.5])]
    assert pooled(walks, "accepted") == [2.0, 3.0]
    assert pooled(walks, "reached") == [6.0] and pooled(walks, "emitted") == [0.5, 1.0]
    assert pooled([], "emitted") == []


def test_geometric_rounds() -> None:
    """By hand: two tokens, one draft at most, as the last token of the length is never drafted."""
    assert geometric(2, 3, 0.5, 4).rounds == pytest.approx(1.5)
    assert geometric(2, 9, 0.5, 4).rounds == pytest.approx(1.5)  # the draft may end the text
    assert geometric(9, 10, 1.0, 4).rounds == 2.0 and geometric(9, 10, 0.0, 4).rounds == 9.0
    assert geometric(0, 10, 0.5, 4).rounds == 0.0
    tokens = geometric(4000, 4001, 0.7, 4)
    assert tokens.tokens / tokens.rounds == pytest.approx(expected_tokens(0.7, 4), abs=3e-3)
