"""What is refused before a run: batch sizes, trackers, and options that an engine cannot serve."""

from pathlib import Path
from typing import Any

import pytest

from training import processes
from training.options.run import RunOptions
from training.processes import data_share, make_accelerator, on_main

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def make(tmp_path: Path, lora: bool = False, parallel: str = "none", **run: Any) -> Any:
    return make_accelerator(RunOptions(out=str(tmp_path), **run), "cpu", parallel, lora)


def test_accumulation_fills_the_batch(tmp_path: Path) -> None:
    assert make(tmp_path, batch_size=12, micro_batch_size=3).gradient_accumulation_steps == 4


def test_batches_that_do_not_divide(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run\.batch_size \(5\) must be a multiple"):
        make(tmp_path, batch_size=5, micro_batch_size=2)


def test_an_unknown_tracker_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run\.trackers: 'wandbb' is not installed"):
        make(tmp_path, trackers=["wandbb"])


@pytest.mark.parametrize(
    ("options", "name"),
    [({"mixed_precision": "fp16"}, r"run\.mixed_precision=fp16"), ({"lora": True}, r"lora\.rank")],
)
def test_options_that_do_not_go_with_fsdp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], name: str
) -> None:
    monkeypatch.setattr(processes, "wants_fsdp", lambda accelerator: True)
    with pytest.raises(ValueError, match=f"{name} does not go with FSDP2"):
        make(tmp_path, **options)


def test_what_goes_with_fsdp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "wants_fsdp", lambda accelerator: True)
    make(tmp_path, on_nonfinite="skip", mixed_precision="bf16")


def test_bf16_is_left_to_the_objective(tmp_path: Path) -> None:
    assert make(tmp_path, mixed_precision="bf16").mixed_precision == "no"


def test_an_offload_that_would_not_happen_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "wants_fsdp", lambda accelerator: True)
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    with pytest.raises(ValueError, match="fsdp_offload_params has no effect"):
        make(tmp_path)


def test_what_the_main_process_finds_or_fails_at(tmp_path: Path) -> None:
    accelerator = make(tmp_path)
    assert on_main(accelerator, lambda: [1, "two"]) == [1, "two"]

    def fail() -> None:
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        on_main(accelerator, fail)


def test_who_trains_on_what(tmp_path: Path) -> None:
    class Two:
        process_index, num_processes = 1, 2

    assert data_share(Two(), "none") == data_share(Two(), "shard") == (1, 2)
    assert data_share(Two(), "tensor") == (0, 1), "all see the same sequences"
    make(tmp_path, parallel="tensor", batch_size=3)
