"""Vocabulary-sized losses without vocabulary-sized memory.

``chunked_sum`` evaluates a loss a few label rows at a time, piece by piece where the loss has
several (one per depth of drafting), and takes the gradient of each piece at once. So the logits of
one piece of one chunk are the only ones alive, in the backward pass too, and nothing is computed
twice (the idea of fused linear losses, arXiv:2410.10989, in plain torch). ``plain_sum`` is the slow
twin: one chunk, ordinary autograd.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Metrics = dict[str, Tensor]
ChunkLoss = Callable[[slice, list[Tensor]], Iterable[tuple[Tensor, Metrics]]]
"""(label rows of the chunk, row inputs sliced to it) -> pieces (loss summed over the chunk, sums by
metric name), each computed when it is asked for and with nothing of the graph of another.
"""


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


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: ChunkLoss, chunk: int, metrics: Metrics, count: int, *tensors: Tensor
    ) -> Tensor:
        inputs, parameters = tensors[:count], tensors[count:]
        wanted = ctx.needs_input_grad[4:]
        grads = [
            torch.zeros_like(t) if need else None for t, need in zip(tensors, wanted, strict=True)
        ]
        asked = [index for index, need in enumerate(wanted) if need]
        total = None
        for start in range(0, inputs[0].shape[0], chunk):
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
                        if grad is not None:
                            place = grads[index]
                            assert place is not None
                            (place[rows] if index < count else place).add_(grad)
                    total = value.detach() if total is None else total + value.detach()
                    _add(metrics, sums)
                    del value, found, sums
                    torch.clear_autocast_cache()
        ctx.save_for_backward(*[g for g in grads if g is not None])
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
            *(next(saved) * grad_outputs[0] if need else None for need in ctx.wanted),
        )
