"""From a clone to trained, exported, lossless draft heads on a real model, on a CPU, in minutes.

    make quickstart            (or: python -m scripts.quickstart --out outputs/quickstart)

Each step is an ordinary command of this project, printed before it runs, so that the output doubles
as a tutorial: fetch a target, have it answer the project's own prompts, train EAGLE-3 and Medusa,
measure both on held-out prompts, export, load the export back, decode one prompt with a trace. A
second call continues where the first one stopped.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts.common import print_json, run

METHODS = ("eagle3", "medusa")
RECIPES = Path("recipes/smollm2-135m")
PROMPT = "Explain in three sentences why leaves are green."


def main() -> None:
    """Run all steps and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/quickstart"), help="folder for everything written"
    )
    parser.add_argument("--prompts", type=int, default=280, help="training prompts used")
    parser.add_argument("--heldout", type=int, default=20, help="held-out prompts measured")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    start = time.perf_counter()
    target = Path("targets/smollm2-135m")
    step("fetch the target", "scripts.fetch_target", "smollm2-135m", "--out", target)
    answers = args.out / "answers.jsonl"
    step(
        "have the target answer the training prompts",
        *(
            "scripts.generate_answers",
            "--target",
            target,
            "--prompts",
            "recipes/prompts/train.jsonl",
        ),
        *(
            "--limit",
            args.prompts,
            "--max-new-tokens",
            96,
            "--batch-size",
            32,
            "--threads",
            args.threads,
        ),
        *("--out", answers),
    )
    rows = [measure(method, target, answers, args) for method in METHODS]
    print(table(rows))
    print_json({"minutes": round((time.perf_counter() - start) / 60, 1), "methods": rows})
    if not all(row["greedy_identical"] for row in rows):
        raise ValueError("greedy output differs from plain decoding: see above")


def measure(method: str, target: Path, answers: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train, evaluate and export one method; returns its row of the table."""
    out = args.out / method
    training = step(
        f"train {method}",
        *("accelerate.commands.launch", "--cpu", "--num_processes", 1, "--num_machines", 1),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "-m", "recipes.train"),
        *("--config", RECIPES / f"quickstart-{method}.yaml", "--data.train", f"[{answers}]"),
        *("--run.out", out, "--run.threads", args.threads),
    )
    quality = step(
        f"measure {method} on held-out prompts",
        *("scripts.evaluate", "--target", target, "--head", out / "head"),
        *("--prompts", "recipes/prompts/heldout.jsonl", "--limit", args.heldout),
        *("--max-new-tokens", 48, "--size", 24, "--threads", args.threads),
    )
    dialect = "sglang" if method == "eagle3" else "native"
    export = step(
        f"export {method}",
        *("scripts.export", "--target", target, "--head", out / "head", "--format", dialect),
        *("--out", args.out / f"{method}-{dialect}"),
    )
    step(
        f"load the {dialect} export of {method} back and decode with a trace",
        *("scripts.chat", "--target", target, "--head", export["path"], "--prompt", PROMPT),
        *("--max-new-tokens", 48, "--trace", "--threads", args.threads),
    )
    keys = ("acceptance_length", "tokens_per_second", "speedup", "greedy_identical")
    return {
        "method": method,
        "parameters": training["parameters"],
        "training_tokens": training["training_tokens"],
        **{key: quality[key] for key in keys},
        "exported": dialect,
    }


def step(title: str, module: str, *arguments: object) -> dict[str, Any]:
    """Run ``python -m module arguments``, showing its output.

    Returns:
        The JSON object of its last line, or {} if it prints none.

    Raises:
        ValueError: it failed.
    """
    words = [str(argument) for argument in arguments]
    print(f"\n== {title}\n$ python -m {module} {shlex.join(words)}", flush=True)
    begun = time.perf_counter()
    command = [sys.executable, "-m", module, *words]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    print(f"   ({time.perf_counter() - begun:.0f} s)", flush=True)
    if process.returncode:
        raise ValueError(
            f"step '{title}' failed with exit code {process.returncode}; its message is above"
        )
    try:
        found = json.loads(last)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


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


if __name__ == "__main__":
    run(main)
