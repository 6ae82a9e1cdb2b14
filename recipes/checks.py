"""What must hold before the first optimizer step."""

import logging

import torch

from drafters import TargetModel
from recipes.parity import check_parity
from training.data.batches import Dataset, collate
from training.features import check_packing
from training.objectives import Objective

logger = logging.getLogger("recipes.train")
CHECKED = 32
"""Sequences looked at."""


def check_before_training(target: TargetModel, objective: Objective, dataset: Dataset) -> None:
    """Packing must not leak, and both passes must agree.

    Raises:
        ValueError: either fails.
    """
    groups = dataset.head(CHECKED)
    fullest = max(groups, key=len)  # leaks need more than one document to show
    batch = collate([fullest], dataset.length).to(target.device)
    tolerance = 1e-1 if target.dtype in (torch.bfloat16, torch.float16) else 1e-2
    check_packing(target, batch, objective.drafter.feature_layers, tolerance)
    row = max((row for group in groups for row in group), key=lambda row: len(row.ids))
    report = check_parity(target, objective, row)
    logger.info(
        "parity: training and decoding logits agree to %.1e (allowed %.0e) at %d positions, the "
        "target's hidden states to %.1e",
        report.error,
        report.tolerance,
        report.positions,
        report.feature_error,
    )
