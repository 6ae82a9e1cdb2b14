"""Cells of a grid: which ones there are, and what is said of the others."""

import json
from pathlib import Path
from typing import Any

import pytest

from inference.measuring.run_records import read_run
from scripts.evaluate import main, parse_args
from scripts.evaluate_grid import grid
from tests.scripts.heads import save_models

BASE = ["--target", "t", "--prompts", "p.jsonl"]
GRID = "--temperature 0 1 --rule match coupled rejection"


def cells(options: str) -> tuple[list[tuple[float, str, Any]], list[str]]:
    found, notes = grid(parse_args([*BASE, *options.split()]))
    return [(one.temperature, one.rule, one.size) for one in found], notes


def test_one_cell_is_what_it_always_was() -> None:
    assert cells("") == ([(0.0, "match", None)], [])
    assert cells("--rule rejection --size 4") == ([(0.0, "rejection", 4)], [])
    assert cells("--temperature 0.5 --size auto") == ([(0.5, "match", "auto")], [])


def test_at_temperature_0_one_rule_stands_for_all() -> None:
    found, notes = cells(f"{GRID} --size 4 8")
    greedy = [(0.0, "match", 4), (0.0, "match", 8)]
    warm = [(1.0, rule, size) for rule in ("match", "coupled", "rejection") for size in (4, 8)]
    assert found == [*greedy, *warm]
    assert notes == ["at temperature 0 every rule gives the same: match stands for all"]


def test_without_drafts_one_rule_stands_for_all() -> None:
    found, notes = cells("--temperature 1 --rule coupled rejection --size 1 4")
    assert found == [(1.0, "match", 1), (1.0, "coupled", 4), (1.0, "rejection", 4)]
    assert notes == ["without drafts (size 1) every rule gives the same: match stands for all"]


def test_a_cell_asked_for_twice_is_one() -> None:
    assert cells("--temperature 0 0 --size 4 4")[0] == [(0.0, "match", 4)]


def test_options_of_draft_laws_go_where_they_have_an_effect() -> None:
    args = parse_args([*BASE, *GRID.split(), "--sharpness", "0.5", "--draws", "one"])
    found, _ = grid(args)
    assert [(one.rule, one.sharpness, one.draws) for one in found] == [
        ("match", None, None),
        ("match", None, None),
        ("coupled", 0.5, None),
        ("rejection", None, "one"),
    ]
    with pytest.raises(ValueError, match="--sharpness has an effect with --rule coupled"):
        cells("--temperature 0 1 --rule match --sharpness 0.5")


def test_costs_belong_to_the_cells_that_decide_by_them() -> None:
    found, _ = grid(parse_args([*BASE, "--size", "4", "auto", "--costs", "c.json"]))
    assert [one.costs for one in found] == [None, Path("c.json")]
    (alone,), _ = grid(parse_args([*BASE, "--size", "4", "--costs", "c.json"]))
    assert alone.costs is not None, "an option without effect is refused where drafts are made"


def test_traces_need_a_folder_and_an_engine_that_has_trees() -> None:
    assert parse_args(BASE).trace == 0
    assert parse_args([*BASE, "--out", "run"]).trace == 4
    assert parse_args([*BASE, "--out", "run", "--engine", "device"]).trace == 0
    for options in ("--trace 2", "--out run --engine device --trace 2", "--out run --trace -1"):
        with pytest.raises(SystemExit):
            parse_args([*BASE, *options.split()])


def test_simulated_drafts_take_rules_that_promise_the_tokens() -> None:
    found, notes = cells(f"{GRID} --simulate 0.7")
    assert [(t, rule) for t, rule, _ in found] == [(0.0, "match"), (1.0, "match"), (1.0, "coupled")]
    assert len(notes) == 2 and "T=1 rejection: left out" in notes[1]
    with pytest.raises(ValueError, match=r"no combination is left.*rejection"):
        cells("--temperature 0.5 1 --rule rejection --simulate 0.7")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("grid")
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt": "hello there", "category": "a"}, {"prompt": "how are you", "category": "b"}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = save_models(folder, "eagle3")
    return [*options, "--prompts", str(prompts), "--max-new-tokens", "10"]


def test_a_grid_from_the_command_line_to_the_folder(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    options = "--temperature 0 1 --rule match rejection block --size 1 6 --trace 1"
    assert main([*command, *options.split(), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    line = json.loads(printed.splitlines()[-1])
    names = [
        "T=0 match size 1",
        "T=0 match size 6",
        "T=1 match size 1",
        "T=1 match size 6",
        "T=1 rejection size 6",
    ]
    assert [cell["name"] for cell in line["cells"]] == names
    assert "left out, block takes chains (--branch 1)" in printed
    assert "at temperature 0 every rule gives the same" in printed
    assert all(f"== {name}" in printed for name in names)
    same = [cell["identical"] for cell in line["cells"]]
    assert same == [True, True, True, True, None]
    assert [cell["verify_width"] for cell in line["cells"][::2]][:2] == [1.0, 1.0]
    run = read_run(out)
    assert [cell["name"] for cell in run.cells] == names
    assert line["settings"]["rule"] == ["match", "rejection", "block"]
    for number in range(5):
        requests = run.requests_of(number)
        assert len(requests) == 2
        rounds = run.rounds_of(requests[0])
        assert all(each.trace is not None for each in rounds) and rounds
        assert all(each.trace is None for each in run.rounds_of(requests[1]))
    plain = [[r.tokens for r in run.requests_of(number)] for number in range(5)]
    assert plain[0] == plain[1] and plain[2] == plain[3] != plain[0]
    seconds = [[r.plain_seconds for r in run.requests_of(number)] for number in range(5)]
    assert seconds[0] == seconds[1] and seconds[2] == seconds[3] == seconds[4] != seconds[0]


def test_chains_keep_block(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = "--temperature 1 --rule rejection block --size 4 --branch 1 --no-plain"
    assert main([*command, *options.split()]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [cell["rule"] for cell in line["cells"]] == ["rejection", "block"]


def test_block_alone_with_trees_is_refused(command: list[str]) -> None:
    with pytest.raises(ValueError, match="rule 'block' verifies chains"):
        main([*command, "--temperature", "1", "--rule", "block", "--size", "6"])


def test_simulated_drafts_from_the_command_line(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bare = [word for word in command if word not in command[2:4]]  # no --head
    assert main([*bare, "--simulate", "1", "--depth", "4"]) == 0
    out = capsys.readouterr().out
    line = json.loads(out.splitlines()[-1])
    assert line["identical"] is True and line["name"] == "T=0 match alpha 1"
    assert line["acceptance_length"] > 3  # 9 tokens: 5, 4
    theory = line["simulated"]
    assert (theory["alpha"], theory["depth"], theory["formula"]) == (1.0, 4, 5.0)
    assert theory["expected"] == pytest.approx(line["acceptance_length"])
    assert "formula gives 5.00 tokens per round" in out
    assert line["speedup"] is None and line["plain_tokens_per_second"] > 0
    with pytest.raises(ValueError, match="--head has no effect on simulated drafts"):
        main([*command, "--simulate", "1"])
    with pytest.raises(ValueError, match="--size has no effect on simulated drafts"):
        main([*bare, "--simulate", "1", "--size", "4"])
    with pytest.raises(ValueError, match="rule 'rejection' at a temperature"):
        main([*bare, "--simulate", "1", "--rule", "rejection", "--temperature", "1"])
