"""Cost tables: exact at the points, monotone between them, and only of this machine."""

import itertools
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inference.scheduling.costs import (
    FILE,
    CostTable,
    MachineKey,
    check_writable,
    current_costs,
    machine_key,
)
from tests.inference.scheduling.costs import KEY, cost_table

VERIFY = {
    (width, context, batch): (0.1 + 0.01 * width + 0.0001 * context) * (1 + 0.5 * batch)
    for width in (1, 4, 8)
    for context in (0, 128, 1024)
    for batch in (1, 4)
}
DRAFT = {("head", 1, 1, 1): 0.01, ("head", 5, 1, 1): 0.03, ("head", 1, 8, 1): 0.02} | {
    ("head", 5, 8, 1): 0.06,
    ("block", 7, 1, 1): 0.05,
}


def table(**changes: object) -> CostTable:
    return replace(CostTable(KEY, VERIFY, DRAFT, {1: 0.002, 4: 0.005}), **changes)  # type: ignore


def test_at_the_points_costs_are_the_measured_ones() -> None:
    costs = table()
    for (width, context, batch), seconds in VERIFY.items():
        assert costs.verify(width, context, batch) == seconds
    for (name, depth, width, batch), seconds in DRAFT.items():
        assert costs.draft(name, depth, width, batch) == seconds
    assert costs.rest(4) == 0.005


def test_between_the_points_costs_are_linear() -> None:
    costs = table()
    assert costs.verify(6, 0) == pytest.approx((costs.verify(4, 0) + costs.verify(8, 0)) / 2)
    assert costs.verify(4, 64) == pytest.approx((costs.verify(4, 0) + costs.verify(4, 128)) / 2)
    assert costs.verify(1, 0, 3) == pytest.approx(
        costs.verify(1, 0, 1) / 3 + costs.verify(1, 0, 4) * 2 / 3
    )
    assert costs.draft("head", 3) == pytest.approx(0.02)
    assert costs.draft("head", 3, 8) == pytest.approx(0.04)
    assert costs.draft("block", 2) == 0.05  # one pass
    assert costs.draft("nobody", 0) == 0.0
    assert costs.rest(2) == pytest.approx(0.003)


def test_beyond_the_last_context_costs_go_on() -> None:
    costs = table()
    slope = (costs.verify(1, 1024) - costs.verify(1, 128)) / (1024 - 128)
    assert costs.verify(1, 2048) == pytest.approx(costs.verify(1, 1024) + 1024 * slope)
    assert cost_table({1: 0.1}).verify(1, 10**6) == 0.1


def test_costs_rise_with_the_context_everywhere() -> None:
    source = random.Random(0)
    contexts = (0, 100, 1000, 5000)
    points = {}
    for width in (1, 3, 9):
        seconds = 0.1
        for context in contexts:
            seconds += source.choice([0.0, source.random()])
            points[width, context, 1] = seconds
    costs = CostTable(KEY, points)
    for width in range(1, 10):
        found = [costs.verify(width, context) for context in range(0, 8000, 37)]
        assert all(low <= high + 1e-12 for low, high in itertools.pairwise(found))


def test_rows_cost_what_their_bucket_costs() -> None:
    costs = table(buckets=(1, 4, 8))
    assert costs.verify(2, 0) == costs.verify(3, 0) == costs.verify(4, 0)
    assert costs.verify(5, 0) == costs.verify(8, 0) > costs.verify(4, 0)
    assert costs.verify(1, 0) < costs.verify(2, 0)
    assert costs.widths() == [1, 4, 8]


def test_what_was_not_measured_is_refused() -> None:
    costs = table()
    with pytest.raises(ValueError, match="9 rows per sequence at batch 1 were not measured"):
        costs.verify(9, 0)
    with pytest.raises(ValueError, match="'medusa' was not measured"):
        costs.draft("medusa", 1)


