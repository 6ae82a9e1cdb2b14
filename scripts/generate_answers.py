"""Have the target answer prompts itself: the data that lets a head learn the target's own words.

    python -m scripts.generate_answers --target targets/smollm2-135m --prompts prompts.jsonl \\
        --out answers.jsonl --max-new-tokens 256

Prompts come from a JSONL or parquet file, a hub data set, or a `save_to_disk` folder, with a column
`messages`, `prompt` or `turns`. Answers are appended to --out one batch at a time, with exact token
ids; the same command continues a run that was stopped. With --samples each prompt is answered
several times, by consecutive seeds, and --min-tokens stops where there are enough answer tokens
(prompts then come in another order for every seed). The last line is one JSON object.
"""

import argparse
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafters import TargetModel
from scripts.common import (
    add_options,
    check_chat_template,
    load_target,
    parser_for,
    print_json,
    run,
)
from training.answers import AnswerOptions, generate_answers
from training.data import load_rows


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add_options(parser, "--target", "--max-new-tokens", "--temperature", max_new_tokens=256)
    add_options(parser, "--batch-size", "--seed", "--dtype", "--device", "--threads", batch_size=16)
    add_options(parser, "--chat-template")
    parser.add_argument("--prompts", required=True, metavar="NAME", help="file, folder or hub id")
    parser.add_argument("--split", default="train", help="of a hub data set (default: train)")
    parser.add_argument("--limit", type=int, metavar="N", help="answer the first N prompts")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="JSONL to append to"
    )
    parser.add_argument(
        "--max-prompt-tokens",
        type=int,
        default=1024,
        metavar="N",
        help="leave out longer prompts (default: %(default)s)",
    )
    parser.add_argument(
        "--samples", type=int, default=1, metavar="N", help="answers per prompt (default: 1)"
    )
    parser.add_argument(
        "--min-tokens", type=int, metavar="N", help="stop when --out holds so many answer tokens"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Answer what is not answered yet, print the count."""
    args = parse_args(argv)
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {args.limit}")
    if args.samples < 1 or (args.samples > 1 and not args.temperature):
        raise ValueError(
            "--samples must be at least 1, and more than one needs a --temperature above 0 (greedy "
            f"answers are all the same), got {args.samples}"
        )
    options = AnswerOptions(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        batch_size=args.batch_size,
        max_prompt_tokens=args.max_prompt_tokens,
        seed=args.seed,
    )
    rows = load_rows(args.prompts, args.split, args.limit)
    target = load_target(args, args.chat_template)
    check_chat_template(target.tokenizer)
    start = time.perf_counter()
    written = answer_all(target, rows, options, args)
    seconds = time.perf_counter() - start
    answers = count_lines(args.out)
    print(f"{written} answers written in {seconds:.1f} s, {answers} in {args.out}")
    print_json(
        {
            "out": str(args.out),
            "prompts": len(rows),
            "written": written,
            "answers": answers,
            "answer_tokens": count_tokens(args.out),
            "temperature": args.temperature,
            "max_new_tokens": args.max_new_tokens,
            "seconds": round(seconds, 2),
        }
    )


def answer_all(
    target: TargetModel,
    rows: list[dict[str, Any]],
    options: AnswerOptions,
    args: argparse.Namespace,
) -> int:
    """All samples, or as many as ``--min-tokens`` needs; how many answers were written."""
    written, size = 0, 4 * args.batch_size if args.min_tokens else len(rows)
    for seed in range(args.seed, args.seed + args.samples):
        order = list(rows)
        if args.min_tokens:
            random.Random(seed).shuffle(order)
        for part in parts(order, size):
            if args.min_tokens and count_tokens(args.out) >= args.min_tokens:
                return written
            written += generate_answers(target, part, args.out, replace(options, seed=seed))
    return written


def parts(rows: list[dict[str, Any]], size: int) -> list[list[dict[str, Any]]]:
    """Consecutive parts of at most ``size`` rows; one empty part if there are none."""
    return [rows[start : start + size] for start in range(0, max(1, len(rows)), max(1, size))]


def count_tokens(path: Path) -> int:
    """Answer tokens in the file, 0 without one."""
    if not path.exists():
        return 0
    lines = path.read_text(encoding="utf-8").rpartition("\n")[0].split("\n")
    return sum(len(json.loads(line)["answer_ids"]) for line in lines if line)


def count_lines(path: Path) -> int:
    """Answers in the file."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


if __name__ == "__main__":
    run(main)
