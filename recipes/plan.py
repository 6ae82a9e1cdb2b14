"""What a run would take, before it is paid for:

    python -m recipes.train --plan --config recipes/qwen3-8b/eagle3.yaml \
        --processes 8 --engine ddp --device-gb 80

Prints parameters, tokens, peak memory, disk, time per step and the files of the run; trains nothing
and writes nothing. The target's ``config.json`` is enough: what needs weights, a tokenizer or data
that are not there is left out, and the report says so. A run that cannot fit ends with exit code 2
and names the largest part. The last line printed is a JSON object.
"""

import argparse
import json
import math
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafters.vocab import size_for_coverage
from recipes.counting import DataFacts, read_data, total_steps
from recipes.dryrun import StepTrace, read_model_config, trace_step
from recipes.memory import (
    ENGINES,
    DoesNotFit,
    cure,
    device_memory,
    launched,
    plan_memory,
    spill,
)
from recipes.timing import has_weights, time_step
from training.config import TrainConfig, parse_config
from training.store.encoding import predicted_bytes, row_tensors

TFLOPS = 100.0


@dataclass(frozen=True)
class PlanOptions:
    """The flags of a plan.

    Attributes:
        processes: N, over all machines.
        engine: one of ``recipes.memory.ENGINES``.
        device_gb: memory of a device, in 10^9 bytes; None is this machine's.
        tflops: what a device is taken to achieve where nothing can be timed.
        timed_steps: micro-batches to time where the weights are there; 0 times none.
    """

    processes: int = 1
    engine: str = "ddp"
    device_gb: float | None = None
    tflops: float = TFLOPS
    timed_steps: int = 2


def parse_plan(argv: list[str]) -> tuple[PlanOptions, TrainConfig]:
    """Flags of the plan, and the configuration of the run it is about.

    Raises:
        ValueError: an option that is unknown, out of range or contradicts another.
    """
    processes, engine = launched()
    parser = argparse.ArgumentParser(prog="recipes.train --plan", allow_abbrev=False)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--processes", type=int, default=processes)
    parser.add_argument("--engine", choices=ENGINES, default=engine)
    parser.add_argument("--device-gb", type=float)
    parser.add_argument("--tflops", type=float, default=TFLOPS)
    parser.add_argument("--timed-steps", type=int, default=2)
    found, rest = parser.parse_known_args(argv)
    given = {name: value for name, value in vars(found).items() if name != "plan"}
    options, config = PlanOptions(**given), parse_config(rest)
    if options.processes < 1 or options.tflops <= 0 or options.timed_steps < 0:
        raise ValueError("--processes must be at least 1, --tflops positive, --timed-steps not < 0")
    if options.processes == 1 and options.engine != "ddp":
        raise ValueError(f"--engine {options.engine} has no effect on one process: --processes N")
    if config.lora.rank and options.engine != "ddp":
        raise ValueError(f"lora.rank does not go with --engine {options.engine}: use ddp")
    group = shares(options, config) * config.run.micro_batch_size
    if config.run.batch_size % group:
        raise ValueError(
            f"run.batch_size ({config.run.batch_size}) must be a multiple of processes "
            f"({shares(options, config)}) x run.micro_batch_size ({config.run.micro_batch_size})"
        )
    return options, config


def shares(options: PlanOptions, config: TrainConfig) -> int:
    """In how many parts the sequences of a step are dealt out."""
    together = config.target.parallel == "tensor" or config.target.device_map is not None
    return 1 if together else options.processes


