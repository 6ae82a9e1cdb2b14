"""Engines: how weights, gradients and optimizer states are spread over the processes of a run.

The launcher chooses one (``accelerate launch --config_file recipes/launch/X.yaml``) and the loop
does not know which: one process and data parallelism (:class:`Engine`), FSDP2
(:class:`ShardedEngine`), DeepSpeed's ZeRO 1 to 3 (``training.deepspeed_engine``).

What is saved never depends on the engine: whole tensors by parameter name. So a run can be
continued by another engine, on another number of processes.

A head is small beside its target. FSDP2 therefore shards it as one unit: everything is gathered
once per forward and backward pass, and what each process keeps is its part of weights, gradients
and optimizer states. Sharding is torch's own ``fully_shard``, on CPUs and GPUs alike (accelerate
prepares it on GPUs only).
"""

import copy
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from drafters import Drafter
from training.objectives import Objective

MakeOptimizers = Callable[[Objective], list[Optimizer]]
OptimizerState = dict[str, dict[str, Tensor]]
"""By parameter name, by what the optimizer keeps of it ("exp_avg", "step", ...), whole."""


class Engine:
    """One process, or data parallelism: every process has everything.

    Attributes:
        module: the prepared objective, to be called.
        optimizers: over its parameters.

    Args:
        accelerator: of this process.
        objective: on this process's device.
        make_optimizers: the optimizers of a module, built once its parameters are what they stay.
        clip: largest gradient norm; 0 does not clip.
    """

    name = "data parallel"

    def __init__(
        self,
        accelerator: Accelerator,
        objective: Objective,
        make_optimizers: MakeOptimizers,
        clip: float,
    ) -> None:
        self.accelerator, self.bare = accelerator, objective
        self.clip = clip or math.inf
        self._twin: Drafter | None = None
        self.module, self.optimizers = self._prepare(make_optimizers)

    def _prepare(self, make_optimizers: MakeOptimizers) -> tuple[nn.Module, list[Optimizer]]:
        optimizers = make_optimizers(self.bare)
        module, *self._steppers = self.accelerator.prepare(self.bare, *optimizers)
        return module, optimizers

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name, as this process holds them."""
        return {n: p for n, p in self.bare.named_parameters() if p.requires_grad}

    def accumulate(self, last: bool) -> AbstractContextManager:
        """Around forward and backward of a micro-batch; gradients are exchanged in the last."""
        return nullcontext() if last else self.accelerator.no_sync(self.module)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of ``loss``.

        Args:
            loss: scalar; processes' gradients are averaged.
            last: of the micro-batches of this step.
        """
        scaler = self.accelerator.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    def gradient_norm(self) -> Tensor:
        """Norm of the whole gradient, after clipping it; infinite or NaN if any part is."""
        if self.accelerator.scaler is not None:
            self.accelerator.unscale_gradients()
        return torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.clip)

    def step(self) -> None:
        """Change the weights and forget the gradient."""
        for stepper in self._steppers:
            stepper.step()
        self.discard()

    def discard(self) -> None:
        """Forget the gradient."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def whole(self, value: Tensor) -> Tensor:
        """A tensor that processes may hold parts of, whole; all processes call this together."""
        return value.detach()

    def part(self, value: Tensor, like: Tensor) -> Tensor:
        """What this process holds of a whole tensor that is spread like ``like``."""
        return value.to(like.device)

    def weights(self) -> dict[str, Tensor]:
        """Trained parameters by name, whole; all processes call this together."""
        return {name: self.whole(value) for name, value in self.parameters.items()}

    def optimizer_state(self) -> OptimizerState:
        """What the optimizers keep, whole, on the main process (on the CPU; {} on the others); all
        processes call this together.
        """
        found: OptimizerState = {}
        names: dict[Tensor, str] = {p: name for name, p in self.parameters.items()}
        for optimizer in self.optimizers:
            for parameter, values in optimizer.state.items():
                whole = {key: self.whole(value) for key, value in values.items()}
                if self.accelerator.is_main_process:
                    found[names[parameter]] = {key: v.cpu() for key, v in whole.items()}
        return found

    @torch.no_grad()
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Take whole trained parameters by name.

        Raises:
            ValueError: they are another head's.
        """
        check_shapes(weights, self.parameters)
        for name, parameter in self.parameters.items():
            parameter.copy_(self.part(weights[name].to(parameter.dtype), parameter))

    def load_optimizer_state(self, state: OptimizerState) -> None:
        """Take what :meth:`optimizer_state` gave."""
        parameters = self.parameters
        for optimizer in self.optimizers:
            mine = {p for group in optimizer.param_groups for p in group["params"]}
            for name, values in state.items():
                if parameters[name] in mine:
                    optimizer.state[parameters[name]] = {
                        key: self._state_part(value, parameters[name])
                        for key, value in values.items()
                    }

    def _state_part(self, value: Tensor, parameter: nn.Parameter) -> Tensor:
        """A step count is a single number that every process has, where the weights are (the fused
        optimizers read it there); the rest has the parameter's shape.
        """
        same = value.shape == parameter.shape
        return self.part(value, parameter) if same else value.to(parameter.device, copy=True)

    @property
    def has_whole_head(self) -> bool:
        """Whether the trained head itself can be called outside the loss."""
        return True

    @property
    def has_parts(self) -> bool:
        """Whether the weights that this process holds are there between steps."""
        return True

    def served(self, weights: dict[str, Tensor] | None = None) -> Drafter:
        """The head to evaluate and export; all processes call this together.

        Args:
            weights: whole parameters of the objective by name to have in it; None takes the present
                ones.
        """
        if weights is None and self.has_whole_head:
            return self.bare.drafter
        chosen = weights or self.weights()
        prefix = "drafter."
        own = {n.removeprefix(prefix): v for n, v in chosen.items() if n.startswith(prefix)}
        twin = self._copy()
        incomplete = twin.load_state_dict(own, strict=False)
        assert not incomplete.unexpected_keys, incomplete
        return twin

    def _copy(self) -> Drafter:
        """A second head with the buffers of the first and its own weights, made once."""
        if self._twin is None:
            self._twin = copy_head(self.bare.drafter)
        return self._twin

    def release(self) -> None:
        """Let go of all that belongs to the process group."""
        self.optimizers, self._steppers, self._twin = [], [], None
        del self.module, self.bare


