"""The kernels compiled for three generations of GPUs, none of which has to be there.

What is asked of every one: shared memory within the GPU's limit, tensor cores used, no registers
spilled to memory. On Hopper also that as many programs run at once as the launch counts on, and
that they keep the memory busy.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.kernels import MAX_HEAD_DIM

triton = pytest.importorskip("triton", reason="Triton is not installed: it has no build for macOS")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from inference.kernels import triton_attention as launching  # noqa: E402
from inference.kernels import triton_kernels as kernels  # noqa: E402

SHARED = {80: launching.LEAST_SHARED, 90: launching.HOPPER_SHARED, 100: launching.HOPPER_SHARED}
"""Of sm_80's code less than it has: sm_86 and sm_89 run it, too."""
H200 = launching.Device(num_sms=132, shared=launching.HOPPER_SHARED)
MMA = {80: "mma.sync", 90: r"mma.sync|wgmma.mma_async", 100: r"mma.sync|tcgen05.mma"}
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

INTEGERS = ("window", "num_rows", "num_pending", "sequences", "splits", "most")
ALIGNED = ("q_ptr", "k_ptr", "v_ptr", "part_ptr", "lse_ptr", "words_ptr", "lengths_ptr", "out_ptr")


def compiled(fn: Any, capability: int, element: str, constants: dict, **options: int) -> Any:
    """As a call would compile it, with pointers and strides divisible by 16."""
    types: dict[str, Any] = {name: "i32" for name in INTEGERS}
    types |= {"scale": "fp32", "cap": "fp32", "part_ptr": "*fp32", "lse_ptr": "*fp32"}
    types |= {"lengths_ptr": "*i64", "words_ptr": "*i32", "depths_ptr": "*i64"}
    attributes = {}
    signature = {}
    for place, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name == "strides":
            signature[name] = (("i32",) * 3,) * 3
            attributes |= {
                (place, i, j): [["tt.divisibility", 16]] for i in range(3) for j in range(3)
            }
        elif name == "out_strides":
            signature[name] = ("i32",) * 3
        else:
            signature[name] = types.get(name, "*" + element)
        if name in ALIGNED:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn, signature, constants, attributes)
    options["enable_fp_fusion"] = True
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def split_kernel(
    capability: int, element: str, dim: int, rows: int, everything: bool, **others: int
) -> Any:
    """The kernel for a head dimension and M packed rows, with or without window and soft cap."""
    tile = launching.tile_for(rows, dim, TYPES[element].itemsize, SHARED[capability])
    constants = {
        "HEADS": 8, "GROUP": 4, "D": dim, "DV": dim, "WORDS": 2,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_D": dim, "BLOCK_DV": dim,
        **({} if everything else {"window": None, "cap": None, "depths_ptr": None}), **others,
    }  # fmt: skip
    return compiled(
        kernels.split_kernel, capability, element, constants,
        num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=launching.MAX_REGISTERS,
    )  # fmt: skip


def check(kernel: Any, capability: int) -> None:
    assert kernel.metadata.shared <= SHARED[capability]
    assert re.search(MMA[capability], kernel.asm["ptx"])
    spills = re.findall(r"\b(?:STL|LDL)\b", kernel.asm["sass"])
    assert not spills, f"{len(spills)} instructions move spilled registers"


@pytest.mark.parametrize("kernel", [kernels.split_kernel, kernels.merge_kernel])
def test_no_number_of_rows_or_splits_is_a_kernel_of_its_own(kernel: Any) -> None:
    """Triton builds numbers in that are 1, and tells multiples of 16 apart, where it may."""
    free = {p.name for p in kernel.params if p.do_not_specialize}
    assert free == {name for name in kernel.arg_names if name in INTEGERS and name != "window"}


def test_a_window_of_one_compiles() -> None:
    check(split_kernel(80, "fp16", 64, 16, True, window=1), 80)


def test_a_small_tile_compiles() -> None:
    check(split_kernel(80, "fp16", dim=64, rows=16, everything=False), 80)


COMPILED = [
    ("fp16", 64, 64, False),
    ("bf16", 64, 32, False),
    ("bf16", 64, 128, True),
    ("bf16", 128, 16, False),
    ("bf16", 128, 64, True),
    ("fp16", 128, 128, False),
    ("bf16", 256, 64, False),
    ("fp16", 256, 16, True),
    ("fp32", 64, 16, False),
    ("fp32", 128, 64, True),
]
"""Element, head dimension, packed rows, and whether with window and soft cap."""