def test_a_narrower_table_at_a_large_batch_says_so() -> None:
    points = {(width, 0, 1): 1.0 for width in (1, 8)} | {(width, 0, 8): 1.0 for width in (1, 2)}
    costs = CostTable(KEY, points)
    assert [costs.widest(batch) for batch in (1, 4, 8, 16)] == [8, 2, 2, 2]
    assert costs.widths(8) == [1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verify_points": {}}, "need a point each"),
        ({"verify_points": {(1, 0, 1): 0.0}}, "above 0"),
        ({"verify_points": {(1, 0, 1): 1.0, (2, 0, 1): 1.0, (1, 9, 1): 1.0}}, "lack some widths"),
        ({"verify_points": {(1, 0, 1): 1.0, (1, 9, 1): 0.9}}, "fall with the context"),
        ({"buckets": (1, 16)}, "buckets .16. were not measured"),
    ],
)
def test_tables_with_holes_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table(**changes)


# On disk ------------------------------------------------------------------------------------------


def test_a_saved_table_comes_back(tmp_path: Path) -> None:
    costs = table(buckets=(1, 4, 8))
    costs.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert CostTable.load(tmp_path) == costs
    elsewhere = tmp_path / "other.json"
    costs.save(elsewhere)
    assert current_costs(elsewhere, KEY) == (costs, [])


def test_a_table_of_another_machine_is_not_used(tmp_path: Path) -> None:
    assert current_costs(tmp_path, KEY)[0] is None
    table().save(tmp_path)
    here = replace(KEY, threads=2, engine="compiled")
    found, why = current_costs(tmp_path, here)
    assert found is None
    assert why == [
        "threads: 2 here, 1 in the table",
        "engine: compiled here, eager in the table",
    ]


@pytest.mark.parametrize("text", ["", "[]", '{"format": 0}', '{"format": 2, "key": {}}'])
def test_what_is_no_table_is_measured_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    found, [why] = current_costs(tmp_path, KEY)
    assert found is None and "holds no cost table" in why


def test_a_place_that_cannot_be_written_is_found_before_measuring(tmp_path: Path) -> None:
    check_writable(tmp_path / "costs.json")
    with pytest.raises(ValueError, match="cannot be written to: give another path"):
        check_writable(tmp_path / "missing" / "costs.json")
    with pytest.raises(ValueError, match="give another path"):
        table().save(tmp_path / "missing" / "costs.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="give another path"):
        check_writable(tmp_path)


def test_the_key_is_of_this_process() -> None:
    found = machine_key(torch.device("cpu"), torch.float32, {"weights": "a", "shape": "b"}, "eager")
    version, threads = torch.__version__, torch.get_num_threads()
    expected = (found.cpu, threads, "cpu", version, "float32", "shape:b weights:a", "eager")
    assert found == MachineKey(*expected)
    assert found.cpu


def test_the_printed_table_shows_every_number() -> None:
    text = "\n".join(table().lines())
    for seconds in [*VERIFY.values(), *DRAFT.values()]:
        assert f"{1000 * seconds:.2f}" in text
    assert "rest of a round, by batch: 1:2.00 4:5.00" in text


def test_taking_in_what_was_missed_is_known_by_positions(tmp_path: Path) -> None:
    points = {("head", 64): 0.006, ("head", 512): 0.09, ("model", 64): 0.6}
    table = CostTable(KEY, {(1, 0, 1): 0.1}, absorb_points=points)
    assert table.absorb("head", 0) == table.absorb("ngram", 500) == 0.0
    assert table.absorb("head", 32) == pytest.approx(0.003)
    assert table.absorb("head", 64) == 0.006
    assert table.absorb("head", 288) == pytest.approx(0.048)
    assert table.absorb("head", 960) == pytest.approx(0.09 + 448 * (0.09 - 0.006) / 448)
    assert table.absorb("model", 128) == pytest.approx(1.2)
    table.save(tmp_path)
    assert CostTable.load(tmp_path).absorb_points == points
