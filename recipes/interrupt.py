"""Ctrl-C while the heavy imports still run: one line instead of a traceback."""

import sys
from types import TracebackType


def quiet_interrupts() -> None:
    """Show an uncaught KeyboardInterrupt as one line; everything else as usual."""
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("stopped", file=sys.stderr)
        else:
            before(kind, value, trace)

    sys.excepthook = hook
