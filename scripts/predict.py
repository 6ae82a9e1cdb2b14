"""Predict the acceptance length of a head from one pass over texts of the target, and check it.

    python -m scripts.predict --target targets/smollm2-135m --head outputs/eagle3/head \\
        --prompts prompts.jsonl --limit 10 --max-new-tokens 32 --temperatures 0 1

The target answers the prompts without drafts, at each temperature. One pass over each answer tells
what a round at every position would accept, for chains of `--chain` drafts and trees of `--tree`
nodes, and so the tokens per round of a decode. Unless `--no-decode` is given the prompts are then
decoded, and both are printed side by side with 95 % intervals; where they are further apart than
chance allows, likely causes are named and the exit code is 1. `--costs` adds predicted speeds and
the fastest size. The last line is one JSON object.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafters import Drafter, TargetModel
from drafters.export import read_head
from inference.generate import plain_generate, speculative_generate
from inference.measuring.evaluation import Prompt, request_seed
from inference.prediction.alarms import Decoded
from inference.prediction.predict import Answer
from inference.proposers import HeadProposer, TreeOptions, build_proposer
from inference.sampling import SamplingParams
from inference.scheduling.costs import CostTable
from inference.verify import RULES
from scripts.common import (
    MODEL_OPTIONS,
    WARPER_OPTIONS,
    add_options,
    encode_prompts,
    fitting,
    load_prompts,
    load_target,
    parser_for,
    print_json,
    run,
    sampling_params,
    write_json_atomic,
)
from scripts.evaluate_prediction import ARM, predict_texts, print_prediction


def main(argv: list[str] | None = None) -> int:
    """Predict every cell, decode it, print both; 1 if a gap is beyond its interval."""
    args = parse_args(argv)
    costs = None if args.costs is None else CostTable.load(args.costs)
    rows = load_prompts(args.prompts, args.limit)
    target = load_target(args, args.chat_template)
    drafter = read_head(args.head, target, target.dtype)
    prompts = fitting(target, encode_prompts(target, rows), args.max_new_tokens)
    cells = []
    for temperature in args.temperatures:
        args.temperature = temperature
        sampling = sampling_params(args)
        answers = plain_answers(target, prompts, sampling, args.max_new_tokens)
        for rule, options in cells_of(args, temperature):
            cells.append(predict_one(target, drafter, options, answers, rule, costs, args))
    record = {"head": args.head, "cells": cells}
    if args.out is not None:
        write_json_atomic(args.out, record)
    print_json(record)
    wrong = [cell for cell in cells if cell["comparison"] and not cell["comparison"]["within"]]
    return 1 if wrong else 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add_options(parser, *MODEL_OPTIONS, "--head", "--prompts", "--limit", "--max-new-tokens")
    add_options(parser, *WARPER_OPTIONS, "--seed", "--chat-template", "--out")
    add = parser.add_argument
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T", help="(0 1)")
    add(
        "--rules",
        nargs="+",
        choices=tuple(RULES),
        default=["match", "rejection"],
        help="above temperature 0, where they differ (default: match rejection)",
    )
    add("--chain", type=int, default=5, metavar="N", help="drafts of a chain; 0 for none (5)")
    add("--tree", type=int, default=16, metavar="N", help="nodes of a tree; 0 for none (16)")
    add("--branch", type=int, default=8, metavar="N", help="children of a node (8)")
    add("--grown", action="store_true", help="grow trees although the head has one of its own")
    add("--no-decode", action="store_true", help="predict alone")
    add("--costs", type=Path, metavar="PATH", help="what rounds cost here: a cost table's file")
    add("--arm", default=ARM, metavar="NAME", help="the head's name in it (head)")
    args = parser.parse_args(argv)
    if args.chain < 0 or args.tree < 0 or args.tree == 1 or not args.chain + args.tree:
        parser.error("--chain and --tree must be 0 for none, --chain 1 or --tree 2 at least")
    if args.branch < 2:
        parser.error("--branch must be at least 2: with one child a tree is a chain")
    args.repetition_penalty = args.presence_penalty = args.frequency_penalty = None
    args.no_repeat_ngram_size = None
    return args


def cells_of(args: argparse.Namespace, temperature: float) -> list[tuple[str, TreeOptions]]:
    """Rules and trees at a temperature; `block` takes chains only."""
    rules = args.rules if temperature > 0 else ["match"]
    shapes = []
    if args.chain:
        shapes.append(TreeOptions(args.chain + 1, args.chain, 1))
    if args.tree:
        shapes.append(TreeOptions(args.tree, None, args.branch, grown=args.grown))
    return [
        (rule, options) for rule in rules for options in shapes if rule != "block" or options.chains
    ]


def plain_answers(
    target: TargetModel, prompts: list[Prompt], sampling: SamplingParams, most: int
) -> list[Answer]:
    """The target's answers, without drafts."""
    found = []
    for number, prompt in enumerate(prompts):
        name = prompt.id or f"prompt {number}"
        own = replace(sampling, seed=request_seed(sampling.seed, replace(prompt, id=name)))
        [tokens] = plain_generate(target, [prompt.ids], max_new_tokens=most, sampling=own).sequences
        found.append(Answer(prompt.ids, tokens, most, own, name, prompt.category))
    return found


def predict_one(
    target: TargetModel,
    drafter: Drafter,
    options: TreeOptions,
    answers: list[Answer],
    rule: str,
    costs: CostTable | None,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """One cell: predicted, decoded, printed."""
    proposer = build_proposer(drafter, options)
    decoded = []
    if not args.no_decode:
        decoded = [decode(target, proposer, answer, rule) for answer in answers]
    found = predict_texts(target, proposer, answers, decoded, rule, costs=costs, arm=args.arm)
    record = found.to_dict()
    print_prediction({"prediction": record})
    return record


def decode(target: TargetModel, proposer: HeadProposer, answer: Answer, rule: str) -> Decoded:
    """The same request with drafts."""
    emitted: list[int] = []
    result = speculative_generate(
        target,
        proposer,
        [answer.prompt],
        max_new_tokens=answer.max_new_tokens,
        sampling=answer.sampling,
        rule=rule,
        on_round=lambda done: emitted.append(len(done.emitted)),
    )
    return Decoded(answer.id, result.sequences[0], emitted, answer.turn)


if __name__ == "__main__":
    run(main)
