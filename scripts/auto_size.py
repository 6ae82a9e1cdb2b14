"""Calibrate `--size auto` once for a machine and a head: what rounds cost, and how good drafts are.

    python -m scripts.auto_size --target targets/smollm2-135m --head outputs/eagle3/head \\
        --engine packed --prompts prompts.jsonl --limit 24

Without it `--size auto` measures costs at its first start and learns acceptance from nothing, while
it decodes. Here both are measured and kept in the head's folder (or beside --costs):
costs-ENGINE.json, if there is none of this machine, and survival-LAW.json for the rule and the
temperature asked for. Texts of the target are gone through position by position, and each arm
drafts along them with all its depths and ranks. Runs with --size auto start from that, and those
whose rule allows it add what they learn.

The last line is one JSON object.
"""

import argparse
from typing import Any

import torch

from inference.engine import EagerEngine
from inference.proposers.draft_model import DraftModelProposer
from inference.scheduling.auto import AutoProposer
from inference.scheduling.schedule import Choice, best_choice, menu, plain_step
from inference.scheduling.survival import Prior, SurvivalEstimator
from inference.scheduling.survival_calibration import SurvivalCalibration
from scripts.auto_decided import say
from scripts.common import (
    SAMPLING_OPTIONS,
    add_options,
    encode_prompts,
    fitting,
    load_prompts,
    load_target,
    open_engine,
    parser_for,
    print_json,
    run,
    sampling_params,
)
from scripts.drafting import add_drafting_options, load_proposer

CONTEXTS = (128, 1024)
"""At which it is told what would be chosen."""


def main(argv: list[str] | None = None) -> int:
    """Measure, keep, print the tables and the JSON line."""
    args = parse_args(argv)
    sampling = sampling_params(args)
    rows = load_prompts(args.prompts, args.limit)
    target = load_target(args, args.chat_template)
    engine = open_engine(args, target) or EagerEngine(target)
    args.size = "auto"
    proposer = load_proposer(args, target, engine, args.batch_size)
    assert isinstance(proposer, AutoProposer), "--size auto"
    if proposer.memory is None:
        raise ValueError("--costs PATH is needed where the head is no folder: both are kept there")
    prompts = fitting(target, encode_prompts(target, rows), args.max_new_tokens)
    calibration = SurvivalCalibration(
        engine, proposer.proposers, sampling, args.rule, args.positions
    )
    counts = calibration.run([prompt.ids for prompt in prompts], args.max_new_tokens)
    if not calibration.seen:
        raise ValueError("--prompts: nothing was drafted; give more prompts or new tokens")
    proposer.memory.write(counts, say)
    priors = {name: Prior.counted(*counted) for name, counted in counts.items()}
    print(f"{calibration.seen} positions, kept in {proposer.memory.path}")
    print_rates(priors)
    print_json(record(args, proposer, priors, calibration.seen))
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add_drafting_options(parser)
    add_options(parser, "--target", "--prompts", "--limit", "--max-new-tokens", limit=24)
    add_options(parser, *SAMPLING_OPTIONS, "--rule", "--batch-size")
    add_options(parser, "--engine", "--dtype", "--device", "--threads", "--chat-template")
    parser.add_argument(
        "--positions",
        type=int,
        default=1000,
        metavar="N",
        help="to draft at, over all texts (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if args.size not in (None, "auto"):
        parser.error("--size: it is auto here, drop it")
    if args.positions < 1:
        parser.error(f"--positions must be at least 1, got {args.positions}")
    return args


def record(
    args: argparse.Namespace, proposer: AutoProposer, priors: dict[str, Prior], positions: int
) -> dict[str, Any]:
    """The last line: rates by arm, and what would be chosen first."""
    assert proposer.memory is not None
    first = {}
    for context in CONTEXTS:
        best, plain = first_choice(proposer, priors, context)
        speed = {"tokens": best.tokens, "seconds": best.seconds, "over_plain": best.rate / plain}
        first[str(context)] = {"does": list(best.same), **speed}
        print(
            f"context {context}: {best.arm or 'no drafts'}, {best.size} nodes, depth {best.depth}: "
            f"{best.tokens:.2f} tokens in {1000 * best.seconds:.1f} ms, {best.rate / plain:.2f} "
            "times plain decoding"
        )
    return {
        "positions": positions,
        "law": proposer.memory.law.name,
        "path": str(proposer.memory.path),
        "rates": {name: [list(row) for row in prior.rates] for name, prior in priors.items()},
        "first": first,
        "engine": args.engine,
        "threads": torch.get_num_threads(),
        "without_counts": [
            name for name, arm in proposer.proposers.items() if isinstance(arm, DraftModelProposer)
        ],
    }


def first_choice(
    proposer: AutoProposer, priors: dict[str, Prior], context: int
) -> tuple[Choice, float]:
    """What is best by these rates, and the rate of plain decoding. Copies are left out: what there
    is to copy is known in each round only.
    """
    costs = proposer.costs
    plain = plain_step(costs, context)
    choices = [plain]
    for name, arm in proposer.arms.items():
        if name in priors and not arm.copies:
            table = SurvivalEstimator(arm.depth, arm.top_k, priors[name]).table()
            choices += menu(arm, table, costs, context)
    return best_choice(choices), plain.rate


def print_rates(priors: dict[str, Prior]) -> None:
    """Rates by depth and rank."""
    for name, prior in priors.items():
        print(f"{name}: accepted by depth, given those before; ranks 1, 2, ...")
        for level, (row, rounds) in enumerate(zip(prior.rates, prior.rounds, strict=True), start=1):
            shown = " ".join(f"{rate:.3f}" for rate in row[:8])
            print(f"  depth {level:>2}: {shown}   of {rounds[0]:.0f}")


if __name__ == "__main__":
    run(main)
