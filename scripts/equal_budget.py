"""Compare heads at an equal budget: train each with the same arithmetic on the same answers, then
decode.

    python -m scripts.equal_budget --target targets/smollm2-135m --answers answers.jsonl \\
        --prompts spec_bench.jsonl --petaflops 0.08 --out outputs/compare \\
        --recipe recipes/smollm2-135m/compare/*.yaml

Each recipe is a training configuration; data, length and output are overridden here, other options
by --set. The floating-point operations of a few steps are counted, the target's forward pass
included, and the number of steps that fill the budget is derived from them: a budget that does not
depend on what else the machine does, and every learning-rate schedule runs to its end. With
--seconds in place of --petaflops a few steps are timed instead. Then every head decodes the
prompts as a chain and as a tree, greedily and at temperature 1: `match` for greedy text, at
temperature 1 `rejection` on chains and `coupled` on trees. Draft cost c is the time of a round's
drafting over that of one plain decoding step. What is done already in --out is kept, so an
interrupted comparison goes on where it was, and --part lets training and measuring run side by
side. Prints the commands, a table in Markdown, and one JSON line.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from drafters import Drafter, TargetModel
from drafters.export import read_head
from inference.measuring.evaluation import Prompt, measure
from inference.proposers import TreeOptions, build_proposer
from inference.proposers.heads import own_options
from inference.sampling import SamplingParams
from recipes.heads import make_drafter
from recipes.rows import encode_for
from scripts.common import (
    MODEL_OPTIONS,
    add_options,
    encode_prompts,
    load_prompts,
    load_target,
    parser_for,
    print_json,
    run,
    write_json_atomic,
)
from training.config import TrainConfig, parse_config
from training.data.batches import PackedDataset
from training.data.encoding import encode_all
from training.data.sources import load_rows
from training.features import run_target
from training.loop import ARITHMETIC
from training.objectives import build_objective
from training.optim import make_optimizers

COUNTED_STEPS = 2
TIMED_STEPS, WARM_STEPS = 4, 2
SETTINGS = {
    "chain_greedy": ("chain", 0.0, "match"),
    "tree_greedy": ("tree", 0.0, "match"),
    "chain_sampled": ("chain", 1.0, "rejection"),
    "tree_sampled": ("tree", 1.0, "coupled"),
}
"""Name of each measurement: shape, temperature, rule."""
OWN_SETTINGS = (
    "target.name",
    "data.train",
    "data.regenerate",
    "run.out",
    "run.seed",
    "run.steps",
    "run.threads",
)


def main(argv: list[str] | None = None) -> int:
    """Train, measure, print."""
    args = parse_args(argv)
    rows = load_prompts(args.prompts, args.limit)
    target = load_target(args)
    if args.part in ("all", "train"):
        for recipe in args.recipe:
            train(recipe, target, args)
    if args.part == "train":
        return 0
    prompts = encode_prompts(target, rows)
    with torch.no_grad():
        results = [evaluate(recipe, target, prompts, args) for recipe in args.recipe]
    print(table(results))
    print_json({"budget": budget(args), "prompts": len(prompts), "methods": results})
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add_options(parser, *MODEL_OPTIONS, "--prompts", "--limit", "--max-new-tokens", "--seed")
    add = parser.add_argument
    add("--recipe", type=Path, nargs="+", required=True, metavar="YAML", help="one per method")
    add("--answers", required=True, metavar="FILE", help="training rows: the target's own answers")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--petaflops", type=float, metavar="P", help="training budget per method")
    given.add_argument("--seconds", type=float, metavar="S", help="the budget as training time")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="as data.max_length=512")
    add("--size", type=int, default=32, metavar="N", help="nodes of a tree, root included")
    add(
        "--depth",
        type=int,
        metavar="N",
        help="longest chain and tree (default: all tokens that a head drafts, or 5)",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="runs and results")
    add("--part", choices=("all", "train", "evaluate"), default="all", help="what to do now")
    args = parser.parse_args(argv)
    if args.part != "evaluate" and not budget(args):
        parser.error("a training budget is needed: --petaflops or --seconds")
    if not all(value > 0 for value in budget(args).values()) or args.size < 2:
        parser.error("a budget above 0 and --size of at least 2 are needed")
    if args.depth is not None and args.depth < 1:
        parser.error("--depth of at least 1 is needed")
    for setting in args.set:
        name, equals, _ = setting.partition("=")
        if not equals or "." not in name:
            parser.error(f"--set {setting}: expected section.key=value")
        if name in OWN_SETTINGS:
            parser.error(f"--set {name}: the comparison sets this itself")
    names = [recipe.stem for recipe in args.recipe]
    if len(set(names)) != len(names):
        parser.error("--recipe: two recipes have the same file name")
    return args


def budget(args: argparse.Namespace) -> dict[str, float]:
    """What each method may use, by unit."""
    values = {"petaflops": args.petaflops, "seconds": args.seconds}
    return {name: value for name, value in values.items() if value is not None}


# Training ---------------------------------------------------------------------------------------


def train(recipe: Path, target: TargetModel, args: argparse.Namespace) -> None:
    """Count or time a few steps, then train for the budget; nothing if the head is there.

    Raises:
        ValueError: a training failed, or --out was begun with another budget.
    """
    out, path = args.out / recipe.stem, args.out / f"{recipe.stem}.plan.json"
    if path.is_file():  # an interrupted run goes on with the same number of steps
        plan = json.loads(path.read_text())
        if plan.get("budget", budget(args)) != budget(args):
            raise ValueError(
                f"{path} was made for a budget of {plan['budget']}, not {budget(args)}: give that "
                "one, or another --out"
            )
    else:
        plan = make_plan(command(recipe, out, args)[3:], target, args)
        write_json_atomic(path, plan)
    if (out / "head" / "config.json").is_file():
        print(f"{recipe.stem}: trained already", flush=True)
        return
    words = [*command(recipe, out, args), "--run.steps", str(plan["steps"])]
    print("$ " + shlex.join(["python", *words[1:]]), flush=True)
    code = subprocess.run(words, stdout=subprocess.DEVNULL).returncode
    if code:
        raise ValueError(f"training of {recipe} ended with code {code}; its messages are above")


def command(recipe: Path, out: Path, args: argparse.Namespace) -> list[str]:
    """The training command of one run, but for its length."""
    given = {
        "target.name": args.target,
        "data.train": f"[{args.answers}]",
        "data.regenerate": "false",
        "run.out": out,
        "run.seed": args.seed,
        **({"run.threads": args.threads} if args.threads else {}),
        **dict(setting.split("=", 1) for setting in args.set),
    }
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "recipes.train", "--config", str(recipe), *flags]


def make_plan(argv: list[str], target: TargetModel, args: argparse.Namespace) -> dict[str, Any]:
    """Steps that fill the budget, and what one of them costs."""
    config = parse_config(argv)
    if args.seconds is None:
        cost = step_flops(config, target)
        measured, steps = {"teraflops_per_step": cost / 1e12}, args.petaflops * 1e15 / cost
    else:
        cost = step_seconds(config, target)
        measured, steps = {"seconds_per_step": cost}, args.seconds / cost
    return {**measured, "steps": max(1, int(steps)), "budget": budget(args)}


def first_rows(config: TrainConfig, target: TargetModel, steps: int) -> PackedDataset:
    """Enough of the answers for some steps."""
    limit = 16 * steps * config.run.batch_size
    rows = [row for source in config.data.train for row in load_rows(source, limit=limit)]
    encoded = encode_all(rows, encode_for(target), config.data.skip_bad_rows)
    data, run = config.data, config.run
    return PackedDataset(encoded, data.max_length, run.batch_size, run.seed, data.pack)


def step_flops(config: TrainConfig, target: TargetModel) -> float:
    """Floating-point operations of one optimizer step, the target's forward pass included.

    Args:
        config: of ``recipes.train``.
        target: to count with; its weights' dtype does not matter.
    """
    dataset = first_rows(config, target, COUNTED_STEPS)
    # Chunks take their gradients inside the forward pass, where the counter cannot follow.
    options = replace(config.loss, chunk=0)
    objective = build_objective(make_drafter(config, target, dataset), options)
    with torch.enable_grad(), FlopCounterMode(display=False) as counter:
        for step in range(COUNTED_STEPS):
            for batch in dataset.micro_batches(step, 0, 1, config.run.batch_size):
                data = run_target(target, batch.to(target.device), objective.drafter.feature_layers)
                objective(data)[0].backward()
    return counter.get_total_flops() / COUNTED_STEPS


def step_seconds(config: TrainConfig, target: TargetModel) -> float:
    """Seconds of one optimizer step, as ``training.loop`` runs it.

    Args:
        config: of ``recipes.train``.
        target: to time with, in the dtype it will train with.

    Raises:
        ValueError: another dtype.
    """
    if target.dtype != getattr(torch, config.target.dtype):
        raise ValueError(
            f"--seconds times the target in the recipe's dtype: give --dtype {config.target.dtype}"
        )
    run = config.run
    dataset = first_rows(config, target, WARM_STEPS + TIMED_STEPS)
    objective = build_objective(make_drafter(config, target, dataset), config.loss)
    objective.arithmetic = ARITHMETIC[run.mixed_precision]
    optimizers = make_optimizers(objective, config.optim)
    seconds = []
    for step in range(WARM_STEPS + TIMED_STEPS):
        start = time.perf_counter()
        for batch in dataset.micro_batches(step, 0, 1, run.micro_batch_size):
            data = run_target(target, batch.to(target.device), objective.drafter.feature_layers)
            with torch.enable_grad():
                objective(data)[0].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        seconds.append(time.perf_counter() - start)
    return sum(seconds[WARM_STEPS:]) / TIMED_STEPS


# Measuring --------------------------------------------------------------------------------------


def evaluate(
    recipe: Path, target: TargetModel, prompts: list[Prompt], args: argparse.Namespace
) -> dict[str, Any]:
    """All measurements of one head, read back where they were done before.

    Raises:
        ValueError: there is no head.
    """
    path, out = args.out / f"{recipe.stem}.result.json", args.out / recipe.stem
    settings = {
        "prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens,
        "size": args.size,
        "depth": args.depth,
        "seed": args.seed,
    }
    if path.is_file():
        found = dict(json.loads(path.read_text()))
        if found.get("settings", settings) == settings:
            return found
    if not (out / "head" / "config.json").is_file():
        raise ValueError(f"{recipe.stem} is not trained yet: run this with --part train first")
    drafter = read_head(out / "head", target, target.dtype)
    config = yaml.safe_load((out / "config.yaml").read_text())
    plan = json.loads((args.out / f"{recipe.stem}.plan.json").read_text())
    state = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in state if "train/tokens" in line][-1]
    result: dict[str, Any] = {
        "method": recipe.stem,
        "settings": settings,
        "family": drafter.family,
        "parameters": drafter.num_parameters_trained(),
        "steps": config["run"]["steps"],
        "training_tokens": last["train/tokens"],
        "training_seconds": last["train/seconds"],
        **plan,
    }
    for name, (shape, temperature, rule) in SETTINGS.items():
        result[name] = measured(drafter, target, prompts, args, shape, temperature, rule)
        print(f"{recipe.stem} {name}: {result[name]['acceptance_length']:.3f}", flush=True)
    write_json_atomic(path, result)
    return result


def tree_options(drafter: Drafter, size: int, depth: int | None, chain: bool) -> TreeOptions:
    """Of a measurement: chains as long as the head drafts, or trees of a size.

    Args:
        drafter: attached head.
        size: nodes of a tree, root included.
        depth: longest chain and tree; None leaves it to the head.
        chain: no branches, although the head may have a tree of its own.
    """
    if not chain:
        return TreeOptions(size, depth)
    longest = own_options(TreeOptions(depth=depth, grown=True), drafter).longest
    return TreeOptions(longest + 1, longest, 1, grown=True)


def measured(
    drafter: Drafter,
    target: TargetModel,
    prompts: list[Prompt],
    args: argparse.Namespace,
    shape: str,
    temperature: float,
    rule: str,
) -> dict[str, Any]:
    """One head decoded in one way; greedy trees are compared with plain decoding as well."""
    chain = shape == "chain"
    proposer = build_proposer(drafter, tree_options(drafter, args.size, args.depth, chain))
    report = measure(
        target,
        proposer,
        prompts,
        max_new_tokens=args.max_new_tokens,
        sampling=SamplingParams(temperature, seed=args.seed),
        rule=rule,
        compare="plain" if temperature == 0 and not chain else None,
        progress=True,
    )
    found = report.to_dict()
    names = (
        "acceptance_length",
        "acceptance_length_interval",
        "acceptance_by_position",
        "greedy_identical",
        "near_ties",
        "tokens_per_second",
        "speedup",
    )
    kept = {name: found[name] for name in names if name in found}
    kept["draft_seconds_per_round"] = found["seconds"]["draft"] / found["num_drafts"]
    if found["plain_tokens_per_second"]:
        kept["plain_step_seconds"] = 1 / found["plain_tokens_per_second"]
    return kept


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    head = (
        "| method | parameters | steps | chain, T=0 | tree, T=0 | chain, T=1 | tree, T=1 "
        "| c (chain) | c (tree) | greedy identical |"
    )
    lines = [head, "|" + "---|" * head.count(" | ") + "---|"]
    for r in results:
        same = r["tree_greedy"]["greedy_identical"]
        lengths = " | ".join(
            f"{r[name]['acceptance_length']:.2f}"
            for name in ("chain_greedy", "tree_greedy", "chain_sampled", "tree_sampled")
        )
        step = r["tree_greedy"]["plain_step_seconds"]
        costs = " | ".join(
            f"{r[name]['draft_seconds_per_round'] / step:.2f}"
            for name in ("chain_greedy", "tree_greedy")
        )
        lines.append(
            f"| {r['method']} | {r['parameters'] / 1e6:.1f}M | {r['steps']} | {lengths} | {costs} "
            f"| {'yes' if same else 'NO'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
