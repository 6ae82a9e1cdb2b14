"""`--size auto` calibrated by one command, and what a later run finds."""

import json
from pathlib import Path

import pytest

import inference.scheduling.auto as auto_module
import scripts.auto_decided as auto_decided_module
from inference.scheduling.auto import AutoProposer
from scripts.auto_decided import keep_learnt
from scripts.auto_size import main
from scripts.common import add_options, load_target, parser_for
from scripts.drafting import add_drafting_options, load_proposer
from tests.scripts.heads import save_models

SMALL = ["--depth", "2", "--branch", "2"]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(auto_module, "WIDTHS", (1, 2, 4))
    monkeypatch.setattr(auto_decided_module, "CONTEXTS", (16,))
    monkeypatch.setattr("inference.scheduling.cost_calibration.REPEATS", 1)
    monkeypatch.setattr("inference.scheduling.cost_calibration.MOST_REPEATS", 1)
    return save_models(tmp_path)


def prompts_file(folder: Path) -> list[str]:
    rows = [{"prompt_ids": [5, 6, 7, 8, 5, 6, 7]}, {"prompt_ids": [9, 3, 9, 3]}]
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return ["--prompts", str(path), "--max-new-tokens", "12"]


def proposer_of(models: list[str], *more: str) -> AutoProposer:
    parser = parser_for("doc")
    add_options(parser, "--target", "--dtype", "--device", "--threads", "--rule", "--temperature")
    add_drafting_options(parser)
    args = parser.parse_args([*models, *SMALL, "--size", "auto", *more])
    proposer = load_proposer(args, load_target(args))
    assert isinstance(proposer, AutoProposer)
    return proposer


def test_one_command_fills_both_files_and_the_next_run_starts_from_them(
    models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*models, *prompts_file(tmp_path), *SMALL]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    head = tmp_path / "head"
    assert (head / "costs-eager.json").exists()
    assert found["path"] == str(head / "survival-greedy.json")
    assert found["positions"] == 2 * 11
    assert len(found["rates"]["head"]) == 2
    assert found["first"]["128"]["over_plain"] >= 1.0
    before = (head / "survival-greedy.json").read_text()
    proposer = proposer_of(models)
    assert "measured" not in capsys.readouterr().err  # both were there
    assert proposer.memory is not None
    priors = proposer.memory.read(pytest.fail)
    assert priors["head"].rounds[0][0] == 22.0
    assert priors["head"].rates == found["rates"]["head"]
    keep_learnt(proposer)  # of a run that decoded nothing
    assert (head / "survival-greedy.json").read_text() == before


def test_laws_have_files_of_their_own(models: list[str], tmp_path: Path) -> None:
    options = [*models, *prompts_file(tmp_path), *SMALL]
    assert main([*options, "--temperature", "1", "--rule", "rejection"]) == 0
    assert (tmp_path / "head" / "survival-rejection-t1.json").exists()
    assert not (tmp_path / "head" / "survival-greedy.json").exists()


def test_a_damaged_file_does_not_stop_a_run(
    models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "head" / "survival-greedy.json").write_text("{")
    proposer_of(models)
    assert "survival-greedy.json is left aside" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"), [(["--size", "4"], "it is auto here"), (["--positions", "0"], "positions")]
)
def test_options_without_effect_are_refused(
    models: list[str],
    tmp_path: Path,
    more: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main([*models, *prompts_file(tmp_path), *more])
    assert message in capsys.readouterr().err


def test_counts_need_a_place(models: list[str], tmp_path: Path) -> None:
    place = models.index("--head")
    bare = [*models[:place], *models[place + 2 :], "--proposer", "ngram"]
    with pytest.raises(ValueError, match="--costs PATH is needed"):
        main([*bare, *prompts_file(tmp_path)])
