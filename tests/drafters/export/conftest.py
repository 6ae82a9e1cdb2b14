"""For tests with checkpoints that hold modules."""

import logging

import pytest


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reports the modules' tensors as unexpected in the target."""
    for name in ("transformers.modeling_utils", "transformers.modeling_layers"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
