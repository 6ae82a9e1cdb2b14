"""The section of `scripts.gpu_check` about training.

Letters: B batch, T tokens of a sequence.
"""

from collections.abc import Iterator
from typing import Any

import torch

from drafters import FAMILIES
from scripts import benchmark_training
from scripts.gpu_check_models import SMOL, TINY, random_target
from scripts.gpu_check_timing import device_of
from scripts.training_cost import seconds_of

Row = dict[str, Any]


def training(dry_run: bool) -> Iterator[Row]:
    """Seconds of an optimizer step of every family, target's forward included."""
    device = device_of(dry_run)
    dtype = "float32" if dry_run else "bfloat16"
    target = random_target(TINY if dry_run else SMOL, getattr(torch, dtype), device)
    length, batch = ("16", "1") if dry_run else ("1024", "4")
    options = ["--target", "random", "--dtype", dtype, "--lengths", length, "--batch", batch]
    args = benchmark_training.parse_args(options)
    for family in FAMILIES:
        work = benchmark_training.make_work(target, family, int(length), args)
        times = [
            seconds_of(lambda work=work: work.step(None, work.phases()), device, work.clock)
            for _ in range(2 if dry_run else 5)
        ]
        best = min(times[1:])
        tokens = int(work.batch().supervised.sum())
        yield {
            "family": family, "B": int(batch), "T": int(length), "step ms": best * 1e3,
            "supervised tokens/s": tokens / best, "first step s": times[0],
        }  # fmt: skip
