"""The one-run script for a GPU, where there is none: sections on tiny shapes, and the runner."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inference.kernels.reference import cache_mask
from scripts import gpu_check, gpu_check_kernel

CPU = torch.device("cpu")


def test_agreement_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--section", "agreement", "--dry-run"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 3 * len(gpu_check_kernel.DRY_AGREEMENT)
    assert all(row["ok"] and row["error"] <= row["tolerance"] for row in rows)


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_check_kernel.tree_attention
    monkeypatch.setattr(gpu_check_kernel, "tree_attention", lambda *a, **k: right(*a, **k) * 1.1)
    assert not any(row["ok"] for row in gpu_check_kernel.agreement(dry_run=True))


def test_the_alternatives_compute_the_same() -> None:
    shape = gpu_check_kernel.Shape(2, 20, 5, (4, 2), 16)
    arguments = gpu_check_kernel.tensors_of(shape, torch.float32, CPU)
    expected = gpu_check_kernel.call(arguments)
    mask = cache_mask(*arguments[3:5], 25, arguments[5])[:, None]
    torch.testing.assert_close(gpu_check_kernel.sdpa(arguments, mask), expected)
    block_mask = gpu_check_kernel.block_mask_of(arguments, 25)
    flex = gpu_check_kernel.flex(arguments, block_mask, gpu_check_kernel.flex_attention)
    torch.testing.assert_close(flex, expected)


def test_an_alternative_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room\nfor it")

    monkeypatch.setattr(gpu_check_kernel, "sdpa", fail)
    copy, row = gpu_check_kernel.speed(dry_run=True)
    assert copy["GB/s"] > 0
    assert row["SDPA µs"] == "OutOfMemoryError: no room for it"
    assert row["kernel µs"] > 0 and row["Flex µs"] > 0 and 0 < row["of copy"] < 10


def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agreement: str) -> None:
    """Replace the processes of the sections by a shell script."""
    script = tmp_path / "python"
    script.write_text(
        "#!/usr/bin/env bash\n"
        f'if [[ "$4" == agreement ]]; then {agreement}; fi\n'
        """echo '{"B": 1, "kernel µs": 2.5}'; echo 'a warning' >&2\n"""
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


@pytest.mark.parametrize(
    ("agreement", "status", "error"),
    [
        ("""echo '{"error": 1}'; echo 'CUDA error' >&2; exit 1""", "failed", "CUDA error"),
        ("""echo '{"error": 1, "ok": false}'; exit 0""", "failed", ""),
        ("""echo '{"error": 1}'; exec sleep 60""", "out of time", ""),
    ],
)
def test_a_section_that_fails_loses_nothing(
    agreement: str, status: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, monkeypatch, agreement)
    arguments = ["--out", str(tmp_path / "out"), "--dry-run", "--scale", "0.01"]
    assert gpu_check.main(arguments) == 1
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    first, second = results["sections"]["agreement"], results["sections"]["speed"]
    assert first["status"] == status
    assert first["rows"][0]["error"] == 1
    assert error in first["error"]
    assert second["status"] == "passed" and second["rows"] == [{"B": 1, "kernel µs": 2.5}]
    table = (tmp_path / "out" / "results.md").read_text()
    assert "| B | kernel µs |" in table and "| 1 | 2.5 |" in table


def test_what_is_measured_in_order_of_importance_may_be_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, monkeypatch, "true")
    script = tmp_path / "python"
    script.write_text(script.read_text() + 'if [[ "$4" == speed ]]; then exec sleep 60; fi\n')
    arguments = ["--out", str(tmp_path / "out"), "--dry-run", "--scale", "0.01"]
    assert gpu_check.main([*arguments, "--target", "folder"]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())["sections"]
    assert results["speed"]["status"] == "cut short"
    assert results["speed"]["rows"] == [{"B": 1, "kernel µs": 2.5}]


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_check.main(["--out", "somewhere"])
    assert "no CUDA device here; --dry-run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu_check.main(["--dry-run"])
    assert "give --out" in capsys.readouterr().err


def test_all_sections_fit_into_ten_minutes() -> None:
    assert sum(section.seconds for section in gpu_check.SECTIONS.values()) <= 570


@pytest.mark.slow
def test_the_script_runs_every_section(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    settings = {**os.environ, "OUT": str(tmp_path / "out"), "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "scripts/gpu_check.sh", "--dry-run"],
        cwd=root, env=settings, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert {name: s["status"] for name, s in results["sections"].items()} == dict.fromkeys(
        gpu_check.SECTIONS, "passed"
    )
