"""Vocabulary-sized losses without vocabulary-sized memory.

``chunked_sum`` evaluates a loss a few label rows at a time and takes its gradient at once, so that
the logits of one chunk are the only ones alive, in the backward pass too, and nothing is computed
twice (the idea of fused linear losses, arXiv:2410.10989, in plain torch). ``plain_sum`` is the slow
twin: one chunk, ordinary autograd.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Metrics = dict[str, Tensor]
ChunkLoss = Callable[[slice, list[Tensor]], tuple[Tensor, Metrics]]
"""(label rows of the chunk, row inputs sliced to it) -> (loss summed over the chunk, sums by metric
name).
"""


def plain_sum(loss: ChunkLoss, inputs: Sequence[Tensor]) -> tuple[Tensor, Metrics]:
    """The loss over all rows at once.

    Args:
        loss: see :data:`ChunkLoss`.
        inputs: tensors of the same first dimension n.
    """
    return loss(slice(0, inputs[0].shape[0]), list(inputs))


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
        total = None
        for start in range(0, inputs[0].shape[0], chunk):
            rows = slice(start, min(start + chunk, inputs[0].shape[0]))
            # A cached cast would belong to the graph of the chunk before, which is freed.
            torch.clear_autocast_cache()
            with torch.enable_grad():
                pieces = [
                    x[rows].detach().requires_grad_(need)
                    for x, need in zip(inputs, wanted, strict=False)
                ]
                value, sums = loss(rows, pieces)
                sources = [*pieces, *parameters]
                asked = [i for i, need in enumerate(wanted) if need]
                found = (
                    torch.autograd.grad(value, [sources[i] for i in asked], allow_unused=True)
                    if asked
                    else ()
                )
            for i, grad in zip(asked, found, strict=True):
                if grad is not None:
                    place = grads[i][rows] if i < count else grads[i]  # type: ignore[index]
                    place.add_(grad)  # type: ignore[union-attr]
            value = value.detach()
            total = value if total is None else total + value
            for name, number in sums.items():
                metrics[name] = metrics[name] + number if name in metrics else number
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
