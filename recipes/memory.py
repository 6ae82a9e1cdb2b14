"""How much memory a run takes, before it starts.

One micro-batch of the real training code runs over tensors without data (``recipes.dryrun``), so
activations, chunks and gradients need no formula. Around it, for N processes and W bytes of head
weights (float32):

    target           bytes of its weights in target.dtype; its layers / N for target.parallel, of
                     which sharding gathers one at a time
    optimizer        AdamW 2 W; Muon W of the matrices inside the head and 2 W of the rest
    moving average   W with optim.ema, and W: the copy that is evaluated and saved (without
                     optim.ema that is the head itself)
    ddp              W: the buckets that gradients are exchanged in
    zero2            optimizer / N, W / N its own copy of the weights, W / N of the gradient
    zero3, fsdp2     weights and optimizer / N, W gathered while they are used, W / N of the
                     gradient; W: the copy that is evaluated, always
    runtime          a CUDA context, workspaces, and 5 % of what comes and goes for fragments
"""

import os
from dataclasses import dataclass, replace

import psutil
import torch

from recipes.dryrun import (
    HEAD,
    PASS,
    TARGET,
    StepTrace,
    UnpredictableError,
    read_model_config,
    target_bytes,
    trace_step,
)
from recipes.shadow import COPIES, MASKS, VOCABULARY
from training.config import TrainConfig

ENGINES = ("ddp", "fsdp2", "zero2", "zero3")
STATES, AVERAGE = "head: optimizer states", "head: moving average"
TWIN = "head: copy that is evaluated"
ENGINE, RUNTIME = "head: parts and copies of the engine", "runtime"
CONTEXT, FRAGMENTS = int(0.8e9), 0.05
MARGIN = 1.1
"""A prediction so much above all of the device's memory is refused."""
SMALL_TARGET, SMALL_TOKENS = int(1e9), 4096
"""Bytes of a target and tokens of a micro-batch so few that a run starts without a prediction."""


class DoesNotFit(ValueError):
    """The run needs more memory than the device has."""


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted memory of one process.

    Attributes:
        parts: bytes on the device, by what they are.
        host: bytes of main memory beside it.
    """

    parts: dict[str, int]
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """The part to look at first."""
        return max(self.parts, key=lambda name: self.parts[name])


def plan_memory(
    config: TrainConfig, trace: StepTrace, processes: int = 1, engine: str = "ddp"
) -> MemoryPlan:
    """Predicted peak of one process; see the top of this file.

    Args:
        config: resolved.
        trace: of one micro-batch.
        processes: N, over all machines; with ``target.device_map`` the devices of the one process.
        engine: one of ``ENGINES``.
    """
    n, w = processes, trace.head_bytes
    states = 2 * w - (trace.inner_bytes if config.optim.name == "muon" else 0)
    parts = {TARGET: _target_bytes(config, trace, n), HEAD: w, STATES: states}
    if config.optim.ema:
        parts[AVERAGE] = parts[TWIN] = w
    if n > 1 and config.target.device_map is None:
        if engine == "ddp":
            parts[ENGINE] = w
        else:
            parts[STATES] = states // n
            parts[ENGINE] = 2 * w // n
        if engine in ("fsdp2", "zero3"):
            parts[HEAD], parts[ENGINE] = w // n, w + w // n
            parts = {k: v // n if k == AVERAGE else v for k, v in parts.items()}
            parts[TWIN] = w
    moving = dict(trace.at_peak)
    short = w - sum(moving.values())  # the optimizer's step holds the gradient alone
    if short > 0:
        moving[COPIES] = moving.get(COPIES, 0) + short
    parts |= moving
    parts[RUNTIME] = CONTEXT + int(FRAGMENTS * sum(moving.values()))
    return MemoryPlan(parts, int(config.data.feature_memory_gb * 1e9))


def _target_bytes(config: TrainConfig, trace: StepTrace, processes: int) -> int:
    """Of the target's weights on one device."""
    options = config.target
    size = trace.target_bytes // trace.target_parameters  # bytes per number
    whole = trace.target_bytes - trace.layer_parameters * size
    layers = trace.layer_parameters * size
    if options.device_map is not None or options.parallel == "tensor":
        return whole + layers // processes
    if options.parallel == "shard":
        return whole + layers // processes + 2 * trace.largest_layer * size
    return trace.target_bytes


