"""Calibrate a head for the sampling it is served with: its draft law, and its confidence output.

    python -m scripts.calibrate --target targets/smollm2-135m --head outputs/eagle3/head \\
        --prompts heldout.jsonl --temperature 1.0 --save

Draft temperature, for heads whose drafts are drawn (all but Medusa), at a temperature above 0:
held-out prompts are decoded with drawn chains, and the factor on the draft's temperature is found
with which the most single drafts are accepted. It depends on the temperature and the warpers given.

Confidence, for heads that have such an output: one pass over held-out answers of the target gives
the exact label of every draft, by the rule in the head's config and with the temperature and the
warpers given (a head for temperature 0, "agreement", needs neither). Temperature and bias of each
depth are fitted on every other answer, and measured on the rest: how well the output ranks drafts
(AUC), how far the cumulative product is from the survival it stands for (expected calibration
error, before and after), and what thresholds on the product keep. Answers come from --answers, or
the target answers the prompts first. Give a hundred or more: texts differ from each other by more
than their many rounds suggest, and with few the measured error is that.

`--save` writes both into the head's config, from where every decoder of this project takes them.
Whatever they are, the output stays lossless. The last line is one JSON object.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from drafters import Drafter, MedusaDrafter, TargetModel
from drafters.export import read_head
from inference.generate import Round, plain_generate, speculative_generate
from inference.measuring.confidence import label_note
from inference.measuring.draft_temperature import (
    HIGHEST,
    LOWEST,
    DraftTemperatureFit,
    fit_draft_temperature,
)
from inference.measuring.evaluation import Prompt
from inference.proposers import Proposer, TreeOptions, build_proposer
from inference.proposers.laws import proposal_kind
from inference.proposers.options import DEPTH
from inference.sampling import SamplingParams, probabilities
from scripts.calibrate_confidence import (
    ConfidenceReport,
    build_teacher,
    calibrate_confidence,
    cut_row,
    forced_rounds,
    load_answers,
)
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
from training.data.chat import TokenizedRow

CONFIG = "config.json"


def main(argv: list[str] | None = None) -> int:
    """Fit, print, and save if asked to."""
    args = parse_args(argv)
    sampling = sampling_params(args)
    config = head_config(args.head) if args.save else None
    target = load_target(args, args.chat_template)
    drafter = read_head(args.head, target, target.dtype)
    check_use(args, drafter, sampling)
    rows = None if args.answers is None else load_answers(args.answers, target, args.limit)
    drawn = draws(drafter, sampling)
    prompts = find_prompts(args, target, rows) if drawn or rows is None else []
    found: dict[str, Any] = {}
    record: dict[str, Any] = {}
    if drawn:
        fit, count = fit_drawn(args, target, drafter, prompts, sampling)
        found["draft_temperature"] = fit.factor
        record |= {"draft_temperature": fit.factor, "positions": count, **asdict(fit)}
    if drafter.confidence is not None:
        factor = found.get("draft_temperature", drafter.config.draft_temperature)
        if rows is None:
            rows = answer(target, drafter, prompts, args.max_new_tokens, sampling)
        teacher = build_teacher(drafter, depth_of(drafter, args.depth))
        bar = tqdm(rows, unit="answer", disable=None)
        report = calibrate_confidence(
            [forced_rounds(teacher, row, factor, sampling) for row in bar]
        )
        print_confidence(report)
        if (note := trained_note(drafter, sampling.temperature)) is not None:
            print(f"note: {note}")
        found["confidence_temperatures"] = report.calibration.temperatures
        found["confidence_biases"] = report.calibration.biases
        rule = {"rule": drafter.config.confidence_rule, "at": sampling.temperature}
        record["confidence"] = {**rule, **plain_numbers(asdict(report))}
    if config is not None:
        path = Path(args.head) / CONFIG
        write_json_atomic(path, {**config, **found})
        print(f"saved in {path}")
    print_json(record)
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add_options(parser, *MODEL_OPTIONS, "--head")
    add_options(parser, "--prompts", "--limit", "--max-new-tokens", prompts=None)
    add_options(parser, "--temperature", *WARPER_OPTIONS, "--seed", temperature=1.0)
    add_options(parser, "--chat-template")
    parser.add_argument(
        "--answers",
        metavar="FILE",
        help="the target's own answers to prompts that the head was not trained on, as "
        "scripts.generate_answers writes them (default: the prompts are answered first)",
    )
    parser.add_argument(
        "--depth",
        type=int,
        metavar="N",
        help="length of the chains (default: all tokens that a head drafts, or 5)",
    )
    parser.add_argument(
        "--positions",
        type=int,
        default=2000,
        metavar="N",
        help="to fit the draft temperature on (default: 2000)",
    )
    parser.add_argument("--save", action="store_true", help="write it into the head's config")
    args = parser.parse_args(argv)
    for name in ("depth", "positions", "max_new_tokens"):
        given = getattr(args, name)
        if given is not None and given < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.prompts is None and args.answers is None:
        parser.error("--prompts or --answers is needed: text that the head was not trained on")
    return args


def draws(drafter: Drafter, sampling: SamplingParams) -> bool:
    """Whether any of the head's drafts are drawn from its law."""
    return sampling.temperature > 0 and not isinstance(drafter, MedusaDrafter)


