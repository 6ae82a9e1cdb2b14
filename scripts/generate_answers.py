"""Have the target answer prompts itself: the data that lets a head learn the target's own words.

    python -m scripts.generate_answers --target targets/smollm2-135m --prompts prompts.jsonl \\
        --out answers.jsonl --max-new-tokens 256

Prompts come from a JSONL or parquet file, a hub data set, or a `save_to_disk` folder, with a column
`messages`, `prompt` or `turns`. Answers are appended to --out one batch at a time, with exact token
ids; the same command continues a run that was stopped. The last line is one JSON object.
"""

import argparse
import time
from pathlib import Path

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
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Answer what is not answered yet, print the count."""
    args = parse_args(argv)
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {args.limit}")
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
    written = generate_answers(target, rows, args.out, options)
    seconds = time.perf_counter() - start
    answers = count_lines(args.out)
    print(f"{written} answers written in {seconds:.1f} s, {answers} in {args.out}")
    print_json(
        {
            "out": str(args.out),
            "prompts": len(rows),
            "written": written,
            "answers": answers,
            "temperature": args.temperature,
            "max_new_tokens": args.max_new_tokens,
            "seconds": round(seconds, 2),
        }
    )


def count_lines(path: Path) -> int:
    """Answers in the file."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


if __name__ == "__main__":
    run(main)
