"""Race decoders on the same prompts: plain, transformers' own speculation, and this project's.

    python -m scripts.benchmark --target targets/smollm2-135m --prompts questions.jsonl \\
        --contenders plain plain-compiled prompt-lookup assisted:first=8 \\
            ours:ngram ours:outputs/eagle3/head:chain:6 --baseline plain-compiled --out race.json

KINDS
Each contender is a process of its own; they take turns batch by batch and one computes at a time,
so the machine should be otherwise idle and --threads no more than its cores. With --together ours
share a process for each engine. Loading, compiling and
a first call are not counted but reported. --batch-sizes and --contexts make a grid: a context pads
prompts with the text of others before them, or cuts their beginning; batches of one category come
first, then mixed ones.

Texts are compared with plain decoding's, token by token. A difference is a near tie if the target
prefers neither token by more than --near-tie; otherwise the contender is reported and left out of
the ratios. `tok/s` is decoding without the prefill, `whole` is the whole call; a ratio is one
contender's speed over the baseline's on the same batch, the median over batches with its bootstrap
interval. τ is tokens per target forward. `possible` is the ratio if a step cost only drafting and
verifying, `reached` how much of it there is. The first verified draft of `assisted`,
`prompt-lookup` and `flashspec` is part of their prefill. Ours that draft as one of theirs are
compared with it too, at equal settings. What `--size auto` expected of its rounds is printed beside
what came about, and what a cost table says of the rounds of fixed sizes: the one of --costs, or the
one that auto keeps in the head's folder.

The last line is one JSON object. Exit code 1: a text differs by more than rounding, or a contender
could not do what it should.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import scripts.benchmark_contenders
from drafters import TargetModel
from inference.engines import ENGINES
from inference.measuring.doubt import NEAR_TIE
from inference.scheduling.costs import CostTable
from scripts.benchmark_contenders import Contender, parse_contenders, with_engine
from scripts.benchmark_race import Cell, Field, build_cells, plain_record, race, started
from scripts.benchmark_report import cell_record, print_cell
from scripts.common import (
    MODEL_OPTIONS,
    add_options,
    encode_prompts,
    load_prompts,
    load_target,
    parser_for,
    print_json,
    run,
    write_json_atomic,
)
from training.provenance import provenance

DEFAULT = ("plain", "plain-compiled", "prompt-lookup", "ours", "ours:ngram")


def main(argv: list[str] | None = None) -> int:
    """Race, print the tables and the JSON line."""
    args = parse_args(argv)
    contenders = chosen(args)
    costs = None if args.costs is None else CostTable.load(args.costs)
    rows = load_prompts(args.prompts, args.limit)
    target = load_target(args, args.chat_template)
    prompts = encode_prompts(target, rows)
    new = args.max_new_tokens
    cells = build_cells(target, prompts, args.batch_sizes, args.contexts, new)
    with started(contenders, args, target) as workers:
        results = run_cells(target, contenders, workers, cells, args, costs)
        record = {"results": results, **about(args, workers)}
    print_json(record)
    excluded = any(one["excluded"] for cell in results for one in cell["contenders"])
    return 1 if workers.failed or excluded else 0


def run_cells(
    target: TargetModel,
    contenders: list[Contender],
    workers: Field,
    cells: list[Cell],
    args: argparse.Namespace,
    costs: CostTable | None,
) -> list[dict[str, Any]]:
    """Race cell after cell; what is known is printed, and written to --out, after each."""
    results, raw = [], []
    for cell in cells:
        heat = race(workers, cell, args)
        found = cell_record(
            target, contenders, heat, args.baseline, args.near_tie, costs, workers.threads
        )
        results.append(found)
        print_cell(found)
        if args.out is None:
            continue
        answers = {
            name: [plain_record(b, a) for b, a in zip(cell.batches, given, strict=True)]
            for name, given in heat.answers.items()
        }
        raw.append({"batch_size": cell.batch_size, "context": cell.context, "answers": answers})
        record = {"results": results, **about(args, workers), **provenance(), "raw": raw}
        write_json_atomic(args.out, record)
    return results


def about(args: argparse.Namespace, workers: Field) -> dict[str, Any]:
    """The settings, and what happened beside the race."""
    settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()
    }
    return {
        "failed": workers.failed,
        "start_seconds": workers.start_seconds,
        "threads": torch.get_num_threads(),
        "threads_of": workers.threads,
        "settings": settings,
    }


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    kinds = (scripts.benchmark_contenders.__doc__ or "").partition("\n\n")[2]
    parser = parser_for((__doc__ or "").replace("KINDS", kinds.strip()))
    add_options(parser, *MODEL_OPTIONS, "--prompts", "--limit", "--max-new-tokens", limit=12)
    add_options(parser, "--chat-template", "--out")
    add = parser.add_argument
    add(
        "--contenders",
        nargs="+",
        default=list(DEFAULT),
        metavar="C",
        help=f"who takes part (default: {' '.join(DEFAULT)})",
    )
    add("--sizes", nargs="+", default=[], metavar="N", help="of ours that have drafts and no size")
    add(
        "--engine",
        choices=ENGINES,
        help="runs the target for ours that name none (default: eager, transformers' own cache "
        "without drafts)",
    )
    add("--baseline", metavar="C", help="ratios are taken to it (default: the first contender)")
    add("--batch-sizes", nargs="+", type=int, default=[1], metavar="N", help="(default: 1)")
    add(
        "--contexts",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="tokens of a prompt (default: the prompts as they are)",
    )
    add(
        "--near-tie",
        type=float,
        default=NEAR_TIE,
        metavar="GAP",
        help="in logits, that rounding explains; 16-bit weights need more (default: %(default)s)",
    )
    add(
        "--together",
        action="store_true",
        help="ours of one engine share a process: the same weights in the same memory, which two "
        "processes do not have (default: a process each)",
    )
    add("--costs", type=Path, metavar="FILE", help="measured seconds, to predict speeds from")
    add("--flashspec-python", metavar="PATH", help="interpreter that has the package flashspec")
    add(
        "--timeout",
        type=float,
        default=1800.0,
        metavar="S",
        help="seconds for one answer, compilation included (default: %(default)g)",
    )
    args = parser.parse_args(argv)
    if min([*args.batch_sizes, *args.contexts, args.max_new_tokens]) < 1 or args.timeout <= 0:
        parser.error("--batch-sizes, --contexts, --max-new-tokens and --timeout must be above 0")
    return args


def chosen(args: argparse.Namespace) -> list[Contender]:
    """Who takes part; puts the baseline's name into `args`.

    Raises:
        ValueError: contenders or options that have no meaning.
    """
    found = with_engine(parse_contenders(args.contenders, args.sizes), args.engine)
    names = [one.name for one in found]
    if args.baseline is None:
        args.baseline = names[0]
    if args.baseline not in names:
        raise ValueError(
            f"--baseline {args.baseline} takes no part: give one of {', '.join(names)}"
        )
    for one in found:
        if one.settings.get("engine", "eager") not in ENGINES:
            raise ValueError(f"--contenders {one.name}: engine is one of {', '.join(ENGINES)}")
    flash = any(one.kind == "flashspec" for one in found)
    if flash != (args.flashspec_python is not None):
        raise ValueError("flashspec and --flashspec-python are needed together")
    engines = [one.settings.get("engine") for one in found if one.kind == "ours"]
    if args.together and len(set(engines)) == len(engines):
        raise ValueError("--together has no effect: no two of ours have the same engine")
    return found


if __name__ == "__main__":
    run(main)
