"""Seconds of real micro-batches, for a plan: forward and backward, and nothing of it is kept."""

import time
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn

from drafters import TargetModel
from recipes.dryrun import ARITHMETIC, full_batch, planned_head
from training.config import TrainConfig
from training.data import PackedDataset
from training.features import run_target
from training.objectives import build_objective

INDEX = ("model.safetensors", "model.safetensors.index.json")


def has_weights(name: str) -> bool:
    """Whether a target's weights are on this machine; nothing is downloaded to find out."""
    if Path(name).is_dir():
        return any((Path(name) / file).is_file() for file in INDEX)
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in INDEX)


def seconds_per_micro_batch(
    config: TrainConfig, dataset: PackedDataset | None, count: int
) -> float:
    """Mean time of ``count`` micro-batches on this machine, after one that warms up.

    Args:
        config: resolved.
        dataset: to take them from; None makes full ones.
        count: at least 1.
    """
    options = config.target
    best = "cuda" if torch.cuda.is_available() and options.device == "auto" else "cpu"
    target = TargetModel.load(
        options.name,
        getattr(torch, options.dtype),
        torch.device(best),
        options.attn_implementation,
        options.device_map,
        reserve_gb=options.reserve_gb,
    )
    drafter = planned_head(config, target)
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    drafter.set_draft_vocab(counts, start="random")
    objective = build_objective(drafter, config.loss).train()
    objective.arithmetic = ARITHMETIC[config.run.mixed_precision]
    objective.activation_checkpointing = config.run.activation_checkpointing
    nn.Module.to(objective, target.device)
    size, length = config.run.micro_batch_size, config.data.max_length
    started = 0.0
    for number in range(count + 1):
        batch = full_batch(size, length)
        if dataset is not None:
            batch = next(dataset.micro_batches(number, 0, 1, size))
        data = run_target(target, batch.to(target.device), drafter.feature_layers)
        loss, _ = objective(data)
        loss.backward()
        objective.zero_grad()
        if best == "cuda":
            torch.cuda.synchronize()
        if number == 0:
            started = time.perf_counter()
    return (time.perf_counter() - started) / count
