"""The export script: exit codes, the JSON line, a head that decodes the same after the trip."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters import TargetModel
from drafters.export import check_golden, read_as, read_head
from drafters.export.golden import GOLDEN
from scripts import export as script
from tests.scripts.exporting import arguments, fails, last_json, save_heads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and two heads for it."""
    return save_heads(tmp_path_factory.mktemp("heads"))


# --- writing


def test_sglang(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(arguments(folder, "eagle3", "--to", "sglang", "--out", tmp_path / "out"))

    found = last_json(capsys)
    assert found.pop("notes")  # the confidence output is not served
    assert found == {
        "format": "sglang",
        "served": ["sglang", "vllm", "llama.cpp"],
        "path": str(tmp_path / "out"),
        "num_tensors": 15,
        "bytes": sum(path.stat().st_size for path in (tmp_path / "out").iterdir()),
        "logits_equal": True,
        "left_out": ["confidence.proj.bias", "confidence.proj.weight"],
        "pushed": None,
    }
    target = TargetModel.load(str(folder / "target"))
    assert check_golden(read_as("sglang", tmp_path / "out", target), tmp_path / "out") == 0
    manifest = json.loads((tmp_path / "out" / "export.json").read_text())
    assert {"command", "commit", "versions"} <= manifest["provenance"].keys()


@pytest.mark.parametrize("head", ["eagle3", "medusa"])
def test_native(
    folder: Path, tmp_path: Path, head: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # the second replaces the first
        script.main(arguments(folder, head, "--to", "native", "--out", tmp_path / "out"))
    record = last_json(capsys)
    assert (record["served"], record["logits_equal"]) == (["headway"], True)
    target = TargetModel.load(str(folder / "target"))
    assert read_head(tmp_path / "out", target).family == head


def test_an_export_can_be_exported_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(arguments(folder, "eagle3", "--to", "sglang", "--out", tmp_path / "first"))
    again = ("--to", "native", "--out", tmp_path / "second")
    script.main(arguments(folder, tmp_path / "first", *again))
    assert last_json(capsys)["logits_equal"] is True
    first, second = (load_file(tmp_path / name / GOLDEN) for name in ("first", "second"))
    assert torch.equal(first["logits"], second["logits"])


def test_the_summary_says_what_is_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(arguments(folder, "eagle3", "--to", "sglang", "--out", tmp_path / "out"))
    shown = capsys.readouterr().out
    assert "no place for it: confidence.proj.bias, confidence.proj.weight" in shown
    assert "15 tensors" in shown
    assert f"how to serve it: {tmp_path / 'out' / 'README.md'}" in shown


def test_medusa_to_sglang_names_what_is_supported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = ("--to", "sglang", "--out", tmp_path / "out")
    error = fails(arguments(folder, "medusa", *rest), capsys)
    assert "for eagle3 heads" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (("--to", "native", "--out", "OUT", "--with-embeddings"), "with_embeddings has no effect"),
        (("--to", "sglang"), "--to DIALECT and --out DIR are needed"),
        (("--out", "OUT"), "--to DIALECT and --out DIR are needed"),
        (("--check", "--out", "OUT"), "--check writes nothing"),
        (("--check", "--push-to-hub", "me/head"), "--check writes nothing"),
        (("--to", "sglang", "--out", "OUT", "--private"), "--private has no effect"),
        (("--to", "sglang", "--out", "OUT", "--base-model", "no"), "--base-model no: that is no"),
        (("--to", "sglang", "--out", "OUT", "--runs", "NONE"), "no finished run"),
    ],
)
def test_what_makes_no_sense_is_refused(
    folder: Path,
    tmp_path: Path,
    rest: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"OUT": tmp_path / "out", "NONE": tmp_path / "none"}
    given = [places.get(word, word) for word in rest]
    assert message in fails(arguments(folder, "eagle3", *given), capsys)
    assert not (tmp_path / "out").exists()


def test_a_truncated_head_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / "eagle3" / name).read_bytes())
    os.truncate(tmp_path / "model.safetensors", 3000)
    rest = ("--to", "sglang", "--out", tmp_path / "out")
    assert "damaged or cut short" in fails(arguments(folder, tmp_path, *rest), capsys)


def test_the_trained_head_is_never_overwritten(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (folder / "eagle3").iterdir())
    rest = ("--to", "sglang", "--out", folder / "eagle3")
    assert "is the head itself" in fails(arguments(folder, "eagle3", *rest), capsys)
    after = sorted((path.name, path.stat().st_mtime_ns) for path in (folder / "eagle3").iterdir())
    assert after == before


# --- checking


def test_an_export_is_not_replaced_by_what_is_made_of_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    script.main(arguments(folder, "eagle3", "--to", "sglang", "--out", out))
    said = fails(arguments(folder, out, "--to", "vllm", "--out", out), capsys)
    assert "is the head itself" in said
    assert json.loads((out / "export.json").read_text())["format"] == "sglang"


def test_check(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(arguments(folder, "eagle3", "--to", "sglang", "--out", tmp_path / "out"))
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "out").iterdir())
    for named in ((), ("--to", "sglang")):
        script.main(arguments(folder, tmp_path / "out", "--check", *named))
        found = last_json(capsys)
        engines = found.pop("engines")
        assert found == {"format": "sglang", "tensors": 15, "golden": 0.0}
        assert {name.split()[0] for name in engines} == {"sglang", "vllm"}
        assert not any(engines.values())
    (tmp_path / "out" / GOLDEN).unlink()
    script.main(arguments(folder, tmp_path / "out", "--check"))
    assert last_json(capsys)["golden"] is None
    after = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "out").iterdir())
    assert [each for each in before if each[0] != GOLDEN] == after


def test_check_asks_the_loaders_of_engines(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    script.main(arguments(folder, "eagle3", "--to", "sglang", "--out", out))
    save_file({"strange": torch.ones(2)}, out / "other.safetensors")  # engines read that, too
    said = fails(arguments(folder, out, "--check"), capsys)
    assert "vllm 0.33.0: strange is refused" in said
    assert "sglang 0.5.23: strange is ignored" in said


def test_check_names_what_is_wrong(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    script.main(arguments(folder, "eagle3", "--to", "sglang", "--out", out))
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert "tie_word_embeddings" in fails(arguments(folder, out, "--check"), capsys)
    assert "native head" in fails(arguments(folder, "eagle3", "--check"), capsys)
