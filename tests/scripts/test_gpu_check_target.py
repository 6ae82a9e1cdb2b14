"""The section about a small target, on tiny models where there is no GPU."""

from pathlib import Path

import pytest
import torch

from scripts import gpu_check_target
from scripts.gpu_check_target import first_difference
from tests.tiny import save_tiny_target


def test_every_engine_says_what_plain_decoding_says(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path, torch.float32)
    rows = list(gpu_check_target.target_rows(True, folder))
    assert all(row["ok"] and row["tokens/s"] > 0 for row in rows)
    assert [row["engine"] for row in rows if row.get("B", 1) == 1] == [
        "plain, one by one",
        "device, random head",
        "device, random head, sizes in turn",
        "packed, no drafts",
        "packed, n-grams",
        "packed, random head",
    ]


def test_another_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_check_target.decoded

    def wrong(*args: object) -> object:
        found = right(*args)
        found.sequences[-1][3] += 1
        return found

    monkeypatch.setattr(gpu_check_target, "decoded", wrong)
    plain, *others = gpu_check_target.target_rows(True, None)
    assert plain["ok"] and not any(row["ok"] for row in others)
    assert others[0]["first difference"] == "text 3, token 3"


def test_differences_are_placed() -> None:
    assert first_difference([[1, 2], [3]], [[1, 2], [3], [4]]) is None
    assert first_difference([[1, 2]], [[1, 3]]) == "text 0, token 1"
    assert first_difference([[1], [1]], [[1], [1, 2]]) == "text 1, token 1"
