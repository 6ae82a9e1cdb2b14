"""The first section: what there is to measure on."""

from types import SimpleNamespace

import pytest
import torch

from scripts import gpu_check_machine


def test_without_a_gpu_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA device here; --dry-run"):
        list(gpu_check_machine.facts(dry_run=False))


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="some GPU", multi_processor_count=132, major=9, minor=0,
        shared_memory_per_multiprocessor=233472,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (130 * 2**30, 140 * 2**30))
    monkeypatch.setattr(gpu_check_machine, "copy_bandwidth", lambda device: 4.3e6)
    said = {row["what"]: row["is"] for row in gpu_check_machine.facts(dry_run=False)}
    assert said["GPU"] == "some GPU" and said["compute capability"] == "9.0"
    assert said["memory free, GiB"] == "130 of 140"
    assert said["copy, GB/s (read and written)"] == pytest.approx(4300)
    assert said["torch"] == torch.__version__


def test_what_is_lacking_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(names: list[str]) -> list[str]:
        return ["it is too old"] if names == ["transformers"] else []

    monkeypatch.setattr(gpu_check_machine, "lacking", lacking)
    said = {row["what"]: row["is"] for row in gpu_check_machine.facts(dry_run=True)}
    assert said["transformers"] == "it is too old" and "GPU" not in said
