"""Fit a static draft tree to a head, whatever its family.

    python -m scripts.fit_tree --target targets/smollm2-135m --head outputs/eagle3/head \\
        --prompts heldout.jsonl --size 32 --save

The target answers held-out prompts. At every position of the answers the head drafts along them, by
the decoder's own code, and it is noted at which rank of each draft law the answer's next token is.
From these rates comes the tree with the most expected tokens per round: of `--size` nodes, or of
the size and depth with the least expected time per token by a cost table, which is measured on the
spot (`--measure-cost`, with the `--engine` to decode with) or read from a file (`--cost-table`, as
the last line of output has it).
`--save` writes the tree into the head's config, from where every decoder of this project takes it.

The rates depend on the rule, the temperature and the warpers, so fit for those you decode with.
Under `match` and `coupled` ranks are those of the draft law, with the target's noise for the
latter; under `rejection` they count drawn children in the order in which they are tried, for heads
whose drafts know the path they continue, and the likeliest tokens by rank for the others, which
draw nothing. The tree is lossless under all rules, whatever it was fitted to. The prediction is
checked by decoding `--check` prompts that were not fitted on, where there are enough. The last line
is one JSON object.
"""

import argparse
import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from drafters import Drafter
from drafters.export import read_head
from inference.engine import EagerEngine, Engine
from inference.generate import speculative_generate
from inference.measuring.evaluation import Prompt
from inference.proposers import HeadProposer, TreeOptions, build_proposer
from inference.sampling import SamplingParams
from inference.scheduling.cost_calibration import REPEATS
from inference.scheduling.round_parts import Calibration
from inference.shapes.rates import Rates, measure_rates
from inference.shapes.sequoia import TreeChoice, choose_tree, expected_tokens, optimal_tree
from inference.shapes.static_tree import StaticTree, optimal_static_tree
from scripts.calibrate import CONFIG, head_config
from scripts.common import (
    MODEL_OPTIONS,
    WARPER_OPTIONS,
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
    write_json_atomic,
)

