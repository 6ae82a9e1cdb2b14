"""How many threads a CPU decodes fastest with.

More are not always faster: small products wait for each other's threads at a barrier, and where
another process has a core the wait is a time slice of the scheduler. So it is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from inference.engine import Engine

CONTEXT = 128
ROWS = (1, 8)
"""Of a plain step and of a verifying one."""
REPEATS = 5


@torch.inference_mode()
def thread_seconds(engine: Engine, counts: Sequence[int], repeats: int = REPEATS) -> list[float]:
    """Seconds of a plain and a verifying forward, by number of threads.

    Counts are gone through in turns, so that a machine that gets slower does so for all; the
    fastest of the repeats counts, as a stray process can only slow them down. torch's own setting
    is what it was before.

    Args:
        engine: on a CPU.
        counts: of threads.
        repeats: of each.
    """
    with engine.probing():
        return _measure(engine, counts, repeats)


def _measure(engine: Engine, counts: Sequence[int], repeats: int) -> list[float]:
    before = torch.get_num_threads()
    cache = engine.new_cache(1, CONTEXT + max(ROWS) + 1)
    text, vocab = torch.arange(CONTEXT), engine.target.vocab_size
    engine.append(
        cache,
        [text % vocab],
        [text],
        [torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril()],
        logits_to_keep=1,
    )
    cache.commit([range(CONTEXT)])
    best = [[float("inf")] * len(ROWS) for _ in counts]
    try:
        for _ in range(repeats + 1):
            for count, seconds in zip(counts, best, strict=True):
                torch.set_num_threads(count)
                for place, rows in enumerate(ROWS):
                    nodes = torch.arange(rows)
                    seen = torch.ones(rows, rows, dtype=torch.bool).tril()
                    start = time.perf_counter()
                    engine.append(cache, [nodes % vocab], [nodes], [seen])
                    seconds[place] = min(seconds[place], time.perf_counter() - start)
                    cache.revert()
    finally:
        torch.set_num_threads(before)
    return [sum(seconds) for seconds in best]


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4, ... and all cores."""
    counts = [1]
    while counts[-1] * 2 <= cores:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == cores else [*counts, cores]
