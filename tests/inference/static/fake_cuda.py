"""Objects moved to a CUDA device that is not there.

Under torch's fake tensors shapes, dtypes and devices are computed and nothing else is. A function
that reads a value on the host, or mixes tensors of two devices, raises: what runs through can be
captured in a CUDA graph, as far as that depends on the function.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

CUDA = torch.device("cuda", 0)


def fake_mode() -> FakeTensorMode:
    """In which everything here is to run."""
    return FakeTensorMode()


class Mover:
    """Replaces tensors and devices by fake CUDA ones in whatever it can reach, in place."""

    def __init__(self) -> None:
        self._moved: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that no id is used twice

    def __call__(self, thing: Any) -> Any:
        """The thing itself, changed; or, of what cannot change, another one."""
        if id(thing) in self._moved:
            return self._moved[id(thing)]
        self._kept.append(thing)
        found = self._moved[id(thing)] = self._replaced(thing)
        return found

    def _replaced(self, thing: Any) -> Any:
        if isinstance(thing, nn.Parameter):
            return nn.Parameter(self._tensor(thing), requires_grad=False)
        if isinstance(thing, Tensor):
            return self._tensor(thing)
        if isinstance(thing, torch.device):
            return CUDA
        if isinstance(thing, tuple):
            items = [self(item) for item in thing]
            return type(thing)(*items) if hasattr(thing, "_fields") else tuple(items)
        if isinstance(thing, list):
            thing[:] = [self(item) for item in thing]
        elif isinstance(thing, dict):
            for key in list(thing):
                thing[key] = self(thing[key])
        elif type(thing).__module__.partition(".")[0] in OURS or isinstance(thing, nn.Module):
            self._moved[id(thing)] = thing  # cycles end here
            for key, value in vars(thing).items():
                object.__setattr__(thing, key, self(value))
        return thing

    def _tensor(self, like: Tensor) -> Tensor:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=CUDA)


OURS = ("drafters", "inference")
