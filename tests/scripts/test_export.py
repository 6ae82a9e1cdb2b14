"""The export script: exit codes, the JSON line, and a head that decodes the same after the trip."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafters import TargetModel, build_drafter
from drafters.export import check_golden, read_native, read_sglang
from scripts import export as script
from scripts.common import run
from tests.tiny import save_tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and two heads for it."""
    folder = tmp_path_factory.mktemp("heads")
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


def arguments(folder: Path, head: str, *rest: object) -> list[str]:
    paths = ["--target", folder / "target", "--head", folder / head]
    return [str(argument) for argument in [*paths, *rest]]


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_sglang(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(arguments(folder, "eagle3", "--format", "sglang", "--out", tmp_path / "out"))

    assert last_json(capsys) == {
        "format": "sglang",
        "served": ["sglang", "vllm", "llama.cpp"],
        "path": str(tmp_path / "out"),
        "num_tensors": 15,
        "bytes": sum(path.stat().st_size for path in (tmp_path / "out").iterdir()),
        "logits_equal": True,
        "left_out": ["confidence.proj.bias", "confidence.proj.weight"],
        "notes": [],
    }
    target = TargetModel.load(str(folder / "target"))
    assert check_golden(read_sglang(tmp_path / "out", target), tmp_path / "out") == 0
    manifest = json.loads((tmp_path / "out" / "export.json").read_text())
    assert {"command", "commit", "versions"} <= manifest["provenance"].keys()


@pytest.mark.parametrize("head", ["eagle3", "medusa"])
def test_native(
    folder: Path, tmp_path: Path, head: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # the second replaces the first
        script.main(arguments(folder, head, "--format", "native", "--out", tmp_path / "out"))
    record = last_json(capsys)
    assert (record["served"], record["logits_equal"]) == (["headway"], True)
    target = TargetModel.load(str(folder / "target"))
    assert read_native(tmp_path / "out", target).family == head


def test_an_export_can_be_exported_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(arguments(folder, "eagle3", "--format", "sglang", "--out", tmp_path / "first"))
    again = ("--head", tmp_path / "first", "--format", "native", "--out", tmp_path / "second")
    script.main(arguments(folder, "eagle3", *again))
    assert last_json(capsys)["logits_equal"] is True
    first, second = (
        load_file(tmp_path / name / "golden.safetensors") for name in ("first", "second")
    )
    assert torch.equal(first["logits"], second["logits"])


def test_the_summary_says_what_is_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(arguments(folder, "eagle3", "--format", "sglang", "--out", tmp_path / "out"))
    shown = capsys.readouterr().out
    assert "left out  confidence.proj.bias, confidence.proj.weight" in shown
    assert "15 tensors" in shown


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The one line on stderr of a run that must fail."""
    with pytest.raises(SystemExit) as exit_info:
        run(lambda: script.main(arguments))
    assert exit_info.value.code == code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_medusa_to_sglang_names_what_is_supported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = ("--format", "sglang", "--out", tmp_path / "out")
    error = fails(arguments(folder, "medusa", *rest), capsys)
    assert "for eagle3 heads" in error
    assert not (tmp_path / "out").exists()


def test_options_without_effect_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = ("--format", "native", "--out", tmp_path / "out", "--with-embeddings")
    assert "--with-embeddings" in fails(arguments(folder, "eagle3", *rest), capsys)


def test_a_truncated_head_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / "eagle3" / name).read_bytes())
    os.truncate(tmp_path / "model.safetensors", 3000)
    rest = ("--head", tmp_path, "--format", "sglang", "--out", tmp_path / "out")
    assert "damaged or cut short" in fails(arguments(folder, "eagle3", *rest), capsys)


def test_the_trained_head_is_never_overwritten(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (folder / "eagle3").iterdir())
    rest = ("--format", "sglang", "--out", folder / "eagle3")
    assert "is not an export" in fails(arguments(folder, "eagle3", *rest), capsys)
    after = sorted((path.name, path.stat().st_mtime_ns) for path in (folder / "eagle3").iterdir())
    assert after == before
