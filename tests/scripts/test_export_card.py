"""The card that the export script writes: acceptance, commands, training, no foreign figures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from drafters import TargetModel
from drafters.export import read_head
from scripts import export as script
from tests.scripts.exporting import arguments, fails, save_heads
from tests.scripts.report_runs import made_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and two heads for it."""
    return save_heads(tmp_path_factory.mktemp("heads"))


def trained(folder: Path, run: Path) -> Path:
    """The EAGLE-3 head in the folder of a run that trained it."""
    target = TargetModel.load(str(folder / "target"))
    read_head(folder / "eagle3", target).save_pretrained(run / "head")
    command = ["train.py", "--config", "recipes/some.yaml", "--run.out", "out"]
    record = {"command": command, "commit": "0123abcd", "versions": {"torch": "2.13.0"}}
    (run / "provenance.json").write_text(json.dumps(record))
    (run / "config.yaml").write_text(
        "data:\n  train: [org/answers, /home/me/answers.jsonl]\n  split: train\n"
        "  max_length: 1024\n  regenerate: true\ndrafter:\n  type: eagle3\n"
    )
    lines = [{"step": step, "train/tokens": 100 * step} for step in (10, 20)]
    lines.append({"step": 20, "eval/acceptance_length": 1.5})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run / "head"


def evaluated(
    folder: Path, head: Path, run: Path, change: Callable[[dict[str, Any]], None] | None = None
) -> Path:
    """An evaluation of it."""
    made_run(run, head="eagle3", temperatures=(0.0,), sizes=(6,))
    result = json.loads((run / "result.json").read_text())
    target = TargetModel.load(str(folder / "target"))
    result["target"]["fingerprint"] = target.fingerprint()
    result["head"]["parameters"] = read_head(head, target).num_parameters_trained()
    result |= {"command": ["evaluate.py", "--prompts", "my questions.jsonl"], "commit": "feed"}
    if change is not None:
        change(result)
    (run / "result.json").write_text(json.dumps(result))
    return run


def test_the_card_has_acceptance_commands_and_training(folder: Path, tmp_path: Path) -> None:
    head = trained(folder, tmp_path / "run")
    run = evaluated(folder, head, tmp_path / "evaluation")
    rest = ("--out", tmp_path / "out", "--runs", run, "--base-model", "org/tiny")
    script.main(arguments(folder, head, "--to", "sglang", *rest))
    text = (tmp_path / "out" / "README.md").read_text()
    assert text.startswith("---\nbase_model: org/tiny\n")
    cell = json.loads((run / "result.json").read_text())["cells"][0]
    assert f"| **{cell['acceptance_length']:.2f}**" in text
    assert "python -m scripts.evaluate --prompts 'my questions.jsonl'\n# Headway feed, " in text
    assert f"--speculative-draft-model-path {tmp_path / 'out'}" in text
    assert "- data: org/answers, `answers.jsonl`, split train" in text
    assert "- answers: written by the target itself" in text
    assert "- trained for 20 steps, 2,000 tokens" in text
    assert "python -m recipes.train --config recipes/some.yaml --run.out out" in text
    assert "# Headway 0123abcd, torch 2.13.0" in text and "  type: eagle3\n" in text


def test_what_is_known_of_the_training_travels_on(folder: Path, tmp_path: Path) -> None:
    """From export to export, and away from the run's folder."""
    head = trained(folder, tmp_path / "run")
    script.main(arguments(folder, head, "--to", "sglang", "--out", tmp_path / "one"))
    script.main(arguments(folder, tmp_path / "one", "--to", "native", "--out", tmp_path / "two"))
    one, two = ((tmp_path / name / "README.md").read_text() for name in ("one", "two"))
    assert one.partition("## Training")[2] == two.partition("## Training")[2] != ""


def test_nothing_recorded_is_said(folder: Path, tmp_path: Path) -> None:
    script.main(arguments(folder, "medusa", "--to", "native", "--out", tmp_path / "out"))
    text = (tmp_path / "out" / "README.md").read_text()
    assert "Not recorded: the head came here without its run's folder." in text
    assert "Acceptance" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda result: result["head"].update(type="medusa"), "with a head of type medusa"),
        (lambda result: result["head"].update(parameters=7), "a head of 7 parameters"),
        (lambda result: result.update(head=None), "evaluated with no head"),
        (lambda result: result["target"]["fingerprint"].update(weights="ff"), "with weights ff"),
    ],
)
def test_figures_of_something_else_are_refused(
    folder: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = evaluated(folder, folder / "eagle3", tmp_path / "evaluation", change)
    rest = ("--to", "sglang", "--out", tmp_path / "out", "--runs", run)
    error = fails(arguments(folder, "eagle3", *rest), capsys)
    assert "--runs evaluation: " in error and message in error
    assert not (tmp_path / "out").exists()


def test_a_run_of_the_export_itself_counts(folder: Path, tmp_path: Path) -> None:
    """It was evaluated without the confidence output, which the dialect has no place for."""
    confidence = sum(
        tensor.numel()
        for name, tensor in load_file(folder / "eagle3" / "model.safetensors").items()
        if name.startswith("confidence.")
    )
    run = evaluated(
        folder,
        folder / "eagle3",
        tmp_path / "evaluation",
        lambda result: result["head"].update(parameters=result["head"]["parameters"] - confidence),
    )
    rest = ("--to", "sglang", "--out", tmp_path / "out", "--runs", run)
    script.main(arguments(folder, "eagle3", *rest))