@pytest.mark.slow
@pytest.mark.parametrize(("element", "dim", "rows", "everything"), COMPILED)
@pytest.mark.parametrize("capability", SHARED)
def test_tiles_compile(
    capability: int, element: str, dim: int, rows: int, everything: bool
) -> None:
    check(split_kernel(capability, element, dim, rows, everything), capability)


def registers(kernel: Any, folder: Path) -> int:
    """Per thread."""
    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    command = [tool, "--dump-resource-usage", str(folder / "kernel.cubin")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [found] = re.findall(r"\bREG:(\d+)", told)
    return int(found)


@pytest.mark.slow
@pytest.mark.parametrize(("element", "dim", "rows", "everything"), COMPILED)
def test_hopper_runs_as_many_programs_as_are_counted_on_and_they_keep_its_memory_busy(
    element: str, dim: int, rows: int, everything: bool, tmp_path: Path
) -> None:
    kernel = split_kernel(90, element, dim, rows, everything)
    tile = launching.tile_for(rows, dim, TYPES[element].itemsize, H200.shared)
    per_thread = -(-registers(kernel, tmp_path) // 8) * 8
    by_registers = 65536 // (per_thread * 32 * tile.num_warps)
    by_shared = 228 * 1024 // (kernel.metadata.shared + 1024)
    resident = H200.places(tile) // H200.num_sms
    assert resident <= min(by_registers, by_shared)
    # While a program computes one step, and before it has asked for the next one.
    assert resident * (tile.num_stages - 2) * tile.step_bytes >= launching.IN_FLIGHT
    # Little's law: what is on its way is bandwidth times latency, 4.8 TB/s and a microsecond.
    assert 1.5 * 4.8e12 * 1e-6 / H200.num_sms < launching.IN_FLIGHT


@pytest.mark.parametrize("element", TYPES)
def test_tiles_hold_what_they_have_to(element: str) -> None:
    """What the tested compilations cover: no other tile is ever launched."""
    itemsize = TYPES[element].itemsize
    tiles = {
        (dim, launching.tile_for(rows, dim, itemsize, shared))
        for dim in (16, 32, 64, 128, 256)
        for rows in range(1, 1025)
        for shared in set(SHARED.values())
        if dim <= MAX_HEAD_DIM[TYPES[element]]
    }
    assert all(tile.block_m >= 16 and tile.block_n >= 16 for _, tile in tiles)
    assert {tile.block_m for _, tile in tiles} == ({16} if itemsize == 4 else {16, 32, 64, 128})
    assert max(2 * dim * tile.block_n * itemsize for dim, tile in tiles) == 32 * 1024
    assert all(tile.step_bytes >= 2 * dim * tile.block_n * itemsize for dim, tile in tiles)


@pytest.mark.parametrize(
    ("num_tiles", "capacity", "expected"),
    [
        (8, 2048, 16),  # batch 1: as many as the cache has room for
        (8, 32768, 33),  # two programs for each of 132 multiprocessors
        (128, 8192, 2),
        (200, 8192, 5),  # one each leaves a quarter empty, five each fill almost four times
        (300, 8192, 3),
        (512, 8192, 1),
        (5000, 8192, 1),
        (8, 1, 1),
    ],
)
def test_splits_follow_shapes(num_tiles: int, capacity: int, expected: int) -> None:
    assert launching.num_splits(num_tiles, capacity, places=264) == expected


def test_the_longest_of_a_batch_may_have_more() -> None:
    assert launching.most_splits(33, batch=1, capacity=8192) == 33
    assert launching.most_splits(2, batch=16, capacity=8192) == 4
    assert launching.most_splits(2, batch=16, capacity=300) == 3


def test_small_gpus_run_one_program_where_hopper_runs_two() -> None:
    tiles = {shared: launching.tile_for(64, 128, 2, shared) for shared in (99 * 1024, 227 * 1024)}
    places = {shared: launching.Device(100, shared).places(tile) for shared, tile in tiles.items()}
    assert list(places.values()) == [100, 200]
    high = launching.tile_for(128, 128, 2, 227 * 1024)
    assert H200.places(high) == 132 and high.num_stages == 4


@pytest.mark.parametrize("capability", SHARED)
def test_the_merge_compiles(capability: int) -> None:
    constants = {
        "HEADS": 8, "GROUP": 4, "DV": 128, "window": None,
        "BLOCK_J": launching.MERGED_AT_ONCE, "BLOCK_N": 64, "BLOCK_DV": 128,
    }  # fmt: skip
    kernel = compiled(kernels.merge_kernel, capability, "bf16", constants, num_warps=2)
    assert kernel.metadata.shared <= SHARED[capability]
    assert not re.findall(r"\b(?:STL|LDL)\b", kernel.asm["sass"])
