"""scripts.diagnose from its command line: folders in, lines, a JSON line and an exit code out."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.diagnose import main, parse_args
from tests.recipes.diagnosing import edited, small_target, trained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of a target and of a Medusa head trained for it."""
    folder = tmp_path_factory.mktemp("models")
    target = small_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    trained(target, "medusa").save_pretrained(folder / "head")
    return folder / "target", folder / "head"


def called(
    capsys: pytest.CaptureFixture[str], head: Path, target: Path, *more: str
) -> tuple[int, dict[str, Any], list[str]]:
    """Exit code, the JSON line, and the lines before it."""
    code = main([str(head), "--target", str(target), "--device", "cpu", "--threads", "1", *more])
    lines = capsys.readouterr().out.splitlines()
    return code, json.loads(lines[-1]), lines[:-1]


def test_a_good_head(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target, head = folders
    out = tmp_path / "found.json"
    code, record, lines = called(capsys, head, target, "--out", str(out), "--temperature", "1")
    assert (code, record["faults"], record["family"]) == (0, [], "medusa")
    assert record["overlap"][0] > record["constant"]
    assert json.loads(out.read_text()) == record
    assert any(line.startswith("ok       parity") for line in lines)
    assert not any("FAULT" in line for line in lines)


def test_a_broken_head_is_exit_code_1_and_a_fix(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target, head = folders

    def unlearn(tensors: dict[str, Any]) -> None:
        del tensors["blocks.0.0.linear.bias"]

    broken = edited(head, tmp_path / "broken", None, unlearn)
    code, record, lines = called(capsys, broken, target)
    assert (code, record["faults"]) == (1, ["tensors"])
    place = next(number for number, line in enumerate(lines) if line.startswith("FAULT"))
    assert "blocks.0.0.linear.bias" in lines[place]
    assert "fix:" in lines[place + 1]


def test_a_head_of_another_size(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target, head = folders
    broken = edited(head, tmp_path / "broken", lambda config: config.update(hidden_size=64))
    code, record, _ = called(capsys, broken, target)
    assert (code, record["faults"]) == (1, ["fingerprint"])


def test_options_out_of_range(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--temperature", "-1"], ["--max-new-tokens", "4"]):
        with pytest.raises(SystemExit):
            parse_args(["head", "--target", "t", *wrong])
    assert "at least" in capsys.readouterr().err
