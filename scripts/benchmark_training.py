"""Measure a training step: speed, memory, the floor under both, and where time goes.

    python -m scripts.benchmark_training --target targets/smollm2-135m --families eagle3 medusa

Per family and length, one sequence of random tokens in a batch row, the last `--supervised` part of
it supervised. `online` runs the frozen target in the step, `store` is handed its hidden states, as
the feature store does. A step is data, forward, backward, clipping and fused AdamW; speeds are
supervised tokens per second, the median over the steps.
`floor` is the time of the step's matrix products (counted by torch as they are executed, the
recomputed scores of attention among them) at the best rate that products of the model's own shapes
reach in this run, or the time to move its weights, whichever is longer; `of floor` is its share of
the measured time, and what is missing from 100 % can be gained. `memory` is the most that the
step's own tensors take together beyond weights and optimizer: on a CPU the bytes of live tensors,
counted one by one in a step of its own, on CUDA the allocator's peak. `vocabulary` is what the
vocabulary-sized ones among them take: it must not grow with the length.
With `--speculators-python`, an interpreter of an environment with the PyPI package `speculators`,
its EAGLE-3 step runs on the same tensors, weights, unroll and draft vocabulary in the same run, in
turns with ours: with the output matrix trained on both sides, and frozen on both sides, as it has
it. `ratio` is our speed over theirs per supervised token.
The last line is one JSON object.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drafters import FAMILIES, TargetModel, build_drafter
from scripts.common import (
    MODEL_OPTIONS,
    add_options,
    load_target,
    parser_for,
    print_json,
    run,
    write_json_atomic,
)
from scripts.speculators_race import race
from scripts.training_cost import (
    CLOCKS,
    Clock,
    LiveBytes,
    Phases,
    Rates,
    counted_flops,
    measured_rates,
    moved_bytes,
    seconds_of,
)
from training.data.batches import Batch, collate
from training.data.chat import TokenizedRow
from training.features import TargetBatch, run_target
from training.objectives import Objective, ObjectiveOptions, build_objective
from training.provenance import provenance

PHASES = ("data", "target", "trunk", "vocabulary", "backward", "optimizer", "other")
REDUCIBLE = ("eagle3", "peagle")
LEARNING_RATE, CLIP = 1e-4, 1.0


@dataclass
class Work:
    """One family at one length.

    Attributes:
        target: frozen.
        objective: with its head, float32 weights.
        rows: what the batch is collated from.
        length: T.
        clock: seconds.
    """

    target: TargetModel
    objective: Objective
    rows: list[TokenizedRow]
    length: int
    clock: Clock

    def __post_init__(self) -> None:
        """An optimizer over what is trained."""
        self.trained = [p for p in self.objective.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=LEARNING_RATE, fused=True)
        self.device = self.target.device

    def batch(self) -> Batch:
        """Collated, on the device."""
        return collate([[row] for row in self.rows], self.length).to(self.device)

    def features(self, batch: Batch) -> TargetBatch:
        """What the target says about it."""
        return run_target(self.target, batch, self.objective.drafter.feature_layers)

    def step(self, data: TargetBatch | None, phases: Phases) -> None:
        """One optimizer step, online where no hidden states are given."""
        with phases.phase("other"):
            with phases.phase("data"):
                batch = self.batch()
            if data is None:
                with phases.phase("target"):
                    data = self.features(batch)
            with phases.phase("vocabulary"):
                loss, _ = self.objective(data)
            scaled = loss / self.objective.count(batch)
            with phases.phase("backward"):
                scaled.backward()
            with phases.phase("optimizer"):
                torch.nn.utils.clip_grad_norm_(self.trained, CLIP)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def phases(self) -> Phases:
        """Fresh ones; the trunk, which is what makes the drafts' rows, is told apart."""
        phases = Phases(self.device, self.clock)
        bare = type(self.objective).drafts.__get__(self.objective)
        self.objective.drafts = phases.timed("trunk", bare)  # type: ignore[method-assign]
        return phases


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table and the JSON line."""
    args = parse_args(argv)
    target = load_target(args)
    for parameter in target.model.parameters():
        parameter.requires_grad_(False)
    clock, dtype = CLOCKS[args.clock], getattr(torch, args.dtype)
    rates = measured_rates(product_shapes(target, args), dtype, target.device, clock)
    results, races = [], []
    for family in args.families:
        for length in args.lengths:
            work = make_work(target, family, length, args)
            results += [measure(work, mode, rates, args) for mode in ("online", "store")]
            if family == "eagle3" and args.speculators_python is not None:
                races += [
                    race(work, args, trained_output=trained, attention=attention)
                    for trained in (True, False)
                    for attention in args.speculators_attention
                ]
    print(*table(results), *race_table(races), sep="\n")
    record = {
        "results": results,
        "speculators": races,
        "matmul_flops_per_second": rates.flops,
        "bytes_per_second": rates.bandwidth,
        "threads": torch.get_num_threads(),
        "dtype": args.dtype,
        "clock": args.clock,
    }
    if args.out is not None:
        write_json_atomic(args.out, {**record, **provenance()})
    print_json(record)
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add_options(parser, *MODEL_OPTIONS, "--seed", "--out")
    parser.add_argument(
        "--families",
        nargs="+",
        choices=sorted(FAMILIES),
        default=sorted(FAMILIES),
        help="which (default: all)",
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048], metavar="T")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (default: 1)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="timed (default: 5)")
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="not timed (default: 1)")
    parser.add_argument(
        "--supervised", type=float, default=0.7, metavar="P", help="part of a row (default: 0.7)"
    )
    parser.add_argument(
        "--draft-vocab", type=int, metavar="N", help=f"tokens drafted by {' and '.join(REDUCIBLE)}"
    )
    parser.add_argument("--chunk", type=int, metavar="N", help="loss.chunk (default: its own)")
    parser.add_argument(
        "--activation-checkpointing", action="store_true", help="as run.activation_checkpointing"
    )
    parser.add_argument(
        "--clock",
        choices=tuple(CLOCKS),
        default="wall",
        help="cpu is processor time, for one thread on a shared core (default: wall)",
    )
    parser.add_argument("--speculators-python", metavar="PATH", help="race `speculators` there")
    parser.add_argument(
        "--speculators-attention",
        nargs="+",
        choices=("eager", "sdpa", "simple_flex_attention"),
        default=["eager", "sdpa"],
        help="its attention, each raced (default: eager sdpa)",
    )
    args = parser.parse_args(argv)
    if min(args.batch, args.steps, *args.lengths) < 1 or args.warmup < 0:
        parser.error("--batch, --steps and --lengths must be at least 1, --warmup at least 0")
    if not 0 < args.supervised <= 1:
        parser.error("--supervised must lie in (0, 1]")
    return args


def product_shapes(target: TargetModel, args: argparse.Namespace) -> list[tuple[int, int, int]]:
    """Matrix products like the model's: a feed-forward layer, and a chunk of the vocabulary."""
    config = target.config
    rows = args.batch * max(args.lengths)
    chunk = args.chunk or ObjectiveOptions().chunk
    size, vocabulary = target.hidden_size, args.draft_vocab or target.vocab_size
    return [(rows, size, config.intermediate_size), (chunk, size, vocabulary)]


