"""Have the target answer prompts itself: the data that lets a head learn the target's own words.

    python -m scripts.generate_answers --target targets/smollm2-135m --prompts prompts.jsonl \\
        --out answers.jsonl --max-new-tokens 256
    python -m scripts.generate_answers --server http://localhost:8000/v1 --prompts prompts.jsonl \\
        --out answers.jsonl --batch-size 64

Prompts come from a JSONL or parquet file, a hub data set, or a `save_to_disk` folder, with a column
`messages`, `prompt` or `turns` (and `tools`); every assistant turn is answered anew, in order. The
target answers in process, or, with --server, wherever an OpenAI-compatible server runs it; --target
is then its tokenizer alone, and may be left out. Answers are appended to --out, with exact token
ids where they are known; the same command continues a run that was stopped. --temperatures deals
the prompts over several; with --samples each is answered several times, by consecutive seeds, and
--min-tokens stops where there are enough answer tokens (prompts then come in another order for
every seed). The last line is one JSON object.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.common import (
    add_options,
    check_chat_template,
    load_target,
    parser_for,
    print_json,
    run,
)
from scripts.inspect_mask import load_tokenizer
from training.answers.client import ServerOptions
from training.answers.file import Answered, AnswerOptions, answer_tokens
from training.answers.local import generate_answers
from training.answers.server import answer_by_server
from training.data.sources import load_rows

Answer = Callable[[list[dict[str, Any]], AnswerOptions], Answered]
"""Answers rows into --out."""

SERVER_OPTIONS: dict[str, Any] = {
    "model": None,
    "key_env": "OPENAI_API_KEY",
    "timeout": 600.0,
    "retries": 6,
}
LOCAL_OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "auto", "threads": None}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add_options(parser, "--target", "--max-new-tokens", target=None, max_new_tokens=256)
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: 0)")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", metavar="T", help="deal the prompts over these"
    )
    add_options(parser, "--batch-size", "--seed", "--chat-template", batch_size=16)
    add_options(parser, "--dtype", "--device", "--threads", dtype=None, device=None)
    parser.add_argument("--prompts", required=True, metavar="NAME", help="file, folder or hub id")
    parser.add_argument("--split", default="train", help="of a hub data set (default: train)")
    parser.add_argument("--limit", type=int, metavar="N", help="answer the first N prompts")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="JSONL to append to"
    )
    text = "leave out longer prompts (default: 1024)"
    parser.add_argument("--max-prompt-tokens", type=int, metavar="N", help=text)
    text = "answers per prompt (default: 1)"
    parser.add_argument("--samples", type=int, default=1, metavar="N", help=text)
    text = "stop when --out holds so many answer tokens"
    parser.add_argument("--min-tokens", type=int, metavar="N", help=text)
    server = parser.add_argument_group("server", "--batch-size requests are in flight")
    server.add_argument("--server", metavar="URL", help="as http://localhost:8000/v1")
    text = "its name at the server (default: the only one there)"
    server.add_argument("--model", metavar="NAME", help=text)
    text = "environment variable that holds the key (default: OPENAI_API_KEY)"
    server.add_argument("--key-env", metavar="NAME", help=text)
    text = "seconds that one answer may take (default: 600)"
    server.add_argument("--timeout", type=float, metavar="S", help=text)
    text = "repeat a failed request so often (default: 6)"
    server.add_argument("--retries", type=int, metavar="N", help=text)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Answer what is not answered yet, print the count."""
    args = parse_args(argv)
    check_options(args)
    options = AnswerOptions(
        max_new_tokens=args.max_new_tokens,
        temperatures=tuple(args.temperatures),
        batch_size=args.batch_size,
        max_prompt_tokens=args.max_prompt_tokens or 1024,
        seed=args.seed,
    )
    rows = load_rows(args.prompts, args.split, args.limit)
    answer = by_server(args) if args.server is not None else in_process(args)
    start = time.perf_counter()
    written, failures = answer_all(answer, rows, options, args)
    seconds = time.perf_counter() - start
    answers = count_lines(args.out)
    print(f"{written} answers written in {seconds:.1f} s, {answers} in {args.out}")
    print_json(
        {
            "out": str(args.out),
            "prompts": len(rows),
            "written": written,
            "failed": len(failures),
            "failures": failures[:10],
            "answers": answers,
            "answer_tokens": count_tokens(args.out),
            "temperatures": args.temperatures,
            "max_new_tokens": args.max_new_tokens,
            "seconds": round(seconds, 2),
        }
    )


