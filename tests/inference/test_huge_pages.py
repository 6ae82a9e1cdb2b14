"""Memory moves into huge pages without changing, and what cannot move stays."""

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inference import huge_pages
from inference.huge_pages import collapse, huge_share, page_bytes, whole_pages

PAGE = 100
needs_pages = pytest.mark.skipif(not page_bytes(), reason="this system gives no huge pages")


def plenty() -> bool:
    """Whether the system gives huge pages to memory that asks for them before it is used."""
    asked = mmap.mmap(-1, 32 << 20)
    asked.madvise(mmap.MADV_HUGEPAGE)
    asked.write(b"1" * len(asked))
    first = ctypes.addressof(ctypes.c_char.from_buffer(asked))
    return huge_share([(first, first + len(asked))]) > 0.8


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A system's settings that a test may write; they are read again afterwards, too."""
    monkeypatch.setattr(huge_pages, "SETTINGS", tmp_path)
    page_bytes.cache_clear()
    yield tmp_path
    page_bytes.cache_clear()


@pytest.mark.parametrize(
    ("ranges", "mappings", "expected"),
    [
        ([(120, 180)], [(0, 1000)], [(100, 200)]),
        ([(120, 201)], [(0, 1000)], [(100, 300)]),
        ([(100, 200)], [(0, 1000)], [(100, 200)]),
        ([(110, 120), (130, 140), (250, 260)], [(0, 1000)], [(100, 300)]),
        ([(110, 120), (330, 340)], [(0, 1000)], [(100, 200), (300, 400)]),
        ([(120, 420)], [(110, 1000)], [(200, 500)]),
        ([(120, 420)], [(0, 150), (150, 390)], [(200, 300)]),
        ([(120, 420)], [(0, 300), (300, 1000)], [(100, 300), (300, 500)]),
        ([(120, 420)], [], []),
    ],
)
def test_pages_that_hold_ranges(
    ranges: list[tuple[int, int]],
    mappings: list[tuple[int, int]],
    expected: list[tuple[int, int]],
) -> None:
    assert whole_pages(ranges, mappings, PAGE) == expected


@needs_pages
def test_used_memory_moves_and_keeps_its_values() -> None:
    tensors = [torch.arange(3_000_017) + number for number in range(3)]  # 24 MB each
    ranges = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors]
    before = huge_share(ranges)
    found = collapse(ranges)
    assert 0 <= before <= found <= 1
    assert found > 0.5 or not plenty()
    assert found == pytest.approx(huge_share(ranges))
    for number, x in enumerate(tensors):
        assert torch.equal(x, torch.arange(3_000_017) + number)


@needs_pages
def test_little_memory_is_left_alone() -> None:
    x = torch.zeros(1000)
    assert collapse([(x.data_ptr(), x.data_ptr() + x.nbytes)]) == 0.0
    assert collapse([]) == 0.0


@pytest.mark.parametrize(
    ("enabled", "size", "expected"),
    [
        ("always [madvise] never", "2097152", 2 << 20),
        ("[always] madvise never", "2097152", 2 << 20),
        ("always madvise [never]", "2097152", 0),
        ("always [madvise] never", str(512 << 20), 0),
        ("always [madvise] never", "none", 0),
    ],
)
def test_what_the_system_says(settings: Path, enabled: str, size: str, expected: int) -> None:
    (settings / "enabled").write_text(enabled + "\n")
    (settings / "hpage_pmd_size").write_text(size + "\n")
    assert page_bytes() == expected


def test_a_system_without_huge_pages(settings: Path) -> None:
    x = torch.zeros(10_000_000)
    assert page_bytes() == 0
    assert collapse([(x.data_ptr(), x.data_ptr() + x.nbytes)]) == 0.0


def test_another_system(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (settings / "enabled").write_text("[always] madvise never\n")
    (settings / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr("sys.platform", "darwin")
    assert page_bytes() == 0
