"""The number of threads is chosen by time, and torch's own setting survives the measurement."""

import pytest
import torch

from inference.engine import EagerEngine
from inference.threads import thread_counts, thread_seconds
from tests.tiny import tiny_target


def test_counts_double_up_to_all_cores() -> None:
    assert [thread_counts(cores) for cores in (1, 2, 3, 8, 12)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 12],
    ]


def test_each_count_is_really_set(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, before = EagerEngine(tiny_target()), torch.get_num_threads()
    append, seen = EagerEngine.append, []

    def noting(self: EagerEngine, *args: object, **options: object) -> object:
        seen.append(torch.get_num_threads())
        return append(self, *args, **options)

    monkeypatch.setattr(EagerEngine, "append", noting)
    found = thread_seconds(engine, [1, 2], repeats=2)
    assert len(found) == 2
    assert all(0 < seconds < 60 for seconds in found)
    assert seen[1:] == [1, 1, 2, 2] * 3
    assert torch.get_num_threads() == before
