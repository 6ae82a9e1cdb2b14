"""From a clone to trained, exported, lossless draft heads on a real model, on a CPU, in minutes.

    make quickstart            (or: python -m scripts.quickstart --out outputs/quickstart)

Each step is an ordinary command of this project, printed before it runs, so that the output doubles
as a tutorial: fetch a target, have it answer the project's own prompts, train EAGLE-3 and Medusa,
measure both on held-out prompts, export, load the export back, decode one prompt with a trace. A
second call continues where the first one stopped. A GPU is used where there is one.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.common import parser_for, print_json, run

METHODS = ("eagle3", "medusa")
DIALECTS = {"eagle3": "sglang", "medusa": "native"}
TARGET = Path("targets/smollm2-135m")
PROMPT = "Explain in three sentences why leaves are green."

OUTPUT_CHANGED = 1
"""Exit code of `scripts.evaluate` where greedy output differs: no reason not to show the table."""
PATIENCE = 30.0
"""Seconds that an interrupted step has to save what it did."""


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: fetch, answer, train, measure, export or chat.
        method: the head that it is about; empty if none.
        title: printed above it.
        command: what follows `python -m`: a module and its arguments.
    """

    name: str
    method: str
    title: str
    command: tuple[str, ...]


def main(argv: list[str] | None = None) -> int:
    """Run all steps and print the table; 130 if stopped."""
    args = parse_args(argv)
    start = time.perf_counter()
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for step in steps(args, torch.cuda.is_available()):
        try:
            results[step.name, step.method] = run_step(step)
        except KeyboardInterrupt:
            print(f"\nstopped: {step.title}; the same command continues there", file=sys.stderr)
            return 130
    rows = [row(method, results) for method in METHODS]
    print(table(rows))
    print_json({"minutes": round((time.perf_counter() - start) / 60, 1), "methods": rows})
    if not all(row["greedy_identical"] for row in rows):
        raise ValueError("greedy output differs from plain decoding: see above")
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/quickstart"), help="folder for everything written"
    )
    parser.add_argument("--prompts", type=int, default=200, help="training prompts used")
    parser.add_argument("--heldout", type=int, default=16, help="held-out prompts measured")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    return parser.parse_args(argv)


# The commands -----------------------------------------------------------------------------------


def steps(args: argparse.Namespace, cuda: bool) -> list[Step]:
    """All commands, in their order.

    Args:
        args: the options of this script.
        cuda: whether there is a CUDA device; without one, every step is kept on the CPU.
    """
    answers = args.out / "answers.jsonl"
    device = () if cuda else ("--device", "cpu")
    fetch = ("scripts.fetch_target", TARGET.name, "--out", TARGET)
    answer = (
        *("scripts.generate_answers", "--target", TARGET, "--prompts"),
        *("recipes/prompts/train.jsonl", "--limit", args.prompts, "--max-new-tokens", 96),
        *("--batch-size", 32, "--threads", args.threads, *device, "--out", answers),
    )
    found = [
        make_step("fetch", "", "fetch the target", *fetch),
        make_step("answer", "", "have the target answer the training prompts", *answer),
    ]
    for method in METHODS:
        found += method_steps(method, args, answers, cuda)
    return found


def method_steps(method: str, args: argparse.Namespace, answers: Path, cuda: bool) -> list[Step]:
    """Train, measure and export one method, and decode with the export."""
    folder, dialect = args.out / method, DIALECTS[method]
    export_folder = args.out / f"{method}-{dialect}"
    device = () if cuda else ("--device", "cpu")
    # Not by `accelerate launch`, the documented way: one process needs no launcher, and Ctrl-C
    # through it leaves the training running.
    train = (
        *("recipes.train", "--config", f"recipes/smollm2-135m/quickstart-{method}.yaml"),
        *("--data.train", f"[{answers}]", "--run.out", folder, "--run.threads", args.threads),
        *(() if cuda else ("--target.device", "cpu")),
    )
    measure = (
        *("scripts.evaluate", "--target", TARGET, "--head", folder / "head"),
        *("--prompts", "recipes/prompts/heldout.jsonl", "--limit", args.heldout),
        *("--max-new-tokens", 40, "--size", 24, "--threads", args.threads, *device),
    )
    export = (
        *("scripts.export", folder / "head", "--to", dialect, "--target", TARGET),
        *("--out", export_folder, *device),
    )
    chat = (
        *("scripts.chat", "--target", TARGET, "--head", export_folder, "--prompt", PROMPT),
        *("--max-new-tokens", 48, "--trace", "--threads", args.threads, *device),
    )
    load_back = f"load the {dialect} export of {method} back and decode with a trace"
    return [
        make_step("train", method, f"train {method}", *train),
        make_step("measure", method, f"measure {method} on held-out prompts", *measure),
        make_step("export", method, f"export {method}", *export),
        make_step("chat", method, load_back, *chat),
    ]


def make_step(name: str, method: str, title: str, *command: object) -> Step:
    """A step from words that need not be text yet."""
    return Step(name, method, title, tuple(map(str, command)))


# Running them -----------------------------------------------------------------------------------


def run_step(step: Step) -> dict[str, Any]:
    """Run a command, showing its output.

    Returns:
        The JSON object of its last line, or {} if it prints none.

    Raises:
        ValueError: it failed; that greedy output changed is left to the caller.
    """
    print(f"\n== {step.title}\n$ python -m {shlex.join(step.command)}", flush=True)
    begun = time.perf_counter()
    last = ""
    # In a session of its own, Ctrl-C reaches it from `end` alone, and so exactly once.
    with subprocess.Popen(
        [sys.executable, "-m", *step.command],
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line.strip() or last
            code = process.wait()
        except BaseException:
            end(process)
            raise
    print(f"   ({time.perf_counter() - begun:.0f} s)", flush=True)
    result = json_object(last)
    changed = code == OUTPUT_CHANGED and result.get("greedy_identical") is False
    if code and not changed:
        raise ValueError(f"step '{step.title}' failed with exit code {code}; its message is above")
    return result


def end(process: subprocess.Popen[str]) -> None:
    """Interrupt a command and what it started; kill what does not end."""
    try:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    finally:  # a second Ctrl-C does not wait
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def json_object(line: str) -> dict[str, Any]:
    """The object that a line holds, or {}."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# The table --------------------------------------------------------------------------------------


def row(method: str, results: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """A method's row of the table."""
    training, quality = results["train", method], results["measure", method]
    keys = ("acceptance_length", "tokens_per_second", "speedup", "greedy_identical")
    return {
        "method": method,
        "parameters": training["parameters"],
        "training_tokens": training["training_tokens"],
        **{key: quality[key] for key in keys},
        "exported": DIALECTS[method],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The result as aligned text."""
    header = (
        f"{'method':<8} {'parameters':>11} {'training tokens':>16} {'acceptance length':>18} "
        f"{'tokens/s':>9} {'vs plain':>9} {'greedy identical':>17}"
    )
    lines = [
        f"{row['method']:<8} {row['parameters'] / 1e6:>10.1f}M {row['training_tokens']:>16,} "
        f"{row['acceptance_length']:>18.2f} {row['tokens_per_second']:>9.1f} "
        f"{row['speedup']:>8.2f}x "
        f"{'yes' if row['greedy_identical'] else 'NO':>17}"
        for row in rows
    ]
    return "\n".join(["", header, "-" * len(header), *lines, ""])


def end_children_too() -> None:
    """A request to end, or a closed terminal, ends the running step as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup stays as it is
            signal.signal(number, signal.default_int_handler)


if __name__ == "__main__":
    end_children_too()
    run(main)