def check_use(args: argparse.Namespace, drafter: Drafter, sampling: SamplingParams) -> None:
    """Refuse heads without anything to calibrate, and files that would not be read.

    Raises:
        ValueError: there is nothing, or an option has no effect.
    """
    if draws(drafter, sampling):
        if args.answers is not None and drafter.confidence is None:
            raise ValueError(
                "--answers has no effect on this head, which has no confidence output: give "
                "--prompts alone"
            )
        return
    if drafter.confidence is not None:
        if args.answers is not None and args.prompts is not None:
            raise ValueError("--prompts has no effect beside --answers: nothing is drawn here")
        plain = SamplingParams(sampling.temperature, seed=sampling.seed)
        if drafter.config.confidence_rule == "agreement" and sampling != plain:
            raise ValueError(
                "--top-k, --top-p and the like have no effect here: nothing is drawn, and the "
                "confidence output is for temperature 0 (confidence_rule agreement); drop them"
            )
        return
    if sampling.temperature == 0:
        raise ValueError(
            "--temperature must be above 0: greedy drafts are not drawn, and this head has no "
            "confidence output to calibrate"
        )
    raise ValueError(
        "--head: the drafts of a Medusa head are its likeliest tokens, not drawn, and this one has "
        "no confidence output to calibrate"
    )


def find_prompts(
    args: argparse.Namespace, target: TargetModel, rows: Sequence[TokenizedRow] | None
) -> list[Prompt]:
    """The prompts given, or what comes before the answers."""
    if args.prompts is not None:
        prompts = encode_prompts(target, load_prompts(args.prompts, args.limit))
    else:
        assert rows is not None
        prompts = [Prompt(row.ids[: max(1, row.supervised.index(True))]) for row in rows]
    return fitting(target, prompts, args.max_new_tokens)


def answer(
    target: TargetModel,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    new_tokens: int,
    sampling: SamplingParams,
) -> list[TokenizedRow]:
    """Plain decoding as served; greedy where the confidence output is for temperature 0."""
    if drafter.config.confidence_rule == "agreement":
        sampling = SamplingParams()
    rows = []
    for number, prompt in enumerate(tqdm(prompts, unit="answer", disable=None)):
        own = replace(sampling, seed=sampling.seed + number)
        [new] = plain_generate(
            target, [prompt.ids], max_new_tokens=new_tokens, sampling=own
        ).sequences
        row = TokenizedRow(prompt.ids + new, [False] * len(prompt.ids) + [True] * len(new))
        rows.append(cut_row(row, target.max_length))
    return rows


def fit_drawn(
    args: argparse.Namespace,
    target: TargetModel,
    drafter: Drafter,
    prompts: list[Prompt],
    sampling: SamplingParams,
) -> tuple[DraftTemperatureFit, int]:
    """Fit the draft temperature, and print it."""
    depth = depth_of(drafter, args.depth)
    options = TreeOptions(depth + 1, depth, 1, draft_temperature=1.0, draws="all", grown=True)
    proposer = build_proposer(drafter, options)
    fit, count = calibrate(target, proposer, prompts, sampling, args.max_new_tokens, args.positions)
    print(f"draft temperature {fit.factor:.3f} times the target's, from {count} positions")
    print(f"overlap {fit.overlap_before:.4f} -> {fit.overlap_after:.4f}")
    if not 1.05 * LOWEST < fit.factor < HIGHEST / 1.05:
        print("the best factor is at the end of the search: is this head trained for this target?")
    return fit, count


def depth_of(drafter: Drafter, given: int | None) -> int:
    """Length of the chains: as given, else the head's."""
    return given or drafter.num_drafts or DEPTH


