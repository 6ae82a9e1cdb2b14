"""How costs grow with batch, context and tree, and where speculation stops paying.

    python -m scripts.cost_growth --target targets/smollm2-135m --head outputs/eagle3/head \\
        --engine packed --batches 1 4 16 --contexts 128 1024 4096 --sizes 4 8 16 32 64

Everything is measured on the engine, as for `--size auto`: verifying, drafting, and the rest of a
round. The acceptance length that a round of a tree has to reach is its seconds over those of a
plain step. Beside it stands the length that drafts have, by the counts that `scripts.auto_size`
keeps in the head's folder, if it was run: speculation pays where that is more. The depth of a tree
is the one that is fastest by these counts, or the deepest that is drafted without them.

Markdown tables, then one JSON object.
"""

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch

from inference.engine import EagerEngine, Engine
from inference.proposers import Proposer
from inference.proposers.arms import describe
from inference.scheduling.auto import key_of
from inference.scheduling.cost_calibration import CostGrid, calibrate_costs
from inference.scheduling.costs import CostTable
from inference.scheduling.round_parts import Calibration
from inference.scheduling.schedule import Arm, Table, plain_step, tree_tokens
from inference.scheduling.survival import SurvivalEstimator
from scripts.auto_decided import memory_of, say
from scripts.common import (
    MODEL_OPTIONS,
    add_options,
    load_target,
    open_engine,
    parser_for,
    print_json,
    run,
)
from scripts.drafting import add_drafting_options, load_proposer


@dataclass(frozen=True)
class Cell:
    """Rounds of one tree size at one batch and context.

    Attributes:
        batch: sequences.
        context: committed tokens of each.
        size: nodes, root included; 1 is a plain step.
        depth: of the tree.
        verify: seconds.
        seconds: of the round.
        needs: tokens per round, the target's own included, from which on it pays.
        tokens: that it is expected to emit; None if nothing is known of the drafts.
    """

    batch: int
    context: int
    size: int
    depth: int
    verify: float
    seconds: float
    needs: float
    tokens: float | None

    @property
    def speedup(self) -> float | None:
        """Over plain decoding."""
        return None if self.tokens is None else self.tokens / self.needs

    def to_dict(self) -> dict[str, Any]:
        """For the JSON line."""
        return {**vars(self), "speedup": self.speedup}


def main(argv: list[str] | None = None) -> int:
    """Measure, print the tables and the JSON line."""
    args = parse_args(argv)
    target = load_target(args)
    engine = open_engine(args, target) or EagerEngine(target)
    name = args.proposer or "head"
    if name == "head":
        args.tree = "grown"
    args.size = max(args.sizes)
    arms = {name: load_proposer(args, target, engine)}
    arm = describe(name, arms[name])
    widest = max(args.contexts) + args.size
    if widest > target.max_length:
        raise ValueError(
            f"--contexts: {widest} tokens with a tree are beyond the target's {target.max_length} "
            "positions"
        )
    memory = memory_of(args, arms, engine)
    priors = {} if memory is None else memory.read(say)
    start = time.perf_counter()
    costs = measure(engine, arms, arm, args)
    say(f"measured in {time.perf_counter() - start:.0f} s")
    table = None
    if name in priors:
        table = SurvivalEstimator(arm.depth, arm.top_k, priors[name]).table()
    cells = [
        cell_of(costs, arm, batch, context, size, table)
        for batch in args.batches
        for context in args.contexts
        for size in [1, *args.sizes]
    ]
    print_tables(cells, costs, table is not None)
    if table is None:
        print("\nNo counts of acceptance for this head: python -m scripts.auto_size makes them.")
    key = vars(costs.key)
    print_json({"cells": [cell.to_dict() for cell in cells], "key": key, "survival": table})
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add_options(parser, *MODEL_OPTIONS, "--engine", "--chat-template", "--rule", "--temperature")
    add_drafting_options(parser)
    add = parser.add_argument
    add("--batches", nargs="+", type=int, default=[1, 4, 16], metavar="N")
    add("--contexts", nargs="+", type=int, default=[128, 1024, 4096], metavar="N")
    add("--sizes", nargs="+", type=int, default=[4, 8, 16, 32, 64], metavar="N")
    add(
        "--budget",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds of measuring, warming up and three repeats excepted (default: %(default)g)",
    )
    args = parser.parse_args(argv)
    if args.size is not None:
        parser.error("--size has no effect here, give --sizes")
    if min([*args.batches, *args.contexts]) < 1 or min(args.sizes) < 2 or max(args.sizes) > 64:
        parser.error("--batches and --contexts must be at least 1, --sizes from 2 to 64")
    for name in ("batches", "contexts", "sizes"):
        setattr(args, name, sorted(set(getattr(args, name))))
    return args