def make_work(
    target: TargetModel, family: str, length: int, args: argparse.Namespace, **frozen: bool
) -> Work:
    """A new head and random rows."""
    reduced = args.draft_vocab is not None and family in REDUCIBLE
    fields = {"draft_vocab_size": args.draft_vocab} if reduced else {}
    drafter = build_drafter(family, target, args.seed, **fields)
    generator = torch.Generator().manual_seed(args.seed)
    drafter.set_draft_vocab(torch.randint(100, (target.vocab_size,), generator=generator))
    options = {} if args.chunk is None else {"chunk": args.chunk}
    objective = build_objective(drafter.train(), ObjectiveOptions(**options))
    objective.arithmetic = torch.bfloat16 if args.dtype == "bfloat16" else None
    if args.activation_checkpointing:
        objective.activation_checkpointing = True
    first = length - round(args.supervised * length)
    rows = []
    for _ in range(args.batch):
        ids = torch.randint(target.vocab_size, (length,), generator=generator).tolist()
        rows.append(TokenizedRow(ids, [column >= first for column in range(length)]))
    return Work(target, objective, rows, length, CLOCKS[args.clock])


def measure(work: Work, mode: str, rates: Rates, args: argparse.Namespace) -> dict[str, Any]:
    """Speed, floor, memory and phases of one family, length and mode."""
    batch = work.batch()
    data = work.features(batch) if mode == "store" else None
    for _ in range(max(args.warmup, 1)):  # the optimizer's state is made in the first step
        work.step(data, work.phases())
    seconds, found = [], []
    for _ in range(args.steps):
        phases = work.phases()
        seconds.append(seconds_of(partial(work.step, data, phases), work.device, work.clock))
        found.append(phases.seconds)
    phases = work.phases()
    flops = counted_flops(lambda: work.step(data, phases))
    memory, wide = peak_memory(work, lambda: work.step(data, phases))
    frozen = sum(p.nbytes for p in work.target.model.parameters()) if mode == "online" else 0
    trained = sum(p.nbytes for p in work.trained)
    floor = rates.floor(flops, moved_bytes(frozen, trained))
    median, tokens = statistics.median(seconds), int(batch.supervised.sum())
    return {
        "family": work.objective.drafter.family,
        "mode": mode,
        "length": work.length,
        "batch": args.batch,
        "supervised_tokens": tokens,
        "tokens_per_second": tokens / median,
        "seconds": median,
        "flops": flops,
        "moved_bytes": moved_bytes(frozen, trained),
        "floor_seconds": floor,
        "floor_share": floor / median,
        "peak_bytes": memory,
        "vocabulary_bytes": wide,
        "phases": {
            name: statistics.median(p.get(name, 0.0) for p in found) / median for name in PHASES
        },
    }


