"""`--size auto` judged on recorded drafts, by the script."""

import json
from pathlib import Path
from typing import Any

import pytest

import inference.scheduling.auto as auto_module
import scripts.auto_decided as auto_decided_module
from scripts import auto_size
from scripts.auto_replay import main
from tests.scripts.heads import save_models

SMALL = ["--depth", "2", "--branch", "2"]
ROWS = [
    {"prompt_ids": [5, 6, 7, 8, 5, 6, 7], "category": "copies"},
    {"prompt_ids": [9, 3, 9, 3], "category": "copies"},
    {"prompt_ids": [11, 12, 13], "category": "other"},
]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(auto_module, "WIDTHS", (1, 2, 4))
    monkeypatch.setattr(auto_decided_module, "CONTEXTS", (16,))
    monkeypatch.setattr("inference.scheduling.cost_calibration.REPEATS", 1)
    monkeypatch.setattr("inference.scheduling.cost_calibration.MOST_REPEATS", 1)
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return [*save_models(tmp_path), *SMALL]


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    del found["choice_ms"]
    return found


def test_records_are_replayed_as_they_were_made(
    models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = str(tmp_path / "prompts.jsonl"), tmp_path / "out"
    recording = [*models, "--prompts", prompts, "--max-new-tokens", "14", "--out", str(out)]
    assert main(recording) == 0
    first = result(capsys)
    kept = json.loads((out / "replay.json").read_text())
    assert {name: value for name, value in kept.items() if name != "choice_ms"} == first
    assert main([*models, "--records", str(out / "records.jsonl")]) == 0
    assert result(capsys) == first
    assert first["questions"] == 3 and first["tokens"] == 3 * 13
    assert set(first["auto"]) == {"cold"}
    assert {name: row["questions"] for name, row in first["by_category"].items()} == {
        "copies": 2,
        "other": 1,
    }
    assert first["fixed"]["plain"] == 1.0
    best = first["best_fixed"]
    assert best["speedup"]["value"] == max(first["fixed"].values()) == first["fixed"][best["does"]]
    assert best["speedup"]["value"] <= first["best_of_each_question"] <= first["bound"]
    assert first["auto"]["cold"]["of_bound"] <= 1.0
    speedup = first["auto"]["cold"]["speedup"]["value"]
    over = first["auto"]["cold"]["over_best_fixed"]["value"]
    assert speedup / over == pytest.approx(best["speedup"]["value"])


def test_what_was_counted_before_is_another_start(
    models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "12"]
    assert auto_size.main([*models, *prompts]) == 0
    before = (tmp_path / "head" / "survival-greedy.json").read_text()
    capsys.readouterr()
    assert main([*models, *prompts, "--limit", "2"]) == 0
    found = result(capsys)
    assert set(found["auto"]) == {"cold", "priors"} and found["questions"] == 2
    assert (tmp_path / "head" / "survival-greedy.json").read_text() == before


def test_records_of_another_width_are_refused(models: list[str], tmp_path: Path) -> None:
    prompts = ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "6"]
    assert main([*models, *prompts, "--out", str(tmp_path)]) == 0
    models[models.index("--branch") + 1] = "3"
    with pytest.raises(ValueError, match="depth and branch"):
        main([*models, "--records", str(tmp_path / "records.jsonl")])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "give --prompts"),
        (["--prompts", "a", "--records", "b"], "give --prompts"),
        (["--prompts", "a", "--size", "4"], "it is auto here"),
    ],
)
def test_options_are_checked(
    models: list[str], more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*models, *more])
    assert message in capsys.readouterr().err
