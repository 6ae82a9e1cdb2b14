"""Prove on your own target and drafts that drafts do not change what the target says.

    python -m scripts.verify_lossless --target targets/smollm2-135m --head outputs/eagle3/head \\
        --prompts prompts.jsonl --limit 4 --report lossless.md

Drafts come from a trained head or from anything else that --proposer names. The checks, of every
rule or of the one that `--rule` names:
  greedy     at temperature 0: the very tokens of plain decoding.
  same seed  `match` and `coupled` with the sampling options: the very tokens of plain sampling with
             the same seed, for several seeds.
  law        `rejection` and `block` with the sampling options: many short continuations of one
             prompt; the three tokens after the first are counted and tested against the target's
             exact law by chi-square and by total variation. How far off the law must be to be found
             is stated.
The first two decode every prompt alone, and all of them in a batch whose rows have their own seeds
and lengths. `block` verifies chains, and is left out where the drafts are trees.

Every text of the first two is audited, too: it is run through the target at once, and each token
must be what the target chooses there, or fall short of it by rounding: 1e-4 in float32 and float64,
in bfloat16 and float16 --max-ulp units in the last place, or what plain decoding itself falls short
by if that is more. A miss of up to four times as much is inconclusive, and so is a check during
which no draft token was accepted: it has tried nothing.

`--negative-control` runs the third check alone with drafts whose recorded law is wrong, so that
nearly every draft is accepted; the verdict must then be `not lossless`, or the check has too little
power to say anything with these drafts and options.

`--engine` says what runs target and drafts, and is what the verdict is about. Plain texts, audits
and laws come from transformers' own forward over its own cache, whatever the engine; its linear
layers are the packed ones, where the engine packs them.

`--report` writes a page with the verdict, the figures behind it and what was not tested. The
verdict in the JSON line, the last one, is `lossless` (exit code 0), `not lossless` (1) or
`inconclusive` (3). A lossless decoder fails the third check once in 10,000 runs per rule.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafters import TargetModel
from inference.engine import Engine
from inference.engines import ENGINES
from inference.measuring.evaluation import Prompt
from inference.proofs.law_check import MIN_ROUNDS, NEW_TOKENS, WrongLaw, check_law
from inference.proofs.lossless_report import render
from inference.proofs.token_check import MAX_ULP, TokenChecker
from inference.proofs.verdicts import INCONCLUSIVE, LOSSLESS, NOT_LOSSLESS, overall
from inference.proposers import Proposer
from inference.sampling import SamplingParams
from inference.static.accept import STATIC_RULES
from inference.verify import RULES, SAME_TOKENS
from scripts.common import (
    MODEL_OPTIONS,
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
    write_json_atomic,
)
from scripts.drafting import add_drafting_options, load_proposer
from training.provenance import provenance

EXIT_CODES = {LOSSLESS: 0, NOT_LOSSLESS: 1, INCONCLUSIVE: 3}
"""Rules that promise the tokens of plain sampling with the same seed."""


def main(argv: list[str] | None = None) -> int:
    """Run the checks and print the verdict."""
    args = parse_args(argv)
    sampling = sampling_params(args)
    if sampling.temperature == 0:
        raise ValueError("--temperature must be above 0: greedy decoding is checked in any case")
    rows = load_prompts(args.prompts, args.limit)
    target = load_target(args, args.chat_template)
    engine = open_engine(args, target)
    proposer = load_proposer(args, target, engine)
    given = encode_prompts(target, rows)
    prompts = fitting(target, given, max(args.max_new_tokens, NEW_TOKENS))
    checks, not_tested = run_checks(target, proposer, prompts, sampling, args, engine)
    if len(prompts) < len(given):
        not_tested.append(f"{len(given) - len(prompts)} prompts, which are too long for the target")
    verdict = overall([check["verdict"] for check in checks])
    result = {
        "verdict": verdict,
        "engine": args.engine,
        "negative_control": args.negative_control,
        "checks": checks,
        "not_tested": not_tested,
    }
    greedy = [check["verdict"] != NOT_LOSSLESS for check in checks if check["check"] == "greedy"]
    result["greedy_identical"] = all(greedy) if greedy else None
    for check in checks:
        print(f"{check['check']:<10} {check['rule']:<10} {check['verdict']:<13} {describe(check)}")
    print(f"engine: {args.engine}")
    for remark in not_tested:
        print(f"not tested: {remark}")
    try:
        write(args, result)
    finally:
        print_json(result)
    return EXIT_CODES[verdict]


def write(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """The result and the report, where they are asked for."""
    if args.out is not None:
        write_json_atomic(args.out, {**result, **provenance()})
    if args.report is not None:
        page = render({**result, "settings": vars(args), "provenance": provenance()})
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(page, encoding="utf-8")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add_options(parser, *MODEL_OPTIONS, "--prompts", "--limit", "--max-new-tokens", limit=4)
    add_options(parser, *SAMPLING_OPTIONS, temperature=1.0)
    add_drafting_options(parser)
    add_options(parser, "--chat-template", "--batch-size", "--out", batch_size=16)
    add = parser.add_argument
    add("--engine", choices=ENGINES, default="eager", help="what decodes (default: eager)")
    add("--report", type=Path, metavar="FILE.md", help="write a page with all that was found")
    add("--rule", choices=("all", *RULES), default="all", help="check one rule (default: all)")
    add("--seeds", type=int, default=3, metavar="N", help="seeds per prompt (default: 3)")
    add("--samples", type=int, default=500, metavar="N", help="continuations (default: 500)")
    add(
        "--max-ulp",
        type=float,
        default=MAX_ULP,
        metavar="K",
        help="units in the last place that count as rounding in 16 bits (default: %(default)s)",
    )
    add("--negative-control", action="store_true", help="a wrong law, which must be found out")
    args = parser.parse_args(argv)
    for name in ("seeds", "samples", "max_new_tokens", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not args.max_ulp >= 0:
        parser.error("--max-ulp must be at least 0")
    return args


def run_checks(
    target: TargetModel,
    proposer: Proposer,
    prompts: list[Prompt],
    sampling: SamplingParams,
    args: argparse.Namespace,
    engine: Engine | None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """One record per check and rule, and remarks on what was left out."""
    if args.negative_control:
        rule = "rejection" if args.rule == "all" else args.rule
        if rule in SAME_TOKENS:
            raise ValueError(f"--negative-control has no effect with --rule {rule}: drop one")
        wrong = WrongLaw(proposer, target.vocab_size)
        return [law_record(target, wrong, prompts, sampling, rule, args, engine)], []
    not_tested = [f"rule `{rule}`" for rule in RULES if args.rule not in ("all", rule)]
    if len(prompts) == 1:
        not_tested.append("batches, as there is one prompt only")
    checker = TokenChecker(target, proposer, prompts, args.max_new_tokens, args.max_ulp, engine)
    checks: list[dict[str, Any]] = []
    for rule in RULES if args.rule == "all" else [args.rule]:
        if rule == "block" and args.rule == "all" and not proposer.chains:
            not_tested.append("rule `block`, as it verifies chains and these drafts are trees")
            continue
        if args.engine == "device" and args.rule == "all" and rule not in STATIC_RULES:
            not_tested.append(f"rule `{rule}`, which engine device does not have")
            continue
        checks.append(asdict(checker.run("greedy", rule, SamplingParams(), progress=True)))
        if rule in SAME_TOKENS:
            same = checker.run("same seed", rule, sampling, args.seeds, progress=True)
            checks.append(asdict(same))
        else:
            checks.append(law_record(target, proposer, prompts, sampling, rule, args, engine))
    return checks, not_tested + shallow(checks)


def shallow(checks: Sequence[dict[str, Any]]) -> list[str]:
    """The depths at which laws were hardly tried, as remarks."""
    return [
        f"rule `{check['rule']}` in law at depth {depth}: {number} rounds rejected drafts there"
        for check in checks
        if check["check"] == "law"
        for depth, number in enumerate(check["rejected_at"], start=1)
        if number < MIN_ROUNDS
    ]


def law_record(
    target: TargetModel,
    proposer: Proposer,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    rule: str,
    args: argparse.Namespace,
    engine: Engine | None,
) -> dict[str, Any]:
    """The statistical check of one rule."""
    samples, size = args.samples, args.batch_size
    report = check_law(
        target, proposer, prompts, sampling, samples, rule, size, progress=True, engine=engine
    )
    return {"check": "law", **asdict(report)}


def describe(check: dict[str, Any]) -> str:
    """The numbers behind a verdict, for people."""
    text = describe_law(check) if check["check"] == "law" else describe_tokens(check)
    return "; ".join(part for part in (text, check["reason"]) if part)


def describe_law(check: dict[str, Any]) -> str:
    """Of a law."""
    tests = check["tests"]
    if tests is None:
        return ""
    finds = min(tests["finds_chi_square"], tests["finds_total_variation"])
    return (
        f"{check['samples']} samples in {check['cells']} cells, "
        f"chi-square {tests['chi_square']:.1f}, p = {check['p_value']:.3g}, "
        f"finds a total variation of {finds:.2g}"
    )


def describe_tokens(check: dict[str, Any]) -> str:
    """Of texts; every difference on a line of its own."""
    text = f"{check['texts']} texts and {check['batched']} in batches, "
    text += f"{check['num_accepted_tokens']} draft tokens accepted, "
    text += f"{check['near_ties']} near ties"
    for found in check["differences"]:
        text += f"\n  prompt {found['id']}, seed {found['seed']}, new token {found['position']}: "
        text += f"{found['expected']} -> {found['found']}, gap {found['gap']}"
    return text


if __name__ == "__main__":
    run(main)
