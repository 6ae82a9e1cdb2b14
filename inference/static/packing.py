"""Linear layers on a CPU, with weights laid out once for the kernel that reads them.

A plain `linear` hands its weight to the BLAS as it is stored, which repacks it in every call that
has more than one row: verifying eight tokens then costs twice what one costs. oneDNN takes weights
in an order of its own, made here once per model; with it, a handful of rows costs what one does.
They lie in huge pages where there are some, which makes reading them faster by a tenth and more.

The layers themselves stay what they are: their `forward` is shadowed on the instance and comes back
with `close()`. Weights must not change meanwhile, and take their memory twice.

Letters: M rows, D_in and D_out features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from drafters import Drafter
from inference.huge_pages import collapse

MOST_FILLED = 4
"""Rows up to which a single one may be filled up."""
DTYPES = (torch.float32, torch.bfloat16)
"""What oneDNN has linear kernels for."""

_library = torch.library.Library("headway", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor? bias, int handle, int features) -> Tensor")
_weights: list[Tensor | None] = []
"""Packed weights by handle. They are opaque to torch's compiler, which sees the handle only."""


def packed_linear(x: Tensor, bias: Tensor | None, handle: int, features: int) -> Tensor:
    """x (..., D_in) -> (..., features), by the weight behind ``handle``."""
    weight = _weights[handle]
    assert weight is not None, "the layer was packed and closed"
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def _shape_only(x: Tensor, bias: Tensor | None, handle: int, features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], features)


_library.impl("packed_linear", packed_linear, "CPU")
torch.library.register_fake("headway::packed_linear", _shape_only, lib=_library)


def cannot_pack(weight: Tensor) -> str | None:
    """Why weights like this one cannot be packed; None if they can."""
    if weight.device.type != "cpu":
        return f"the weights are on {weight.device.type}, not on the CPU"
    if weight.dtype not in DTYPES:
        return f"oneDNN has no kernels for {weight.dtype}: load the model in float32 or bfloat16"
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN has no bfloat16 kernels for this CPU: load the model in float32"
    return None


class PackedLinears:
    """The linear layers of some modules, packed.

    Args:
        modules: whose `nn.Linear` layers, themselves included, are packed; each once. Of heads with
            a draft vocabulary also the rows of the target's output matrix that they borrow.

    Attributes:
        huge_share: of the packed bytes, those in huge pages; from 0 to 1.

    Raises:
        ValueError: weights that cannot be packed, or are packed already.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        linears = {
            id(layer): layer
            for module in modules
            for layer in module.modules()
            if type(layer) is nn.Linear
        }
        self._layers = list(linears.values())
        self._handles: list[int] = []
        for layer in self._layers:
            if reason := cannot_pack(layer.weight):
                raise ValueError(f"packed linear layers: {reason}")
            if "forward" in vars(layer):
                raise ValueError("packed linear layers: these are packed already; close that first")
        self._heads: list[Drafter] = []
        for layer in self._layers:
            self._pack(layer)
        for module in modules:
            if isinstance(module, Drafter):
                self._borrow(module)
        self.huge_share = collapse(self._ranges())

    def _borrow(self, drafter: Drafter) -> None:
        """Rows of the target's output matrix; none for a head that borrows all of it or nothing."""
        vocab = drafter.draft_vocab
        if vocab is None:
            return
        target, dtype = drafter.target, next(drafter.parameters()).dtype
        head = target.lm_head
        bias = None if head.bias is None else head.bias[vocab].to(dtype)
        product = self._add(head.weight[vocab].to(dtype), bias)
        self._heads.append(drafter)

        def borrowed_logits(hidden: Tensor) -> Tensor:
            return target.scaled(product(hidden))

        drafter.borrowed_logits = borrowed_logits

    def _add(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """The product with a weight (D_out, D_in), laid out."""
        handle, features = len(_weights), len(weight)
        _weights.append(torch.ops.mkldnn._reorder_linear_weight(weight.detach()))
        self._handles.append(handle)

        def product(x: Tensor) -> Tensor:
            return torch.ops.headway.packed_linear(x, bias, handle, features)

        return product

    def _ranges(self) -> list[tuple[int, int]]:
        """Addresses of the packed weights."""
        packed = [weight for handle in self._handles if (weight := _weights[handle]) is not None]
        places = [torch.ops.mkldnn.data_ptr(weight) for weight in packed]
        sizes = [torch.ops.mkldnn._nbytes(weight) for weight in packed]
        return [(first, first + size) for first, size in zip(places, sizes, strict=True)]

    def _pack(self, layer: nn.Linear) -> None:
        forward = self._add(layer.weight, layer.bias)
        layer.forward = forward  # type: ignore[assignment, method-assign]

    def __len__(self) -> int:
        """Layers that are packed."""
        return len(self._handles)

    def close(self) -> None:
        """Give the layers their own `forward` back and free the packed weights."""
        for layer in self._layers:
            del layer.forward
        for drafter in self._heads:
            del drafter.borrowed_logits
        for handle in self._handles:
            _weights[handle] = None
        self._layers, self._handles, self._heads = [], [], []


def best_rows(layer: nn.Linear, repeats: int = 7) -> int:
    """How many rows a product with a packed weight should have where one is needed.

    The kernel for a single row is not the one for several, and on some CPUs it is the slower one,
    by a fifth and more.

    Args:
        layer: packed, and large, so that its weight comes from memory.
        repeats: timings of each, of which the fastest counts.

    Returns:
        From 1 to `MOST_FILLED`.
    """
    seconds = {}
    weight = layer.weight
    for rows in range(1, MOST_FILLED + 1):
        x = weight.new_ones(rows, layer.in_features)
        timings = []
        for _ in range(repeats):
            start = time.perf_counter()
            layer(x)
            timings.append(time.perf_counter() - start)
        seconds[rows] = min(timings)
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < 0.95 * seconds[1] else 1
