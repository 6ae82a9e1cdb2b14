"""Say what is wrong with a head whose drafts are not accepted.

    python -m scripts.diagnose outputs/eagle3/head --target targets/smollm2-135m

The head may be of any family, in any dialect that `scripts.export` writes or `scripts.import_head`
reads.

First the file is looked at: what it records about its target and template, tensors that are
missing, left over, zero, random, transposed or not finite, vocabulary, rotary base and range. Then
the target answers some prompts, the head drafts every place of the answers at once, and its overlap
with the target's law is measured: as the head is, and under every fault that users have met, undone
(layer ids one off, halves swapped, another norm, ...). A reading that agrees better by a wide
margin (at least 0.03 and 7 % of overlap, and five standard errors) names the fault; for a few
usual conventions, such as layer ids one off, 0.008 and 3.5 are enough. With two faults, the second
is looked for with the first undone. More --prompts find smaller faults.

`ok` is not a promise: it says that nothing was found with so much text. `weak` says that nothing is
wrong that could be seen, but that the head has learnt little. `unknown` says that the file, or the
command line, does not have what the check needs. The last line is one JSON object; the exit code is
1 where a fault was found.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from drafters import TargetModel
from drafters.hub import head_folder
from inference.engines import build_engine
from inference.generate import plain_generate
from inference.sampling import SamplingParams
from inference.verify import RULES
from recipes.diagnosis import Diagnosis, Evidence, Serving, diagnose, gather, load_head
from recipes.diagnosis.files import WrongShape
from recipes.diagnosis.findings import Finding, fault
from scripts.common import (
    MODEL_OPTIONS,
    add_options,
    encode_prompts,
    fitting,
    load_prompts,
    load_target,
    parser_for,
    print_json,
    run,
    write_json_atomic,
)

QUESTIONS = (
    "Explain why the sky is blue in simple words.",
    "Write a Python function that checks whether a word is a palindrome.",
    "What are three good ways to save water at home?",
    "Tell a short story about a lighthouse keeper and a whale.",
    "A train travels 120 km in 90 minutes. What is its average speed?",
    "Compare cats and dogs as pets.",
    "Summarise how a bill becomes a law.",
    "Give me a recipe for a vegetable soup.",
    "What happened in the year 1969?",
    "Write a polite email asking for a day off.",
)
TEMPERATURE = 0.7
"""Of the answers: varied, and still the target's usual words."""


def main(argv: list[str] | None = None) -> int:
    """Diagnose a head and print what was found."""
    args = parse_args(argv)
    target = load_target(args, args.chat_template)
    try:
        loaded = load_head(head_folder(args.head), target)
    except WrongShape as error:
        wrong = fault("fingerprint", str(error), "use the target that the head was trained on")
        return report(args, [wrong], {"dialect": None, "family": None})
    evidence = answers(args, target)
    serving = Serving(args.temperature, args.rule)
    diagnosis = diagnose(loaded, target, evidence, serving, progress if args.verbose else None)
    record = {"dialect": loaded.dialect, "family": loaded.head.family, **figures(diagnosis)}
    print(describe(diagnosis, loaded.dialect, loaded.head.family))
    return report(args, diagnosis.findings, record)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    parser.add_argument("head", metavar="HEAD", help="folder or hub id of the head")
    add_options(parser, *MODEL_OPTIONS, "--limit", "--max-new-tokens", limit=10, max_new_tokens=64)
    add = parser.add_argument
    add("--prompts", metavar="FILE", help="as for scripts.evaluate (default: ten questions)")
    add("--temperature", type=float, metavar="T", help="the head is to be used at, for `sampler`")
    add("--rule", choices=tuple(RULES), default="match", help="it is to be used with")
    add("--verbose", action="store_true", help="say on stderr what is being tried")
    add_options(parser, "--seed", "--chat-template", "--out")
    args = parser.parse_args(argv)
    if args.temperature is not None and args.temperature < 0:
        parser.error("--temperature must be at least 0")
    if args.max_new_tokens < 8:
        parser.error("--max-new-tokens must be at least 8")
    return args


def answers(args: argparse.Namespace, target: TargetModel) -> Evidence:
    """What the target says to the prompts."""
    rows: Sequence[dict[str, Any]]
    if args.prompts is not None:
        rows = load_prompts(args.prompts, args.limit)
    else:
        chat = isinstance(target.tokenizer.chat_template, str)
        rows = [
            {"id": str(number), "category": "all"}
            | ({"messages": [{"role": "user", "content": text}]} if chat else {"text": text})
            for number, text in enumerate(QUESTIONS[: args.limit])
        ]
    prompts = fitting(target, encode_prompts(target, rows), args.max_new_tokens)
    ids = [prompt.ids for prompt in prompts]
    sampling = [SamplingParams(TEMPERATURE, seed=args.seed + place) for place in range(len(ids))]
    engine = build_engine(target, "eager")
    texts = plain_generate(
        target, ids, max_new_tokens=args.max_new_tokens, sampling=sampling, engine=engine
    )
    return gather(target, ids, texts.sequences)


def figures(diagnosis: Diagnosis) -> dict[str, Any]:
    """The numbers of a diagnosis, for the JSON line."""
    return {
        "overlap": diagnosis.overlap,
        "agreement": diagnosis.agreement,
        "constant": diagnosis.constant,
        "overlap_undone": diagnosis.fixed,
        "positions": diagnosis.positions,
        "readings": diagnosis.readings,
    }


def describe(diagnosis: Diagnosis, dialect: str, family: str) -> str:
    """One line about what was measured."""
    depths = " / ".join(f"{value:.3f}" for value in diagnosis.overlap) or "not measured"
    return (
        f"{family} head, {dialect} file; overlap with the target's law by depth {depths} on "
        f"{diagnosis.positions} places (one law for all: {diagnosis.constant:.3f}); "
        f"{diagnosis.readings} hypotheses tried"
    )


def report(args: argparse.Namespace, findings: list[Finding], record: dict[str, Any]) -> int:
    """Print every finding and the JSON line; the exit code."""
    faults = [finding.check for finding in findings if finding.verdict == "FAULT"]
    for finding in findings:
        print(finding.line())
    result = {"faults": faults, **record, "findings": [finding.to_dict() for finding in findings]}
    if args.out is not None:
        write_json_atomic(args.out, result)
    print_json(result)
    return 1 if faults else 0


def progress(text: str) -> None:
    """What is being tried, on stderr."""
    print(text, file=sys.stderr)


if __name__ == "__main__":
    run(main)
