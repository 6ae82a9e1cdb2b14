"""The export script and the hub: pushed once every check has passed, read back from there."""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from drafters import TargetModel, build_drafter
from drafters.export import Export, read_head, writing
from scripts import export as script
from tests.fake_hub import FakeHub, hub
from tests.scripts.exporting import arguments, fails, last_json, save_heads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and two heads for it."""
    return save_heads(tmp_path_factory.mktemp("heads"))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with hub(tmp_path / "cache", monkeypatch) as found:
        yield found


PUSH = ("--to", "sglang", "--base-model", "org/tiny", "--push-to-hub", "me/tiny-eagle3")


def test_push(
    folder: Path, tmp_path: Path, fake: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    script.main(arguments(folder, "eagle3", *PUSH, "--out", out, "--private"))
    repo = fake.repos["me/tiny-eagle3"]
    assert last_json(capsys)["pushed"].endswith(repo.commits[-1][0])
    assert repo.private and len(repo.commits) == 2
    assert repo.files == {".gitattributes": b""} | {p.name: p.read_bytes() for p in out.iterdir()}
    text = repo.files["README.md"].decode()
    assert "--speculative-draft-model-path me/tiny-eagle3 " in text and str(out) not in text


def test_what_was_pushed_is_read_from_there(
    folder: Path, tmp_path: Path, fake: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    """A foreign dialect by its hub id, as a head and in a check."""
    script.main(arguments(folder, "eagle3", *PUSH, "--out", tmp_path / "out"))
    fake.repos["me/tiny-eagle3"].tags["v1"] = fake.repos["me/tiny-eagle3"].commits[-1][0]
    target = TargetModel.load(str(folder / "target"))
    wanted = read_head(tmp_path / "out", target).state_dict()
    for name in ("me/tiny-eagle3", "me/tiny-eagle3@v1"):
        found = read_head(name, target).state_dict()
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
        script.main([name, "--target", str(folder / "target"), "--check"])
        assert last_json(capsys)["format"] == "sglang"


def test_nothing_is_pushed_before_the_checks_pass(
    folder: Path,
    tmp_path: Path,
    fake: FakeHub,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    push = (*PUSH, "--out", tmp_path / "out")
    assert "for eagle3 heads" in fails(arguments(folder, "medusa", *push), capsys)
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "model.safetensors"):
        (broken / name).write_bytes((folder / "eagle3" / name).read_bytes())
    os.truncate(broken / "model.safetensors", 3000)
    assert "damaged" in fails(arguments(folder, broken, *push), capsys)
    monkeypatch.setattr(writing, "golden_difference", lambda *_: 0.25)
    assert "nothing was pushed: logits" in fails(arguments(folder, "eagle3", *push), capsys)
    assert not fake.writes and not fake.repos


def test_rounding_of_a_dropped_vocabulary_does_not_stop_a_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = script.parse_args(["H", "--target", "T", *PUSH, "--out", "O"])
    monkeypatch.setattr(script, "push_folder", lambda *_: "pushed")
    whole = Export(tmp_path, "dflash", ("vllm",), 1, 1, 2e-7, "README.md")
    reduced = replace(whole, left_out=("draft_vocab",))
    assert script.push(args, reduced) == "pushed"
    off = (replace(reduced, difference=value) for value in (0.25, float("nan")))
    for export in (*off, whole):
        with pytest.raises(ValueError, match="nothing was pushed"):
            script.push(args, export)


def test_a_target_that_nobody_finds_is_asked_for(
    folder: Path, tmp_path: Path, fake: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    push = ("--to", "sglang", "--push-to-hub", "me/head", "--out", tmp_path / "out")
    error = fails(arguments(folder, "eagle3", *push), capsys)
    assert "recorded as 'target'" in error and "--base-model user/name" in error
    assert not fake.writes and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("said", "recorded", "loaded", "base"),
    [
        ("org/said", "org/recorded", "org/loaded", "org/said"),
        (None, "org/recorded", "org/loaded", "org/recorded"),
        (None, "smol", "org/loaded", "org/loaded"),
        (None, "smol", "some/folder", None),  # of this machine
        (None, "org/recorded@v1", "org/loaded", "org/recorded"),
        (None, "smol", "org/loaded@v1", "org/loaded"),
    ],
)
def test_the_base_model(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str | None,
    recorded: str,
    loaded: str,
    base: str | None,
) -> None:
    (tmp_path / "some" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    head = AutoModel.from_pretrained(folder / "medusa")
    head.config.target_name = recorded
    args = argparse.Namespace(base_model=said, target=loaded, push_to_hub=None)
    assert script.base_model(args, head) == base


def test_a_target_at_a_revision(folder: Path, tmp_path: Path, fake: FakeHub) -> None:
    """Named by the card as such; engines and other programs take the revision apart."""
    fake.add("org/tiny", folder / "target", tag="v1")
    target = TargetModel.load("org/tiny@v1")
    build_drafter("eagle3", target, feature_layers=[1, 3, 5]).save_pretrained(tmp_path / "head")
    rest = ("--target", "org/tiny@v1", "--to", "speculators-eagle3", "--out", tmp_path / "out")
    script.main([str(tmp_path / "head"), *map(str, rest)])
    text = (tmp_path / "out" / "README.md").read_text()
    assert text.startswith("---\nbase_model: org/tiny\n")
    assert "- target: org/tiny@v1, " in text
    assert "hf download org/tiny --revision v1 --local-dir path/to/tiny\n" in text
    assert "vllm serve path/to/tiny " in text and "trained on revision v1 of org/tiny" in text
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"


def test_no_token(
    folder: Path,
    tmp_path: Path,
    fake: FakeHub,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Said before anything is loaded or written."""
    monkeypatch.delenv("HF_TOKEN")
    error = fails(["none", "--target", "none", *PUSH, "--out", str(tmp_path / "out")], capsys)
    assert "no token of the hub here: set HF_TOKEN" in error
    assert not fake.asked and not (tmp_path / "out").exists()
