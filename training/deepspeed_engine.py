"""DeepSpeed's ZeRO under the loop. Imported only where a launcher asks for DeepSpeed.

ZeRO 1 and 2 spread optimizer states (and gradients), ZeRO 3 the weights too. The optimizer is the
loop's own: DeepSpeed's configuration may hold neither optimizer nor scheduler, and its clipping,
batch and accumulation sizes are set from ours. Weights stay float32 and bf16 arithmetic is the
objective's autocast, as everywhere, so that all engines compute the same.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from deepspeed.utils import (
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn
from torch.optim import Optimizer

from training.engines import Engine, MakeOptimizers, OptimizerState, check_shapes
from training.objectives import Objective

MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeedEngine(Engine):
    """ZeRO stage 1, 2 or 3.

    Args:
        accelerator, objective, make_optimizers, clip: see :class:`~training.engines.Engine`.
        micro_batch_size: sequences per forward pass.

    Raises:
        ValueError: settings that DeepSpeed cannot train with.
    """

    name = "deepspeed"

    def __init__(
        self,
        accelerator: Accelerator,
        objective: Objective,
        make_optimizers: MakeOptimizers,
        clip: float,
        micro_batch_size: int,
    ) -> None:
        self._micro_batch_size = micro_batch_size
        super().__init__(accelerator, objective, make_optimizers, clip)

    def _prepare(self, make_optimizers: MakeOptimizers) -> tuple[nn.Module, list[Optimizer]]:
        plugin = self.accelerator.state.deepspeed_plugin
        settings = plugin.deepspeed_config
        for name in ("optimizer", "scheduler", "fp16", "bf16"):
            section = settings.get(name)
            if section and (not isinstance(section, dict) or section.get("enabled", True) is True):
                raise ValueError(
                    f"the DeepSpeed configuration holds {name!r}: drop it; optim.* and "
                    "run.mixed_precision say it"
                )
        self.stage = int(settings["zero_optimization"]["stage"])
        settings["train_micro_batch_size_per_gpu"] = self._micro_batch_size
        settings["gradient_accumulation_steps"] = self.accelerator.gradient_accumulation_steps
        settings["gradient_clipping"] = 0.0 if self.clip == float("inf") else self.clip
        settings.setdefault("zero_force_ds_cpu_optimizer", False)
        optimizers = make_optimizers(self.bare)
        if len(optimizers) > 1:
            raise ValueError(
                "optim.name=muon does not go with DeepSpeed, which cuts matrices apart"
            )
        if self.stage == 3:
            self._copy()  # while the weights are whole
        engine, _ = self.accelerator.prepare(self.bare, optimizers[0])
        if self.stage == 3:
            for parameter in self.bare.parameters():
                deepspeed.zero.register_external_parameter(self.bare, parameter)
        self._engine, self._inner = engine, optimizers[0]
        return engine, [self._inner]

    @property
    def has_whole_head(self) -> bool:
        """ZeRO 3 leaves parts only."""
        return self.stage < 3

    @property
    def has_parts(self) -> bool:
        """ZeRO 3 hides its parts in storage of its own."""
        return self.stage < 3

    def accumulate(self, last: bool) -> AbstractContextManager:
        """DeepSpeed counts micro-batches itself."""
        self._engine.set_gradient_accumulation_boundary(is_boundary=last)
        return nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient; in the last micro-batch the weights change too."""
        self._engine.backward(loss * self.accelerator.gradient_accumulation_steps)

    def gradient_norm(self) -> Tensor:
        """Of the whole gradient before clipping, known once the weights have changed."""
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self.accelerator.device)

    def step(self) -> None:
        """Done with :meth:`gradient_norm`."""

    def discard(self) -> None:
        """Forget the gradient."""
        self._engine.zero_grad()

    def _whole_parameters(self) -> AbstractContextManager:
        parameters = list(self.bare.parameters())
        context: Any = deepspeed.zero.GatheredParameters(parameters, enabled=self.stage == 3)
        return context

    def weights(self) -> dict[str, Tensor]:
        """Trained parameters by name, whole."""
        with self._whole_parameters():
            return {name: p.detach().clone() for name, p in self.parameters.items()}

    def optimizer_state(self) -> OptimizerState:
        """AdamW's moments, whole, and its step count, on the main process's CPU."""
        steps = [values["step"] for values in self._inner.state.values() if "step" in values]
        found: OptimizerState = {}
        for name, parameter in self.parameters.items():
            moments = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
            if any(value is None for value in moments.values()):
                return {}  # before the first step
            if self.accelerator.is_main_process:
                found[name] = {k: v.detach().to("cpu", copy=True) for k, v in moments.items()}
                found[name]["step"] = torch.as_tensor(float(steps[0]))
        return found

    @torch.no_grad()
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Take whole parameters, in the model and in the optimizer's own float32 copy."""
        check_shapes(weights, self.parameters)
        for name, parameter in self.parameters.items():
            value = weights[name].to(parameter.dtype).to(self.accelerator.device)
            context: Any = deepspeed.zero.GatheredParameters(
                parameter, modifier_rank=0, enabled=self.stage == 3
            )
            with context:
                parameter.data.copy_(value)
            safe_set_full_fp32_param(parameter, value)

    def load_optimizer_state(self, state: OptimizerState) -> None:
        """Take AdamW's moments and step count."""
        if not state:
            return
        self._make_states()
        for name, parameter in self.parameters.items():
            for key in MOMENTS:
                value = state[name][key].to(self.accelerator.device)
                safe_set_full_optimizer_state(parameter, value, key)
        step = next(iter(state.values()))["step"]
        for values in self._inner.state.values():
            values["step"].copy_(step)

    def _make_states(self) -> None:
        """DeepSpeed makes its states in the first step: take one that changes nothing."""
        rates = [group["lr"] for group in self._inner.param_groups]
        for group in self._inner.param_groups:
            group["lr"] = 0.0
        for micro in range(self.accelerator.gradient_accumulation_steps):
            last = micro + 1 == self.accelerator.gradient_accumulation_steps
            self.accumulate(last)
            loss, _ = self._engine(None)
            self._engine.backward(loss)
        self._engine.step()
        for group, rate in zip(self._inner.param_groups, rates, strict=True):
            group["lr"] = rate
