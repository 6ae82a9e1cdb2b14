"""Calibrate the temperature of a head's draft law, for rules that draw their drafts.

    python -m scripts.calibrate --target targets/smollm2-135m --head outputs/eagle3/head \\
        --prompts heldout.jsonl --temperature 1.0 --save

Held-out prompts are decoded with drawn chains. At every position that the decoder visited, the
target's law and the draft law are kept. The factor on the draft's temperature with the largest mean
overlap, which is the rate at which single drafts are accepted, is printed. `--save` writes it into
the head's config as `draft_temperature`, from where every decoder of this project takes it.
Whatever it is, the output stays lossless. It depends on the temperature and the warpers given, so
calibrate for those you decode with. The last line is one JSON object.
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from drafters import MedusaDrafter, TargetModel
from drafters.export import read_head
from inference.draft_temperature import (
    HIGHEST,
    LOWEST,
    DraftTemperatureFit,
    fit_draft_temperature,
)
from inference.evaluation import Prompt
from inference.generate import Round, speculative_generate
from inference.proposers import Proposer, TreeOptions, build_proposer
from inference.sampling import SamplingParams, probabilities
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

CONFIG = "config.json"


def main(argv: list[str] | None = None) -> int:
    """Decode, fit, print, and save if asked to."""
    args = parse_args(argv)
    sampling = sampling_params(args)
    if sampling.temperature == 0:
        raise ValueError("--temperature must be above 0: greedy drafts are not drawn")
    config = head_config(args.head) if args.save else None
    rows = load_prompts(args.prompts, args.limit)
    target = load_target(args, args.chat_template)
    drafter = read_head(args.head, target, target.dtype)
    if isinstance(drafter, MedusaDrafter):
        raise ValueError("--head: the drafts of a Medusa head are its likeliest tokens, not drawn")
    options = TreeOptions(args.depth + 1, args.depth, 1, draft_temperature=1.0)
    proposer = build_proposer(drafter, options)
    prompts = fitting(target, encode_prompts(target, rows), args.max_new_tokens)
    fit, count = calibrate(target, proposer, prompts, sampling, args.max_new_tokens, args.positions)
    print(f"draft temperature {fit.factor:.3f} times the target's, from {count} positions")
    print(f"overlap {fit.overlap_before:.4f} -> {fit.overlap_after:.4f}")
    if not 1.05 * LOWEST < fit.factor < HIGHEST / 1.05:
        print("the best factor is at the end of the search: is this head trained for this target?")
    if config is not None:
        path = Path(args.head) / CONFIG
        write_json_atomic(path, {**config, "draft_temperature": fit.factor})
        print(f"saved in {path}")
    print_json({"draft_temperature": fit.factor, "positions": count, **asdict(fit)})
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add_options(parser, *MODEL_OPTIONS, "--head", "--prompts", "--limit", "--max-new-tokens")
    add_options(parser, "--temperature", *WARPER_OPTIONS, "--seed", temperature=1.0)
    add_options(parser, "--chat-template")
    parser.add_argument(
        "--depth", type=int, default=3, metavar="N", help="length of the chains (default: 3)"
    )
    parser.add_argument(
        "--positions", type=int, default=2000, metavar="N", help="to fit on (default: 2000)"
    )
    parser.add_argument("--save", action="store_true", help="write it into the head's config")
    args = parser.parse_args(argv)
    for name in ("depth", "positions", "max_new_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def head_config(head: str) -> dict[str, object]:
    """The config of a head that can be saved to.

    Raises:
        ValueError: not a folder with a head in this project's own format.
    """
    path = Path(head) / CONFIG
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not str(config.get("model_type", "")).startswith("headway-"):
        raise ValueError(
            f"--save: {head} is not a folder with a head in this project's own format; export it "
            "with `python -m scripts.export --format native` first"
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
    places, laws = [], []
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
