"""Measure drafts: acceptance length, speed, and that the output does not change.

    python -m scripts.evaluate --target targets/smollm2-135m --head outputs/eagle3/head \\
        --prompts prompts.jsonl --limit 24
    python -m scripts.evaluate --target T --head H --prompts q.jsonl --out RUN --predict \\
        --temperature 0 1 --rule match coupled rejection --size 1 6 16
    python -m scripts.evaluate --target T --prompts q.jsonl --simulate 0.7 --depth 5

Prompts are JSONL as of EAGLE, Spec-Bench and SPEED-Bench (question_id, category, turns), a data set
by name (owner/name:config:split), or a .txt file of one prompt a line. Conversations are decoded
turn after turn, with the target's own answers in the history (--turns first takes the first alone).
Several temperatures, rules and sizes make a grid of cells that decode the same prompts, each batch
of them plainly first, once for all cells of a temperature, so that noise of the machine hits all.

Acceptance length is tokens per target forward after the prefill, the bonus token included, pooled
over all rounds; "accepted" leaves the bonus out; "per request" averages the means of the requests.
Intervals are 95 %, from resampling whole conversations. Where texts differ that must not, the gap
between the target's best tokens decides: below 1e-4 it is rounding (a near tie, counted), otherwise
the exit code is 1. --out writes a folder: result.json, and records.jsonl with every round. The last
line of the output is one JSON object.
"""

import argparse
from pathlib import Path
from typing import Any

from inference.engines import ENGINES
from inference.measuring.compare import REFERENCES
from inference.measuring.evaluation import measure_cells
from scripts.auto_decided import keep_learnt
from scripts.common import (
    OPTIONS,
    SAMPLING_OPTIONS,
    add_options,
    encode_prompts,
    load_prompts,
    load_target,
    open_engine,
    parser_for,
    print_json,
    run,
)
from scripts.drafting import add_drafting_options, confidence_note, size_option
from scripts.evaluate_grid import GridCell, load_cells, plain_options
from scripts.evaluate_prediction import add_predictions, print_prediction
from scripts.evaluate_run import cell_result, check_out, run_result, write_out
from scripts.evaluate_tables import print_report, print_summary


def main(argv: list[str] | None = None) -> int:
    """Measure, print the tables and the JSON line; 1 if output changed that must not."""
    args = parse_args(argv)
    if args.out is not None:
        check_out(args.out)
    rows = load_prompts(args.prompts, args.limit, args.turns)
    target = load_target(args, args.chat_template)
    engine = open_engine(args, target)
    grid, notes = load_cells(args, target, engine)
    for note in notes:
        print(f"note: {note}")
    reports = measure_cells(
        target,
        [one.cell for one in grid],
        encode_prompts(target, rows),
        max_new_tokens=args.max_new_tokens,
        compare=args.reference,
        batch_size=args.batch_size,
        progress=True,
        engine=engine,
        trace=args.trace,
    )
    cells = [cell_result(one, report) for one, report in zip(grid, reports, strict=True)]
    if args.predict:
        add_predictions(target, grid, reports, cells)
    for one, cell in zip(grid, cells, strict=True):
        show(one, cell, len(grid) > 1)
        keep_learnt(one.cell.proposer)
    if len(grid) > 1:
        print_summary(cells)
    result = json_line(args, grid, cells)
    try:
        if args.out is not None:
            write_out(args.out, run_result(args, target, grid, cells), reports, target)
    finally:  # a full disk must not cost the results
        print_json(result)
    return 1 if any(report.identical is False for report in reports) else 0


def show(one: GridCell, cell: dict[str, Any], named: bool) -> None:
    """The tables of one cell."""
    if named:
        print(f"\n== {cell['name']}\n")
    print_report(cell)
    if cell["prediction"] is not None:
        print_prediction(cell)
    if cell["confidence_drafts"] and not one.args.min_confidence:  # with it, it has been said
        note = confidence_note(one.cell.proposer, one.args.rule, one.args.temperature)
        print("" if note is None else f"note: {note}\n", end="")


def json_line(
    args: argparse.Namespace, grid: list[GridCell], cells: list[dict[str, Any]]
) -> dict[str, Any]:
    """One cell's numbers at the top level, or several cells."""
    if len(cells) == 1:
        return {**cells[0], "settings": grid[0].options()}
    return {"cells": cells, "settings": plain_options(args)}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__, replace=True)  # some shared options take several values here
    add_drafting_options(parser)
    add_options(parser, "--target", "--prompts", "--limit", "--max-new-tokens")
    add_options(parser, *SAMPLING_OPTIONS, "--rule", "--batch-size")
    add_options(parser, "--dtype", "--device", "--threads", "--chat-template")
    add = parser.add_argument
    grid = "; several make a grid"
    add(
        "--temperature",
        type=float,
        nargs="+",
        default=[0.0],
        metavar="T",
        help=f"0 is greedy (default: 0){grid}",
    )
    add(
        "--rule",
        nargs="+",
        default=["match"],
        choices=OPTIONS["--rule"]["choices"],
        help=f"{OPTIONS['--rule']['help']} (default: match){grid}",
    )
    add(
        "--size",
        type=size_option,
        nargs="+",
        metavar="N|auto",
        help="nodes per tree, root included (default: 32, or the tree that a head brings along), 1 "
        f"drafts nothing, auto decides in every round{grid}",
    )
    engines = OPTIONS["--engine"]["help"] + ", device (whole rounds there, trained heads only)"
    add("--engine", choices=tuple(ENGINES), default="eager", help=f"{engines} (default: eager)")
    add("--simulate", type=float, metavar="A", help="drafts that are right with this probability")
    add(
        "--turns",
        choices=("all", "first"),
        default="all",
        help="of conversations (default: %(default)s)",
    )
    add("--out", type=Path, metavar="RUN", help="folder to write the run into")
    add(
        "--trace",
        type=int,
        metavar="N",
        help="--out: trees of the first N turns of each cell (default: 4; engine device: 0)",
    )
    add(
        "--predict",
        action="store_true",
        help="predict from one pass over the plain texts what heads give, and say if it is not so",
    )
    add_reference(parser)
    return checked(parser.parse_args(argv), parser)


def add_reference(parser: argparse.ArgumentParser) -> None:
    """What to compare with."""
    reference = parser.add_mutually_exclusive_group()
    reference.add_argument(
        "--reference",
        choices=REFERENCES,
        help="decode without drafts by this project or by transformers' generate (default: plain)",
    )
    reference.add_argument(
        "--no-plain", action="store_true", help="no reference: no speed-up, no identity check"
    )


def checked(args: argparse.Namespace, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Options that go together; the reference by name."""
    if args.reference is None and not args.no_plain:
        args.reference = "plain"
    if args.predict and args.reference is None:
        parser.error("--predict needs the plain texts: drop --no-plain")
    if args.trace is not None and args.out is None:
        parser.error("--trace is for the folder: give --out")
    if args.trace and args.engine == "device":
        parser.error("--trace: engine device keeps its trees to itself; use packed")
    if args.trace is None:
        args.trace = 4 if args.out is not None and args.engine != "device" else 0
    if args.trace < 0:
        parser.error("--trace: at least 0")
    return args


if __name__ == "__main__":
    run(main)
