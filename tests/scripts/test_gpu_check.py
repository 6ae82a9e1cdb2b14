"""The one-run script for a GPU, where there is none: what runs the sections."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts import gpu_check

ROOT = Path(__file__).resolve().parents[2]
ROW = '{"B": 1, "kernel µs": 2.5}'


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces the processes of the sections by a shell script: what a section does instead."""

    def replace(**instead: str) -> None:
        script = tmp_path / "python"
        cases = "".join(f"{name}) {does};;\n" for name, does in instead.items())
        script.write_text(
            f"#!/usr/bin/env bash\ncase $4 in\n{cases}esac\necho '{ROW}'; echo 'a warning' >&2\n"
        )
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return replace


def run(tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out"
    code = gpu_check.main(["--out", str(out), "--dry-run", "--scale", "0.02", *more])
    assert {path.name for path in out.iterdir()} == {"results.json", "results.md"}
    return code, json.loads((out / "results.json").read_text())


@pytest.mark.parametrize(
    ("instead", "status", "error"),
    [
        ("""echo '{"error": 1}'; echo 'CUDA error' >&2; exit 1""", "failed", "CUDA error"),
        ("""echo '{"error": 1, "ok": false}'; exit 0""", "failed", ""),
        ("""echo '{"error": 1}'; exec sleep 60""", "out of time", ""),
        ("""echo '{"error": 1}'; sleep 60 & wait""", "out of time", ""),
    ],
)
def test_a_section_that_fails_loses_nothing(
    instead: str, status: str, error: str, tmp_path: Path, stub: Any
) -> None:
    stub(decode=instead)
    code, results = run(tmp_path, "--only", "decode", "kernel")
    assert code == 1
    first, second = results["sections"]["decode"], results["sections"]["kernel"]
    assert first["status"] == status
    assert first["rows"][0]["error"] == 1
    assert error in first["error"]
    assert second["status"] == "passed" and second["rows"] == [{"B": 1, "kernel µs": 2.5}]
    table = (tmp_path / "out" / "results.md").read_text()
    assert "| B | kernel µs |" in table and "| 1 | 2.5 |" in table


def test_what_is_killed_takes_its_children_along(tmp_path: Path, stub: Any) -> None:
    stub(decode=f"sleep 61 & echo $! > {tmp_path}/child; wait")
    run(tmp_path, "--only", "decode")
    child = int((tmp_path / "child").read_text())
    for _ in range(50):
        if not Path(f"/proc/{child}").exists() or "Z" in state_of(child):
            return
        time.sleep(0.1)
    raise AssertionError("it goes on")


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().split()[2]


def test_what_is_measured_in_order_of_importance_may_be_cut_short(
    tmp_path: Path, stub: Any
) -> None:
    stub(kernel=f"echo '{ROW}'; exec sleep 60")
    code, results = run(tmp_path, "--only", "kernel")
    assert code == 0
    assert results["sections"]["kernel"]["status"] == "cut short"
    assert results["sections"]["kernel"]["rows"] == [{"B": 1, "kernel µs": 2.5}]


def test_the_time_for_everything_is_kept(tmp_path: Path, stub: Any) -> None:
    stub(machine="exec sleep 60", kernel="exec sleep 60")
    start = time.monotonic()
    arguments = ["--minutes", "0.05", "--scale", "0.2", "--only", "kernel", "rivals"]
    _, results = run(tmp_path, *arguments)
    assert time.monotonic() - start < 30
    statuses = {name: section["status"] for name, section in results["sections"].items()}
    assert statuses == {"kernel": "cut short", "rivals": "no time left"}


def test_processes_share_a_section(
    tmp_path: Path, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; each is told its share, and a share that fails is no other's loss."""
    said = """echo "{\\"share\\": \\"${@: -1}\\"}\""""
    stub(agreement=said + "; [[ ${@: -1} != 1/6 ]] || exit 3; exit 0")
    monkeypatch.setattr(gpu_check, "lacking", lambda names: [])
    options = gpu_check.parse(["--out", str(tmp_path)])
    found = gpu_check.run_section("agreement", options, 60.0)
    assert sorted(row["share"] for row in found["rows"]) == [f"{k}/6" for k in range(6)]
    assert found["status"] == "failed"


def test_what_a_section_lacks_is_said_at_once(
    tmp_path: Path, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub()
    asked = "transformers>=5.24 is needed, 5.17.0 is installed"
    monkeypatch.setattr(
        gpu_check, "lacking", lambda names: [asked] if "transformers" in names else []
    )
    code, results = run(tmp_path, "--only", "kernel", "decode")
    assert code == 1
    assert results["sections"]["kernel"]["status"] == "passed"
    assert results["sections"]["decode"]["status"] == "lacking"
    assert results["sections"]["decode"]["error"] == asked


def test_without_a_gpu_it_says_so_and_stops(tmp_path: Path) -> None:
    code = gpu_check.main(["--out", str(tmp_path), "--only", "machine", "decode"])
    results = json.loads((tmp_path / "results.json").read_text())
    assert code == 1 and list(results["sections"]) == ["machine"]
    assert "no CUDA device here; --dry-run" in results["sections"]["machine"]["error"]


def test_out_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--dry-run"])
    assert "give --out" in capsys.readouterr().err


def test_all_sections_fit_into_ten_minutes() -> None:
    assert sum(section.seconds for section in gpu_check.SECTIONS.values()) <= 600
    assert gpu_check.parse(["--out", "somewhere"]).minutes < 10


def test_what_is_most_important_comes_first() -> None:
    assert list(gpu_check.SECTIONS)[:5] == ["machine", "agreement", "kernel", "decode", "rivals"]


def test_the_runner_needs_none_of_what_it_checks() -> None:
    """A package that cannot be imported fails the sections that use it, not the script."""
    heavy = "{'torch', 'transformers', 'triton'}"
    code = f"import sys, scripts.gpu_check; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.slow
def test_the_script_runs_every_section(tmp_path: Path) -> None:
    settings = {**os.environ, "OUT": str(tmp_path / "out"), "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "scripts/gpu_check.sh", "--dry-run", "--minutes", "30", "--scale", "10"],
        cwd=ROOT, env=settings, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["statuses"] == dict.fromkeys(gpu_check.SECTIONS, "passed")
    said = {verdict["asked"]: verdict for verdict in last["verdicts"]}
    unmeasured = [asked for asked, one in said.items() if one["measured"] == "not measured"]
    # Of those sizes there are none in a dry run, and its host waits for nothing.
    assert sorted(asked.partition(":")[0].partition(",")[0] for asked in unmeasured) == [
        "engine device", "kernel",
    ]  # fmt: skip
    assert all(one["met"] is not False for one in said.values())


def test_wheels_are_for_one_run(tmp_path: Path) -> None:
    """A package that is brought along is found before the one that is installed."""
    wheels, calls = tmp_path / "wheels", tmp_path / "calls"
    wheels.mkdir()
    (wheels / "some-1.whl").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/usr/bin/env bash\necho "$PYTHONPATH $*" >> {calls}\n')
    python.chmod(0o755)
    settings = {**os.environ, "PYTHON": str(python), "WHEELS": str(wheels), "OUT": str(tmp_path)}
    settings.pop("PYTHONPATH", None)
    command = ["bash", "scripts/gpu_check.sh", "--dry-run"]
    subprocess.run(command, cwd=ROOT, env=settings, check=True)
    install, check = calls.read_text().splitlines()
    site = install.split("--target ")[1].split()[0]
    assert "--no-index --no-deps" in install and install.endswith(f"{wheels}/some-1.whl")
    assert check == f"{site} -m scripts.gpu_check --out {tmp_path} --dry-run"
    assert not Path(site).exists()