def trained_note(drafter: Drafter, temperature: float) -> str | None:
    """One line if the confidence output was trained for no rule at this temperature."""
    own, sampling = drafter.config.confidence_rule, SamplingParams(temperature)
    notes = [
        label_note(own, rule, proposal_kind(rule, sampling), temperature)
        for rule in ("match", "rejection")
    ]
    return notes[-1] if all(notes) else None


def print_confidence(report: ConfidenceReport) -> None:
    """Tables for people: by depth, and by threshold."""
    print(f"confidence: fitted on {report.fitted_on} rounds, measured on {report.held_out} others")
    found = report.calibration
    table = {
        "temperature": found.temperatures,
        "bias": found.biases,
        "accepted": report.mean,
        "AUC": report.auc,
        "error": report.single[0],
        "  calibrated": report.single[1],
        "of product": report.product[0],
        "  calibrated ": report.product[1],
    }
    print(f"{'depth':<14}" + "".join(f"{n:>8}" for n in range(1, len(report.mean) + 1)))
    for name, values in table.items():
        print(f"{name:<14}" + "".join(f"{value:>8.3f}" for value in values))
    print(f"\n{'threshold':<14}{'kept':>8}{'accepted':>10}")
    for step in report.sweep:
        accepted = "-" if step.acceptance is None else f"{step.acceptance:.3f}"
        print(f"{step.threshold:<14.1f}{step.kept:>8.3f}{accepted:>10}")


def plain_numbers(value: Any) -> Any:
    """The same with None for NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {name: plain_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def head_config(head: str) -> dict[str, object]:
    """The config of a head that can be saved to.

    Raises:
        ValueError: not a folder with a head in this project's own format.
    """
    path = Path(head) / CONFIG
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not str(config.get("model_type", "")).startswith("headway-"):
        raise ValueError(
            f"--save: {head} is not a folder with a head in this project's own format; take it "
            "over with `python -m scripts.import_head` first"
        )
    return config


def calibrate(
    target: TargetModel,
    proposer: Proposer,
    prompts: list[Prompt],
    sampling: SamplingParams,
    max_new_tokens: int,
    positions: int,
) -> tuple[DraftTemperatureFit, int]:
    """Fit on what decoding the prompts with drawn chains visits.

    Args:
        target: the model.
        proposer: draws chains at draft temperature 1.
        prompts: held out from training.
        sampling: temperature and warpers to calibrate for.
        max_new_tokens: per prompt.
        positions: M, enough to stop at.

    Returns:
        The fit, and the number of positions.

    Raises:
        ValueError: nothing was drafted.
    """
    laws: list[Tensor] = []
    drafts: list[Tensor] = []
    plain = SamplingParams(sampling.temperature, seed=sampling.seed)
    for number, prompt in enumerate(tqdm(prompts, unit="prompt", disable=None)):
        result = speculative_generate(
            target,
            proposer,
            [prompt.ids],
            max_new_tokens=max_new_tokens,
            sampling=replace(plain, seed=plain.seed + number),
            rule="rejection",
            output_scores=True,
            record_rounds=True,
        )
        p, q = visited(result.rounds, result.scores[0])
        laws.append(p)
        drafts.append(q)
        if sum(map(len, laws)) >= positions:
            break
    scores, q = torch.cat(laws)[:positions], torch.cat(drafts)[:positions]
    if not len(q):
        raise ValueError("--prompts: nothing was drafted; give more prompts or new tokens")
    p = probabilities(scores * sampling.temperature, sampling)
    columns = (q > 0).any(0).nonzero().flatten()
    logits = q[:, columns].log() * sampling.temperature
    return fit_draft_temperature(p, logits, columns, sampling), len(q)


def visited(rounds: list[Round], scores: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides' view of every position at which a draft was judged.

    Args:
        rounds: of one text, with drawn chains.
        scores: (n, V) of its new tokens, the first of which belongs to no round.

    Returns:
        (M, V) the target's logits over the temperature, and (M, V) the draft laws.
    """
    places: list[int] = []
    laws: list[Tensor] = []
    emitted = 1
    for done in rounds:
        judged = min(len(done.accepted) + 1, done.tree.num_draft_tokens, len(done.emitted))
        if judged:
            assert done.tree.draft_probs is not None
            laws.append(done.tree.draft_probs[:judged])
            places += range(emitted, emitted + judged)
        emitted += len(done.emitted)
    empty = scores[:0]
    return scores[places], torch.cat(laws) if laws else empty


if __name__ == "__main__":
    run(main)
