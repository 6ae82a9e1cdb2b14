"""Optimizers, learning rates and the moving average of the weights."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from training.joint import adapter_groups, late_rate
from training.objectives import Objective
from training.options.run import OptimOptions


def make_optimizers(objective: Objective, optim: OptimOptions) -> list[Optimizer]:
    """AdamW over all trained parameters, or Muon over the matrices inside the head and AdamW over
    the rest. The LoRA of a target that is trained too is a group of AdamW's.

    Args:
        objective: its parameters as they will be trained (sharded already, where they are).
        optim: options.
    """
    groups = adapter_groups(objective)
    chosen = {id(parameter) for group in groups for parameter in group["params"]}
    inner = inner_matrices(objective) if optim.name == "muon" else []
    chosen |= {id(parameter) for parameter in inner}
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    rest = [parameter for parameter in trained if id(parameter) not in chosen]
    if rest:
        groups = [{"params": rest}, *groups]
    others = [_adamw(groups, optim)] if groups else []
    if not inner:
        return others
    # Updates have the size of AdamW's, so that one learning rate serves both (arXiv:2502.16982 §2).
    muon = torch.optim.Muon(
        inner, lr=optim.lr, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, *others]


def _adamw(groups: list[dict[str, Any]], optim: OptimOptions) -> Optimizer:
    return torch.optim.AdamW(
        groups, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
    )


def inner_matrices(objective: Objective) -> list[nn.Parameter]:
    """Weights of linear layers inside the head: neither its output matrices, nor embeddings, norms,
    biases and the confidence head.

    Raises:
        ValueError: there is none.
    """
    drafter = objective.drafter
    outside = [module for module in drafter.output_modules() if module is not None]
    outside += [drafter.confidence] if drafter.confidence is not None else []
    excluded = {id(p) for module in outside for p in module.parameters()}
    found: list[nn.Parameter] = [
        module.weight  # type: ignore[misc]
        for module in objective.modules()
        if isinstance(module, nn.Linear)
        and module.weight.requires_grad
        and id(module.weight) not in excluded
    ]
    if not found:
        raise ValueError(
            f"optim.name=muon has no effect: this {drafter.family} head has no matrix but its "
            "output matrices. Use adamw"
        )
    return found


class Rates:
    """Learning rates of all optimizers, a function of the step alone.

    Not prepared by accelerate, which would step it once per process.

    Args:
        optimizers: their parameter groups' present rates are the peaks.
        optim: options.
        total: optimizer steps of the run.
    """

    def __init__(self, optimizers: Sequence[Optimizer], optim: OptimOptions, total: int) -> None:
        self.optimizers = optimizers
        self._schedulers = [_schedule(optimizer, optim, total) for optimizer in optimizers]

    def go_to(self, step: int) -> None:
        """Set the rates behind ``step`` optimizer steps, whatever they were."""
        for optimizer, scheduler in zip(self.optimizers, self._schedulers, strict=True):
            for group, base, factor in zip(
                optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
            ):
                group["lr"] = base * factor(step)

    @property
    def now(self) -> float:
        """The first group's rate."""
        return float(self.optimizers[0].param_groups[0]["lr"])


def _schedule(optimizer: Optimizer, optim: OptimOptions, total: int) -> LambdaLR:
    warmup = math.ceil(optim.warmup * total)
    name, extra = optim.schedule, {}
    if optim.schedule == "wsd":
        name = "warmup_stable_decay"
        decay = max(1, math.ceil(optim.decay * total))
        extra = {"num_decay_steps": decay, "min_lr_ratio": optim.min_lr}
    elif optim.schedule == "cosine" and optim.min_lr:
        name = "cosine_with_min_lr"
        extra = {"min_lr_rate": optim.min_lr}
    found: Any = get_scheduler(
        name, optimizer, warmup, total, scheduler_specific_kwargs=extra or None
    )
    starts = [group.get("start", 0.0) for group in optimizer.param_groups]
    found.lr_lambdas = [
        late_rate(rate, start, warmup, total)
        for rate, start in zip(found.lr_lambdas, starts, strict=True)
    ]
    return found


class MovingAverage:
    """Exponential moving average of the trained weights (Polyak averaging), in their own dtype.

    Args:
        parameters: by name, as this process holds them.
        decay: weight of the past per step, in (0, 1).
    """

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float) -> None:
        self.decay, self._parameters = decay, parameters
        self.values: dict[str, Tensor] = {n: p.detach().clone() for n, p in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step."""
        for name, value in self.values.items():
            value.lerp_(self._parameters[name].detach(), 1 - self.decay)

    @torch.no_grad()
    def load(self, values: dict[str, Tensor]) -> None:
        """Take values as this process holds them."""
        for name, value in self.values.items():
            value.copy_(values[name])
