"""Vocabulary-sized losses without vocabulary-sized memory.

``chunked_sum`` evaluates a loss a few label rows at a time, piece by piece where the loss has
several (one per depth of drafting), and takes the gradient of each piece at once. So the logits of
one piece of one chunk are the only ones alive, in the backward pass too, and nothing is computed
twice (the idea of fused linear losses, arXiv:2410.10989, in plain torch). ``plain_sum`` is the slow
twin: one chunk, ordinary autograd.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

Metrics = dict[str, Tensor]
ChunkLoss = Callable[[slice, list[Tensor]], Iterable[tuple[Tensor, Metrics]]]
"""(label rows of the chunk, row inputs sliced to it) -> pieces (loss summed over the chunk, sums by
metric name), each computed when it is asked for and with nothing of the graph of another.
"""


class Sample:
    """A dry run of the first chunks of a loss only: all take the same memory and operations.

    Attributes:
        skipped: operations that the chunks left out would have taken.

    Args:
        most: chunks to run.
        meter: operations so far.
    """

    def __init__(self, most: int, meter: Callable[[], int]) -> None:
        self.most, self.skipped, self._meter = most, 0, meter

    def choose(self, starts: Sequence[int]) -> Iterator[int]:
        """The first few, and a note of the others."""
        before, few = self._meter(), starts[: self.most]
        yield from few
        self.skipped += (self._meter() - before) * (len(starts) - len(few)) // len(few)


_SAMPLE: ContextVar[Sample | None] = ContextVar("sample", default=None)


@contextmanager
def sampled(sample: Sample) -> Iterator[None]:
    """Inside, losses are evaluated on some chunks only. Their values mean nothing."""
    token = _SAMPLE.set(sample)
    try:
        yield
    finally:
        _SAMPLE.reset(token)


def plain_sum(loss: ChunkLoss, inputs: Sequence[Tensor]) -> tuple[Tensor, Metrics]:
    """The loss over all rows at once.

    Args:
        loss: see :data:`ChunkLoss`.
        inputs: tensors of the same first dimension n.
    """
    total: Tensor | None = None
    metrics: Metrics = {}
    for value, sums in loss(slice(0, inputs[0].shape[0]), list(inputs)):
        total = value if total is None else total + value
        _add(metrics, sums)
    assert total is not None, "a loss needs at least one piece"
    return total, metrics


def _add(metrics: Metrics, sums: Metrics) -> None:
    for name, number in sums.items():
        metrics[name] = metrics[name] + number if name in metrics else number


def chunked_sum(
    loss: ChunkLoss, inputs: Sequence[Tensor], parameters: Sequence[Tensor], chunk: int
) -> tuple[Tensor, Metrics]:
    """The same value and gradients as :func:`plain_sum`, ``chunk`` rows at a time.

    Args:
        loss: may use ``parameters`` freely; any other tensor it uses gets no gradient.
        inputs: row inputs, (n, ...), sliced for each chunk.
        parameters: trainable tensors the loss reads.
        chunk: rows per chunk.

    Returns:
        ``(loss, metrics)``; call backward once.
    """
    trained = [p for p in parameters if p.requires_grad]
    metrics: Metrics = {}
    total = _ChunkedSum.apply(loss, chunk, metrics, len(inputs), *inputs, *trained)
    return total, metrics


def _gradients(value: Tensor, sources: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Of one piece; None for what it does not read. Its graph is freed."""
    if not sources or not value.requires_grad:
        return [None] * len(sources)
    return torch.autograd.grad(value, sources, allow_unused=True)


def _own(grad: Tensor, others: Sequence[Tensor | None]) -> Tensor:
    """The gradient as a tensor that can be added to: autograd may hand out one for two sources."""
    memory = grad.untyped_storage()._cdata
    shared = any(x is not None and x.untyped_storage()._cdata == memory for x in others)
    return grad.clone() if shared or not grad.is_contiguous() else grad


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: ChunkLoss, chunk: int, metrics: Metrics, count: int, *tensors: Tensor
    ) -> Tensor:
        inputs, parameters = tensors[:count], tensors[count:]
        wanted = ctx.needs_input_grad[4:]
        grads: list[Tensor | None] = [  # those of parameters begin as the first that is found
            torch.zeros_like(t) if need and index < count else None
            for index, (t, need) in enumerate(zip(tensors, wanted, strict=True))
        ]
        asked = [index for index, need in enumerate(wanted) if need]
        total = None
        starts, sample = range(0, inputs[0].shape[0], chunk), _SAMPLE.get()
        for start in starts if sample is None else sample.choose(starts):
            rows = slice(start, min(start + chunk, inputs[0].shape[0]))
            with torch.enable_grad():
                pieces = [
                    x[rows].detach().requires_grad_(need)
                    for x, need in zip(inputs, wanted, strict=False)
                ]
                sources = [*pieces, *parameters]
                # A cached cast would belong to the graph of the piece before, which is freed.
                torch.clear_autocast_cache()
                for value, sums in loss(rows, pieces):
                    found = _gradients(value, [sources[index] for index in asked])
                    for index, grad in zip(asked, found, strict=True):
                        place = grads[index]
                        if grad is None:
                            continue
                        if place is None:
                            grads[index] = _own(grad, grads)
                        else:
                            (place[rows] if index < count else place).add_(grad)
                    total = value.detach() if total is None else total + value.detach()
                    _add(metrics, sums)
                    del value, found, sums
                    torch.clear_autocast_cache()
        found = [torch.zeros_like(tensors[i]) if grads[i] is None else grads[i] for i in asked]
        ctx.save_for_backward(*found)
        ctx.wanted = wanted
        assert total is not None, "chunked_sum needs at least one row"
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        return (
            None,
            None,
            None,
            None,
            *(next(saved).mul_(grad_outputs[0]) if need else None for need in ctx.wanted),
        )
