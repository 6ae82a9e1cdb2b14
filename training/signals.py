"""Stopping a run between two steps."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ONE_PRESS = 2.0
"""Seconds within which signals are one: a terminal, torchrun and Slurm each send it to every
process.
"""


class Stop:
    """Truthy once a stop was asked for."""

    def __init__(self) -> None:
        self.asked = False
        self.since = 0.0

    def __bool__(self) -> bool:
        return self.asked


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Turn the first SIGINT or SIGTERM into a flag, so that the step in progress can finish and be
    saved. A later Ctrl-C stops at once; SIGTERM never does.
    """
    stop = Stop()

    def ask(number: int, frame: Any) -> None:
        if stop.asked:
            if number == signal.SIGINT and time.monotonic() - stop.since > ONE_PRESS:
                raise KeyboardInterrupt
            return
        stop.asked, stop.since = True, time.monotonic()
        os.write(2, b"\nstopping after this step (Ctrl-C again to stop at once)\n")

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
