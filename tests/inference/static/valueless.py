"""Objects moved to torch's "meta" device, on which tensors have shapes and no values.

A function that reads a value on the host, makes a shape of one, or mixes the tensors of two devices
raises there. What runs through can be captured in a CUDA graph, as far as that depends on it.
"""

from typing import Any

import torch
from torch import Tensor, nn

META = torch.device("meta")
OURS = ("drafters", "inference")


class Mover:
    """Replaces tensors and devices in whatever it can reach, in place."""

    def __init__(self) -> None:
        self._moved: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that no id is used twice

    def __call__(self, thing: Any) -> Any:
        """The thing itself, changed; or, of what cannot change, another one."""
        if id(thing) not in self._moved:
            self._kept.append(thing)
            self._moved[id(thing)] = self._replaced(thing)
        return self._moved[id(thing)]

    def _replaced(self, thing: Any) -> Any:
        if isinstance(thing, nn.Parameter):
            return nn.Parameter(thing.detach().to(META), requires_grad=False)
        if isinstance(thing, Tensor):
            return torch.empty_strided(thing.shape, thing.stride(), dtype=thing.dtype, device=META)
        if isinstance(thing, torch.device):
            return META
        if isinstance(thing, tuple):
            items = [self(item) for item in thing]
            return tuple(items) if type(thing) is tuple else type(thing)(*items)
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
