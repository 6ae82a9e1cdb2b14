"""`import drafters` is enough for transformers' Auto classes to know every head."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel

from drafters import FAMILIES, build_drafter
from drafters.export import golden_inputs, golden_logits
from tests.fake_hub import hub
from tests.tiny import tiny_target

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(tmp_path: Path, family: str) -> None:
    target = tiny_target(torch.float32)
    head = build_drafter(family, target).eval()
    head.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is FAMILIES[family].config_class
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again) is FAMILIES[family]
    inputs = golden_inputs(head)
    logits = golden_logits(again.attach(target).eval(), inputs)
    assert torch.equal(logits, golden_logits(head, inputs))


def test_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_drafter("medusa", tiny_target(torch.float32)).save_pretrained(tmp_path / "head")
    with hub(tmp_path / "cache", monkeypatch) as fake:
        fake.add("me/head", tmp_path / "head", tag="v1")
        assert type(AutoModel.from_pretrained("me/head", revision="v1")) is FAMILIES["medusa"]


def test_nothing_else_needs_to_be_imported(tmp_path: Path) -> None:
    build_drafter("eagle3", tiny_target(torch.float32)).save_pretrained(tmp_path)
    source = (
        "import sys, drafters\n"
        "from transformers import AutoModel\n"
        "print(type(AutoModel.from_pretrained(sys.argv[1])).__name__)"
    )
    command = [sys.executable, "-c", source, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "Eagle3Drafter"
