"""The Triton kernels of tree attention: one for the splits, one that merges them.

`triton_attention` says how they fit together and launches them.

Scores are kept in units of log 2, softmax and accumulators in float32. Tensor cores multiply
float32 as three products of TF32, which is as good as float32 to about two bits.

Letters: B batch, Hkv key-value heads, M packed rows of one of them (row m is tree row m // GROUP
and query head m % GROUP of the head's), T tree rows, W words, d and dv dimensions of a head, J
slots for partial results, of which slot 0 is the tree's.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
MIN_SPLIT = tl.constexpr(128)
"""Columns of a split at least. What a split leaves behind costs 8 bytes per row and dimension to
write and read, what it reads 4 per column and dimension (float16): much shorter splits would move
more than they share out."""
AT_ONCE = tl.constexpr(128)
"""Lengths of sequences that are read at once."""
NARROW = tl.constexpr(32)
"""Columns per step where they are few: of the tree, and of what whole blocks leave of a split. A
step then needs one 32-bit word of a row."""


@triton.jit
def _span(length: tl.tensor, window: tl.tensor) -> tl.tensor:
    """Columns at the end of the prefix that the root, which sees furthest back, sees."""
    span = length
    if window is not None:
        span = tl.minimum(length, window - 1)
    return span


@triton.jit
def _split_size(
    lengths_ptr: tl.tensor,
    span: tl.tensor,
    window: tl.tensor,
    sequences: tl.tensor,
    splits: tl.tensor,
    most: tl.tensor,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Columns per split of a sequence of this span: equal shares of whole blocks.

    Sequences have `splits` each on average, the longer the more, and `most` at most.
    """
    total = 0
    for first in range(0, sequences, AT_ONCE):
        place = first + tl.arange(0, AT_ONCE)
        lengths = tl.load(lengths_ptr + place, mask=place < sequences, other=0).to(tl.int32)
        total += tl.sum(_span(lengths, window), 0)
    average = tl.maximum(tl.cdiv(total, splits * sequences), 1)
    share = tl.minimum(tl.maximum((span + average // 2) // average, 1), most)
    size = tl.maximum(tl.cdiv(span, share), MIN_SPLIT)
    return tl.cdiv(size, BLOCK_N) * BLOCK_N


@triton.jit
def _load(
    base: tl.tensor,
    stride: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BOUNDED: tl.constexpr,
) -> tl.tensor:
    """(BLOCK_N, BLOCK_D) keys or values of the columns from `start` on, zeros from `end` on."""
    column = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    place = base + tl.cast(start, tl.int64) * stride + column[:, None] * stride + dim[None, :]
    if BOUNDED:
        inside = (start + column < end)[:, None] & (dim < DIM)[None, :]
        block = tl.load(place, mask=inside, other=0.0)
    elif DIM < BLOCK_D:
        block = tl.load(place, mask=(dim < DIM)[None, :], other=0.0)
    else:
        block = tl.load(place)
    return block


@triton.jit
def _load_queries(
    rows: tl.tensor, real: tl.tensor, D: tl.constexpr, BLOCK_D: tl.constexpr
) -> tl.tensor:
    """(BLOCK_M, BLOCK_D) from pointers to rows; zeros where there is no row."""
    dim = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (dim < D)[None, :]
    return tl.load(rows[:, None] + dim[None, :], mask=inside, other=0.0)


@triton.jit
def _load_depths(depths_ptr: tl.tensor, place: tl.tensor, real: tl.tensor) -> tl.tensor:
    """Depths at these places; zeros where there is no row, or no depths are needed."""
    if depths_ptr is None:
        depths = tl.zeros_like(place).to(tl.int32)
    else:
        depths = tl.load(depths_ptr + place, mask=real, other=0).to(tl.int32)
    return depths


@triton.jit
def _step(
    acc: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """One block of columns into the output, maximum and sum of an online softmax."""
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
    if cap is not None:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
        scores = cap - 2 * cap / (tl.exp2(scores) + 1)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = new_top
    if MASKED:  # where a row has seen nothing yet, infinities must not be subtracted
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(top - shift)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="tf32x3")
    return acc, new_top, total


@triton.jit
def _attend_prefix(
    q: tl.tensor,
    k_base: tl.tensor,
    v_base: tl.tensor,
    strides: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    length: tl.tensor,
    depth: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
) -> tl.tensor:
    """Columns start .. end - 1 of a prefix of `length`; `depth` matters with a window."""
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    reach = depth  # where there is no window, nobody looks
    if window is not None:
        reach = length + depth - window + 1
    column = tl.arange(0, BLOCK_N)[None, :]
    whole = start + (end - start) // BLOCK_N * BLOCK_N
    for at in range(start, whole, BLOCK_N):
        k = _load(k_base, strides[0], at, end, D, BLOCK_N, BLOCK_D, False)
        v = _load(v_base, strides[1], at, end, DV, BLOCK_N, BLOCK_DV, False)
        seen = at + column >= reach[:, None]
        acc, top, total = _step(acc, top, total, q, k, v, seen, scale, cap, window is not None)
    column = tl.arange(0, NARROW)[None, :]
    for at in range(whole, end, NARROW):  # less than a block is left
        k = _load(k_base, strides[0], at, end, D, NARROW, BLOCK_D, True)
        v = _load(v_base, strides[1], at, end, DV, NARROW, BLOCK_DV, True)
        seen = at + column < end
        if window is not None:
            seen = seen & (at + column >= reach[:, None])
        acc, top, total = _step(acc, top, total, q, k, v, seen, scale, cap, True)
    return acc, top, total


@triton.jit
def _attend_tree(
    q: tl.tensor,
    k_base: tl.tensor,
    v_base: tl.tensor,
    strides: tl.tensor,
    length: tl.tensor,
    num_tree: tl.tensor,
    words: tl.tensor,
    depths: tl.tensor,
    depth: tl.tensor,
    window: tl.tensor,
    real: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
) -> tl.tensor:
    """The tree's T columns: row m sees those whose bits are set in its words of 32 bits."""
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    end = length + num_tree
    for first in range(0, num_tree, NARROW):
        k = _load(k_base, strides[0], length + first, end, D, NARROW, BLOCK_D, True)
        v = _load(v_base, strides[1], length + first, end, DV, NARROW, BLOCK_DV, True)
        column = first + tl.arange(0, NARROW)
        word = tl.load(words + first // 32, mask=real, other=0)
        seen = ((word[:, None] >> (column % 32)[None, :]) & 1) != 0
        seen = seen & (column < num_tree)[None, :]
        if window is not None:
            above = _load_depths(depths[0], depths[1] + column, column < num_tree)
            seen = seen & (depth[:, None] - above[None, :] < window)
        acc, top, total = _step(acc, top, total, q, k, v, seen, scale, cap, True)
    return acc, top, total


# No number is built in that differs from call to call: each would be a kernel of its own.
@triton.jit(do_not_specialize=("num_rows", "num_pending", "sequences", "splits"))
def split_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    words_ptr: tl.tensor,
    depths_ptr: tl.tensor,
    part_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    strides: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    num_rows: tl.tensor,
    num_pending: tl.tensor,
    sequences: tl.tensor,
    splits: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
) -> None:
    """Program (tile, split): a split of the prefix of the tile's sequence, the last one the tree.

    Writes part (B, Hkv, M, J, dv) and, in units of log 2, lse (B, Hkv, M, J); both contiguous.
    """
    packed = num_rows * GROUP
    tiles = tl.cdiv(packed, BLOCK_M)
    pair = tl.program_id(0) // tiles
    batch = (pair // HEADS).to(tl.int64)
    head = (pair % HEADS).to(tl.int64)
    split = tl.program_id(1)
    most = tl.num_programs(1) - 1
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    span = _span(length, window)
    size = _split_size(lengths_ptr, span, window, sequences, splits, most, BLOCK_N)
    if (split < most) & (split * size >= span):
        return  # a text of this length needs fewer splits

    row = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < packed
    node = row // GROUP
    q_rows = q_ptr + batch * strides[0][0] + node * strides[0][2]
    q_rows += (head * GROUP + row % GROUP) * strides[0][1]
    q = _load_queries(q_rows, real, D, BLOCK_D)
    k = k_ptr + batch * strides[1][0] + head * strides[1][1]
    v = v_ptr + batch * strides[2][0] + head * strides[2][1]
    columns = (strides[1][2], strides[2][2])
    num_tree = num_pending + num_rows
    depth = _load_depths(depths_ptr, batch * num_tree + num_pending + node, real)
    if split < most:
        start = length - span + split * size
        end = tl.minimum(start + size, length)
        acc, top, total = _attend_prefix(
            q, k, v, columns, start, end, length, depth, window, scale, cap,
            D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    else:
        words = words_ptr + (batch * num_rows + node) * WORDS
        depths = (depths_ptr, batch * num_tree)
        acc, top, total = _attend_tree(
            q, k, v, columns, length, num_tree, words, depths, depth, window, real, scale, cap,
            D, DV, BLOCK_M, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    _store(part_ptr, lse_ptr, packed, acc, top, total, DV, BLOCK_M, BLOCK_DV)


@triton.jit
def _store(
    part_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    packed: tl.tensor,
    acc: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
) -> None:
    """Leave a partial result; nothing seen is a zero output of log-sum-exp minus infinity.

    Where it belongs is worked out again here: registers have no room to keep it.
    """
    tiles = tl.cdiv(packed, BLOCK_M)
    row = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    slots = tl.num_programs(1)
    slot = (tl.program_id(1) + 1) % slots  # the last program's, the tree's, is 0
    place = ((tl.program_id(0) // tiles).to(tl.int64) * packed + row) * slots + slot
    dim = tl.arange(0, BLOCK_DV)
    total = tl.where(total == 0, 1.0, total)
    tl.store(
        part_ptr + place[:, None] * DV + dim[None, :],
        acc / total[:, None],
        mask=(row < packed)[:, None] & (dim < DV)[None, :],
    )
    tl.store(lse_ptr + place, top + tl.log2(total), mask=row < packed)


@triton.jit(do_not_specialize=("num_rows", "sequences", "splits", "most"))
def merge_kernel(
    part_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_strides: tl.tensor,
    window: tl.tensor,
    num_rows: tl.tensor,
    sequences: tl.tensor,
    splits: tl.tensor,
    most: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
) -> None:
    """Program (packed row): the partial results of one row, weighted by their log-sum-exps."""
    packed = num_rows * GROUP
    place = tl.program_id(0).to(tl.int64)
    row = place % packed
    head = place // packed % HEADS
    batch = place // packed // HEADS
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    span = _span(length, window)
    size = _split_size(lengths_ptr, span, window, sequences, splits, most, BLOCK_N)
    written = 1 + tl.cdiv(span, size)
    query_head = head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    top = float("-inf")
    total = 0.0
    if sinks_ptr is not None:
        top = tl.load(sinks_ptr + query_head).to(tl.float32) * LOG2_E
        total = 1.0
    for first in range(0, written, BLOCK_J):
        slot = first + tl.arange(0, BLOCK_J)
        there = slot < written
        at = place * (most + 1) + slot
        lse = tl.load(lse_ptr + at, mask=there, other=float("-inf"))
        inside = there[:, None] & (dim < DV)[None, :]
        part = tl.load(part_ptr + at[:, None] * DV + dim[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))  # finite: the tree's slot is in the first block
        weights = tl.exp2(lse - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(part * weights[:, None], 0)
        top = new_top
    out = batch * out_strides[0] + query_head * out_strides[1] + row // GROUP * out_strides[2]
    result = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out + dim, result, mask=dim < DV)
