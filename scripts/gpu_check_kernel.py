"""The sections of `scripts.gpu_check` about tree attention.

`agreement` compares the kernel with plain attention, `speed` takes its time, `against` that of the
alternatives beside it, in a section of its own as one of them has a compiler at work.

Sizes are those of a layer of Llama 3.1 8B. Letters: B batch, P committed tokens, N new tree rows,
W words, C columns attended to, d dimension of a head.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from inference.kernels import kernel_refusal, tree_attention
from inference.kernels.reference import AttentionOptions, cache_mask, masked_attention
from scripts.gpu_check_timing import capture_for, copy_bandwidth, device_of, microseconds

Row = dict[str, Any]
HEADS, KV_HEADS, DIM = 32, 8, 128
ROTATED_BYTES = 256 * 2**20
"""Timed calls take turns on so many bytes of caches, more than any L2 holds: in a model the weights
of a layer lie between one layer's cache and the next one's."""


@dataclass(frozen=True)
class Shape:
    """One call: B, P of the longest sequence, N, and what the target's attention has besides."""

    batch: int
    prefix: int
    rows: int
    heads: tuple[int, int] = (HEADS, KV_HEADS)
    dim: int = DIM
    pending: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def cache_bytes(self, dtype: torch.dtype) -> int:
        """Of keys and values that a call has to read."""
        columns = self.batch * self.heads[1] * (self.prefix + self.rows)
        return 2 * columns * self.dim * dtype.itemsize


