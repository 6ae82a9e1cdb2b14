"""scripts.benchmark: the command line, and whole races of processes."""

import json
import sys
from pathlib import Path

import pytest

from scripts.benchmark import DEFAULT, chosen, main, parse_args
from tests.tiny import save_tiny_target

NEEDED = ["--target", "t", "--prompts", "p.jsonl"]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("bench")
    target = save_tiny_target(folder / "target")
    prompts = folder / "prompts.jsonl"
    rows = [
        {"question_id": 7, "category": "loops", "prompt_ids": [5, 6, 7, 5, 6]},
        {"question_id": 8, "category": "loops", "prompt_ids": [11, 12, 13, 11]},
        {"question_id": 9, "category": "other", "prompt_ids": [20] * 9},
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--target", str(target), "--prompts", str(prompts), "--dtype", "float64"]
    return [*options, "--device", "cpu", "--max-new-tokens", "12", "--timeout", "900"]


def result(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_first_contender_is_the_baseline() -> None:
    args = parse_args(NEEDED)
    assert [one.name for one in chosen(args)] == list(DEFAULT)
    assert args.baseline == "plain"
    args = parse_args([*NEEDED, "--baseline", "ours"])
    chosen(args)
    assert args.baseline == "ours"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--baseline", "fast"], "--baseline fast takes no part: give one of plain, "),
        (["--contenders", "plain", "fast"], "'fast' is none of"),
        (["--contenders", "flashspec:ngram"], "flashspec and --flashspec-python are needed"),
        (["--flashspec-python", "python"], "flashspec and --flashspec-python are needed"),
        (["--contenders", "plain", "--engine", "packed"], "--engine has no effect"),
        (["--contenders", "plain", "ours:engine=x"], "engine is one of eager, packed"),
        (["--contenders", "plain", "--sizes", "4"], "--sizes has no effect"),
        (["--contenders", "plain", "ours", "--together"], "--together has no effect"),
        (["--contenders", "ours", "ours:engine=packed", "--together"], "--together has no effect"),
    ],
)
def test_options_without_a_meaning_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(parse_args([*NEEDED, *words]))


@pytest.mark.parametrize("option", ["--batch-sizes", "--contexts", "--max-new-tokens"])
def test_numbers_are_above_0(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args([*NEEDED, option, "0"])
    assert "must be above 0" in capsys.readouterr().err


def test_help_explains_the_contenders(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    out = capsys.readouterr().out
    assert "prompt-lookup:length=10" in out and "ours:as-prompt-lookup" in out
    assert "KINDS" not in out


@pytest.mark.slow
def test_a_race(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A grid of two batch sizes; transformers' prompt lookup refuses the larger, and only that."""
    pair = ["prompt-lookup:length=4", "ours:as-prompt-lookup:length=4"]
    words = ["--contenders", "plain", *pair, "--contexts", "16", "--batch-sizes", "1", "2"]
    words = [*words, "--out", str(tmp_path / "result.json")]
    assert main([*command, *words]) == 1
    found = result(capsys)
    assert list(found["failed"]) == [pair[0]]
    assert "only supported for batch_size = 1" in found["failed"][pair[0]]
    one, two = found["results"]
    assert (one["batch_size"], one["context"], one["reference"]) == (1, 16, "plain")
    assert [each["name"] for each in one["contenders"]] == ["plain", *pair]
    for each in one["contenders"]:
        assert (each["identical"], each["excluded"]) == (3, False)
        assert each["ratio"]["median"] > 0 and each["warm_up_seconds"] > 0
        assert sorted(each["by_category"]) == ["loops", "other"]
    theirs, ours = one["contenders"][1:]
    assert ours["counterpart"]["name"] == theirs["name"]
    assert ours["acceptance_length"] == pytest.approx(theirs["acceptance_length"], rel=0.15)
    assert ours["split"].keys() >= {"verify", "host"}
    assert [each["name"] for each in two["contenders"]] == ["plain", pair[1]]
    assert (two["batches"], two["dropped_prompts"]) == (1, 1)
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["results"] == found["results"]
    assert len(written["raw"][0]["answers"]["plain"]) == 3


@pytest.mark.slow
def test_one_that_cannot_start_does_not_cost_the_others(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--contenders", "assisted:first=6", "ours", "--limit", "2"]) == 1
    found = result(capsys)
    assert "first must be below the target's 6 layers" in found["failed"]["assisted:first=6"]
    [cell] = found["results"]
    [ours] = cell["contenders"]
    assert (ours["name"], cell["reference"], ours["identical"]) == ("ours", "ours", 2)
    assert "ratio" not in ours


@pytest.mark.slow
def test_ours_in_one_process(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """They give what they give apart; one that cannot start does not cost those beside it."""
    names = ["ours", "ours:ngram:chain:3", "ours:as-early-exit:first=9:length=2"]
    texts = []
    for more in ([], ["--together"]):
        assert main([*command, "--contenders", *names, "--engine", "packed", *more]) == 1
        found = result(capsys)
        [refused] = found["failed"].values()
        assert "first must be below the target's 6 layers" in refused
        [cell] = found["results"]
        plain, copies = cell["contenders"]
        assert plain["identical"] == copies["identical"] == 3
        texts.append(copies["acceptance_length"])
    assert texts[0] == texts[1] > 1.0


@pytest.mark.slow
def test_an_environment_without_flashspec_says_so(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--contenders", "ours", "flashspec:ngram", "--flashspec-python", sys.executable]
    assert main([*command, *words, "--limit", "1"]) == 1
    assert "No module named 'flashspec'" in result(capsys)["failed"]["flashspec:ngram"]