class ShardedEngine(Engine):
    """FSDP2: every process keeps its part of weights, gradients and optimizer states."""

    name = "fsdp2"

    def _prepare(self, make_optimizers: MakeOptimizers) -> tuple[nn.Module, list[Optimizer]]:
        if self.accelerator.scaler is not None:
            raise ValueError("run.mixed_precision=fp16 does not go with FSDP2: use bf16 or no")
        self._copy()  # while the weights are whole
        device = self.accelerator.device
        mesh = init_device_mesh(device.type, (self.accelerator.num_processes,))
        fully_shard(self.bare, mesh=mesh)
        self._steppers = make_optimizers(self.bare)
        return self.bare, self._steppers

    @property
    def has_whole_head(self) -> bool:
        """The trained head holds parts only."""
        return False

    def accumulate(self, last: bool) -> AbstractContextManager:
        """Gradients are exchanged in every micro-batch, so that no process holds all of them."""
        return nullcontext()

    def discard(self) -> None:
        """Forget the gradient, and the weights gathered for a backward pass that did not come."""
        super().discard()
        cast(FSDPModule, self.bare).reshard()

    def gradient_norm(self) -> Tensor:
        """Of all parts together."""
        norm = super().gradient_norm()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def whole(self, value: Tensor) -> Tensor:
        """Gathered from all processes."""
        return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()

    def part(self, value: Tensor, like: Tensor) -> Tensor:
        """This process's rows."""
        assert isinstance(like, DTensor)
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def check_shapes(weights: dict[str, Tensor], parameters: dict[str, nn.Parameter]) -> None:
    """Refuse the weights of another head.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    for name, parameter in parameters.items():
        found = weights[name].shape if name in weights else None
        wanted = whole_shape(parameter)
        if found != wanted:
            raise ValueError(
                "the checkpoint holds a different head than drafter.* describes: "
                f"{name} is {None if found is None else tuple(found)}, not {tuple(wanted)}"
            )


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Of the whole parameter, whatever part of it is here."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def copy_head(drafter: Drafter) -> Drafter:
    """The same head again, with the same target."""
    target = drafter.target
    return copy.deepcopy(drafter, {id(target): target}).eval()


def wants_fsdp(accelerator: Accelerator) -> bool:
    """Whether the launcher asked for FSDP; for CPU processes accelerate does not say so itself."""
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    on_cpus = accelerator.distributed_type == DistributedType.MULTI_CPU and asked
    return on_cpus or accelerator.distributed_type == DistributedType.FSDP


def make_engine(
    accelerator: Accelerator,
    objective: Objective,
    make_optimizers: MakeOptimizers,
    clip: float,
    micro_batch_size: int,
) -> Engine:
    """The engine that the launcher asked for.

    Args:
        accelerator: of this process.
        objective: moved to this process's device.
        make_optimizers: see :class:`Engine`.
        clip: largest gradient norm; 0 does not clip.
        micro_batch_size: sequences per forward pass.

    Raises:
        ValueError: options that do not go with the engine.
    """
    nn.Module.to(objective, accelerator.device)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from training.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(accelerator, objective, make_optimizers, clip, micro_batch_size)
    kind = ShardedEngine if wants_fsdp(accelerator) else Engine
    return kind(accelerator, objective, make_optimizers, clip)
