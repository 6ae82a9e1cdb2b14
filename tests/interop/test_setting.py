"""Heads by label, environments, and programs that fail."""

import sys
from pathlib import Path

import pytest
import torch

from drafters import TargetModel
from drafters.export import write_as
from interop import setting as module
from interop.__main__ import parse_args
from interop.setting import CannotRun, Setting, answer, family_of, labelled, output
from interop.speculators_check import random_head
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(torch.float32)


@pytest.fixture(scope="module")
def heads(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two of one family, one of another."""
    folder = tmp_path_factory.mktemp("heads")
    for name, vocab in (("part", 48), ("full", target.vocab_size)):
        head = random_head("eagle3", target, num_layers=1, draft_vocab_size=vocab)
        head.save_pretrained(folder / name)
    random_head("dspark", target, num_layers=1, markov_rank=16).save_pretrained(folder / "dspark")
    return {name: folder / name for name in ("part", "full", "dspark")}


def test_the_family_is_read_from_the_folder(
    target: TargetModel, heads: dict[str, Path], tmp_path: Path
) -> None:
    """Of our own format and of another."""
    assert [family_of(folder) for folder in heads.values()] == ["eagle3", "eagle3", "dspark"]
    write_as("speculators-dspark", random_head("dspark", target, markov_rank=16), tmp_path / "e")
    assert family_of(tmp_path / "e") == "dspark"


def test_heads_are_named_by_labels(heads: dict[str, Path]) -> None:
    """A family may have several; without a label it is the family's name."""
    part, full, dspark = heads.values()
    assert labelled([f"{part}", f"whole={full}", f"dspark={dspark}"]) == {
        "eagle3": part,
        "whole": full,
        "dspark": dspark,
    }
    args = ["--target", "t", "--head", f"a={part}", "--head", f"b={full}"]
    assert parse_args(args).head == {"a": part, "b": full}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["dspark={part}"], "that is a eagle3 head"),
        (["x={part}", "x={full}"], "x is there already"),
        (["{part}", "{full}"], "eagle3 is there already"),
        (["a/b={part}"], "letters, digits"),
        (["={part}"], "letters, digits"),
        (["a={part}/nowhere"], "nowhere"),
    ],
)
def test_labels_that_cannot_be_are_refused(
    given: list[str], said: str, heads: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [option.format(**heads) for option in given]
    with pytest.raises(ValueError, match=said):
        labelled(options)
    with pytest.raises(SystemExit):
        parse_args(["--target", "t", *(x for option in options for x in ("--head", option))])
    assert said in capsys.readouterr().err


def test_checks_take_all_heads_of_a_family(heads: dict[str, Path], tmp_path: Path) -> None:
    setting = Setting(tmp_path, heads, tmp_path)
    assert list(setting.of("eagle3")) == ["part", "full"]
    assert list(setting.of("dspark", "eagle3")) == ["part", "full", "dspark"]
    assert setting.of("medusa") == {}


def test_programs_that_fail_say_why() -> None:
    assert output([sys.executable, "-c", "print(3)"]) == "3\n"
    with pytest.raises(CannotRun, match=r"ended with 1: .*no such thing"):
        output([sys.executable, "-c", "raise SystemExit('no such thing')"])
    with pytest.raises(CannotRun, match="missing-program"):
        output(["missing-program"])


def test_the_other_side_of_a_check_fails_it() -> None:
    """Its environment is there: what it says is what was found."""
    code = "print('loading'); print('{\"class\": \"Theirs\"}')"
    assert answer([sys.executable, "-c", code], 60) == {"class": "Theirs"}
    with pytest.raises(ValueError, match=r"their side failed: .*no such key"):
        answer([sys.executable, "-c", "raise SystemExit('no such key')"], 60)


def test_named_environments_are_used_as_they_are(tmp_path: Path) -> None:
    there = Setting(tmp_path, {}, tmp_path, {"vllm": Path("/usr/bin/python3")}, install=False)
    assert there.python("vllm", "vllm==1") == Path("/usr/bin/python3")
    with pytest.raises(CannotRun, match="--no-install"):
        there.python("speculators", "speculators==1")


def test_environments_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is bare is installed without what it asks for; other requirements make it anew."""
    done: list[list[str]] = []
    monkeypatch.setattr(module, "output", lambda command: done.append(command[5:]) or "")
    monkeypatch.setattr(module.venv, "create", lambda folder, **_: folder.mkdir(parents=True))
    setting = Setting(tmp_path, {}, tmp_path)
    setting.python("vllm", "torch==1", "a<2", bare=["vllm==3"])
    assert done == [["torch==1", "a<2"], ["--no-deps", "vllm==3"]]
    folder = tmp_path / "environments" / "vllm"
    assert setting.python("vllm", "torch==1", "a<2", bare=["vllm==3"]) == folder / "bin" / "python"
    assert len(done) == 2
    done_before = (folder / ".requirements").read_text(encoding="utf-8")
    monkeypatch.setattr(module.venv, "create", lambda folder, **_: None)
    setting.python("vllm", "torch==1", bare=["vllm==4"])
    assert done[2:] == [["torch==1"], ["--no-deps", "vllm==4"]]
    assert (folder / ".requirements").read_text(encoding="utf-8") != done_before
