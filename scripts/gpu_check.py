"""Everything that needs a GPU, in one run of at most ten minutes; nothing is downloaded.

    bash scripts/gpu_check.sh                                # what there is, on this machine's GPU
    bash scripts/gpu_check.sh --target targets/smollm2-135m  # with texts of a real small target
    python -m scripts.gpu_check --out outputs/gpu_check --only agreement speed
    python -m scripts.gpu_check --out /tmp/dry --dry-run     # tiny shapes, on the CPU

Every section is a function that yields rows. It runs in a process of its own, with a time limit, so
that one that fails, hangs or corrupts the GPU's state loses neither its own earlier rows nor the
other sections. Results: OUT/results.json, and OUT/results.md with a table per section.

A new section is one line in `SECTIONS`.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts import gpu_check_decode, gpu_check_kernel, gpu_check_target

Row = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """One part of the check.

    Attributes:
        title: above its table.
        seconds: it is stopped after so long.
        rows: takes the command line. A row with `"ok": False` fails the check.
        partial: rows come in order of importance, so to be stopped is no failure.
    """

    title: str
    seconds: int
    rows: Callable[[argparse.Namespace], Iterator[Row]]
    partial: bool = False


SECTIONS = {
    "agreement": Section(
        "Tree attention: kernel against plain attention",
        170,
        lambda options: gpu_check_kernel.agreement(options.dry_run),
    ),
    "decode": Section(
        "A round on a random Llama of 8B, batch 1, 2048 tokens",
        90,
        lambda options: gpu_check_decode.decode(options.dry_run),
    ),
    "speed": Section(
        "Tree attention: time per layer",
        130,
        lambda options: gpu_check_kernel.speed(options.dry_run),
        partial=True,
    ),
    "costs": Section(
        "What verification costs on that Llama, and where drafts stop paying",
        70,
        lambda options: gpu_check_decode.costs(options.dry_run),
        partial=True,
    ),
    "target": Section(
        "Greedy texts of the engines on a small target",
        60,
        lambda options: gpu_check_target.target_rows(options.dry_run, options.target),
    ),
    "training": Section(
        "A training step of every family on a small target",
        50,
        lambda options: gpu_check_target.training(options.dry_run),
    ),
}


FINE = {"passed", "cut short"}
"""Statuses that do not fail the check."""


def run_section(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one section in a process of its own and collect the rows that it got to.

    Returns:
        `title`, `status` ("passed", "cut short", "failed" or "out of time"), `seconds`, `rows` and,
        where it did not pass, `error`: the end of what it wrote to stderr.
    """
    section = SECTIONS[name]
    command = [sys.executable, "-m", "scripts.gpu_check", "--section", name]
    command += ["--dry-run"] if options.dry_run else []
    command += ["--target", str(options.target)] if options.target else []
    rows_file, errors_file = options.out / f"{name}.jsonl", options.out / f"{name}.stderr"
    start = time.monotonic()
    with rows_file.open("w") as rows_out, errors_file.open("w") as errors_out:
        try:
            limit = section.seconds * options.scale
            code = subprocess.run(command, stdout=rows_out, stderr=errors_out, timeout=limit)
            status = "failed" if code.returncode else "passed"
        except subprocess.TimeoutExpired:
            status = "cut short" if section.partial else "out of time"
    rows = [json.loads(line) for line in rows_file.read_text().splitlines() if line[:1] == "{"]
    if status in FINE and not all(row.get("ok", True) for row in rows):
        status = "failed"
    result: dict[str, Any] = {"title": section.title, "status": status, "rows": rows}
    result["seconds"] = round(time.monotonic() - start, 1)
    if status != "passed":
        result["error"] = errors_file.read_text()[-2000:]
    return result


def markdown(results: dict[str, Any]) -> str:
    """The results as a heading and a table per section."""
    lines = ["# GPU check", "", *(f"- {key}: {value}" for key, value in results["machine"].items())]
    for section in results["sections"].values():
        lines += ["", f"## {section['title']}", ""]
        lines += [f"{section['status']} after {section['seconds']} s", ""]
        if section["rows"]:
            columns = list(dict.fromkeys(key for row in section["rows"] for key in row))
            lines += ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
            lines += ["| " + " | ".join(_cell(row.get(c)) for c in columns) + " |"
                      for row in section["rows"]]  # fmt: skip
        if section.get("error"):
            lines += ["", "```", section["error"].strip(), "```"]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def machine() -> dict[str, str]:
    """What the results depend on."""
    found = {"torch": torch.__version__, "python": platform.python_version()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["GPU"] = f"{properties.name}, {properties.multi_processor_count} multiprocessors"
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="F", help="factor on the sections' time limits"
    )
    parser.add_argument(
        "--target", type=Path, metavar="DIR", help="small target to decode (default: a random one)"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--section", choices=SECTIONS, help="run this here, rows to stdout")
    options = parser.parse_args(arguments)
    if (options.out is None) == (options.section is None):
        parser.error("give --out, or --section (which this script gives to itself)")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device here; --dry-run tries every section on the CPU")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the sections. Returns 1 if one of them failed."""
    options = parse(arguments)
    if options.section:
        for row in SECTIONS[options.section].rows(options):
            print(json.dumps(row), flush=True)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": machine(), "dry_run": options.dry_run, "sections": {}}
    for name in options.only:
        results["sections"][name] = run_section(name, options)
        (options.out / "results.json").write_text(json.dumps(results, indent=1))
        (options.out / "results.md").write_text(markdown(results))
        print(f"{name}: {results['sections'][name]['status']}", file=sys.stderr, flush=True)
    print(markdown(results))
    print(json.dumps(results))
    statuses = {section["status"] for section in results["sections"].values()}
    return 0 if statuses <= FINE else 1


if __name__ == "__main__":
    sys.exit(main())
