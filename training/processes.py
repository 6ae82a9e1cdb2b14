"""The processes of a run: accelerate's state, and who trains on what."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, InitProcessGroupKwargs, broadcast_object_list
from transformers.integrations import unset_hf_deepspeed_config

from training.engines import wants_fsdp
from training.options.run import RunOptions


def make_accelerator(
    run: RunOptions, device: str = "auto", parallel: str = "none", lora: bool = False
) -> Accelerator:
    """The accelerator of a run, and a check that its process group is one this loop trains
    correctly on.

    Args:
        run: batch sizes, arithmetic and trackers.
        device: "auto", or "cpu".
        parallel: ``target.parallel``.
        lora: whether the target is trained too.

    Raises:
        ValueError: batch sizes do not divide, a tracker is unknown, or options that do not go with
            the launcher's engine.
    """
    available = {str(tracker) for tracker in get_available_trackers()}
    if unknown := sorted(set(run.trackers) - available):
        raise ValueError(
            f"run.trackers: {unknown[0]!r} is not installed or not known to accelerate; here are "
            f"{sorted(available) or 'none'}"
        )
    patience = InitProcessGroupKwargs(timeout=timedelta(days=1))  # others wait for evaluations
    accelerator = Accelerator(
        # bf16 is the objective's own autocast, the same under every engine
        mixed_precision="fp16" if run.mixed_precision == "fp16" else "no",
        log_with=run.trackers or None,
        project_dir=run.out,
        cpu=device == "cpu",
        kwargs_handlers=[patience],
    )
    _check_engine(accelerator, run, lora)
    _, world = data_share(accelerator, parallel)
    if run.batch_size % (world * run.micro_batch_size):
        raise ValueError(
            f"run.batch_size ({run.batch_size}) must be a multiple of processes ({world}) x "
            f"run.micro_batch_size ({run.micro_batch_size})"
        )
    accelerator.gradient_accumulation_steps = run.batch_size // (world * run.micro_batch_size)
    return accelerator


def _check_engine(accelerator: Accelerator, run: RunOptions, lora: bool) -> None:
    """Refuse what an engine cannot do.

    Raises:
        ValueError: naming the option.
    """
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    if deepspeed:
        # transformers would build every model in pieces under ZeRO-3, the frozen target too
        unset_hf_deepspeed_config()
    if not deepspeed and not wants_fsdp(accelerator):
        return
    name = "DeepSpeed" if deepspeed else "FSDP2"
    if run.mixed_precision == "fp16":
        raise ValueError(f"run.mixed_precision=fp16 does not go with {name}: use bf16 or no")
    if not deepspeed and os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        raise ValueError(
            "fsdp_offload_params has no effect on how Headway shards a head: drop it from the "
            "launch file"
        )
    if lora:
        raise ValueError(f"lora.rank does not go with {name}: launch with data parallelism")
    if deepspeed and run.on_nonfinite == "skip":
        raise ValueError(
            "run.on_nonfinite=skip does not go with DeepSpeed, which changes the weights before "
            "the gradient's norm is known: use stop"
        )


def on_main(accelerator: Accelerator, work: Callable[[], Any]) -> Any:
    """What ``work`` returns on the main process, on all processes; its error too. For whatever is
    decided by looking at files, which processes on several machines do not see at the same time.

    Args:
        accelerator: of this process; all call this together.
        work: done by the main process alone; its result is pickled.
    """
    answer: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            answer[0] = work()
        except Exception as error:  # raised again below, or the others would wait for ever
            answer[1] = error
    broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def data_share(accelerator: Accelerator, parallel: str) -> tuple[int, int]:
    """(which, of how many) shares of each step's sequences this process trains on.

    Processes that hold one target together by tensor parallelism see the same sequences.
    """
    if parallel == "tensor":
        return 0, 1
    return accelerator.process_index, accelerator.num_processes
