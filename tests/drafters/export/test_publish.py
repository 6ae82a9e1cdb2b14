"""An export is whole or not there: full disks, interrupts and kills leave the former one."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from drafters import TargetModel
from drafters.export import ExportError, read_native, write_as
from drafters.export import folder as folder_module
from tests.drafters.export.written import contents, eagle3, logits
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


def full_disk(*args: Any) -> None:
    raise SafetensorError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    )


def full_disk_by_number(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("dialect", ["sglang", "native"])
@pytest.mark.parametrize("failure", [full_disk, full_disk_by_number])
@pytest.mark.parametrize("step", ["save_file", "_sync"])
def test_a_full_disk_leaves_the_former_export(
    target: TargetModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dialect: str,
    failure: Callable[..., None],
    step: str,
) -> None:
    write_as(dialect, eagle3(target), tmp_path / "head")
    before = contents(tmp_path / "head")
    monkeypatch.setattr(folder_module, step, failure)
    with pytest.raises(ExportError, match=r"no space left .*untouched"):
        write_as(dialect, eagle3(target, fc_norm=True), tmp_path / "head")
    assert contents(tmp_path / "head") == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize("step", ["save_file", "_sync"])
def test_an_interrupt_leaves_the_former_export(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    write_as("sglang", eagle3(target), tmp_path / "head")
    before = contents(tmp_path / "head")
    monkeypatch.setattr(folder_module, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_as("sglang", eagle3(target, fc_norm=True), tmp_path / "head")
    assert contents(tmp_path / "head") == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_a_failing_rename_brings_the_former_export_back(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_as("sglang", eagle3(target), tmp_path / "head")
    before = contents(tmp_path / "head")
    replace = os.replace

    def fail_to_publish(source: Path, destination: Path) -> None:
        if source.name == ".head.writing":
            raise OSError(errno.EIO, "Input/output error")
        replace(source, destination)

    monkeypatch.setattr(os, "replace", fail_to_publish)
    with pytest.raises(ExportError, match=r"cannot write .*Input/output error"):
        write_as("sglang", eagle3(target, fc_norm=True), tmp_path / "head")
    assert contents(tmp_path / "head") == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


@pytest.mark.parametrize("dialect", ["sglang", "native"])
def test_files_are_readable_for_the_server(
    target: TargetModel, tmp_path: Path, dialect: str
) -> None:
    write_as(dialect, eagle3(target), tmp_path / "head")
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "head").iterdir()}
    assert modes == {(tmp_path / "head").stat().st_mode & 0o666}


def test_a_kill_while_replacing_is_mended(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two renames, with the new export still under its working name."""
    write_as("sglang", eagle3(target), tmp_path / "head")
    before = contents(tmp_path / "head")
    (tmp_path / "head").rename(tmp_path / ".head.former")
    (tmp_path / ".head.writing").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "save_file", full_disk)
        with pytest.raises(ExportError):
            write_as("sglang", eagle3(target), tmp_path / "head")
    assert contents(tmp_path / "head") == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_an_export_is_replaced_by_the_next(target: TargetModel, tmp_path: Path) -> None:
    write_as("sglang", eagle3(target, draft_vocab_size=40), tmp_path / "deep" / "head")
    second = eagle3(target)
    write_as("native", second, tmp_path / "deep" / "head")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["head"]
    again = read_native(tmp_path / "deep" / "head", target)
    assert torch.equal(logits(again), logits(second))


@pytest.mark.parametrize("dialect", ["sglang", "native"])
def test_a_folder_of_the_user_is_never_touched(
    target: TargetModel, tmp_path: Path, dialect: str
) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text("mine")
    with pytest.raises(ExportError, match=r"is not an export .*remove it or choose"):
        write_as(dialect, eagle3(target), tmp_path / "head")
    assert contents(tmp_path / "head") == {"config.json": b"mine"}
