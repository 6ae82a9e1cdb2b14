"""Everything that needs a GPU, in one run of at most ten minutes; nothing is downloaded.

    bash scripts/gpu_check.sh                                # what there is, on this machine's GPU
    bash scripts/gpu_check.sh --target targets/smollm2-135m  # with texts of a real small target
    python -m scripts.gpu_check --out outputs/gpu_check --only agreement kernel
    python -m scripts.gpu_check --out /tmp/dry --dry-run     # tiny shapes, on the CPU

A section is a function that yields rows. It runs in processes of its own with a time limit, so that
one that fails, hangs or corrupts the GPU's state loses neither its earlier rows nor the other
sections. They come in order of importance, and what `--minutes` leave no time for is not started.
After each, OUT/results.json and OUT/results.md are written: what was asked, measured and met
(`scripts.gpu_check_verdicts`), and a table per section. The rows of the one that runs are in
OUT/SECTION.jsonl, in case all is stopped from outside.

This file needs the standard library and `packaging` alone, so that a package that is missing or too
old costs the sections that need it and nothing else. A new section is one entry of `SECTIONS`.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from scripts.gpu_check_needs import lacking
from scripts.gpu_check_verdicts import verdicts

Row = dict[str, Any]
KERNEL_NEEDS = ("torch", "triton")
MODEL_NEEDS = (*KERNEL_NEEDS, "transformers", "safetensors")


@dataclass(frozen=True)
class Section:
    """One part of the check.

    Attributes:
        title: above its table.
        seconds: it is stopped after so long.
        function: "module:name" in `scripts`; yields rows. A row with `"ok": False` fails the check.
        needs: packages, of the versions that pyproject.toml asks for.
        takes: command line options that the function takes.
        partial: rows come in order of importance, so to be stopped is no failure.
        processes: that share the work, on a GPU. The function then takes `share`.
    """

    title: str
    seconds: int
    function: str
    needs: tuple[str, ...] = MODEL_NEEDS
    takes: tuple[str, ...] = ("dry_run",)
    partial: bool = False
    processes: int = 1

    def rows(self, options: argparse.Namespace) -> Iterator[Row]:
        """Run it here."""
        module, _, name = self.function.partition(":")
        function = getattr(importlib.import_module(f"scripts.{module}"), name)
        yield from function(**{key: getattr(options, key) for key in self.takes})


SECTIONS = {
    "machine": Section(
        "What there is, and how fast it copies", 40, "gpu_check_machine:facts", needs=("torch",)
    ),
    "agreement": Section(
        "Tree attention: kernel against plain attention",
        100,
        "gpu_check_kernel:agreement",
        needs=KERNEL_NEEDS,
        takes=("dry_run", "share"),
        processes=6,
    ),
    "kernel": Section(
        "Tree attention: the kernel's time per layer",
        50,
        "gpu_check_kernel:speed",
        needs=KERNEL_NEEDS,
        partial=True,
    ),
    "decode": Section(
        "A round on a random Llama of 8B, batch 1, 2048 tokens", 80, "gpu_check_decode:decode"
    ),
    "rivals": Section(
        "Tree attention: the kernel beside SDPA with a mask and FlexAttention",
        95,
        "gpu_check_kernel:against",
        needs=KERNEL_NEEDS,
        partial=True,
    ),
    "sizes": Section(
        "Engine device that decides how much to draft, on that Llama", 80, "gpu_check_sizes:sizes"
    ),
    "target": Section(
        "Greedy texts of the engines on a small target",
        50,
        "gpu_check_target:target_rows",
        takes=("dry_run", "target"),
        partial=True,
    ),
    "costs": Section(
        "What verification costs on that Llama, and where drafts stop paying",
        55,
        "gpu_check_decode:costs",
        partial=True,
    ),
    "training": Section(
        "A training step of every family on a small target",
        40,
        "gpu_check_training:training",
        needs=(*MODEL_NEEDS, "accelerate", "datasets"),
        partial=True,
    ),
}
FINE = {"passed", "cut short", "no time left"}
"""Statuses that do not fail the check."""
LEAST_SECONDS = 8.0
"""A section that has less is not started."""
KILLED_SECONDS = 10.0
"""Time for a killed process to end; one that hangs in a driver may not."""


# Running ------------------------------------------------------------------------------------------


def run_section(name: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run one section in processes of its own and collect the rows that it got to.

    Returns:
        `title`, `status` ("passed", "cut short", "failed", "out of time", "no time left" or
        "lacking"), `seconds`, `rows` and, where it did not pass, `error`: what it lacks, or the end
        of what it wrote to stderr.
    """
    section = SECTIONS[name]
    result: dict[str, Any] = {"title": section.title, "status": "lacking", "seconds": 0, "rows": []}
    if missing := lacking(section.needs):
        return {**result, "error": "; ".join(missing)}
    if seconds < LEAST_SECONDS * options.scale:
        return {**result, "status": "no time left"}
    files = options.out / f"{name}.jsonl", options.out / f"{name}.stderr"
    for file in files:
        file.unlink(missing_ok=True)
    start = time.monotonic()
    with files[0].open("a") as rows_out, files[1].open("a") as errors_out:
        processes = started(name, options, rows_out, errors_out)
        codes = waited_for(processes, min(seconds, section.seconds * options.scale))
    lines = files[0].read_text().splitlines()
    result["rows"] = [json.loads(line) for line in lines if line[:1] == "{"]
    result["status"] = status_of(section, codes, result["rows"])
    result["seconds"] = round(time.monotonic() - start, 1)
    if result["status"] != "passed":
        result["error"] = files[1].read_text()[-2000:]
    for file in files:
        file.unlink()
    return result