AGREEMENT = {
    "one row": Shape(1, 1000, 1),
    "tree of 16": Shape(1, 2000, 16),
    "ragged batch": Shape(8, 3000, 16),
    "no prefix": Shape(3, 0, 9),
    "two words": Shape(2, 700, 60, pending=60),
    "heads of 64": Shape(2, 500, 16, (9, 3), 64),
    "heads of 256": Shape(2, 500, 16, (8, 4), 256),
    "heads of 80": Shape(2, 500, 7, (4, 4), 80),
    "window": Shape(3, 1500, 16, window=128),
    "soft cap": Shape(2, 900, 16, softcap=50.0),
    "sinks and window": Shape(2, 900, 16, (64, 8), 64, window=128, sinks=True),
    "everything": Shape(4, 4000, 30, pending=7, window=2000, softcap=30.0, sinks=True),
}
DRY_AGREEMENT = {
    "tree": Shape(2, 20, 5, (4, 2), 16),
    "everything": Shape(2, 20, 5, (4, 2), 16, 2, 9, 20.0, True),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPEED = [  # the size that the target is set for comes first, in case time runs out
    Shape(batch, prefix, rows)
    for batch, prefix in [(16, 8192), (1, 2048), (1, 8192), (4, 8192), (64, 2048), (1, 32768),
                          (16, 2048), (4, 2048), (16, 32768), (64, 8192), (4, 32768), (1, 1024),
                          (16, 1024), (64, 1024), (64, 32768)]
    for rows in (16, 8, 64)
]  # fmt: skip
DRY_SPEED = [Shape(2, 20, 3, (4, 2), 16)]
RIVALS = ("SDPA µs", "SDPA grouped µs", "Flex µs")


def random_tree(rows: int, seed: int) -> tuple[list[int], list[int]]:
    """Ancestor bits, a row's own included, and depth of every row."""
    draw, bits, depths = Random(seed), [1], [0]
    for row in range(1, rows):
        parent = draw.randrange(row)
        bits.append(bits[parent] | 1 << row)
        depths.append(depths[parent] + 1)
    return bits, depths


def words_of(bits: list[int], num_words: int) -> Tensor:
    """(rows, W) long."""
    parts = [[(b >> (64 * w)) & (2**64 - 1) for w in range(num_words)] for b in bits]
    return torch.tensor([[p - 2**64 if p >= 2**63 else p for p in row] for row in parts])


def tensors_of(
    shape: Shape, dtype: torch.dtype, device: torch.device, ragged: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, AttentionOptions]:
    """What the implementations take: a cache with 128 spare columns, filled throughout."""
    generator = torch.Generator(device).manual_seed(seed)
    (heads, kv_heads), size = shape.heads, shape.pending + shape.rows

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device, dtype=dtype)

    q = normal(shape.batch, shape.rows, heads, shape.dim).transpose(1, 2)
    cache = normal(2, shape.batch, kv_heads, shape.prefix + size + 128, shape.dim)
    trees = [random_tree(size, seed + b) for b in range(shape.batch)]
    words = torch.stack([words_of(bits[shape.pending :], -(-size // 64)) for bits, _ in trees])
    lengths = torch.tensor([
        Random(seed + b).randint(0, shape.prefix) if ragged and b else shape.prefix
        for b in range(shape.batch)
    ])  # fmt: skip
    depths = torch.tensor([depths for _, depths in trees], device=device)
    options = AttentionOptions(
        scale=shape.dim**-0.5,
        num_pending=shape.pending,
        depths=None if shape.window is None else depths,
        window=shape.window,
        softcap=shape.softcap,
        sinks=normal(heads).float() if shape.sinks else None,
    )
    return q, cache[0], cache[1], lengths.to(device), words.to(device), options


def call(arguments: tuple[Any, ...]) -> Tensor:
    """`tree_attention` on what `tensors_of` gives."""
    q, keys, values, lengths, words, options = arguments
    return tree_attention(q, keys, values, lengths, words, **vars(options))


def agreement(dry_run: bool, share: tuple[int, int] = (0, 1)) -> Iterator[Row]:
    """Kernel against plain attention; repeated, and replayed as a graph with other lengths.

    Args:
        dry_run: tiny shapes on the CPU.
        share: (k, n): every n-th case from the k-th on.
    """
    cases = DRY_AGREEMENT if dry_run else AGREEMENT
    every = [(dtype, name, shape) for dtype in DTYPES for name, shape in cases.items()]
    for dtype, name, shape in every[share[0] :: share[1]]:
        yield {"case": name, "dtype": str(dtype).removeprefix("torch."),
               **compared(shape, dtype, device_of(dry_run))}  # fmt: skip


def compared(shape: Shape, dtype: torch.dtype, device: torch.device) -> Row:
    """One case of `agreement`."""
    arguments = tensors_of(shape, dtype, device, ragged=True)
    refusal = kernel_refusal(*arguments[:3]) if device.type == "cuda" else None
    if refusal is not None:
        return {"not served": refusal}
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    first, second = call(arguments), call(arguments)
    row: Row = {"error": error_of(first, arguments), "tolerance": tolerance}
    row["repeats"] = torch.equal(first, second)
    row["graph"] = replays_agree(arguments, tolerance)
    row["ok"] = row["error"] <= tolerance and row["repeats"] and row["graph"]
    return row


def error_of(out: Tensor, arguments: tuple[Any, ...]) -> float:
    """The largest difference from plain attention, relative to results above 1."""
    expected = masked_attention(*arguments).float()
    return ((out.float() - expected).abs() / expected.abs().clamp(min=1)).max().item()


def replays_agree(arguments: tuple[Any, ...], tolerance: float) -> bool:
    """Whether a captured call follows lengths that change between its replays."""
    lengths = arguments[3]
    run = capture_for(lengths.device, warm_ups=1)(lambda: call(arguments))
    agrees = True
    for factor in (1, 0.5, 0):
        lengths.copy_((lengths * factor).long())
        agrees = error_of(run(), arguments) <= tolerance and agrees
    return agrees


def speed(dry_run: bool) -> Iterator[Row]:
    """The kernel by itself; bytes that have to move over copying's."""
    device, dtype = device_of(dry_run), torch.float32 if dry_run else torch.bfloat16
    bandwidth = copy_bandwidth(device)
    yield {"B": "copy", "GB/s": bandwidth / 1e3}
    for shape in DRY_SPEED if dry_run else SPEED:
        inputs = inputs_of(shape, dtype, device)
        time = microseconds([lambda a=a: call(a) for a in inputs], device)
        needed = shape.cache_bytes(dtype) + 2 * inputs[0][0].nbytes  # and queries in, results out
        yield {**size_of(shape), "kernel µs": time, "of copy": needed / time / bandwidth}


def inputs_of(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[tuple[Any, ...]]:
    """Arguments of calls that take turns."""
    most = 1 if device.type == "cpu" else 32
    turns = max(1, min(most, ROTATED_BYTES // shape.cache_bytes(dtype)))
    return [tensors_of(shape, dtype, device, seed=turn) for turn in range(turns)]


def size_of(shape: Shape) -> Row:
    """The first columns of a table."""
    return {"B": shape.batch, "P": shape.prefix, "N": shape.rows}


def repeated(states: Tensor, groups: int) -> Tensor:
    """Keys or values once per query head, as transformers hands them to SDPA beside a mask."""
    return states[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


def sdpa(arguments: tuple[Any, ...], mask: Tensor) -> Tensor:
    """What transformers runs for a tree: one mask, repeated keys and values."""
    q, keys, values, *_, options = arguments
    columns, groups = mask.shape[-1], q.shape[1] // keys.shape[1]
    keys, values = (repeated(t[:, :, :columns], groups) for t in (keys, values))
    return scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=options.scale)


def grouped_sdpa(arguments: tuple[Any, ...], mask: Tensor) -> Tensor:
    """The same without repeats: a key-value head's query heads become rows, as for the kernel."""
    q, keys, values, *_, options = arguments
    columns, groups = mask.shape[-1], q.shape[1] // keys.shape[1]
    rows = q.unflatten(1, (-1, groups)).flatten(2, 3)  # (B, Hkv, G · N, d)
    keys, values = keys[:, :, :columns], values[:, :, :columns]
    out = scaled_dot_product_attention(
        rows, keys, values, attn_mask=mask.repeat(1, 1, groups, 1), scale=options.scale
    )
    return out.reshape(q.shape)


def block_mask_of(arguments: tuple[Any, ...], columns: int) -> BlockMask:
    """The tree's mask for FlexAttention; equal lengths, one word."""
    q, _, _, lengths, words, _ = arguments
    prefix, bits = lengths[0].clone(), words[:, :, 0].contiguous()

    def seen(b: Tensor, _: Tensor, row: Tensor, column: Tensor) -> Tensor:
        ancestor = (bits[b, row] >> (column - prefix).clamp(min=0)) & 1
        return (column < prefix) | (ancestor != 0)

    device = str(q.device)
    return create_block_mask(seen, q.shape[0], None, q.shape[2], columns, device=device)


def flex(arguments: tuple[Any, ...], mask: BlockMask, attend: Callable[..., Any]) -> Tensor:
    """The same through FlexAttention."""
    q, keys, values, *_, options = arguments
    columns = mask.shape[-1]
    return attend(
        q, keys[:, :, :columns], values[:, :, :columns],
        block_mask=mask, scale=options.scale, enable_gqa=True,
    )  # fmt: skip


def against(dry_run: bool) -> Iterator[Row]:
    """The kernel, SDPA with a mask and FlexAttention, in turn at every size."""
    device, dtype = device_of(dry_run), torch.float32 if dry_run else torch.bfloat16
    torch._dynamo.config.recompile_limit = 100  # beyond it FlexAttention would run uncompiled
    attend = flex_attention if dry_run else torch.compile(flex_attention, dynamic=True)
    for shape in DRY_SPEED if dry_run else SPEED:
        inputs = inputs_of(shape, dtype, device)
        row: Row = size_of(shape)
        row["kernel µs"] = microseconds([lambda a=a: call(a) for a in inputs], device)
        row |= rivals(inputs, shape.prefix + shape.rows, attend, device)
        times = [row[name] for name in RIVALS if isinstance(row[name], float)]
        if times:
            row["faster by"] = min(times) / row["kernel µs"]
        yield row


def rivals(
    inputs: list[tuple[Any, ...]], columns: int, attend: Callable[..., Any], device: torch.device
) -> Row:
    """Times of the alternatives, or why there is none; masks are made beforehand."""
    row: Row = {}
    _, _, _, lengths, words, options = inputs[0]
    mask = cache_mask(lengths, words, columns, options)[:, None]
    block_mask = block_mask_of(inputs[0], columns)
    functions = (
        lambda a: sdpa(a, mask),
        lambda a: grouped_sdpa(a, mask),
        lambda a: flex(a, block_mask, attend),
    )
    for name, function in zip(RIVALS, functions, strict=True):
        try:
            row[name] = microseconds([lambda a=a, f=function: f(a) for a in inputs], device)
        except Exception as error:  # out of memory, or its compiler has failed
            row[name] = f"{type(error).__name__}: {str(error)[:60]}".replace("\n", " ")
    return row
