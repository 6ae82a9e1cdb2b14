"""Heads for the export script, and how its tests call it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import TargetModel, build_drafter
from scripts import export as script
from scripts.common import run
from tests.tiny import save_tiny_target


def save_heads(folder: Path) -> Path:
    """Write a tiny target and two heads for it; the folder."""
    save_tiny_target(folder / "target", dtype=torch.float32)
    target = TargetModel.load(str(folder / "target"))
    options = {"draft_vocab_size": 40, "feature_layers": [1, 3, 5], "confidence_head": True}
    eagle3 = build_drafter("eagle3", target, **options)
    eagle3.set_draft_vocab(torch.arange(96) % 7)
    eagle3.save_pretrained(folder / "eagle3")
    medusa = build_drafter("medusa", target)
    medusa.set_draft_vocab(torch.arange(96))
    medusa.save_pretrained(folder / "medusa")
    return folder


def arguments(folder: Path, head: str | Path, *rest: object) -> list[str]:
    return [str(argument) for argument in (folder / head, "--target", folder / "target", *rest)]


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The one line on stderr of a run that must fail."""
    with pytest.raises(SystemExit) as exit_info:
        run(lambda: script.main(arguments))
    assert exit_info.value.code == code
    lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(lines) == 1
    return lines[0]
