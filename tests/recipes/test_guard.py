"""Foreign packages of the same names, and Ctrl-C while the imports still run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["drafters", "inference"])
def test_foreign_packages_are_refused_with_the_fix(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import recipes"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 1
    assert f"pip uninstall {name}" in done.stderr
    assert "Traceback" not in done.stderr


def test_our_own_packages_pass() -> None:
    code = "import recipes, scripts"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_during_imports_is_one_line() -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "import recipes, time; print('up', flush=True); time.sleep(60)"
    run = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert run.stdout is not None and run.stdout.readline() == b"up\n"
    time.sleep(0.1)
    os.kill(run.pid, signal.SIGINT)
    _, stderr = run.communicate(timeout=30)
    assert stderr == b"stopped\n"
    assert run.returncode != 0
