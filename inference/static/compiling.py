"""Forwards compiled once for each kind, and called without looking the model over again.

torch's compiler checks before every call whether all that it has built in is still so: thousands of
attributes of a model's modules, a millisecond and more for a step that takes twenty. What is told
apart by a *kind* here cannot have changed: an engine's weights and modules stay what they are while
it is open, and a forward of other layers is another kind. So modules are not checked, nor is what
they hold meanwhile, while the arguments of a forward are. Kinds do not look through each other's
graphs either, which the compiler does for all graphs of one piece of code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch._dynamo

from drafters import TargetOutput

Forward = Callable[..., TargetOutput]
GRAPHS = 64
"""Of a kind, at most: another for each number of threads and mode of gradients, for example."""


class CompiledKinds:
    """A forward by kinds of calls.

    Args:
        forward: a method or function of positional arguments. What it finds in modules must depend
            on the kind alone.

    Attributes:
        compiled: by kind.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.compiled: dict[Hashable, Forward] = {}

    def of(self, kind: Hashable) -> Forward:
        """The forward for calls of a kind; compiled when it is called first.

        Args:
            kind: whatever its modules depend on.
        """
        if kind not in self.compiled:
            limits = torch._dynamo.config
            limits.recompile_limit = max(limits.recompile_limit, GRAPHS)
            self.compiled[kind] = torch.compile(
                own_code(self._forward),
                fullgraph=True,
                dynamic=True,
                options={"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe},
            )
        return self.compiled[kind]


def own_code(forward: Forward) -> Forward:
    """A function that calls another and shares its code with no third one.

    The compiler keeps graphs by code; methods of two objects have the same.

    Args:
        forward: of positional arguments.
    """

    def run(*inputs: Any) -> TargetOutput:
        return forward(*inputs)

    run.__code__ = run.__code__.replace()
    return run
