"""Tree attention on CUDA: how the Triton kernels are laid out and launched.

The M = N · G rows of a key-value head (its new tree rows times its query heads) are packed into
tiles, so that a tile reads keys and values once. For every tile, `split_kernel` runs one program
per split of the committed prefix, without a mask, and one more for the tree, where a row's ancestor
words say what it sees. Each leaves an output and its log-sum-exp; `merge_kernel` combines them.

The grid depends on shapes alone. Lengths are read on the device: a sequence's prefix is cut into
equal splits of whole blocks, of at least `MIN_SPLIT` columns, longer sequences into more of them,
and programs beyond them return at once. So a launch can live in a CUDA graph, and its results
repeat exactly.

What is chosen here aims at two things. Enough bytes have to be on their way: a memory of 4.8 TB/s
that answers within a microsecond needs 36 KB of every one of 132 multiprocessors. And partial
results, which are written and read again, should be few: there are as many splits as fill the
device once, not more.

Letters: B batch, Hq and Hkv query and key-value heads, G = Hq / Hkv, N new rows, M = N · G packed
rows, T tree rows, P committed tokens, S columns of the cache, W words, d and dv dimensions of a
head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor

from inference.kernels.reference import AttentionOptions
from inference.kernels.triton_kernels import LOG2_E, MIN_SPLIT, merge_kernel, split_kernel

IN_FLIGHT = 64 * 1024
"""Bytes that the programs of a multiprocessor have on their way at any time, where there is room:
36 KB and a margin."""
LEAST_SHARED = 99 * 1024
"""Bytes of shared memory that a program may have on the smallest GPUs, sm_86 and sm_89."""
HOPPER_SHARED = 227 * 1024
"""On Hopper and later."""
MOST_WAVES = 4
GOOD_FILL = 0.9
"""Splits fill the device once, or, where whole splits leave too much of it empty, so many times."""
MAX_REGISTERS = 255
"""Per thread. Otherwise the compiler spills some to fit in more programs than are counted on."""
MERGED_AT_ONCE = 16


@dataclass(frozen=True)
class Tile:
    """How one program is cut.

    Attributes:
        block_m: packed rows.
        block_n: columns of the cache per step.
        num_warps: of 32 threads.
        num_stages: steps that there is shared memory for: one is computed, one is free for the
            next, the others are on their way.
        step_bytes: of a step's keys and values.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    step_bytes: int

    @property
    def by_registers(self) -> int:
        """Programs whose registers a multiprocessor has: 65536 for threads of `MAX_REGISTERS`."""
        return 1 if self.num_warps == 8 else 2


@dataclass(frozen=True)
class Device:
    """What of a GPU a launch depends on.

    Attributes:
        num_sms: multiprocessors.
        shared: bytes of shared memory that a program may have; a multiprocessor has 1 KB more.
    """

    num_sms: int
    shared: int

    def places(self, tile: Tile) -> int:
        """Programs that run at once: two per multiprocessor, if registers and shared memory let
        them.
        """
        by_shared = self.shared // (tile.num_stages * tile.step_bytes)
        return self.num_sms * max(1, min(tile.by_registers, by_shared))


def tile_for(num_rows: int, head_dim: int, itemsize: int, shared: int = LEAST_SHARED) -> Tile:
    """The tile for M packed rows.

    Chosen so that nothing spills, and by shared memory:

    * 99 KB have room for three steps of keys and values, 32 KB each, or five of 16 KB for heads of
      64. Two stages are left where queries take the room.
    * On Hopper and later there are as many stages as keep `IN_FLIGHT` bytes on their way. So the
      highest tiles, of which registers let one run per multiprocessor, have more of them.
    * Large heads have a wide accumulator, so rows are fewer or warps more.
    * Three products of TF32 need queries as two parts in registers, so float32 gets the lowest
      tile. More tiles then read the same keys and values, from L2.

    Args:
        num_rows: M.
        head_dim: the larger of d and dv, a power of two.
        itemsize: bytes per element.
        shared: bytes of shared memory that a program may have.
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
    step_bytes = 2 * block_n * max(head_dim, 64) * itemsize  # smaller heads need no more stages
    tile = Tile(block_m, block_n, 8 if many else 4, num_stages, step_bytes)
    if shared < HOPPER_SHARED:
        return tile
    return replace(tile, num_stages=2 + IN_FLIGHT // (tile.by_registers * step_bytes))


def num_splits(num_tiles: int, capacity: int, places: int) -> int:
    """Splits of a prefix on average, from what is known before any length is.

    Args:
        num_tiles: B · Hkv · tiles of rows.
        capacity: S, the longest prefix there can be.
        places: programs that the device runs at once.
    """
    found, best = 1, 0.0
    for waves in range(1, MOST_WAVES + 1):
        splits = max(1, waves * places // num_tiles)
        needed = -(-splits * num_tiles // places)
        fill = splits * num_tiles / (needed * places)
        if fill > best:
            found, best = splits, fill
        if best >= GOOD_FILL:
            break
    return min(found, -(-capacity // MIN_SPLIT.value))


def most_splits(splits: int, batch: int, capacity: int) -> int:
    """Splits that the longest sequence of a batch may have.

    Args:
        splits: of a sequence on average.
        batch: B.
        capacity: S.
    """
    return splits if batch == 1 else min(2 * splits, -(-capacity // MIN_SPLIT.value))


@cache
def _facts(device: torch.device) -> Device:
    """Of a CUDA device; the interpreter, on a CPU, is to try a few splits."""
    if device.type == "cpu":
        return Device(4, LEAST_SHARED)
    found = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return Device(found["multiprocessor_count"], found["max_shared_mem"])


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
    device = _facts(q.device)
    tile = tile_for(packed, max(block_d, block_dv), q.element_size(), device.shared)
    tiles = batch * kv_heads * -(-packed // tile.block_m)
    splits = num_splits(tiles, capacity, device.places(tile))
    most = most_splits(splits, batch, capacity)
    part = q.new_empty(batch, kv_heads, packed, most + 1, dim_v, dtype=torch.float32)
    lse = part.new_empty(part.shape[:4])
    out = q.new_empty(batch, num_rows, num_heads, dim_v).transpose(1, 2)
    scale, cap = options.scale * LOG2_E.value, None
    if options.softcap is not None:
        scale, cap = 2 * scale / options.softcap, options.softcap * LOG2_E.value
    depths = None if options.depths is None else options.depths.contiguous()
    split_kernel[tiles, most + 1](
        q, keys, values, lengths, words.contiguous().view(torch.int32), depths, part, lse,
        (q.stride()[:3], keys.stride()[:3], values.stride()[:3]),
        scale, cap, options.window, num_rows, options.num_pending, batch, splits,
        HEADS=kv_heads, GROUP=group, D=dim, DV=dim_v, WORDS=2 * words.shape[2],
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=block_d, BLOCK_DV=block_dv,
        num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=MAX_REGISTERS,
        enable_fp_fusion=True,
    )  # fmt: skip
    merge_kernel[(batch * num_heads * num_rows,)](
        part, lse, lengths, options.sinks, out, out.stride()[:3],
        options.window, num_rows, batch, splits, most,
        HEADS=kv_heads, GROUP=group, DV=dim_v,
        BLOCK_J=MERGED_AT_ONCE, BLOCK_N=tile.block_n, BLOCK_DV=block_dv,
        num_warps=2, enable_fp_fusion=True,
    )  # fmt: skip
    return out
