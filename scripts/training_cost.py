"""What a training step costs: live memory, matrix products, the machine's own rates. Pure parts of
``scripts.benchmark_training``.

Legend: B batch, T sequence, D hidden, I intermediate, V / Vd target / draft vocabulary, H heads, d
head size.
"""

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
"""By name; processor time is the one to take where one thread shares its core with others."""


def _attention(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(q, k, v)


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)


FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""Attention on a CPU, which torch's counter leaves out."""


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made inside the context that are alive together, exactly.

    Storages are counted once however many views they have, those from before the context not at
    all. Scratch space inside a kernel is not seen.

    Attributes:
        now, peak: bytes.
        wide_peak: the most bytes that tensors of one of the widths took together.

    Args:
        widths: last dimensions to watch, such as the sizes of the vocabularies.
    """

    def __init__(self, widths: Collection[int] = ()) -> None:
        super().__init__()
        self.now = self.peak = self.wide_peak = 0
        self._widths, self._wide = set(widths), 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for x in tree_leaves((args, kwargs)):
            self._see(x, new=False)
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            self._see(x, new=True)
        return found

    def _see(self, x: Any, new: bool) -> None:
        if not isinstance(x, Tensor):
            return
        storage = x.untyped_storage()
        place = storage._cdata
        if place in self._alive:
            return
        self._alive.add(place)
        size = storage.nbytes() if new else 0
        wide = size if x.ndim > 1 and x.shape[-1] in self._widths else 0
        self.now += size
        self._wide += wide
        self.peak, self.wide_peak = max(self.peak, self.now), max(self.wide_peak, self._wide)
        weakref.finalize(storage, self._forget, place, size, wide).atexit = False

    def _forget(self, place: int, size: int, wide: int) -> None:
        self._alive.discard(place)
        self.now -= size
        self._wide -= wide


def counted_flops(step: Callable[[], Any]) -> int:
    """Floating-point operations of the matrix products that a call executes."""
    with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
        step()
    return counter.get_total_flops()


def target_flops(config: Any, rows: int, pairs: int, projected: int) -> int:
    """Of a forward pass of a Llama-like target, by formula.

    Args:
        config: the target's.
        rows: B·T.
        pairs: query-key pairs, B·T² where none are left out.
        projected: rows that go through the output matrix.
    """
    size, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    d = config.head_dim
    weights = size * d * (2 * heads + 2 * config.num_key_value_heads) + 3 * size * inner
    layer = 2 * rows * weights + 4 * pairs * heads * d
    return config.num_hidden_layers * layer + 2 * projected * size * config.vocab_size


def eagle3_flops(
    config: Any, rows: int, pairs: int, labels: int, steps: int, trained_output: bool = True
) -> int:
    """Of EAGLE-3's unroll with its backward pass, by formula: a product costs three, one forward
    and two gradients, but for the fusion, whose input needs none.

    Args:
        config: the head's, with one layer.
        rows: B·T.
        pairs: query-key pairs on the text, of each step, scores computed once.
        labels: supervised tokens.
        steps: K.
        trained_output: whether the output matrix is trained.

    Returns:
        The diagonals of later steps, which are no matrix products, are left out.
    """
    size, heads, d = config.hidden_size, config.num_attention_heads, config.head_dim
    weights = 2 * size * d * (heads + 2 * config.num_key_value_heads) + heads * d * size
    weights += 3 * size * config.intermediate_size
    fusion = 2 * 2 * rows * len(config.feature_layers) * size * size
    attention = 3 * 4 * pairs * heads * d
    output = (3 if trained_output else 2) * 2 * labels * size * config.draft_vocab_size
    law = 2 * labels * size * config.vocab_size
    return fusion + steps * (3 * 2 * rows * weights + attention + output) + law


def moved_bytes(frozen: int, trained: int) -> int:
    """The least a step moves: frozen weights are read once; trained ones twice, with a gradient
    written, and AdamW reads weight, gradient and two moments and writes all but the gradient.
    """
    return frozen + trained * (2 + 1 + 4 + 3)


@dataclass(frozen=True)
class Rates:
    """What the machine does at best.

    Attributes:
        flops: of matrix products, per second.
        bandwidth: bytes per second, read and written.
    """

    flops: float
    bandwidth: float

    def floor(self, flops: int, moved: int) -> float:
        """Seconds that no implementation with these products can beat."""
        return max(flops / self.flops, moved / self.bandwidth)


def measured_rates(
    shapes: list[tuple[int, int, int]], dtype: torch.dtype, device: torch.device, clock: Clock
) -> Rates:
    """The best over some products (n, k) x (k, m), and over copies of 256 MiB."""
    rate = 0.0
    for n, k, m in shapes:
        left = torch.randn(n, k, device=device).to(dtype)
        right = torch.randn(k, m, device=device).to(dtype)
        times = [seconds_of(partial(torch.matmul, left, right), device, clock) for _ in range(6)]
        rate = max(rate, 2 * n * k * m / min(times))
    source = torch.zeros(1 << 26, device=device)
    place = torch.empty_like(source)
    times = [seconds_of(lambda: place.copy_(source), device, clock) for _ in range(6)]
    return Rates(rate, 2 * source.numel() * source.element_size() / min(times))


def seconds_of(call: Callable[[], Any], device: torch.device, clock: Clock) -> float:
    """Of one call, with all that it queued."""
    drain(device)
    start = clock()
    call()
    drain(device)
    return clock() - start


def drain(device: torch.device) -> None:
    """Wait for what is queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Phases:
    """Seconds by name of nested phases, each without those inside it.

    Args:
        device: drained at both ends of a phase, where it is a GPU.
        clock: of ``CLOCKS``.
    """

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._device, self._clock = device, clock
        self._inner: list[float] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the body to ``name``."""
        drain(self._device)
        start = self._clock()
        self._inner.append(0.0)
        try:
            yield
        finally:
            drain(self._device)
            total = self._clock() - start
            self.seconds[name] += total - self._inner.pop()
            if self._inner:
                self._inner[-1] += total

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, charged to ``name``."""

        def inside(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return inside
