"""What training draws afresh, each time a sequence is seen: noise, anchors, dropped depths.

Every draw is keyed by ``Batch.draw``, the global number of the use of the sequence, so that it is
the same on any number of processes and after a resumed checkpoint.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_STRIDE = 1_000_003


def generator(draw: int, purpose: int = 0) -> torch.Generator:
    """The stream of one use of one sequence.

    Args:
        draw: its global number.
        purpose: different streams for different things drawn.
    """
    return torch.Generator().manual_seed((draw * _STRIDE + purpose) % (1 << 63))


def uniform_rows(draw: Tensor, shape: Sequence[int], like: Tensor) -> Tensor:
    """(B, *shape) uniform in [-½, ½), row b from the stream of ``draw[b]``.

    Args:
        draw: (B,) int64.
        shape: of one row.
        like: its dtype and device are those of the result.
    """
    rows = [torch.rand(*shape, generator=generator(number)) - 0.5 for number in draw.tolist()]
    return torch.stack(rows).to(like)
