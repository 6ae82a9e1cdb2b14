"""A dry run of real code: floating-point tensors have shapes and no data, and their bytes are
counted.

    with Shadow() as shadow:
        ...                      # build models, run forward and backward: the ordinary code
    shadow.peak                  # what would have been alive at most, by kind

Token ids, positions and masks stay real, because the code branches on them; weights, activations
and gradients are torch's fake tensors, which take no memory. So what is counted is what the code
does, in every family, and no formula has to follow when the code changes. Under ``real=True``
nothing is faked and the same counter watches an ordinary run: the twin that the tests compare with.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

VOCABULARY = "vocabulary-sized tensors of one chunk"
COPIES = "head: gradients and bf16 copies of weights"
MASKS = "token ids and masks"


class Shadow(TorchDispatchMode):
    """Counts the memory of tensors, and fakes the floating-point ones.

    Attributes:
        phase: what storage allocated from now on is counted as, unless its shape says more.
        vocabularies: last dimensions of vocabulary-sized tensors.
        weights: shapes of the head's matrices; other tensors of such a shape are its gradients and
            copies in another dtype.
        now: bytes alive.
        peak: bytes alive at most since :meth:`restart`.
        at_peak: those by kind.
        flops: floating-point operations so far, of matrix products and attention.

    Args:
        real: fake nothing.
    """

    def __init__(self, real: bool = False) -> None:
        super().__init__()
        self.real = real
        self.phase = "other"
        self.vocabularies: set[int] = set()
        self.weights: set[tuple[int, ...]] = set()
        self.now = self.peak = self.flops = 0
        self.at_peak: dict[str, int] = {}
        self._by_kind: dict[str, int] = {}
        self._live: dict[int, tuple[str, int]] = {}
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def restart(self) -> None:
        """Forget the peak."""
        self.peak, self.at_peak = self.now, dict(self._by_kind)

    @contextmanager
    def counting(self, phase: str) -> Iterator[None]:
        """Count what is allocated inside as ``phase``."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @property
    def alive(self) -> dict[str, int]:
        """Bytes alive, by kind."""
        return dict(self._by_kind)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs) if self.real else self._faked(func, args, kwargs)
        self.flops += _operations(func, args, kwargs, out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return out

    def _faked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run without data wherever floating-point numbers are involved."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            if func is torch.ops.aten.index.Tensor:  # which rows a real mask chooses is known
                args = (args[0], _chosen(args[1]))
            with self._fakes:
                if func is torch.ops.aten._grouped_mm.default:
                    return _grouped(*args, **kwargs)
                return func(*args, **kwargs)
        if not given:  # a factory: ids are made, weights are not
            with self._fakes:
                out = func(*args, **kwargs)
            if not isinstance(out, Tensor) or out.is_floating_point():
                return out
        out = func(*args, **kwargs)
        return tree_map_only(Tensor, self._without_data, out)

    def _without_data(self, tensor: Tensor) -> Tensor:
        """Numbers computed from ids; single ones stay real, as code may look at them."""
        if tensor.is_floating_point() and tensor.numel() > 1:
            return self._fakes.from_tensor(tensor)
        return tensor

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size, kind = storage.nbytes(), self._kind(tensor)
        self._live[key] = (kind, size)
        self._by_kind[kind] = self._by_kind.get(kind, 0) + size
        self.now += size
        if self.now > self.peak:
            self.restart()
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        kind, size = self._live.pop(key)
        self._by_kind[kind] -= size
        self.now -= size

    def _kind(self, tensor: Tensor) -> str:
        if not tensor.is_floating_point():
            return MASKS
        if tensor.ndim > 1 and tensor.shape[-1] in self.vocabularies:
            return VOCABULARY
        return COPIES if tuple(tensor.shape) in self.weights else self.phase


def _operations(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations of one call."""
    if func is torch.ops.aten._grouped_mm.default:  # experts: each row meets one of the matrices
        return 2 * out.numel() * args[0].shape[-1]
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _grouped(a: Tensor, b: Tensor, offs: Tensor, *rest: Any, **more: Any) -> Tensor:
    """What experts multiply, of any dtype: torch knows its shape for bfloat16 only."""
    groups = [len(offs)] if a.ndim == b.ndim else []
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])


def _chosen(index: list[Tensor | None]) -> list[Tensor | None]:
    """Real boolean masks as the positions they choose."""
    found: list[Tensor | None] = []
    for part in index:
        if part is not None and part.dtype == torch.bool and not isinstance(part, FakeTensor):
            found += part.nonzero(as_tuple=True)
        else:
            found.append(part)
    return found
