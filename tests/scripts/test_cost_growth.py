"""Where speculation stops paying, by hand, and the command on tiny models."""

import json
from pathlib import Path

import pytest

from inference.scheduling.priors import Memory
from inference.scheduling.schedule import Arm
from inference.scheduling.survival import Prior
from scripts.cost_growth import Cell, cell_of, main, parse_args, print_tables
from tests.inference.scheduling.costs import cost_table
from tests.scripts.heads import save_models

VERIFY = {1: 0.05, 4: 0.06, 8: 0.10, 16: 0.30}
COSTS = cost_table(VERIFY, step=0.01, depth=3, rest=0.01)
ARM = Arm("head", 3, 2, 16)
RATES = [[0.6, 0.2], [0.5, 0.1], [0.4, 0.1]]


def cells(rates: list[list[float]] | None = RATES, arm: Arm = ARM) -> list[Cell]:
    return [cell_of(COSTS, arm, 1, 0, size, rates) for size in (1, 4, 8, 16)]


def test_what_a_round_needs_is_its_seconds_over_a_plain_step() -> None:
    plain, four, _, sixteen = cells(None)
    assert (plain.needs, plain.tokens, plain.depth) == (1.0, 1.0, 0)
    assert four.depth == sixteen.depth == 3
    assert four.needs == pytest.approx((0.03 + 0.06 + 0.01) / 0.06)
    assert sixteen.needs == pytest.approx((0.03 + 0.30 + 0.01) / 0.06)
    assert four.tokens is None and four.speedup is None


def test_the_depth_is_the_fastest_by_the_counts() -> None:
    _, four, _, _ = cells()
    by_depth = {  # the three likeliest nodes down to each depth
        1: (0.6 + 0.2, 0.08),
        2: (0.6 + 0.3 + 0.2, 0.09),
        3: (0.6 + 0.3 + 0.2, 0.10),
    }
    rates = {depth: (1 + gain) / seconds for depth, (gain, seconds) in by_depth.items()}
    assert four.depth == max(rates, key=lambda depth: rates[depth]) == 2
    assert four.tokens == pytest.approx(2.1)
    assert four.speedup == pytest.approx(2.1 / (0.09 / 0.06))


def test_copies_need_no_drafting() -> None:
    found = cells(None, Arm("ngram", 3, 1, 16, copies=True))
    assert found[1].needs == pytest.approx(0.07 / 0.06)


def test_the_table_says_where_it_stops(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(cells(), COSTS, known=True)
    lines = capsys.readouterr().out.splitlines()
    assert "| 1 | 0 | 50.0 | 60.0 | 100.0 | 300.0 |" in lines
    assert lines[-1].endswith("| 4: 1.40 x | 8 |")
    print_tables(cells([[0.01, 0.01]] * 3), COSTS, known=True)
    assert capsys.readouterr().out.splitlines()[-1].endswith("| no drafts | - |")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = save_models(tmp_path)
    options = ["--batches", "2", "1", "--contexts", "24", "8", "--sizes", "4", "3"]
    more = ["--depth", "2", "--branch", "2", "--budget", "0"]
    assert main([*models, *options, *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    places = [(cell["batch"], cell["context"], cell["size"]) for cell in found["cells"]]
    assert places == [(b, p, n) for b in (1, 2) for p in (8, 24) for n in (1, 3, 4)]
    assert all(cell["needs"] >= 1.0 or cell["size"] > 1 for cell in found["cells"])
    assert found["survival"] is None
    assert sum(line.startswith("| batch | context | 1 | 3 | 4 |") for line in lines) == 2


def test_counts_of_earlier_runs_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without rounds of its own the rates are those that were counted."""
    rates = [[0.6, 0.2], [0.5, 0.1]]
    known = {"head": Prior.measured(rates)}
    monkeypatch.setattr(Memory, "read", lambda self, say: known)
    options = ["--batches", "1", "--contexts", "8", "--sizes", "4", "--budget", "0"]
    assert main([*save_models(tmp_path), *options, "--depth", "2", "--branch", "2"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["survival"][0] == pytest.approx(rates[0], abs=0.02)
    assert found["cells"][1]["tokens"] > 1.6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "4"], "give --sizes"),
        (["--sizes", "65"], "from 2 to 64"),
        (["--batches", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--target", "t", "--head", "h", *options])
    assert message in capsys.readouterr().err


def test_a_context_beyond_the_target_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--contexts"):
        main([*save_models(tmp_path), "--contexts", "1000000", "--batches", "1"])
