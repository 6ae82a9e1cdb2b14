"""The Triton kernels, run by Triton's interpreter on the CPU, against the plain implementation."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.inference.kernels.interpreted import BATCHES, CASES

pytest.importorskip("triton", reason="Triton is not installed: it has no build for macOS")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.inference.kernels.interpreted"],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_plain_implementation(name: str, found: dict[str, Any]) -> None:
    assert found["errors"][name] < (2e-6 if CASES[name].dtype == torch.float32 else 2e-3)


def test_the_longer_a_sequence_the_more_splits_it_has(found: dict[str, Any]) -> None:
    splits = {
        name: [-(-length // size) for length, size in zip(BATCHES[name][0], sizes, strict=True)]
        for name, sizes in found["sizes"].items()
    }
    assert splits == {
        "one": [8],
        "equal": [2, 2, 2],
        "almost equal": [2, 2, 2],
        "one long": [4, 1, 1, 1],
        "short": [1, 0],
    }
    sizes = [size for some in found["sizes"].values() for size in some]
    assert min(sizes) == 128 and all(size % 64 == 0 for size in sizes)