def spill(plan: MemoryPlan, trace: StepTrace, device_bytes: int, reserve_gb: float) -> MemoryPlan:
    """With ``target.device_map``, layers that find no room beside ``target.reserve_gb`` wait in
    main memory and are copied for each pass.
    """
    size = trace.target_bytes // trace.target_parameters
    over = plan.parts[TARGET] - (device_bytes - int(reserve_gb * 1e9))
    resting = trace.target_bytes - trace.layer_parameters * size + 2 * trace.largest_layer * size
    moved = min(max(0, over), max(0, plan.parts[TARGET] - resting))
    parts = {**plan.parts, TARGET: plan.parts[TARGET] - moved}
    return replace(plan, parts=parts, host=plan.host + moved)


def cure(config: TrainConfig, part: str, processes: int, engine: str) -> str:
    """What makes a part smaller."""
    run, target = config.run, config.target
    options: list[str] = []
    if part == TARGET:
        if target.dtype in ("float32", "float64"):
            options.append("target.dtype=bfloat16")
        if processes > 1 and target.parallel == "none":
            options.append("target.parallel=shard")
        if target.device_map is None and target.parallel == "none":
            options.append("target.device_map=auto in one process")
        if target.device_map is not None:
            options.append("a larger target.reserve_gb")
        options.append("a smaller target")
    elif part in (HEAD, STATES, AVERAGE, TWIN, ENGINE, COPIES):
        if processes > 1 and engine == "ddp":
            options.append("the engine zero2 or fsdp2")
        if config.drafter.family in ("medusa", "hydra"):
            options.append("drafter.shared_lm_head=true")
        options.append("a smaller drafter.draft_vocab_size")
        if config.optim.ema:
            options.append("optim.ema=0")
    elif part == VOCABULARY:
        options += ["a smaller loss.chunk (not 0)", "a smaller drafter.draft_vocab_size"]
    else:
        if run.micro_batch_size > 1:
            options.append("run.micro_batch_size=1")
        if part in (PASS, MASKS) and not run.activation_checkpointing:
            options.append("run.activation_checkpointing=true")
        if part == PASS and run.mixed_precision == "no":
            options.append("run.mixed_precision=bf16")
        options.append("a smaller data.max_length")
    return ", ".join(options)


def check_memory(
    config: TrainConfig, device: torch.device, processes: int = 1, engine: str = "ddp"
) -> str | None:
    """Refuse a run that cannot fit, before its target is loaded.

    Args:
        config: resolved.
        device: of this process.
        processes: of the run.
        engine: one of ``ENGINES``.

    Returns:
        A warning where the device has the memory but not free, where ``run.memory_check`` asks for
        a warning in place of a refusal, or where nothing could be predicted; None where all is
        well, or where target and batch are so small that nothing was predicted.

    Raises:
        DoesNotFit: the prediction is far above all the memory of the device.
        ValueError: the target has no ``config.json``, or options that do not fit it.
    """
    if config.run.memory_check == "off":
        return None
    try:
        return _refusal_or_warning(config, device, processes, engine)
    except UnpredictableError as error:
        return str(error)


def _refusal_or_warning(
    config: TrainConfig, device: torch.device, processes: int, engine: str
) -> str | None:
    """See :func:`check_memory`."""
    if config.drafter.init_from == "native" or config.target.device_map is not None:
        return None  # not known without the weights; chosen by what is free
    model_config = read_model_config(config.target.name)
    tokens = config.run.micro_batch_size * config.data.max_length
    if tokens <= SMALL_TOKENS and target_bytes(config, model_config) < SMALL_TARGET:
        return None
    accumulates = config.run.batch_size > processes * config.run.micro_batch_size
    trace = trace_step(config, model_config, accumulates=accumulates)
    plan = plan_memory(config, trace, processes, engine)
    free, total = device_memory(device)
    message = (
        f"predicted peak memory is {plan.total / 1e9:.1f} GB per process, the largest part is "
        f"{plan.largest} ({plan.parts[plan.largest] / 1e9:.1f} GB): try "
        f"{cure(config, plan.largest, processes, engine)}"
    )
    if plan.total > MARGIN * total:
        refusal = f"this run does not fit into {total / 1e9:.1f} GB: {message}"
        if config.run.memory_check == "refuse":
            raise DoesNotFit(f"{refusal}; run.memory_check=warn starts it nevertheless")
        return refusal
    if plan.total > free:
        return f"only {free / 1e9:.1f} GB of memory are free on {device}; {message}"
    return None


def device_memory(device: torch.device) -> tuple[int, int]:
    """Free and whole bytes of a device; of main memory, this process's share."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    memory, sharing = psutil.virtual_memory(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return memory.available // sharing, memory.total // sharing


def launched() -> tuple[int, str]:
    """Processes and engine that accelerate's launcher has set up."""
    env = os.environ
    engine = "ddp"
    if env.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        engine = "fsdp2"
    elif env.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        engine = "zero3" if env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3" else "zero2"
    return int(env.get("WORLD_SIZE", "1")), engine