def started(
    name: str, options: argparse.Namespace, rows_out: TextIO, errors_out: TextIO
) -> list[subprocess.Popen[bytes]]:
    """The processes of a section; they append whole lines to the same files."""
    command = [sys.executable, "-m", "scripts.gpu_check", "--section", name]
    command += ["--dry-run"] if options.dry_run else []
    command += ["--target", str(options.target)] if options.target else []
    count = 1 if options.dry_run else SECTIONS[name].processes
    return [
        subprocess.Popen(
            [*command, "--share", f"{k}/{count}"],
            stdout=rows_out, stderr=errors_out, start_new_session=True,
        )
        for k in range(count)
    ]  # fmt: skip


def waited_for(processes: list[subprocess.Popen[bytes]], seconds: float) -> list[int | None]:
    """Exit codes, None of those that had to be killed with all that they started."""
    end = time.monotonic() + seconds
    codes: list[int | None] = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.0, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            codes.append(None)
    for process, code in zip(processes, codes, strict=True):
        if code is None:
            try:
                process.wait(KILLED_SECONDS)
            except subprocess.TimeoutExpired:
                print(f"process {process.pid} does not end", file=sys.stderr)
    return codes


def status_of(section: Section, codes: list[int | None], rows: list[Row]) -> str:
    """What became of a section."""
    if any(codes) or not all(row.get("ok", True) for row in rows):
        return "failed"
    if None in codes:
        return "cut short" if section.partial else "out of time"
    return "passed"


# Telling ------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> list[str]:
    """Lines of a Markdown table with the columns of all rows."""
    if not rows:
        return []
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(c)) for c in columns) + " |" for row in rows]
    return lines


def markdown(results: dict[str, Any]) -> str:
    """The results: what was asked, then a table per section."""
    lines = ["# GPU check", "", *table(results["verdicts"])]
    for section in results["sections"].values():
        lines += ["", f"## {section['title']}", ""]
        lines += [f"{section['status']} after {section['seconds']} s", "", *table(section["rows"])]
        if section.get("error"):
            lines += ["", "```", section["error"].strip(), "```"]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "/")


def write(results: dict[str, Any], out: Path) -> None:
    """Both files, whole."""
    (out / "results.json").write_text(json.dumps(results, indent=1))
    (out / "results.md").write_text(markdown(results))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument(
        "--minutes", type=float, default=9.25, metavar="M", help="for everything (default: 9.25)"
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="F", help="factor on the sections' time limits"
    )
    parser.add_argument(
        "--target", type=Path, metavar="DIR", help="small target to decode (default: a random one)"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--section", choices=SECTIONS, help="run this here, rows to stdout")
    parser.add_argument("--share", default="0/1", metavar="K/N", help="with --section: part K of N")
    options = parser.parse_args(arguments)
    if (options.out is None) == (options.section is None):
        parser.error("give --out, or --section (which this script gives to itself)")
    first, _, count = options.share.partition("/")
    options.share = int(first), int(count)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the sections. Returns 1 if one failed, or if something was measured and is not met."""
    options = parse(arguments)
    if options.section:
        for row in SECTIONS[options.section].rows(options):
            print(json.dumps(row), flush=True)
        return 0
    end = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"dry_run": options.dry_run, "verdicts": [], "sections": {}}
    sections = results["sections"]
    for name in options.only:
        sections[name] = run_section(name, options, end - time.monotonic())
        results["verdicts"] = verdicts(sections, options.dry_run)
        write(results, options.out)
        told = sections[name]
        print(f"{name}: {told['status']} after {told['seconds']} s", file=sys.stderr, flush=True)
        if name == "machine" and told["status"] != "passed":
            break  # whatever it is, nothing else could run
    print(markdown({**results, "verdicts": []}))
    print("\n".join(table(results["verdicts"])) + "\n")
    statuses = {name: section["status"] for name, section in sections.items()}
    print(json.dumps({"verdicts": results["verdicts"], "statuses": statuses}))
    missed = any(verdict["met"] is False for verdict in results["verdicts"])
    return 0 if set(statuses.values()) <= FINE and not missed else 1


if __name__ == "__main__":
    sys.exit(main())
