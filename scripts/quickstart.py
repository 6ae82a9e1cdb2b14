"""From a clone to trained, exported, lossless draft heads on a real model, on a CPU, in minutes.

    make quickstart            (or: python -m scripts.quickstart --out outputs/quickstart)

Each step is an ordinary command of this project, printed before it runs, so that the output doubles
as a tutorial: fetch a target, have it answer the project's own prompts, train EAGLE-3 and Medusa,
measure both on held-out prompts, export, load the export back, decode one prompt with a trace. A
second call continues where the first one stopped. A GPU is used where there is one.
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.common import print_json, run

METHODS = ("eagle3", "medusa")
DIALECTS = {"eagle3": "sglang", "medusa": "native"}
RECIPES = Path("recipes/smollm2-135m")
PROMPT = "Explain in three sentences why leaves are green."
CHANGED = 1
"""Exit code of `scripts.evaluate` when greedy output differs; the table has to show it."""
PATIENCE = 30.0
"""Seconds that an interrupted step has to save what it has."""


@dataclass(frozen=True)
class Step:
    """One command: `python -m module arguments`.

    Attributes:
        name: kind of step: fetch, answer, train, measure, export or chat.
        method: the head it is about; empty if none.
        title: printed above it.
        module: to run.
        arguments: of its command line.
    """

    name: str
    method: str
    title: str
    module: str
    arguments: tuple[str, ...]


class StepError(ValueError):
    """A step failed; its own message stands above."""


def main(argv: list[str] | None = None) -> None:
    """Run all steps and print the table."""
    args = parse_args(argv)
    start = time.perf_counter()
    found: dict[str, dict[str, dict[str, Any]]] = {method: {} for method in ("", *METHODS)}
    for step in steps(args, torch.cuda.is_available()):
        found[step.method][step.name] = run_step(step)
    rows = [table_row(method, found[method]) for method in METHODS]
    print(table(rows))
    print_json({"minutes": round((time.perf_counter() - start) / 60, 1), "methods": rows})
    if not all(row["greedy_identical"] for row in rows):
        raise ValueError("greedy output differs from plain decoding: see above")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/quickstart"), help="folder for everything written"
    )
    parser.add_argument("--prompts", type=int, default=280, help="training prompts used")
    parser.add_argument("--heldout", type=int, default=20, help="held-out prompts measured")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    return parser.parse_args(argv)


# The commands -----------------------------------------------------------------------------------


def steps(args: argparse.Namespace, cuda: bool) -> list[Step]:
    """All commands in their order.

    Args:
        args: the options of this script.
        cuda: there is a CUDA device; otherwise every step is kept on the CPU.
    """
    target, answers = Path("targets/smollm2-135m"), args.out / "answers.jsonl"
    device = () if cuda else ("--device", "cpu")
    first = [
        make_step("fetch", "", "fetch the target", "scripts.fetch_target", target.name)(
            "--out", target
        ),
    ]
    return first


if __name__ == "__main__":
    run(main)
