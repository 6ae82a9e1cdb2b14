"""The timer charges phases, and drains the device it was made for."""

import time

import pytest
import torch

from inference.timing import PhaseTimer


def test_seconds_are_charged_to_their_phase() -> None:
    timer = PhaseTimer(torch.device("cpu"))
    for name in ("draft", "target", "draft"):
        with timer.phase(name):
            time.sleep(0.01)
    assert timer.seconds["draft"] >= 0.02 and timer.seconds["target"] >= 0.01


def test_a_phase_that_fails_is_charged_too() -> None:
    timer = PhaseTimer()
    with pytest.raises(ValueError), timer.phase("target"):
        raise ValueError
    assert set(timer.seconds) == {"target"}


def test_the_timed_device_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the current one, which may be another."""
    drained: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", drained.append)
    device = torch.device("cuda:1")
    with PhaseTimer(device).phase("target"):
        assert drained == [device]
    assert drained == [device, device]
    for other in (None, torch.device("cpu")):
        with PhaseTimer(other).phase("target"):
            pass
    assert len(drained) == 2
