"""Prove on your own target and head that drafts do not change what the target says.

    python -m scripts.verify_lossless --target targets/smollm2-135m --head outputs/eagle3/head \\
        --prompts prompts.jsonl --limit 4

Three checks; `--rule` limits them to one acceptance rule.
  greedy     every rule at temperature 0: the very tokens of plain decoding.
  same seed  `match` and `coupled` at --temperature: the very tokens of plain sampling with the same
             seed, for several seeds.
  law        `rejection` at --temperature: many short continuations of one prompt; the two tokens
             after the first are counted and tested by chi-square against the target's exact law.
Differing tokens whose scores are within 1e-4 of the target's best are rounding: near ties, counted.
A check during which no draft token was accepted is inconclusive: it has tried nothing.
Use float32 or float64; in 16 bits, rounding decides many tokens.

`--negative-control` runs the third check alone with drafts whose recorded law is wrong, so that
nearly every draft is accepted; the verdict must then be `not lossless`, or the check has too little
power to say anything with this head and these options.

The verdict in the JSON line, the last one, is `lossless` (exit code 0), `not lossless` (1) or
`inconclusive` (3). A lossless decoder fails the third check once in 10,000 runs.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from tqdm.auto import tqdm

from drafters import TargetModel
from inference.compare import Difference, explain_difference, reference_text
from inference.evaluation import Prompt
from inference.generate import speculative_generate
from inference.law_check import (
    INCONCLUSIVE,
    LOSSLESS,
    NEW_TOKENS,
    NOT_LOSSLESS,
    WrongLaw,
    check_law,
)
from inference.proposers import Proposer
from inference.sampling import SamplingParams
from inference.stats import AcceptanceStats
from inference.verify import RULES
from scripts.common import (
    MODEL_OPTIONS,
    SAMPLING_OPTIONS,
    TREE_OPTIONS,
    add_options,
    encode_prompts,
    load_prompts,
    load_proposer,
    load_target,
    parser_for,
    print_json,
    run,
    sampling_params,
    write_json_atomic,
)
from training.provenance import provenance

EXIT_CODES = {LOSSLESS: 0, NOT_LOSSLESS: 1, INCONCLUSIVE: 3}


def main(argv: list[str] | None = None) -> int:
    """Run the checks and print the verdict."""
    args = parse_args(argv)
    sampling = sampling_params(args)
    if sampling.temperature == 0:
        raise ValueError("--temperature must be above 0: greedy decoding is checked in any case")
    rows = load_prompts(args.prompts, args.limit)
    target = load_target(args, args.chat_template)
    proposer = load_proposer(args, target)
    prompts = fitting(target, encode_prompts(target, rows), args.max_new_tokens)
    checks = run_checks(target, proposer, prompts, sampling, args)
    verdict = overall([check["verdict"] for check in checks])
    result = {"verdict": verdict, "negative_control": args.negative_control, "checks": checks}
    greedy = [check["verdict"] != NOT_LOSSLESS for check in checks if check["check"] == "greedy"]
    result["greedy_identical"] = all(greedy) if greedy else None
    for check in checks:
        print(f"{check['check']:<10} {check['rule']:<10} {check['verdict']:<13} {describe(check)}")
    try:
        if args.out is not None:
            write_json_atomic(args.out, {**result, **provenance()})
    finally:
        print_json(result)
    return EXIT_CODES[verdict]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add_options(parser, *MODEL_OPTIONS, "--prompts", "--limit", "--max-new-tokens", limit=4)
    add_options(parser, *SAMPLING_OPTIONS, *TREE_OPTIONS, temperature=1.0)
    add_options(parser, "--chat-template", "--out")
    parser.add_argument("--rule", choices=("all", *RULES), default="all", help="check one rule")
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="seeds per prompt (default: 3)"
    )
    parser.add_argument(
        "--samples", type=int, default=500, metavar="N", help="continuations (default: 500)"
    )
    parser.add_argument(
        "--negative-control", action="store_true", help="a wrong law, which must be found out"
    )
    args = parser.parse_args(argv)
    for name in ("seeds", "samples", "max_new_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def fitting(target: TargetModel, prompts: list[Prompt], max_new_tokens: int) -> list[Prompt]:
    """Prompts that leave room for the new tokens.

    Raises:
        ValueError: none does.
    """
    room = target.max_length - max(max_new_tokens, NEW_TOKENS)
    kept = [prompt for prompt in prompts if len(prompt.ids) <= room]
    if not kept:
        raise ValueError(f"--prompts: none fits into the target's {target.max_length} positions")
    return kept


def run_checks(
    target: TargetModel,
    proposer: Proposer,
    prompts: list[Prompt],
    sampling: SamplingParams,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """One record per check and rule."""
    if args.negative_control:
        wrong = WrongLaw(proposer, target.vocab_size)
        return [law_record(target, wrong, prompts, sampling, args.samples)]
    rules = list(RULES) if args.rule == "all" else [args.rule]
    checks = check_tokens(
        target, proposer, prompts, [SamplingParams()], rules, args.max_new_tokens, "greedy"
    )
    if same := [rule for rule in rules if rule != "rejection"]:
        seeds = [replace(sampling, seed=sampling.seed + n) for n in range(args.seeds)]
        checks += check_tokens(
            target, proposer, prompts, seeds, same, args.max_new_tokens, "same seed"
        )
    if "rejection" in rules:
        checks.append(law_record(target, proposer, prompts, sampling, args.samples))
    return checks


def overall(verdicts: Sequence[str]) -> str:
    """One refutation refutes; otherwise one doubt leaves it open."""
    return next((v for v in (NOT_LOSSLESS, INCONCLUSIVE) if v in verdicts), LOSSLESS)


def describe(check: dict[str, Any]) -> str:
    """The numbers behind a verdict, for people."""
    if check["check"] == "law":
        if check["p_value"] is None:
            return check["reason"]
        text = f"{check['samples']} samples in {check['cells']} cells, "
        text += f"chi-square {check['chi_square']:.1f}, p = {check['p_value']:.3g}"
        return f"{text}; {check['reason']}" if check["reason"] else text
    text = f"{check['texts']} texts, {check['num_accepted_tokens']} draft tokens accepted, "
    text += f"{check['near_ties']} near ties"
    text += f"; {check['reason']}" if check["reason"] else ""
    for found in check["differences"]:
        text += f"\n  prompt {found['id']}, seed {found['seed']}, new token {found['position']}: "
        text += f"{found['expected']} -> {found['found']}, gap {found['gap']}"
    return text


# Token for token --------------------------------------------------------------------------------


def check_tokens(
    target: TargetModel,
    proposer: Proposer,
    prompts: Sequence[Prompt],
    samplings: Sequence[SamplingParams],
    rules: Sequence[str],
    max_new_tokens: int,
    name: str,
) -> list[dict[str, Any]]:
    """Decode every prompt plainly once per sampling and compare every rule with it."""
    found: dict[str, list[dict[str, Any]]] = {rule: [] for rule in rules}
    stats = {rule: AcceptanceStats() for rule in rules}
    jobs = [(prompt, sampling) for prompt in prompts for sampling in samplings]
    for prompt, sampling in tqdm(jobs, desc=name, unit="text", disable=None):
        plain = reference_text(target, prompt.ids, max_new_tokens, sampling).tokens
        for rule in rules:
            result = speculative_generate(
                target,
                proposer,
                [prompt.ids],
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                rule=rule,
            )
            stats[rule] = stats[rule].merge(result.stats)
            tokens = result.sequences[0]
            difference = explain_difference(target, prompt.ids, plain, tokens, sampling)
            if difference is not None:
                found[rule].append(_difference_record(prompt, sampling, difference))
    records = []
    for rule in rules:
        verdict, reason = judge(found[rule], stats[rule].num_accepted_tokens)
        records.append(
            {
                "check": name,
                "rule": rule,
                "verdict": verdict,
                "reason": reason,
                "texts": len(jobs),
                "num_accepted_tokens": stats[rule].num_accepted_tokens,
                "near_ties": sum(d["near_tie"] for d in found[rule]),
                "differences": found[rule],
            }
        )
    return records


def judge(differences: Sequence[dict[str, Any]], num_accepted_tokens: int) -> tuple[str, str]:
    """Verdict on texts that should be equal, and why it is not `lossless`; empty otherwise."""
    if not all(difference["near_tie"] for difference in differences):
        return NOT_LOSSLESS, "the output differs by more than rounding"
    if num_accepted_tokens == 0:
        return INCONCLUSIVE, (
            "no draft token was ever accepted, so nothing that drafts could change was tried: take "
            "more prompts, more new tokens or a head that is trained"
        )
    return LOSSLESS, ""


def _difference_record(
    prompt: Prompt, sampling: SamplingParams, difference: Difference
) -> dict[str, Any]:
    named = {"id": prompt.id, "seed": sampling.seed, "near_tie": difference.near_tie}
    return {**named, **asdict(difference)}


# In law -----------------------------------------------------------------------------------------


def law_record(
    target: TargetModel,
    proposer: Proposer,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    samples: int,
) -> dict[str, Any]:
    """The statistical check of `rejection`."""
    report = check_law(target, proposer, prompts, sampling, samples, progress=True)
    return {"check": "law", "rule": "rejection", **asdict(report)}


if __name__ == "__main__":
    run(main)
