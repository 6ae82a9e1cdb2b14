"""What all tests share: our own packages, one thread, no hub, and the real target where it is."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the hub's client is imported

import torch
from accelerate.state import AcceleratorState, GradientState

from scripts.fetch_target import is_fetched, target_folder

ROOT = Path(__file__).resolve().parents[1]

torch.set_num_threads(1)


def pytest_configure() -> None:
    """Refuse to test a foreign distribution: PyPI has others named `drafters` and `inference`."""
    for name in ("drafters", "inference"):
        spec = importlib.util.find_spec(name)
        found = list(spec.submodule_search_locations or []) if spec is not None else []
        if [Path(place).resolve() for place in found] != [ROOT / name]:
            pytest.exit(
                f"the imported `{name}` is not this project's: found {found or 'nothing'}, "
                f"expected {ROOT / name}. `pip uninstall {name}`, then "
                '`pip install -e ".[dev]"` and run pytest from the repository root.',
                returncode=4,
            )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use the real target, and skip GPU tests where there is none."""
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if isinstance(item, pytest.Function) and "smollm2" in item.fixturenames:
            item.add_marker(pytest.mark.real_model)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the real target, SmolLM2-135M in float32; skips the test where it is absent."""
    if not is_fetched("smollm2-135m"):
        pytest.skip("no real target: python -m scripts.fetch_target smollm2-135m")
    return target_folder("smollm2-135m")


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its state in singletons: forget it after a test that trains."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
