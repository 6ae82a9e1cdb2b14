"""Counts of acceptance on disk: found again, of what they are, and never in the way."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from inference.scheduling.priors import Law, Memory

TARGET = {"shape": "1", "weights": "2"}
GREEDY = Law("match", 0.0)
COUNTS = {"head": ([[5.0, 1.0], [2.0, 0.0]], [[8.0, 3.0], [5.0, 2.0]]), "ngram": ([[1.0]], [[4.0]])}


def memory(path: Path, law: Law = GREEDY) -> Memory:
    return Memory.beside(path, TARGET, law, {"head": "h1", "ngram": "n1"})


def said_by(one: Memory) -> list[str]:
    said: list[str] = []
    assert one.read(said.append) == {}
    return said


def test_what_is_written_is_read(tmp_path: Path) -> None:
    one = memory(tmp_path)
    assert said_by(one) == []  # no file is nothing to talk about
    one.write(COUNTS, pytest.fail)
    found = one.read(pytest.fail)
    assert found["head"].rates == [[5 / 8, 1 / 3], [2 / 5, 0.0]]
    assert found["head"].rounds == [[8.0, 3.0], [5.0, 2.0]]
    assert found["ngram"].rates == [[0.25]]
    assert [path.name for path in tmp_path.iterdir()] == ["survival-greedy.json"]


def test_laws_under_which_acceptance_is_alike_share_a_file() -> None:
    names = {law.name for law in (GREEDY, Law("rejection", 0.0), Law("coupled", 0.0))}
    assert names == {"greedy"}
    assert Law("match", 0.1).name == "match-t0.25"
    assert Law("rejection", 0.7).name == Law("rejection", 0.75).name == "rejection-t0.75"
    assert Law("rejection", 1.0).name != Law("match", 1.0).name


@pytest.mark.parametrize(
    ("rule", "temperature", "teaches"),
    [
        ("match", 1.0, True),
        ("coupled", 1.0, True),
        ("rejection", 0.0, True),
        ("rejection", 1.0, False),
        ("block", 0.5, False),
    ],
)
def test_who_tosses_coins_over_drafts_teaches_nobody(
    rule: str, temperature: float, teaches: bool
) -> None:
    assert Law(rule, temperature).teaches is teaches


def test_the_file_stands_beside_the_cost_table(tmp_path: Path) -> None:
    assert memory(tmp_path / "costs.json").path == memory(tmp_path).path


def test_another_head_finds_nothing_and_loses_nothing_of_others(tmp_path: Path) -> None:
    memory(tmp_path).write(COUNTS, pytest.fail)
    other = replace(memory(tmp_path), arms={"head": "h2", "ngram": "n1"})
    assert set(other.read(pytest.fail)) == {"ngram"}
    other.write({"head": ([[1.0]], [[1.0]])}, pytest.fail)
    assert set(other.read(pytest.fail)) == {"head", "ngram"}
    assert set(memory(tmp_path).read(pytest.fail)) == {"ngram"}


def test_an_arm_that_does_not_draft_here_is_left_alone(tmp_path: Path) -> None:
    memory(tmp_path).write(COUNTS, pytest.fail)
    alone = replace(memory(tmp_path), arms={"head": "h1"})
    assert set(alone.read(pytest.fail)) == {"head"}
    alone.write({"head": COUNTS["head"]}, pytest.fail)
    assert set(memory(tmp_path).read(pytest.fail)) == {"head", "ngram"}


def test_a_run_of_smaller_trees_loses_nothing_of_larger_ones(tmp_path: Path) -> None:
    one = memory(tmp_path)
    one.write(COUNTS, pytest.fail)
    one.write({"head": ([[3.0]], [[4.0]])}, pytest.fail)
    assert one.read(pytest.fail)["head"].rates == [[3 / 4, 1 / 3], [2 / 5, 0.0]]
    one.write({"head": ([[0.0, 1.0, 2.0]] * 3, [[9.0, 9.0, 9.0]] * 3)}, pytest.fail)
    assert one.read(pytest.fail)["head"].rates == [[0.0, 1 / 9, 2 / 9]] * 3


def test_a_file_of_another_target_or_law_is_left_aside(tmp_path: Path) -> None:
    memory(tmp_path).write(COUNTS, pytest.fail)
    [line] = said_by(replace(memory(tmp_path), target="shape:9"))
    assert "survival-greedy.json" in line and "target" in line and "shape:9" in line
    sampled = replace(memory(tmp_path), law=Law("match", 1.0))
    assert "law" in said_by(sampled)[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{",
        '{"format": 1}',
        '{"format": 0, "target": "shape:1 weights:2", "law": "greedy", "arms": {}}',
        '{"format": 1, "target": "shape:1 weights:2", "law": "greedy", "arms": {"head": 3}}',
        '{"format": 1, "target": "shape:1 weights:2", "law": "greedy", "arms": []}',
    ],
)
def test_a_damaged_file_costs_a_message_and_is_replaced(tmp_path: Path, text: str) -> None:
    one = memory(tmp_path)
    one.path.write_text(text)
    assert "learnt anew" in said_by(one)[0]
    one.write(COUNTS, pytest.fail)
    assert set(one.read(pytest.fail)) == {"head", "ngram"}


@pytest.mark.parametrize(
    ("accepted", "tried"),
    [
        ([[5.0]], [[4.0]]),
        ([[-1.0]], [[4.0]]),
        ([[1.0, 1.0]], [[4.0]]),
        ([[1.0]], [[4.0], [4.0]]),
        ([["1"]], [[4.0]]),
        ([[float("nan")]], [[4.0]]),
        ([[float("inf")]], [[float("inf")]]),
        (3, [[4.0]]),
    ],
)
def test_counts_that_cannot_be_are_refused(tmp_path: Path, accepted: object, tried: object) -> None:
    one = memory(tmp_path)
    one.write(COUNTS, pytest.fail)
    record = json.loads(one.path.read_text())
    record["arms"]["head"] |= {"accepted": accepted, "tried": tried}
    one.path.write_text(json.dumps(record))
    assert "learnt anew" in said_by(one)[0]


def test_a_place_that_cannot_be_written_costs_a_message(tmp_path: Path) -> None:
    said: list[str] = []
    one = memory(tmp_path)
    replace(one, path=tmp_path / "no" / "survival.json").write(COUNTS, said.append)
    assert "not kept" in said[0]
