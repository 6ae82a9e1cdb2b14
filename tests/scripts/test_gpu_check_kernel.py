"""Sections about tree attention, on tiny shapes where there is no GPU."""

import pytest
import torch

from inference.kernels.reference import cache_mask
from scripts import gpu_check_kernel

CPU = torch.device("cpu")


def test_agreement_is_checked() -> None:
    rows = list(gpu_check_kernel.agreement(dry_run=True))
    assert len(rows) == 3 * len(gpu_check_kernel.DRY_AGREEMENT)
    assert all(row["ok"] and row["error"] <= row["tolerance"] for row in rows)


def test_shares_are_all_cases() -> None:
    def told(share: tuple[int, int]) -> list[tuple[str, str]]:
        rows = gpu_check_kernel.agreement(dry_run=True, share=share)
        return [(row["case"], row["dtype"]) for row in rows]

    every = told((0, 1))
    assert sorted(told((0, 4)) + told((1, 4)) + told((2, 4)) + told((3, 4))) == sorted(every)
    assert len(set(every)) == len(every)


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_check_kernel.tree_attention
    monkeypatch.setattr(gpu_check_kernel, "tree_attention", lambda *a, **k: right(*a, **k) * 1.1)
    assert not any(row["ok"] for row in gpu_check_kernel.agreement(dry_run=True))


def test_a_kernel_that_looks_at_its_first_lengths_only_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, first = gpu_check_kernel.tree_attention, {}

    def wrong(q, keys, values, lengths, words, **options):
        kept = first.setdefault(q.data_ptr(), lengths.clone())
        return right(q, keys, values, kept, words, **options)

    monkeypatch.setattr(gpu_check_kernel, "tree_attention", wrong)
    rows = list(gpu_check_kernel.agreement(dry_run=True))
    assert not any(row["graph"] for row in rows) and not any(row["ok"] for row in rows)


def test_the_alternatives_compute_the_same() -> None:
    shape = gpu_check_kernel.Shape(2, 20, 5, (4, 2), 16)
    arguments = gpu_check_kernel.tensors_of(shape, torch.float32, CPU)
    expected = gpu_check_kernel.call(arguments)
    mask = cache_mask(*arguments[3:5], 25, arguments[5])[:, None]
    torch.testing.assert_close(gpu_check_kernel.sdpa(arguments, mask), expected)
    torch.testing.assert_close(gpu_check_kernel.grouped_sdpa(arguments, mask), expected)
    block_mask = gpu_check_kernel.block_mask_of(arguments, 25)
    flex = gpu_check_kernel.flex(arguments, block_mask, gpu_check_kernel.flex_attention)
    torch.testing.assert_close(flex, expected)


def test_the_kernel_is_timed_by_itself() -> None:
    copy, row = gpu_check_kernel.speed(dry_run=True)
    assert copy["GB/s"] > 0
    assert row["kernel µs"] > 0 and 0 < row["of copy"] < 10


def test_an_alternative_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room\nfor it")

    monkeypatch.setattr(gpu_check_kernel, "sdpa", fail)
    [row] = gpu_check_kernel.against(dry_run=True)
    assert row["SDPA µs"] == "OutOfMemoryError: no room for it"
    others = min(row["SDPA grouped µs"], row["Flex µs"])
    assert row["faster by"] == others / row["kernel µs"] > 0


def test_the_size_that_is_asked_for_is_timed_first() -> None:
    first = gpu_check_kernel.SPEED[0]
    assert (first.batch, first.prefix, first.rows) == (16, 8192, 16)
