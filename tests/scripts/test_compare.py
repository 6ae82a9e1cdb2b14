"""scripts.compare on folders written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from inference.measuring.run_records import RequestRecord, RoundRecord, Run, write_run
from scripts import compare


def write(
    folder: Path,
    accepted: list[list[int]],
    *,
    temperatures: tuple[float, ...] = (0.0,),
    fingerprint: str = "abc",
    speedup: float | None = 2.0,
    **settings: Any,
) -> Path:
    """A run whose cells all decoded the same: one question per list of accepted counts."""
    cells = [
        {
            "temperature": temperature,
            "rule": "match",
            "size": 8,
            "name": f"T={temperature:g} match 8",
            "prediction": None,
            "reliability": None,
            "speedup": speedup,
            "by_category": {},
        }
        for temperature in temperatures
    ]
    result = {
        "format": 1,
        "settings": settings,
        "target": {"name": "t", "fingerprint": fingerprint, "dtype": "float32"},
        "head": None,
        "cells": cells,
        "costs": None,
        "training": None,
    }
    requests, rounds = [], []
    for cell in range(len(cells)):
        for number, counts in enumerate(accepted):
            name, length = f"q{number}", 6
            tokens = [0] * (1 + sum(count + 1 for count in counts))
            pieces = ["x"] * len(tokens)
            times = {"prefill": 0.1, "target": 1.0, "draft": 0.2, "total": float(len(counts))}
            plain = {"prefill": 0.1, "total": float(len(tokens))}
            category = "code" if number % 2 else "talk"
            requests.append(
                RequestRecord(
                    cell, name, category, 0, 5, tokens, pieces, times, plain, None, len(tokens)
                )
            )
            for place, count in enumerate(counts):
                new = [0] * (count + 1)
                rounds.append(RoundRecord(cell, name, 0, place, length, 7, 4, 8, count, new, False))
                length += len(new)
    write_run(folder, Run(result, requests, rounds))
    return folder


def last_line(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one", [[3, 1], [2, 2], [0, 1]], max_new_tokens=9)
    two = write(tmp_path / "two", [[1, 1], [2, 2], [1, 1]], max_new_tokens=12)
    compare.main([str(one), str(two), "--out", str(tmp_path / "found.json")])
    out, record = last_line(capsys)
    group = record["groups"][0]
    assert group["baseline"] == "one" and group["questions"] == 3
    second = group["contenders"][1]
    assert second["length"]["value"] == pytest.approx(14 / 6)  # (2+2 + 3+3 + 2+2) over 6 rounds
    assert second["difference"]["value"] == pytest.approx(14 / 6 - 15 / 6)
    assert (second["wins"], second["ties"], second["losses"]) == (1, 1, 1)
    assert [each["category"] for each in group["by_category"]] == ["talk", "code"]
    assert "max_new_tokens differs: one 9, two 12" in out
    assert json.loads((tmp_path / "found.json").read_text()) == record


def test_cells_of_one_run_are_contenders_by_temperature(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path / "one", [[3, 1]], temperatures=(0.0, 1.0))
    two = write(tmp_path / "two", [[1, 1]], temperatures=(0.0, 1.0))
    compare.main([str(one), str(two), "--baseline", "two T=1 match 8"])
    _, record = last_line(capsys)
    assert [group["temperature"] for group in record["groups"]] == [1.0]
    names = [each["name"] for each in record["groups"][0]["contenders"]]
    assert names == ["two T=1 match 8", "one T=1 match 8"]


def test_names_and_ties_in_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bar in a name is no new column; the first of equals did not win."""
    one, two = write(tmp_path / "a|b", [[1], [2]]), write(tmp_path / "c", [[1], [3]])
    compare.main([str(one), str(two)])
    out, record = last_line(capsys)
    tables = [line for line in out.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in tables} == {8, 7}
    assert "a\\|b" in out and "| talk | 1 | 2.00 | 2.00 | tie | +0.00 |" in out
    assert "| code | 1 | 3.00 | 4.00 | c | +1.00 |" in out
    speedup = record["groups"][0]["contenders"][0]["speedup"]["value"]
    assert speedup == pytest.approx((5 / 2) / (5 / 7))  # behind the prefills; plainly 3 s and 4 s


def test_speeds_that_are_not_of_like_decoding_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of simulated drafts, or of batches against texts decoded one by one."""
    fair, other = write(tmp_path / "a", [[1]]), write(tmp_path / "b", [[2]], speedup=None)
    compare.main([str(fair), str(other)])
    first, second = last_line(capsys)[1]["groups"][0]["contenders"]
    assert first["speedup"]["value"] > 0
    assert second["speedup"] is None and second["speedup_difference"] is None


def test_a_text_without_rounds_is_no_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare.main([str(write(tmp_path / "a", [[], [1]])), str(write(tmp_path / "b", [[], [2]]))])
    out, record = last_line(capsys)
    assert record["groups"][0]["by_category"][0]["length"] is None
    assert "nan" not in out


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: [write(path / "a", [[1]])], "two contenders of equal temperature"),
        (
            lambda path: [
                write(path / "a", [[1]]),
                write(path / "b", [[1]], fingerprint="other"),
            ],
            "different targets",
        ),
        (
            lambda path: [write(path / "x" / "a", [[1]]), write(path / "y" / "a", [[1]])],
            "two contenders are called 'a'",
        ),
        (
            lambda path: [write(path / "a", [[1]]), write(path / "b", [[1]]), "--baseline", "c"],
            "there is none; there are 'a', 'b'",
        ),
        (lambda path: [path, path], "no result.json"),
    ],
)
def test_refusals(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare.main([str(each) for each in make(tmp_path)])