def make_plan(options: PlanOptions, config: TrainConfig) -> dict[str, Any]:
    """Everything the report says, as JSON.

    Raises:
        ValueError: options that do not fit the target, or data that cannot be read.
    """
    model_config = read_model_config(config.target.name)
    facts = read_data(config, model_config)
    micro_batches = config.run.batch_size // (shares(options, config) * config.run.micro_batch_size)
    coverage, size = config.drafter.draft_vocab_coverage, None
    if coverage is not None and facts.dataset is not None:
        counts = facts.dataset.token_counts(model_config.get_text_config().vocab_size)
        size = size_for_coverage(counts, coverage, ())
    trace = trace_step(config, model_config, size, accumulates=micro_batches > 1)
    memory = plan_memory(config, trace, options.processes, options.engine)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    room = device_memory(device)[1] if options.device_gb is None else int(options.device_gb * 1e9)
    if config.target.device_map is not None:
        memory = spill(memory, trace, room, config.target.reserve_gb)
    fits = memory.total <= room
    seconds, how = _seconds(options, config, facts, trace, fits, micro_batches)
    steps = total_steps(config, facts)
    return {
        "fits": fits,
        "device_gb": room / 1e9,
        "processes": options.processes,
        "engine": options.engine,
        "parameters": trace.trained,
        "borrowed_parameters": trace.borrowed,
        "target_parameters": trace.target_parameters,
        "data": {
            "rows": facts.rows,
            "sequences": facts.sequences,
            "supervised_tokens": facts.supervised,
            "tokens": facts.tokens,
            "exact": facts.exact,
            "note": facts.note,
        },
        "steps": steps,
        "peak_gb": memory.total / 1e9,
        "parts_gb": {name: size / 1e9 for name, size in memory.parts.items()},
        "host_gb": memory.host / 1e9,
        "largest": memory.largest,
        "try": cure(config, memory.largest, options.processes, options.engine),
        "seconds_per_step": seconds,
        "seconds_from": how,
        "disk_gb": _disk(config, trace, facts, steps),
        "files": files(config, trace, steps),
    }


def _seconds(
    options: PlanOptions,
    config: TrainConfig,
    facts: DataFacts,
    trace: StepTrace,
    fits: bool,
    micro_batches: int,
) -> tuple[float, str]:
    """Seconds per optimizer step of one process, and what they are from."""
    here = options.device_gb is None and options.processes == 1
    if here and fits and options.timed_steps and has_weights(config.target.name):
        one, last, what = time_step(config, facts.dataset, options.timed_steps, micro_batches > 1)
        how = f"{options.timed_steps} micro-batches and an optimizer step timed here ({what})"
        return one * micro_batches + last, how
    operations: float = (trace.target_flops + trace.head_flops) * micro_batches
    if config.target.parallel == "tensor":
        operations -= trace.target_flops * micro_batches * (1 - 1 / options.processes)
    how = f"{operations / 1e12:.2f} TFLOP at {options.tflops:g} TFLOP/s achieved (--tflops)"
    how += ", without the optimizer step"
    return operations / (options.tflops * 1e12), how