def peak_memory(work: Work, step: Callable[[], None]) -> tuple[int, int]:
    """Bytes that the step's own tensors take at most, and the vocabulary-sized ones among them;
    those are not told apart (0) on CUDA.
    """
    if work.device.type == "cuda":
        before = torch.cuda.memory_allocated(work.device)
        torch.cuda.reset_peak_memory_stats(work.device)
        step()
        return torch.cuda.max_memory_allocated(work.device) - before, 0
    drafter = work.objective.drafter
    vocab: Tensor | None = drafter.draft_vocab
    widths = {work.target.vocab_size} | (set() if vocab is None else {len(vocab)})
    with LiveBytes(widths) as live:
        step()
    return live.peak, live.wide_peak


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """The results in Markdown."""
    names = ("family", "mode", "T", "tokens/s", "of floor", "memory MB", "vocabulary MB", *PHASES)
    yield "| " + " | ".join(names) + " |"
    yield "|---|---|" + "---:|" * (len(names) - 2)
    for found in results:
        parts = " | ".join(f"{100 * found['phases'][name]:.0f} %" for name in PHASES)
        yield (
            f"| {found['family']} | {found['mode']} | {found['length']} "
            f"| {found['tokens_per_second']:.1f} | {100 * found['floor_share']:.0f} % "
            f"| {found['peak_bytes'] / 1e6:.0f} | {found['vocabulary_bytes'] / 1e6:.0f} | {parts} |"
        )


def race_table(races: list[dict[str, Any]]) -> Iterator[str]:
    """The races in Markdown; nothing without any."""
    if not races:
        return
    yield ""
    yield "| T | output matrix | their attention | ours tokens/s | theirs tokens/s | ratio |"
    yield "|---:|---|---|---:|---:|---:|"
    for found in races:
        output = "trained" if found["trained_output"] else "frozen"
        start = f"| {found['length']} | {output} | {found['attention']} "
        if "error" in found:
            yield start + f"| | {found['error']} | |"
        else:
            yield start + (
                f"| {found['ours_tokens_per_second']:.1f} | {found['theirs_tokens_per_second']:.1f}"
                f" | {found['ratio']:.2f} |"
            )


if __name__ == "__main__":
    run(main)
