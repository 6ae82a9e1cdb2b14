"""Tree attention on CUDA: how the Triton kernels are laid out and launched.

The M = N · G rows of a key-value head (its new tree rows times its query heads) are packed into
tiles, so that a tile reads keys and values once. For every tile, `split_kernel` runs one program
per split of the committed prefix, without a mask, and one more for the tree, where a row's ancestor
words say what it sees. Each leaves an output and its log-sum-exp; `merge_kernel` combines them.

The grid depends on shapes alone. A sequence's length is read on the device: its prefix is cut into
equal splits of whole blocks, of at least `MIN_SPLIT` columns, and programs beyond them return at
once. So a launch can live in a CUDA graph, and its results repeat exactly.

Letters: B batch, Hq and Hkv query and key-value heads, G = Hq / Hkv, N new rows, M = N · G packed
rows, T tree rows, P committed tokens, S columns of the cache, W words, d and dv dimensions of a
head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from inference.kernels.reference import AttentionOptions
from inference.kernels.triton_kernels import LOG2_E, MIN_SPLIT, merge_kernel, split_kernel

PROGRAMS_PER_SM = 4
"""Splits are as many as make so many programs per multiprocessor: two fit at a time."""
MERGED_AT_ONCE = 16


@dataclass(frozen=True)
class Tile:
    """How one program is cut.

    Attributes:
        block_m: packed rows.
        block_n: columns of the cache per step.
        num_warps: of 32 threads.
        num_stages: steps in flight while one is computed.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def tile_for(num_rows: int, head_dim: int, itemsize: int) -> Tile:
    """The tile for M packed rows.

    Chosen so that nothing spills and shared memory stays below the 99 KB of the smallest GPUs
    (sm_86, sm_89); Hopper and later, which have 227, need up to 132 for the highest tiles:

    * a step of keys and values is 32 KB and three are in flight, or four of 16 KB for heads of 64;
    * large heads have a wide accumulator, so rows are fewer or warps more;
    * three products of TF32 need queries as two parts in registers, so float32 gets the lowest
      tile. More tiles then read the same keys and values, from L2.

    Args:
        num_rows: M.
        head_dim: the larger of d and dv, a power of two.
        itemsize: bytes per element.
    """
    lowest, highest = 16, 128
    if itemsize == 4:
        highest = 16
    elif head_dim > 128:
        highest = 64
    block_m = min(max(lowest, triton.next_power_of_2(num_rows)), highest)
    block_n = min(64, 16384 // (head_dim * itemsize))
    num_stages = 2 if itemsize == 4 or head_dim > 128 else 3 if head_dim > 64 else 4
    many = block_m > 64 or block_m * head_dim > 64 * 128
    return Tile(block_m, block_n, 8 if many else 4, num_stages)


def num_splits(num_tiles: int, capacity: int, num_sms: int) -> int:
    """Splits of the prefix, from what is known before any length is.

    Args:
        num_tiles: B · Hkv · tiles of rows.
        capacity: S, the longest prefix there can be.
        num_sms: multiprocessors of the device.
    """
    wanted = -(-PROGRAMS_PER_SM * num_sms // num_tiles)
    return max(1, min(wanted, -(-capacity // MIN_SPLIT.value)))


@cache
def _multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; the interpreter, on a CPU, is to try a few splits."""
    if device.type == "cpu":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def triton_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    words: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Launch both kernels; reads nothing on the host.

    Args:
        q: (B, Hq, N, d), strided as you like but contiguous in d, like keys and values.
        keys: (B, Hkv, S, d); the tree's rows are in columns P .. P + T - 1 of each sequence.
        values: (B, Hkv, S, dv).
        lengths: (B,) long, P.
        words: (B, N, W) long.
        options: the rest.

    Returns:
        (B, Hq, N, dv) in the dtype of q, a view of (B, N, Hq, dv).
    """
    batch, num_heads, num_rows, dim = q.shape
    kv_heads, capacity, dim_v = values.shape[1:]
    group = num_heads // kv_heads
    packed = num_rows * group
    block_d, block_dv = (max(16, triton.next_power_of_2(n)) for n in (dim, dim_v))
    tile = tile_for(packed, max(block_d, block_dv), q.element_size())
    tiles = batch * kv_heads * -(-packed // tile.block_m)
    splits = num_splits(tiles, capacity, _multiprocessors(q.device))
    part = q.new_empty(batch, kv_heads, packed, splits + 1, dim_v, dtype=torch.float32)
    lse = part.new_empty(part.shape[:4])
    out = q.new_empty(batch, num_rows, num_heads, dim_v).transpose(1, 2)
    scale, cap = options.scale * LOG2_E.value, None
    if options.softcap is not None:
        scale, cap = 2 * scale / options.softcap, options.softcap * LOG2_E.value
    depths = None if options.depths is None else options.depths.contiguous()
    split_kernel[tiles, splits + 1](
        q, keys, values, lengths, words.contiguous().view(torch.int32), depths, part, lse,
        (q.stride()[:3], keys.stride()[:3], values.stride()[:3]),
        scale, cap, options.window, num_rows, options.num_pending, splits,
        HEADS=kv_heads, GROUP=group, D=dim, DV=dim_v, WORDS=2 * words.shape[2],
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=block_d, BLOCK_DV=block_dv,
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    merge_kernel[(batch * num_heads * num_rows,)](
        part, lse, lengths, options.sinks, out, out.stride()[:3], options.window, num_rows, splits,
        HEADS=kv_heads, GROUP=group, DV=dim_v,
        BLOCK_J=MERGED_AT_ONCE, BLOCK_N=tile.block_n, BLOCK_DV=block_dv,
        num_warps=2, enable_fp_fusion=True,
    )  # fmt: skip
    return out