def _disk(
    config: TrainConfig, trace: StepTrace, facts: DataFacts, steps: int | None
) -> dict[str, float | None]:
    """10^9 bytes of a feature store of this data, and of everything in the run folder."""
    layers = [0] * (trace.feature_width // trace.hidden_size - 1)
    found: dict[str, float | None] = {}
    for dtype in ("bfloat16", "fp8"):
        tensors = row_tensors(range(len(layers)), trace.hidden_size, dtype)
        documents, tokens = facts.rows or 0, facts.tokens
        size = None if tokens is None else predicted_bytes(tensors, documents, tokens) / 1e9
        found[f"features_{dtype}"] = size
    found["run"] = sum(size for _, size, _ in _written(config, trace, steps)) / 1e9
    return found


def _written(
    config: TrainConfig, trace: StepTrace, steps: int | None
) -> list[tuple[str, int, str]]:
    """(path, bytes, what it is) of everything a run writes."""
    run, out = config.run, Path(config.run.out)
    trained = trace.head_bytes  # of head and LoRA
    head = trained - trace.lora_bytes
    states = 2 * trained - (trace.inner_bytes if config.optim.name == "muon" else 0)
    raw = trained if config.optim.ema or config.lora.rank else 0  # beside the head
    one = head + raw + states
    kept = run.keep + 1 + bool(config.evaluate.prompts)  # newest, one being written, the best
    if steps is not None and run.save_every:
        kept = min(kept, max(1, math.ceil(steps / run.save_every)))
    found = [
        (f"{out}/head/", head, "the trained head"),
        (f"{out}/checkpoints/", one * kept, f"up to {kept} checkpoints of {one / 1e9:.2f} GB"),
        (f"{out}/metrics.jsonl", 0, f"a line every {run.log_every} steps"),
        (f"{out}/config.yaml, provenance.json", 0, "the resolved configuration, versions"),
    ]
    if config.lora.rank:
        found.append((f"{out}/lora/", trace.lora_bytes, "the target's LoRA"))
        found.append((f"{out}/target/", trace.target_bytes, "the target with its LoRA merged"))
    if config.data.regenerate:
        found.append((config.data.answers or f"{out}/answers.jsonl", 0, "the target's answers"))
    return found


def files(config: TrainConfig, trace: StepTrace, steps: int | None) -> dict[str, str]:
    """Path -> what would be written there."""
    return {path: what for path, _, what in _written(config, trace, steps)}


def report(plan: dict[str, Any], config: TrainConfig) -> str:
    """The plan for people."""
    data, disk = plan["data"], plan["disk_gb"]
    lines = [
        f"target   {config.target.name}: {plan['target_parameters'] / 1e9:.3f}B parameters, "
        f"{config.target.dtype}",
        f"head     {config.drafter.family}: {plan['parameters'] / 1e6:.1f}M trained, "
        f"{plan['borrowed_parameters'] / 1e6:.1f}M borrowed from the target",
        f"data     {_counts(data)}",
        f"steps    {_or_unknown(plan['steps'])} of {config.run.batch_size} sequences of "
        f"{config.data.max_length}",
        f"time     {plan['seconds_per_step']:.3g} s a step, from {plan['seconds_from']}"
        + (f": {_hours(plan)} in all" if plan["steps"] else ""),
        f"memory   {plan['peak_gb']:.2f} GB at the peak on each of {plan['processes']} "
        f"({plan['engine']}), device has {plan['device_gb']:.1f} GB",
    ]
    width = max(map(len, plan["parts_gb"]))
    for name, size in sorted(plan["parts_gb"].items(), key=lambda item: -item[1]):
        lines.append(f"           {name:<{width}} {size:8.2f} GB")
    if plan["host_gb"]:
        lines.append(f"         and {plan['host_gb']:.2f} GB of main memory")
    stored = [f"{disk[f'features_{d}']:.2f} GB {d}" for d in ("bfloat16", "fp8") if data["tokens"]]
    lines.append(f"disk     {disk['run']:.2f} GB in {config.run.out}")
    lines.append(f"         a feature store: {', '.join(stored) or 'unknown without the data'}")
    lines += [f"writes   {path}: {what}" for path, what in plan["files"].items()]
    return "\n".join(lines)


def _counts(data: dict[str, Any]) -> str:
    if data["rows"] is None:
        return data["note"]
    counted = "counted after masking" if data["exact"] else f"at most ({data['note']})"
    return (
        f"{data['rows']:,} rows, {data['sequences']:,} sequences, "
        f"{data['supervised_tokens']:,} supervised of {data['tokens']:,} tokens, {counted}"
    )


def _or_unknown(steps: int | None) -> str:
    return "unknown without the data" if steps is None else f"{steps:,}"


def _hours(plan: dict[str, Any]) -> str:
    return f"{plan['steps'] * plan['seconds_per_step'] / 3600:.2f} h"


def plan_command(argv: list[str]) -> None:
    """Print the plan of a run; see the top of this file.

    Raises:
        ValueError: a user error.
        DoesNotFit: the run cannot fit; the plan is printed nevertheless.
    """
    options, config = parse_plan(argv)
    if int(os.environ.get("RANK", "0")):
        return  # one process speaks for all
    plan = make_plan(options, config)
    print(report(plan, config))
    free = shutil.disk_usage(_existing(Path(config.run.out))).free
    if plan["disk_gb"]["run"] * 1e9 > free:
        print(f"warning: only {free / 1e9:.1f} GB are free on the disk of {config.run.out}")
    print(json.dumps(plan))
    if not plan["fits"]:
        raise DoesNotFit(
            f"this run does not fit: {plan['peak_gb']:.1f} GB of {plan['device_gb']:.1f} GB. The "
            f"largest part is {plan['largest']} ({plan['parts_gb'][plan['largest']]:.1f} GB): try "
            f"{plan['try']}"
        )


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def run(argv: list[str] | None = None) -> None:
    """Command line: exit code 2 with one line for a user's error or a run that does not fit."""
    try:
        plan_command(list(sys.argv[1:] if argv is None else argv))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run()
