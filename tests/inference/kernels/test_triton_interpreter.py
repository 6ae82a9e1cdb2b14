"""The Triton kernels, run by Triton's interpreter on the CPU, against the plain implementation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.inference.kernels.interpreted import CASES

pytest.importorskip("triton", reason="Triton is not installed: it has no build for macOS")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.inference.kernels.interpreted"],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_plain_implementation(name: str, errors: dict[str, float]) -> None:
    assert errors[name] < (2e-6 if CASES[name].dtype == torch.float32 else 2e-3)
