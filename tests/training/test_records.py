"""Metric sums over processes, and the file of lines."""

import json
import math
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from training import records
from training.records import Records, read_lines


@pytest.fixture
def made(tmp_path: Path) -> Records:
    return Records(Accelerator(cpu=True), tmp_path / "metrics.jsonl", trackers=False)


def test_sums_are_divided_once(made: Records) -> None:
    for value, count in ((3.0, 1), (5.0, 3)):
        made.add({"loss_sum": torch.tensor(value), "loss_count": torch.tensor(count)})
    assert made.take_means() == {"loss": 2.0}
    assert made.take_means() == {}, "taken"


def test_nothing_counted_is_zero_and_not_an_error(made: Records) -> None:
    made.add({"a_sum": torch.tensor(0.0), "a_count": torch.tensor(0)})
    assert made.take_means() == {"a": 0.0}


def test_names_that_only_another_process_knows_are_reduced_too(
    made: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had something to draft where this one had not; both must hand on equally many numbers."""
    sent: list[Tensor] = []

    def reduce(numbers: Tensor, reduction: str) -> Tensor:
        sent.append(numbers)
        return numbers

    monkeypatch.setattr(made.accelerator, "reduce", reduce)
    monkeypatch.setattr(records, "gather_object", lambda own: [*own, "b_sum", "d_sum"])
    made.add({"c_sum": torch.tensor(3.0), "b_sum": torch.tensor(2.0)})
    assert made.totals() == {"b_sum": 2.0, "c_sum": 3.0, "d_sum": 0.0}
    assert len(sent) == 1 and sent[0].dtype == torch.float64
    made.sums = {}
    assert made.totals() == {"b_sum": 0.0, "d_sum": 0.0}, "also a process that knows none"


def test_restored_sums_go_on(made: Records) -> None:
    made.add({"a_sum": torch.tensor(1.0), "a_count": torch.tensor(1)})
    totals = made.totals()
    made.sums = {}
    made.restore(totals)
    made.add({"a_sum": torch.tensor(3.0), "a_count": torch.tensor(1)})
    assert made.take_means() == {"a": 2.0}


def test_lines_past_a_step_and_torn_ones_are_cut(made: Records) -> None:
    for step in (1, 2, 3):
        made.write(step, {"train/loss": step / 2})
    with made.file.open("a") as file:
        file.write('{"step": 4, "train/lo')
    assert [line["step"] for line in read_lines(made.file)] == [1, 2, 3]
    made.cut(2)
    assert made.file.read_text() == "".join(
        json.dumps({"step": step, "train/loss": step / 2}) + "\n" for step in (1, 2)
    )


def test_numbers_that_json_does_not_have_are_null(made: Records) -> None:
    made.write(1, {"a": math.nan, "b": math.inf, "c": 1.5})
    assert "NaN" not in made.file.read_text()
    assert made.lines() == [{"step": 1, "a": None, "b": None, "c": 1.5}]


def test_a_missing_file_has_no_lines(tmp_path: Path, made: Records) -> None:
    assert read_lines(tmp_path / "none") == []
    made.cut(3)
    assert not made.file.exists()
