"""The first section of `scripts.gpu_check`: what there is to measure on."""

import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch

from scripts.gpu_check_needs import lacking, requirements
from scripts.gpu_check_timing import copy_bandwidth, device_of

Row = dict[str, Any]
GIB = 2**30


def facts(dry_run: bool) -> Iterator[Row]:
    """The GPU and its copy bandwidth, versions, and what is lacking.

    Raises:
        RuntimeError: there is no GPU, and it is no dry run.
    """
    if not dry_run and not torch.cuda.is_available():
        raise RuntimeError("no CUDA device here; --dry-run tries every section on the CPU")
    device = device_of(dry_run)
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        yield {"what": "GPU", "is": found.name}
        yield {"what": "multiprocessors", "is": found.multi_processor_count}
        yield {"what": "compute capability", "is": f"{found.major}.{found.minor}"}
        shared = found.shared_memory_per_multiprocessor
        yield {"what": "shared memory of a multiprocessor", "is": shared}
        free, total = torch.cuda.mem_get_info(device)
        yield {"what": "memory free, GiB", "is": f"{free / GIB:.0f} of {total / GIB:.0f}"}
    yield {"what": "copy, GB/s (read and written)", "is": copy_bandwidth(device) / 1e3}
    yield {"what": "python", "is": platform.python_version()}
    # Triton builds what launches its kernels.
    yield {"what": "C compiler", "is": shutil.which("gcc") or shutil.which("clang") or "none"}
    for name in requirements():
        missing = lacking([name])
        yield {"what": name, "is": missing[0] if missing else metadata.version(name)}
