"""The section about training, on a tiny target where there is no GPU."""

from drafters import FAMILIES
from scripts import gpu_check_training


def test_every_family_takes_a_step() -> None:
    rows = list(gpu_check_training.training(dry_run=True))
    assert [row["family"] for row in rows] == list(FAMILIES)
    assert all(row["step ms"] > 0 and row["supervised tokens/s"] > 0 for row in rows)
