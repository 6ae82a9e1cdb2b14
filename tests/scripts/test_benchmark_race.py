"""scripts.benchmark_race: the grid, whose turn it is, and contenders that fail."""

import argparse
from typing import Any

import pytest

from inference.measuring.evaluation import Prompt
from scripts.benchmark_protocol import Answer, RefusalError, WorkerError
from scripts.benchmark_race import (
    MIXED,
    Batch,
    Cell,
    Field,
    build_cells,
    make_batches,
    of_length,
    race,
)
from tests.tiny import tiny_target


def prompts(categories: str) -> list[Prompt]:
    """Prompts of one token, their place, in categories of one letter."""
    return [Prompt([place], category, f"p{place}") for place, category in enumerate(categories)]


def test_batches_of_one_are_the_prompts_by_category() -> None:
    batches, dropped = make_batches(prompts("abab"), 1)
    assert [batch.name for batch in batches] == ["p0", "p2", "p1", "p3"]
    assert [batch.category for batch in batches] == ["a", "a", "b", "b"] and dropped == 0


def test_batches_are_full_and_repeat_nothing() -> None:
    batches, dropped = make_batches(prompts("aaabbbcc"), 2)
    assert [(batch.name, batch.category) for batch in batches] == [
        *(("p0 p1", "a"), ("p3 p4", "b"), ("p6 p7", "c"), ("p2 p5", MIXED))
    ]
    assert dropped == 0
    batches, dropped = make_batches(prompts("aaabb"), 3)
    assert ([batch.category for batch in batches], dropped) == (["a"], 2)
    with pytest.raises(ValueError, match="--batch-sizes 6: there are only 5 prompts"):
        make_batches(prompts("aaabb"), 6)


def test_a_context_keeps_the_end_of_a_prompt() -> None:
    found = of_length([Prompt([1, 2, 3], "a", "x"), Prompt([4, 5], "b", "y")], 4)
    assert [prompt.ids for prompt in found] == [[5, 1, 2, 3], [2, 3, 4, 5]]
    assert [(prompt.category, prompt.id) for prompt in found] == [("a", "x"), ("b", "y")]
    assert of_length([Prompt([1, 2, 3])], 2)[0].ids == [2, 3]
    assert of_length([Prompt([1, 2])], 5)[0].ids == [2, 1, 2, 1, 2]


def test_the_grid() -> None:
    target, given = tiny_target(), [Prompt([5, 6, 7]), Prompt([8] * 400)]
    cells = build_cells(target, given, [1, 2], [64, 128], 16)
    assert [(cell.context, cell.batch_size) for cell in cells] == [
        *((64, 1), (64, 2), (128, 1), (128, 2))
    ]
    assert {len(ids) for cell in cells[2:] for batch in cell.batches for ids in batch.ids} == {128}
    [cell] = build_cells(target, given, [1], [], 200)
    assert [len(batch.ids[0]) for batch in cell.batches] == [3], "the other has no room"
    with pytest.raises(ValueError, match=r"--contexts 500: .* beyond the target's 512 positions"):
        build_cells(target, given, [1], [500], 16)


class Fake:
    """A worker without a process that notes its turns."""

    def __init__(self, name: str, turns: list, error: Exception | None = None, at: int = 99):
        self.name, self.turns, self.error, self.at = name, turns, error, at
        self.closed = False

    def warm_up(self, ids: list, longest: int, new: int, timeout: float) -> float:
        self.turns.append((self.name, "warm", ids, longest))
        if self.error is not None and self.at == 0:
            raise self.error
        return 0.5

    def decode(self, ids: list, new: int, timeout: float) -> Answer:
        self.turns.append((self.name, ids[0][0]))
        self.at -= 1
        if self.error is not None and self.at == 0:
            raise self.error
        return Answer([[1]] * len(ids), 1.0, 0.5, len(ids))

    def close(self) -> None:
        self.closed = True


ARGS = argparse.Namespace(max_new_tokens=4, timeout=1.0)


def run(*fakes: Any) -> tuple[Field, Any]:
    field = Field({fake.name: fake for fake in fakes})
    batches = [Batch([Prompt([place, place + 1])], "a") for place in range(4)]
    return field, race(field, Cell(1, None, batches), ARGS)


def test_who_begins_moves_on() -> None:
    turns: list = []
    _, heat = run(*(Fake(name, turns) for name in "xyz"))
    assert turns[:3] == [(name, "warm", [[1, 0]], 2) for name in "xyz"], "backwards"
    assert [name for name, _ in turns[3:]] == list("xyzyzxzxyxyz")
    assert [place for _, place in turns[3:]] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert {name: len(found) for name, found in heat.answers.items()} == dict.fromkeys("xyz", 4)
    assert heat.warm_up_seconds == dict.fromkeys("xyz", 0.5)


def test_one_that_dies_leaves_the_race(capsys: pytest.CaptureFixture[str]) -> None:
    turns: list = []
    dead = Fake("y", turns, WorkerError("no answer within 1 s"), at=2)
    field, heat = run(Fake("x", turns), dead)
    assert list(heat.answers) == ["x"] and len(heat.answers["x"]) == 4
    assert field.failed == {"y": "no answer within 1 s"}
    assert dead.closed and list(field.workers) == ["x"]
    assert [name for name, place in turns[2:]].count("y") == 2
    assert "y: no answer within 1 s" in capsys.readouterr().err


@pytest.mark.parametrize("at", [0, 2])
def test_one_that_refuses_leaves_the_cell_only(at: int) -> None:
    turns: list = []
    field, heat = run(Fake("x", turns), Fake("y", turns, RefusalError("one at a time"), at=at))
    assert list(heat.answers) == ["x"] and list(field.workers) == ["x", "y"]
    assert field.failed == {"y": "batch 1, prompts as they are: one at a time"}


def test_when_all_fail_there_is_nothing() -> None:
    _, heat = run(Fake("x", [], WorkerError("dead"), at=0))
    assert heat.answers == {}