def check_options(args: argparse.Namespace) -> None:
    """Fill in defaults.

    Raises:
        ValueError: an option is out of range, or has no effect here.
    """
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {args.limit}")
    if args.temperatures is not None and args.temperature is not None:
        raise ValueError("--temperature has no effect beside --temperatures: drop it")
    args.temperatures = args.temperatures or [args.temperature or 0.0]
    repeated = 0 in args.temperatures and args.samples > len(args.temperatures)
    if args.samples < 1 or (args.samples > 1 and repeated):
        raise ValueError(
            "--samples must be at least 1, and more than there are --temperatures need a "
            "--temperature above 0 (greedy answers are all the same), got " + str(args.samples)
        )
    if args.server is None:
        if args.target is None:
            raise ValueError("name the model with --target, or where it is served with --server")
        unused, where = SERVER_OPTIONS, "without --server"
    else:
        unused, where = LOCAL_OPTIONS, "with --server: the model runs there"
    for name, default in {**SERVER_OPTIONS, **LOCAL_OPTIONS}.items():
        if name in unused and getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no effect {where}; drop it")
        if name not in unused and getattr(args, name) is None:
            setattr(args, name, default)
    if args.target is None:
        for name in ("chat_template", "max_prompt_tokens"):
            if getattr(args, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')} needs the tokenizer: give it with --target"
                )


def in_process(args: argparse.Namespace) -> Answer:
    """Load the target, which answers itself."""
    target = load_target(args, args.chat_template)
    check_chat_template(target.tokenizer)
    return lambda rows, options: generate_answers(target, rows, args.out, options)


def by_server(args: argparse.Namespace) -> Answer:
    """Load no more than the tokenizer; the server answers."""
    names = ("model", "key_env", "timeout", "retries")
    server = ServerOptions(args.server, **{name: getattr(args, name) for name in names})
    tokenizer = None
    if args.target is not None:
        tokenizer = load_tokenizer(args.target, args.chat_template)
        check_chat_template(tokenizer)
    return lambda rows, options: answer_by_server(server, rows, args.out, options, tokenizer)


def answer_all(
    answer: Answer, rows: list[dict[str, Any]], options: AnswerOptions, args: argparse.Namespace
) -> tuple[int, list[dict[str, str]]]:
    """All samples, or as many as ``--min-tokens`` needs; how many were written, and failures."""
    written, size = 0, 4 * args.batch_size if args.min_tokens else len(rows)
    failures: list[dict[str, str]] = []
    for seed in range(args.seed, args.seed + args.samples):
        order = list(rows)
        if args.min_tokens:
            random.Random(seed).shuffle(order)
        for part in parts(order, size):
            if args.min_tokens and count_tokens(args.out) >= args.min_tokens:
                return written, failures
            answered = answer(part, replace(options, seed=seed))
            written += answered.written
            failures += answered.failures
    return written, failures


def parts(rows: list[dict[str, Any]], size: int) -> list[list[dict[str, Any]]]:
    """Consecutive parts of at most ``size`` rows; one empty part if there are none."""
    return [rows[start : start + size] for start in range(0, max(1, len(rows)), max(1, size))]


def count_tokens(path: Path) -> int:
    """Answer tokens in the file, 0 without one."""
    if not path.exists():
        return 0
    lines = path.read_text(encoding="utf-8").rpartition("\n")[0].split("\n")
    return sum(answer_tokens(json.loads(line)) for line in lines if line)


def count_lines(path: Path) -> int:
    """Answers in the file."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


if __name__ == "__main__":
    run(main)