def measure(
    engine: Engine, arms: dict[str, Proposer], arm: Arm, args: argparse.Namespace
) -> CostTable:
    """The cost table of the grid; it is not kept."""
    key = key_of(engine, engine.name, arms)
    buckets = () if engine.widths is None else engine.widths
    widths = sorted({1, *args.sizes, *buckets})
    drafts = [] if arm.copies else [(arm.name, depth, arm.top_k) for depth in {1, arm.depth}]
    calibration = Calibration(engine, arms)
    grid = CostGrid(widths, args.contexts, args.batches, drafts, buckets)
    with torch.inference_mode():
        return calibrate_costs(
            key, grid, calibration.verify, calibration.draft, args.budget, calibration.rest
        )


def cell_of(
    costs: CostTable, arm: Arm, batch: int, context: int, size: int, table: Table | None
) -> Cell:
    """One size at one batch and context.

    Args:
        costs: measured.
        arm: that drafts.
        batch: B.
        context: P.
        size: N.
        table: (K, R) rates of acceptance, or None.
    """
    plain = plain_step(costs, context, batch).seconds
    verify = costs.verify(size, context, batch)
    if size == 1:
        return Cell(batch, context, 1, 0, verify, plain, 1.0, 1.0)

    def seconds(depth: int) -> float:
        drafting = 0.0 if arm.copies else costs.draft(arm.name, depth, arm.top_k, batch)
        return drafting + verify + costs.rest(batch)

    deepest = min(arm.depth, size - 1)
    if table is None:
        spent = seconds(deepest)
        return Cell(batch, context, size, deepest, verify, spent, spent / plain, None)
    tokens = [level[-1] for level in tree_tokens(table[:deepest], size)]
    depth = max(range(1, deepest + 1), key=lambda depth: tokens[depth - 1] / seconds(depth))
    spent = seconds(depth)
    return Cell(batch, context, size, depth, verify, spent, spent / plain, tokens[depth - 1])


# Tables -----------------------------------------------------------------------------------------


def print_tables(cells: list[Cell], costs: CostTable, known: bool) -> None:
    """Markdown: milliseconds of verifying, lengths that pay, and lengths that there are.

    Args:
        cells: in order of batch, context and size.
        costs: whose machine is named.
        known: whether there are expected tokens.
    """
    rows: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.batch, cell.context), []).append(cell)
    key = costs.key
    print(f"{key.cpu}, {key.device}, {key.threads} threads, {key.dtype}, engine {key.engine}\n")
    sizes = [cell.size for cell in next(iter(rows.values()))]
    head = "| batch | context | " + " | ".join(f"{size}" for size in sizes)
    print("Milliseconds of verifying, by nodes of the tree (1: a plain step):\n")
    print(f"{head} |\n{_rule(len(sizes) + 2)}")
    for (batch, context), own in rows.items():
        shown = " | ".join(f"{1000 * cell.verify:.1f}" for cell in own)
        print(f"| {batch} | {context} | {shown} |")
    print("\nAcceptance length from which on a round pays", end="")
    print(" / expected (depth), and where it stops:\n" if known else ":\n")
    more = " | fastest | pays up to |" if known else " |"
    print(f"{head}{more}\n{_rule(len(sizes) + (4 if known else 2))}")
    for (batch, context), own in rows.items():
        shown = " | ".join(_needs(cell) for cell in own)
        print(f"| {batch} | {context} | {shown} |" + (_verdict(own) if known else ""))


def _rule(columns: int) -> str:
    return "|" + "---|" * columns


def _needs(cell: Cell) -> str:
    if cell.size == 1:
        return "1"
    if cell.tokens is None:
        return f"{cell.needs:.2f}"
    return f"{cell.needs:.2f} / {cell.tokens:.2f} ({cell.depth})"


def _verdict(own: list[Cell]) -> str:
    """The fastest size, and the largest that still pays."""
    paying = [cell for cell in own if cell.size > 1 and (cell.speedup or 0.0) > 1.0]
    if not paying:
        return " no drafts | - |"
    best = max(paying, key=lambda cell: cell.speedup or 0.0)
    return f" {best.size}: {best.speedup:.2f} x | {paying[-1].size} |"


if __name__ == "__main__":
    run(main)