RULES = ("match", "coupled", "rejection")
SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Sizes of trees that `--measure-cost` tries, and beside them the root alone."""
DEPTH = 5
"""Of heads that have no depth of their own."""


def main(argv: list[str] | None = None) -> int:
    """Measure, fit, print, save if asked to, and decode with it."""
    args = parse_args(argv)
    sampling = sampling_params(args)
    check_rule(args.rule, sampling)
    config = head_config(args.head) if args.save else None
    costs = None if args.cost_table is None else read_costs(args.cost_table)
    rows = load_prompts(args.prompts, args.limit)
    target = load_target(args, args.chat_template)
    drafter = read_head(args.head, target, target.dtype)
    depth = depth_of(drafter, args.depth)
    prompts = fitting(target, encode_prompts(target, rows), args.max_new_tokens)
    engine = open_engine(args, target) or EagerEngine(target)
    engine.prepare(drafter)
    kept = args.check if len(prompts) > args.check else 0
    fitted, checked = prompts[: len(prompts) - kept], prompts[-args.check :] if args.check else []
    proposer = build_proposer(drafter, TreeOptions(depth + 1, depth, 1, grown=True))
    rates = measure(engine, proposer, fitted, sampling, args, depth)
    print(f"rates of acceptance by depth and rank, from {rates.rounds} rounds:")
    for row in rates.table.tolist():
        print("  " + " ".join(f"{rate:.3f}" for rate in row))
    if args.measure_cost:
        costs = measure_costs(engine, proposer, fitted[0], rates)
    shape, choice = fit(rates, args, costs, args.rule == "rejection" and proposer.draws == "all")
    expected = expected_tokens(shape, rates.table)
    print(f"tree: {shape.num_nodes} nodes, depth {shape.depth}, expected {expected:.3f} per round")
    if config is not None:
        path = Path(args.head) / CONFIG
        write_json_atomic(path, {**config, "tree": [list(path) for path in shape.paths()]})
        print(f"saved in {path}")
    lengths = check(engine, drafter, shape, checked, sampling, args)
    print_json(record(rates, shape, expected, lengths, choice, costs))
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add_options(
        parser, *MODEL_OPTIONS, "--engine", "--head", "--prompts", "--limit", "--max-new-tokens"
    )
    add_options(parser, "--temperature", *WARPER_OPTIONS, "--seed", "--chat-template")
    add = parser.add_argument
    add("--rule", choices=RULES, default="match", help="to decode with (default: match)")
    add("--size", type=int, metavar="N", help="nodes, root included (default: 32)")
    add("--measure-cost", action="store_true", help="choose size and depth by measured costs")
    add("--cost-table", type=Path, metavar="FILE", help="choose size and depth by these costs")
    add("--depth", type=int, metavar="N", help=f"deepest draft (default: the head's, or {DEPTH})")
    add("--ranks", type=int, default=10, metavar="R", help="per node, at most (default: 10)")
    add("--positions", type=int, default=2000, metavar="N", help="rounds to fit on (default: 2000)")
    add("--check", type=int, default=4, metavar="N", help="prompts to check it on (default: 4)")
    add("--save", action="store_true", help="write the tree into the head's config")
    args = parser.parse_args(argv)
    for name in ("ranks", "positions", "max_new_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.check < 0:
        parser.error("--check must be at least 0")
    if sum([args.size is not None, args.measure_cost, args.cost_table is not None]) > 1:
        parser.error("--size, --measure-cost and --cost-table exclude each other: give one")
    if args.size is not None and args.size < 2:
        parser.error("--size must be at least 2: the root and a draft")
    return args


def check_rule(rule: str, sampling: SamplingParams) -> None:
    """Rules that are one at temperature 0.

    Raises:
        ValueError: a rule that has no effect.
    """
    if sampling.temperature == 0 and rule != "match":
        raise ValueError(f"--rule {rule} has no effect at temperature 0: drop it")


def depth_of(drafter: Drafter, given: int | None) -> int:
    """The deepest draft to look at.

    Raises:
        ValueError: none, or more than the head drafts.
    """
    most = drafter.num_drafts
    depth = given if given is not None else most or DEPTH
    if depth < 1 or (most is not None and depth > most):
        limit = "at least 1" if most is None else f"in 1..{most}, as the head drafts {most} tokens"
        raise ValueError(f"--depth must be {limit}; got {depth}")
    return depth


def measure(
    engine: Engine,
    proposer: HeadProposer,
    prompts: list[Prompt],
    sampling: SamplingParams,
    args: argparse.Namespace,
    depth: int,
) -> Rates:
    """Rates along the target's answers to the prompts.

    Raises:
        ValueError: nothing was drafted.
    """
    columns = proposer.drafter.config.draft_vocab_size
    found = Rates.none(depth, min(args.ranks, columns or args.ranks))
    for number, prompt in enumerate(tqdm(prompts, unit="prompt", disable=None)):
        own = replace(sampling, seed=sampling.seed + number)
        answer = speculative_generate(  # its text is plain decoding's
            engine.target,
            proposer,
            [prompt.ids],
            max_new_tokens=args.max_new_tokens,
            sampling=own,
            engine=engine,
        )
        measure_rates(
            found,
            engine.target,
            proposer,
            [*prompt.ids, *answer.sequences[0]],
            len(prompt.ids),
            own,
            args.rule,
            args.positions,
        )
        if found.rounds >= args.positions:
            break
    if not found.rounds:
        raise ValueError("--prompts: nothing was drafted; give more prompts or new tokens")
    return found


def fit(
    rates: Rates, args: argparse.Namespace, costs: dict[str, Any] | None, drawn: bool
) -> tuple[StaticTree, TreeChoice | None]:
    """The best tree of a size, or the fastest by a cost table.

    Args:
        rates: measured.
        args: of the command line.
        costs: table, or None.
        drawn: the rates are those of drawn children, which are tried in turn.
    """
    if costs is not None:
        choice = choose_tree(rates.table, costs["verify_seconds"], costs["draft_seconds"])
        return choice.shape, choice
    size = 32 if args.size is None else args.size
    if drawn:
        return optimal_tree(rates.table, size)[0], None
    return optimal_static_tree(rates.table, min(size - 1, possible(rates.table))), None


def possible(table: Tensor) -> int:
    """Draft tokens that were ever accepted, in the tree that has all of them.

    Raises:
        ValueError: none.
    """
    count, paths = 0, 1
    for ranks in (table > 0).sum(1).tolist():
        paths *= ranks
        count += paths
    if not count:
        raise ValueError("no draft was accepted: is this head trained for this target?")
    return count


def read_costs(path: Path) -> dict[str, Any]:
    """A cost table from a file.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found = found.get("costs") or found
        verify = {int(size): float(cost) for size, cost in found["verify_seconds"].items()}
        draft = [float(cost) for cost in found["draft_seconds"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f'--cost-table {path}: it must hold {{"verify_seconds": {{nodes: seconds}}, '
            f'"draft_seconds": [seconds of depth 1, of depth 2, ...]}} ({error!r})'
        ) from error
    if not all(cost > 0 for cost in verify.values()) or not all(cost >= 0 for cost in draft):
        raise ValueError(f"--cost-table {path}: costs must be above 0")
    return {"verify_seconds": verify, "draft_seconds": draft}


def measure_costs(
    engine: Engine, proposer: HeadProposer, prompt: Prompt, rates: Rates
) -> dict[str, Any]:
    """Seconds of target forwards behind a text as long as a prompt, and of drafting, on this
    machine; a larger tree is never cheaper, as noise might have it.
    """
    context = len(prompt.ids)
    sizes = [size for size in (1, *SIZES) if engine.target.has_room(context, size)]
    calibration = Calibration(engine, {"head": proposer})
    with torch.inference_mode():
        turns = [
            [calibration.verify(size, context, 1) for size in sizes] for _ in range(1 + REPEATS)
        ]
    medians = map(median, zip(*turns[1:], strict=True))  # the first turn warms up
    return {
        "verify_seconds": dict(zip(sizes, accumulate(medians, max), strict=True)),
        "draft_seconds": rates.draft_seconds(proposer.drafter.shape == "sequential"),
    }


def check(
    engine: Engine,
    drafter: Drafter,
    shape: StaticTree,
    prompts: list[Prompt],
    sampling: SamplingParams,
    args: argparse.Namespace,
) -> dict[str, float]:
    """Mean tokens per round when decoding with the fitted tree, and with grown ones of its size."""
    if not prompts:
        return {}
    tried = {
        "static": TreeOptions(shape=shape),
        "grown": TreeOptions(shape.num_nodes, shape.depth, grown=True),
    }
    lengths = {}
    for name, options in tried.items():
        stats = speculative_generate(
            engine.target,
            build_proposer(drafter, options),
            [prompt.ids for prompt in prompts],
            max_new_tokens=args.max_new_tokens,
            sampling=sampling,
            rule=args.rule,
            engine=engine,
        ).stats
        if stats.num_drafts:
            lengths[name] = 1.0 + stats.accepted_per_round
    if lengths:
        print("decoded: " + ", ".join(f"{name} {value:.3f}" for name, value in lengths.items()))
    return lengths


def record(
    rates: Rates,
    shape: StaticTree,
    expected: float,
    lengths: dict[str, float],
    choice: TreeChoice | None,
    costs: dict[str, Any] | None,
) -> dict[str, Any]:
    """The last line of output."""
    chosen = {} if choice is None else {"seconds_per_token": choice.seconds_per_token}
    return {
        "tree": [list(path) for path in shape.paths()],
        "size": shape.num_nodes,
        "depth": shape.depth,
        "expected_tokens_per_round": expected,
        "decoded_tokens_per_round": lengths.get("static"),
        "grown_tokens_per_round": lengths.get("grown"),
        "rounds": rates.rounds,
        "rates": rates.table.tolist(),
        **chosen,
        "costs": costs,
    }


if __name__ == "__main__":
    run(main)
