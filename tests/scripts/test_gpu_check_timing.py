"""Clocks of the check: what a GPU would do is imitated."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from scripts import gpu_check_timing
from scripts.gpu_check_timing import host_waits, microseconds, milliseconds, wall_milliseconds

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU on which a call takes what is added to `now`, and on which nothing is captured."""
    state = SimpleNamespace(now=0.0, mode="default", synchronized=0, captured=0)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = state.now

        def elapsed_time(self, other: "Event") -> float:
            return other.at - self.at

    def synchronize(*_: object) -> None:
        state.synchronized += 1
        if state.mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    def capture(*_: object) -> object:
        state.captured += 1
        return lambda function: function

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(
        torch.cuda, "set_sync_debug_mode", lambda mode: vars(state).update(mode=mode)
    )
    monkeypatch.setattr(gpu_check_timing, "CudaCapture", capture)
    return state


def test_parts_are_timed_by_events(gpu: SimpleNamespace) -> None:
    def part(milliseconds: float):
        def call() -> None:
            gpu.now += milliseconds

        return call

    assert milliseconds([part(1.0), part(3.0)], CUDA) == pytest.approx([1.0, 3.0])
    assert gpu.synchronized > 0


def test_calls_that_take_turns_share_one_graph(gpu: SimpleNamespace) -> None:
    def call() -> None:
        gpu.now += 2.0

    assert microseconds([call] * 4, CUDA) == pytest.approx(2000.0)
    assert gpu.captured == 1


def test_waits_of_the_host_are_counted(gpu: SimpleNamespace) -> None:
    def twice() -> None:
        torch.cuda.synchronize()
        warnings.warn("something else", stacklevel=1)
        torch.cuda.synchronize()

    assert host_waits(twice, CUDA) == 2
    assert gpu.mode == "default"
    with pytest.raises(KeyError):
        host_waits(lambda: {}["nothing"], CUDA)
    assert gpu.mode == "default"


def test_a_cpu_waits_for_nothing() -> None:
    calls: list[int] = []
    assert host_waits(lambda: calls.append(1), CPU) is None
    assert calls == [1]


def test_walls_wait_on_both_sides(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check_timing, "REPEATS", 2)
    assert wall_milliseconds(lambda: None, CUDA) >= 0
    assert gpu.synchronized == 2 * 3
