"""The keyed noise of ``inference.sampling`` for a whole batch: seeds and positions are tensors.

The same bits as there, so that a text does not depend on which of the two drew it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from inference.sampling import _GOLDEN, _MIX_1, _MIX_2, Stream, _shift_right, _signed

GOLDEN, MIX_1, MIX_2 = _signed(_GOLDEN), _signed(_MIX_1), _signed(_MIX_2)
"""SplitMix64's constants as int64, which wraps around just as the unsigned arithmetic does."""


def seed_words(seeds: Iterable[int], device: torch.device | str | None = None) -> Tensor:
    """Any integers -> (B,) int64 with the same last 64 bits, of which alone the noise depends."""
    return torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64, device=device)


def _mix(values: Tensor) -> Tensor:
    """The finaliser of SplitMix64."""
    values = (values ^ _shift_right(values, 30)) * MIX_1
    values = (values ^ _shift_right(values, 27)) * MIX_2
    return values ^ _shift_right(values, 31)


def uniform_at(seeds: Tensor, stream: int, positions: Tensor, index: Tensor) -> Tensor:
    """``inference.sampling.uniform_at`` element by element.

    Args:
        seeds: int64, as `seed_words` gives them.
        stream: a `Stream`.
        positions: int64 absolute positions.
        index: int64, for instance token ids. All three are broadcast against each other.

    Returns:
        float64 strictly inside (0, 1), of the broadcast shape.
    """
    key = _mix(seeds + GOLDEN)
    key = _mix((key ^ int(stream)) + GOLDEN)
    key = _mix((key ^ positions) + GOLDEN)
    bits = _mix((index + 1) * GOLDEN + key)
    return (_shift_right(bits, 64 - 52).double() + 0.5) * 2.0**-52


def gumbel_at(
    seeds: Tensor, positions: Tensor, index: Tensor, stream: int = Stream.TARGET
) -> Tensor:
    """Standard Gumbel noise, float64, of the shape that the arguments are broadcast to."""
    return -(-uniform_at(seeds, stream, positions, index).log()).log()


def race(probs: Tensor, seeds: Tensor, positions: Tensor, stream: int = Stream.TARGET) -> Tensor:
    """Scores in whose order `inference.sampling.draw_top` draws: p / e instead of log p + g, as the
    Gumbel noise is g = -log e. This costs one logarithm per token, not three.

    Args:
        probs: (..., V) laws.
        seeds: (...) int64, broadcast to the laws.
        positions: (...) int64.
        stream: of the noise.

    Returns:
        (..., V) float64; 0 for tokens that are never drawn.
    """
    index = torch.arange(probs.shape[-1], device=probs.device)
    uniform = uniform_at(seeds[..., None], stream, positions[..., None], index)
    return probs.double() / -uniform.log()
