"""Where the time of a decoding step goes: target forward, draft forward, everything else."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseTimer:
    """Seconds by phase name; phases do not nest.

    Args:
        device: on CUDA the queue is drained at both ends of a phase, so that kernels are charged to
            the phase that launched them. Measuring therefore costs a little there; pass None to
            skip it.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._device = device if device is not None and device.type == "cuda" else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the body to ``name``."""
        self._drain()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._drain()
            self.seconds[name] += time.perf_counter() - start

    def _drain(self) -> None:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
