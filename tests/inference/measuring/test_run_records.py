"""The folder of a run: written and read back, and everything that contradicts itself refused."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference.measuring.run_records import RECORDS, RESULT, RoundRecord, Run, read_run, write_run
from tests.inference.recorded import small_run, traced


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    run = small_run()
    run.rounds[0] = replace(traced(), emitted=[2, 3, 4], accepted=2)
    run.rounds[1:3] = [replace(each, context=each.context - 1) for each in run.rounds[1:3]]
    run.requests[0] = replace(
        run.requests[0], tokens=[1, 2, 3, 4, 6, 7, 8], pieces=["ä"] * 7, difference={"gap": None}
    )
    write_run(tmp_path / "run", run)
    assert read_run(tmp_path / "run") == run
    lines = [json.loads(line) for line in (tmp_path / "run" / RECORDS).read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["request"] * 3 + ["round"] * 6
    write_run(tmp_path / "run", small_run())  # replaces
    assert read_run(tmp_path / "run") == small_run()


def test_requests_and_their_rounds() -> None:
    run = small_run()
    assert [len(run.rounds_of(request)) for request in run.requests_of(0)] == [3, 2, 1]
    assert run.requests_of(1) == [] and run.cells == run.result["cells"]
    trace = traced().trace
    assert trace is not None and [trace.children(node) for node in range(3)] == [[1, 2], [3], [4]]


def without_key(run: Run) -> None:
    del run.result["training"]


def without_name(run: Run) -> None:
    run.result["cells"] = [{"temperature": 0.0}]


def without_round(run: Run) -> None:
    del run.rounds[1]


def with_stranger(run: Run) -> None:
    run.rounds.append(replace(run.rounds[0], id="c"))


def with_twin(run: Run) -> None:
    run.requests.append(run.requests[0])


def with_other_tokens(run: Run) -> None:
    run.requests[2] = replace(run.requests[2], tokens=[1, 2, 3, 4, 6])


def with_other_cell(run: Run) -> None:
    run.requests[2] = replace(run.requests[2], cell=1)
    run.rounds[5] = replace(run.rounds[5], cell=1)


def with_other_context(run: Run) -> None:
    run.rounds[1] = replace(run.rounds[1], context=14)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_key, "lacks training"),
        (without_name, "cell 0 .* lacks rule"),
        (without_round, "missing or out of order"),
        (with_stranger, "'c' belongs to no request"),
        (with_twin, "same id and turn"),
        (with_other_tokens, "'b' did not emit its tokens"),
        (with_other_cell, "of cell 1: no such"),
        (with_other_context, r"context 14, but 10 \+ 1 \+ 4 tokens"),
    ],
)
def test_a_run_that_contradicts_itself_is_refused(
    tmp_path: Path, spoil: Callable[[Run], None], message: str
) -> None:
    run = small_run()
    spoil(run)
    with pytest.raises(ValueError, match=message):
        write_run(tmp_path / "run", run)


@pytest.mark.parametrize(
    "change",
    [
        {"accepted": 4},
        {"width": 4},
        {"depth": 5},
        {"emitted": [2, 3]},
        {"ended": True},
        {"trace": None, "accepted": 1},
    ],
)
def test_a_round_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"does not hold|emitted|trace"):
        replace(traced(), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": [4]}, "go down the tree"),
        ({"p": [None]}, "one entry per node"),
        ({"parents": [0, 0, 0, 1, 2]}, "root first"),
        ({"tokens": [1, 5, 7, 6, 3]}, "does not fit"),
    ],
)
def test_a_trace_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    round_ = traced()
    assert round_.trace is not None
    with pytest.raises(ValueError, match=message):
        replace(round_, trace=replace(round_.trace, **change))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "tree"}', "line 10: kind must be request or round"),
        ("[]", "line 10: not a JSON object"),
        ("{", "line 10: not JSON"),
        ('{"kind": NaN}', "line 10: not JSON .NaN is no number"),
        (
            '{"kind": "request", "cell": 0, "id": "c", "category": "a", "turn": 0, "pieces": [], '
            '"prompt_tokens": 1, "tokens": 3, "seconds": {}, "plain_seconds": null, '
            '"difference": null, "plain_tokens": null}',
            "line 10: .*len",
        ),
        ('{"kind": "request", "cell": 0}', "line 10: RequestRecord: missing keys .*'tokens'"),
    ],
)
def test_strange_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    write_run(tmp_path, small_run())
    with (tmp_path / RECORDS).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path)


def test_unknown_keys_are_named(tmp_path: Path) -> None:
    write_run(tmp_path, small_run())
    text = (tmp_path / RECORDS).read_text().replace('"ended"', '"over"', 1)
    (tmp_path / RECORDS).write_text(text)
    with pytest.raises(ValueError, match=r"missing keys \['ended'\], unknown keys \['over'\]"):
        read_run(tmp_path)


def test_other_folders_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished run"):
        read_run(tmp_path)
    write_run(tmp_path, small_run())
    (tmp_path / RECORDS).unlink()
    with pytest.raises(ValueError, match=RECORDS):
        read_run(tmp_path)
    (tmp_path / RESULT).write_text('{"format": 9}')
    with pytest.raises(ValueError, match="format 9"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        write_run(tmp_path / RESULT, small_run())


def test_a_full_disk_leaves_no_half_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No result.json means no run; nothing else is left lying about."""
    write_run(tmp_path, small_run())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        write_run(tmp_path, small_run())
    assert [path.name for path in tmp_path.iterdir()] == [RECORDS]


def test_numbers_must_be_finite(tmp_path: Path) -> None:
    """And a run that is not written does not cost the one that was there."""
    run = small_run()
    write_run(tmp_path, run)
    run.result["costs"] = float("nan")
    with pytest.raises(ValueError, match=r"[Oo]ut of range"):
        write_run(tmp_path, run)
    assert read_run(tmp_path) == small_run()


def test_a_round_without_drafts() -> None:
    plain = RoundRecord(0, "a", 0, 0, 11, 0, 0, 1, 0, [5], False)
    assert plain.trace is None
