"""Columns per split of every sequence of a batch, as the kernels compute them on the device."""

import torch
import triton
import triton.language as tl

from inference.kernels.triton_kernels import _split_size

BLOCK = 64


@triton.jit
def sizes_kernel(lengths_ptr, sizes_ptr, sequences, splits, most, BLOCK_N: tl.constexpr):
    row = tl.program_id(0)
    span = tl.load(lengths_ptr + row).to(tl.int32)
    size = _split_size(lengths_ptr, span, None, sequences, splits, most, BLOCK_N)
    tl.store(sizes_ptr + row, size)


def split_sizes(lengths: tuple[int, ...], splits: int, most: int) -> list[int]:
    """For splits of a sequence on average, and at most."""
    sizes, count = torch.zeros(len(lengths), dtype=torch.int64), len(lengths)
    sizes_kernel[(count,)](torch.tensor(lengths), sizes, count, splits, most, BLOCK)
    return sizes.tolist()
