"""Stopping a run between two steps."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stop:
    """Truthy once a stop was asked for."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Turn the first SIGINT or SIGTERM into a flag, so that the step in progress can finish and be
    saved.
    """
    stop = Stop()

    def ask(number: int, frame: Any) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        os.write(2, b"\nstopping after this step (again to stop at once)\n")

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
