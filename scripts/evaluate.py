"""Measure a draft head: acceptance length, speed, and that greedy output does not change.

    python -m scripts.evaluate --target targets/smollm2-135m --head outputs/eagle3/head \\
        --prompts prompts.jsonl --limit 24

Every prompt is decoded plainly and then speculatively, so that noise of the machine hits both.
Acceptance length is tokens per target forward after the prefill, the bonus token included, pooled
over all rounds; "accepted" leaves the bonus out; "per request" averages the means of the prompts.
Where greedy texts differ, the gap between the target's best tokens decides: below 1e-4 it is
rounding (a near tie, counted), otherwise the exit code is 1. The last line is one JSON object.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from inference.compare import REFERENCES
from inference.evaluation import Report, measure
from scripts.common import (
    SAMPLING_OPTIONS,
    add_options,
    encode_prompts,
    load_prompts,
    load_target,
    open_engine,
    parser_for,
    print_json,
    run,
    sampling_params,
    write_json_atomic,
)
from scripts.drafting import add_drafting_options, confidence_note, load_proposer
from training.provenance import provenance


def main(argv: list[str] | None = None) -> int:
    """Measure, print the tables and the JSON line; 1 if greedy output changed."""
    args = parse_args(argv)
    sampling = sampling_params(args)
    rows = load_prompts(args.prompts, args.limit)
    target = load_target(args, args.chat_template)
    engine = open_engine(args, target)
    proposer = load_proposer(args, target, engine, args.batch_size)
    report = measure(
        target,
        proposer,
        encode_prompts(target, rows),
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        rule=args.rule,
        compare=args.reference,
        batch_size=args.batch_size,
        progress=True,
        engine=engine,
    )
    result = {**report.to_dict(), "settings": settings(args)}
    print_report(result)
    if result["confidence_drafts"] and not args.min_confidence:  # with it, it has been said
        note = confidence_note(proposer, args.rule, sampling.temperature)
        print("" if note is None else f"note: {note}\n", end="")
    try:
        if args.out is not None:
            write_json_atomic(args.out, {**result, **provenance(), "requests": records(report)})
    finally:  # a full disk must not cost the results
        print_json(result)
    return 1 if report.identical is False else 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add_drafting_options(parser)
    add_options(parser, "--target", "--prompts", "--limit", "--max-new-tokens")
    add_options(parser, *SAMPLING_OPTIONS, "--rule", "--batch-size")
    add_options(parser, "--engine", "--dtype", "--device", "--threads", "--chat-template", "--out")
    reference = parser.add_mutually_exclusive_group()
    reference.add_argument(
        "--reference",
        choices=REFERENCES,
        help="decode without drafts by this project or by transformers' generate (default: plain)",
    )
    reference.add_argument(
        "--no-plain", action="store_true", help="no reference: no speed-up, no identity check"
    )
    args = parser.parse_args(argv)
    if args.reference is None and not args.no_plain:
        args.reference = "plain"
    return args


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """All options, and the threads in use, as plain values."""
    used = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()
    }
    return {**used, "threads": torch.get_num_threads()}


def records(report: Report) -> list[dict[str, Any]]:
    """What every prompt gave, so that any other average can be taken."""
    return [
        {
            "id": request.prompt.id,
            "category": request.prompt.category,
            "emitted_per_round": request.emitted,
            "tokens": request.tokens,
            "seconds": request.seconds,
        }
        for request in report.requests
    ]


# Tables -----------------------------------------------------------------------------------------


def print_report(result: dict[str, Any]) -> None:
    """Tables for people: by category, by position, time, identity."""
    print(
        f"{'category':<18}{'prompts':>8}{'rounds':>8}{'length':>8}  {'95 % interval':<16}", end=""
    )
    print(f"{'accepted':>8}{'per request':>13}{'tokens/s':>10}{'plain':>8}{'speedup':>9}")
    for name, group in [*sorted(result["by_category"].items()), ("all", result)]:
        interval = group["acceptance_length_interval"]
        shown = f"[{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "-"
        print(f"{name:<18.18}{group['num_prompts']:>8}{group['num_drafts']:>8}", end="")
        print(f"{_number(group['acceptance_length']):>8}  {shown:<16}", end="")
        print(f"{_number(group['accepted_per_round']):>8}", end="")
        print(f"{_number(group['acceptance_length_per_request']):>13}", end="")
        print(f"{_number(group['tokens_per_second'], 1):>10}", end="")
        print(f"{_number(group['plain_tokens_per_second'], 1):>8}", end="")
        print(f"{_number(group['speedup']):>9}")
    rates = result["acceptance_by_position"]
    print("\nposition   " + "".join(f"{n:>7}" for n in range(1, len(rates["survival"]) + 1)))
    for name in ("survival", "conditional"):
        print(f"{name:<11}" + "".join(f"{_number(rate, 3):>7}" for rate in rates[name]))
    seconds, total = result["seconds"], result["seconds"]["total"]
    if total:
        parts = (f"{name} {seconds[name] / total:.1%}" for name in ("target", "draft", "other"))
        print(f"\ndecoding time: {', '.join(parts)} of {total:.1f} s")
    if result["confidence_drafts"]:
        print(
            f"confidence: AUC {_number(result['confidence_auc'], 3)}, error of the predicted "
            f"survival {_number(result['confidence_error'], 3)} over "
            f"{result['confidence_drafts']} drafts"
        )
    print_identity(result)


def print_identity(result: dict[str, Any]) -> None:
    """Whether the output is that of the reference, and every difference."""
    if result["num_skipped"]:
        print(f"skipped: {result['num_skipped']} prompts too long for the target")
    if result["identical"] is None:
        return
    verdict = "identical" if result["identical"] else "NOT identical"
    print(f"output: {verdict} to decoding without drafts; near ties: {result['near_ties']}")
    for found in result["differences"]:
        gap = "no gap" if found["gap"] is None else f"gap {found['gap']:.2e}"
        kind = "near tie" if found["near_tie"] else "FAILURE"
        print(
            f"  {kind}: prompt {found['id']}, new token {found['position']}: "
            f"{found['expected']} -> {found['found']}, {gap}"
        )


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    run(main)
