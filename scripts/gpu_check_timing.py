"""Time on the device, for `scripts.gpu_check`: of captured calls, parts of a round, waits."""

import statistics
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from inference.static.graphs import WARM_UPS, Capture, CudaCapture, called_each_time

REPEATS = 10
"""Timings of which the median is taken, after a first that does not count."""


def device_of(dry_run: bool) -> torch.device:
    """Where a section runs."""
    return torch.device("cpu") if dry_run else torch.device("cuda", 0)


def capture_for(device: torch.device, graphs: bool = True, warm_ups: int = WARM_UPS) -> Capture:
    """Graphs of a memory pool of their own; on a CPU, or without graphs, calls."""
    if not graphs or device.type == "cpu":
        return called_each_time
    return CudaCapture(device, "gpu_check: a part of a round", "that is a bug", warm_ups)


def milliseconds(parts: list[Callable[[], Any]], device: torch.device) -> list[float]:
    """Median time on the device of each part, all run in turn; a first time does not count."""
    found: list[list[float]] = [[] for _ in parts]
    for repeat in range(REPEATS + 1):
        times = _cpu_times(parts) if device.type == "cpu" else _cuda_times(parts)
        if repeat:
            for place, each in enumerate(times):
                found[place].append(each)
    return [statistics.median(each) for each in found]


def _cpu_times(parts: list[Callable[[], Any]]) -> list[float]:
    marks = [time.perf_counter()]
    for part in parts:
        part()
        marks.append(time.perf_counter())
    return [(end - start) * 1e3 for start, end in pairwise(marks)]


def _cuda_times(parts: list[Callable[[], Any]]) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for part, event in zip(parts, events[1:], strict=True):
        part()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def microseconds(calls: list[Callable[[], Any]], device: torch.device) -> float:
    """Median time of one call, the calls taking turns; in a CUDA graph, so without launches."""

    def all_of_them() -> None:
        for function in calls:
            function()

    [whole] = milliseconds([capture_for(device, warm_ups=1)(all_of_them)], device)
    return whole / len(calls) * 1e3


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Of one call that waits for its result, the host's part included."""
    wait_for(device)
    start = time.perf_counter()
    call()
    wait_for(device)
    return time.perf_counter() - start


def wall_milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median of `seconds_of`; a first time does not count."""
    found = [seconds_of(call, device) for _ in range(REPEATS + 1)]
    return statistics.median(found[1:]) * 1e3


def wait_for(device: torch.device) -> None:
    """Until the device has done all that was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per microsecond, read and written, of a copy within the device's memory."""
    size = 2**20 if device.type == "cpu" else 2**31
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)  # zeros are faster
    target = torch.empty_like(source)
    return 2 * size / microseconds([lambda: target.copy_(source)], device)


def host_waits(call: Callable[[], Any], device: torch.device) -> int | None:
    """How often a call has the host wait for the device; None on a CPU, which never does."""
    if device.type == "cpu":
        call()
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in caught)
