"""Seconds of a real step on this machine, for a plan; nothing of it is kept."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn

from drafters import Drafter, TargetModel
from drafters.hub import split_revision
from recipes.dryrun import full_batch, planned_head, prepared_objective, step_input
from training.config import TrainConfig
from training.data.batches import PackedDataset
from training.objectives import Objective
from training.optim import make_optimizers

INDEX = ("model.safetensors", "model.safetensors.index.json")


def has_weights(name: str) -> bool:
    """Whether a target's weights are on this machine; nothing is downloaded to find out."""
    if Path(name).is_dir():
        return any((Path(name) / file).is_file() for file in INDEX)
    place, revision = split_revision(name)
    return any(
        isinstance(try_to_load_from_cache(place, file, revision=revision), str) for file in INDEX
    )


def time_step(
    config: TrainConfig, dataset: PackedDataset | None, count: int, accumulates: bool
) -> tuple[float, float, str]:
    """Times on this machine, after a step that warms up. With ``lora.rank`` they are those past
    ``lora.start``, where more is to do.

    Args:
        config: resolved.
        dataset: to take micro-batches from; None makes full ones.
        count: micro-batches, at least 1.
        accumulates: a step has several micro-batches.

    Returns:
        Mean seconds of a micro-batch; seconds of clipping and of the optimizers' step; what ran in
        a micro-batch.
    """
    target = _load(config)
    drafter, objective = _build(config, target)
    optimizers = make_optimizers(objective, config.optim)
    weights = [p for p in objective.parameters() if p.requires_grad]
    size, length = config.run.micro_batch_size, config.data.max_length

    def micro_batch(number: int) -> None:
        if not accumulates:
            objective.zero_grad()
        batch = full_batch(size, length)
        if dataset is not None:
            batch = next(dataset.micro_batches(number, 0, 1, size))
        loss, _ = objective(step_input(config, target, drafter, batch.to(target.device)))
        loss.backward()

    def step(_: int) -> None:
        nn.utils.clip_grad_norm_(weights, config.optim.clip or math.inf)
        for optimizer in optimizers:
            optimizer.step()

    micro_batch(0)
    step(0)
    one = _seconds(micro_batch, range(1, count + 1), target.device)
    return one / count, _seconds(step, range(1), target.device), _what(config)


def _what(config: TrainConfig) -> str:
    """What a micro-batch runs."""
    if config.lora.rank:
        return "the head and its target with a LoRA, forward and backward"
    if config.data.features is not None:
        return "the head alone, on stored hidden states; reading them is left out"
    return "the target's pass, the head forward and backward"


def _load(config: TrainConfig) -> TargetModel:
    options = config.target
    best = "cuda" if torch.cuda.is_available() and options.device == "auto" else "cpu"
    return TargetModel.load(
        options.name,
        getattr(torch, options.dtype),
        torch.device(best),
        options.attn_implementation,
        options.device_map,
        reserve_gb=options.reserve_gb,
    )


def _build(config: TrainConfig, target: TargetModel) -> tuple[Drafter, Objective]:
    """The head and its objective as a run would have them, but for the start of its weights."""
    drafter = planned_head(config, target)
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    drafter.set_draft_vocab(counts, start="random")
    objective = prepared_objective(config, target, drafter)
    nn.Module.to(objective, target.device)
    return drafter, objective


def _seconds(work: Callable[[int], None], numbers: range, device: torch.device) -> float:
    """Of doing it with each of the numbers."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for number in numbers:
        work(number)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
