"""Race this decoder against transformers' own speculative decoding at equal settings.

    python -m scripts.benchmark --target targets/smollm2-135m --prompts prompts.jsonl --limit 12

Pairs, greedy, each prompt decoded by both right after the other, in turns first:
  plain          plain `generate` against this project's decoding without drafts
  prompt-lookup  `generate(prompt_lookup_num_tokens=K)` against n-gram drafts, same match, same K
  draft-model    `generate(assistant_model=...)` against the same draft model, chains of K
  early-exit     `generate(assistant_early_exit=E)` against layer skipping, chains of K
The draft model is `--draft-model`, or the target's first `--draft-first` layers as a model of its
own. Acceptance is the same on both sides by construction, so the ratio compares the decoders; at an
early exit transformers runs the text up to there again for every draft token, and the ratio says
more about that than about this project.
Speeds are whole calls, prefill included. `ratio` is this project's speed over transformers', the
median over prompts of the two times; above 1 is faster. `identical` counts equal texts, near ties
apart. The last line is one JSON object. Exit code 1: a text differs by more than rounding, or a
pair could not be run.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from drafters import TargetModel
from inference.compare import clean_generation_config, explain_difference
from inference.evaluation import Prompt
from inference.generate import plain_generate, speculative_generate
from inference.proposers import Proposer, TreeOptions
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.layer_skip import LayerSkipProposer
from inference.proposers.ngram import NgramProposer
from inference.sampling import SamplingParams
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
from training.provenance import provenance

PAIRS = ("plain", "prompt-lookup", "draft-model", "early-exit")

Decode = Callable[[list[int]], list[int]]


@dataclass(frozen=True)
class Pair:
    """Two ways to decode the same thing.

    Attributes:
        name: one of `PAIRS`.
        theirs: transformers.
        ours: this project.
    """

    name: str
    theirs: Decode
    ours: Decode


def main(argv: list[str] | None = None) -> int:
    """Race, print the table and the JSON line."""
    args = parse_args(argv)
    rows = load_prompts(args.prompts, args.limit)
    target = load_target(args, args.chat_template)
    prompts = fitting(target, encode_prompts(target, rows), args.max_new_tokens)
    if args.draft_first >= target.num_layers:
        raise ValueError(f"--draft-first must be below the target's {target.num_layers} layers")
    results, failed = [], {}
    for pair in build_pairs(target, args):
        try:
            results.append(race(target, pair, prompts))
        except Exception as error:  # whatever transformers raises must not cost the other pairs
            failed[pair.name] = f"{type(error).__name__}: {error}"
            print(f"{pair.name}: failed: {failed[pair.name]}", file=sys.stderr)
    print(f"{'pair':<15}{'prompts':>8}{'identical':>11}{'theirs':>9}{'ours':>9}{'ratio':>8}")
    for found in results:
        print(f"{found['pair']:<15}{found['prompts']:>8}{found['identical']:>11}", end="")
        print(f"{found['theirs_tokens_per_second']:>9.1f}", end="")
        print(f"{found['ours_tokens_per_second']:>9.1f}{found['ratio']:>8.2f}")
    record = {"results": results, "failed": failed, "threads": torch.get_num_threads()}
    try:
        if args.out is not None:
            write_json_atomic(args.out, {**record, **provenance()})
    finally:
        print_json(record)
    return 1 if failed or any(found["failures"] for found in results) else 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add_options(parser, *MODEL_OPTIONS, "--prompts", "--limit", "--max-new-tokens", limit=12)
    add_options(parser, "--chat-template", "--out")
    parser.add_argument(
        "--pairs", nargs="+", choices=PAIRS, default=list(PAIRS), help="which (default: all)"
    )
    parser.add_argument("--draft-model", metavar="NAME", help="folder or hub id, same tokenizer")
    parser.add_argument(
        "--draft-first",
        type=int,
        default=8,
        metavar="E",
        help="layers of the early exit, and of the draft model unless it is given (default: 8)",
    )
    parser.add_argument(
        "--draft-length", type=int, default=5, metavar="K", help="tokens per draft (default: 5)"
    )
    args = parser.parse_args(argv)
    if args.draft_length < 1 or args.draft_first < 1:
        parser.error("--draft-length and --draft-first must be at least 1")
    return args


def build_pairs(target: TargetModel, args: argparse.Namespace) -> list[Pair]:
    """The pairs that were asked for, with equal settings on both sides."""
    count, new = args.draft_length, args.max_new_tokens
    makers: dict[str, Callable[[], tuple[dict[str, Any], Proposer | None]]] = {
        "plain": lambda: ({}, None),
        "prompt-lookup": lambda: (
            {"prompt_lookup_num_tokens": count, "max_matching_ngram_size": 2},
            NgramProposer(count + 1, count, 1, max_ngram=2, occurrence="first"),
        ),
        "draft-model": lambda: _draft_model(target, args),
        "early-exit": lambda: (
            {"assistant_early_exit": args.draft_first, **_constant(count)},
            LayerSkipProposer(args.draft_first, width=1, depth=count),
        ),
    }
    pairs = []
    for name in args.pairs:
        options, proposer = makers[name]()
        pairs.append(Pair(name, _theirs(target, new, options), _ours(target, new, proposer)))
    return pairs


def _draft_model(
    target: TargetModel, args: argparse.Namespace
) -> tuple[dict[str, Any], Proposer | None]:
    if args.draft_model is not None:
        draft = TargetModel.load(args.draft_model, target.dtype, target.device)
    else:
        draft = first_layers(args.target, args.draft_first, target)
    vars(draft.model.generation_config).update(_constant(args.draft_length))
    options = TreeOptions(size=args.draft_length + 1, depth=args.draft_length, top_k=1)
    return {"assistant_model": draft.model}, DraftModelProposer(draft, options)


def first_layers(name: str, count: int, target: TargetModel) -> TargetModel:
    """The first layers of a target as a model of its own.

    Args:
        name: folder or hub id of the target.
        count: layers, fewer than the target has.
        target: the model.
    """
    config = AutoConfig.from_pretrained(name)
    text = config.get_text_config()
    text.num_hidden_layers = count
    if (types := getattr(text, "layer_types", None)) is not None:
        text.layer_types = types[:count]
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # the other layers are left out on purpose
    model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=target.dtype)
    transformers.logging.set_verbosity(verbosity)
    return TargetModel(model.to(target.device), target.tokenizer)


def _constant(count: int) -> dict[str, Any]:
    """transformers' settings for chains of one length, whatever the confidence."""
    return {
        "num_assistant_tokens": count,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def _theirs(target: TargetModel, max_new_tokens: int, options: dict[str, Any]) -> Decode:
    assistant = {key: value for key, value in options.items() if key == "assistant_model"}
    settings = {key: value for key, value in options.items() if key not in assistant}
    config = clean_generation_config(target, max_new_tokens, **settings)

    def decode(ids: list[int]) -> list[int]:
        prompt = torch.tensor([ids], device=target.device)
        own, target.model.generation_config = target.model.generation_config, config
        try:
            out = target.model.generate(prompt, attention_mask=torch.ones_like(prompt), **assistant)
        finally:
            target.model.generation_config = own
        return out[0, len(ids) :].tolist()

    return decode


def _ours(target: TargetModel, max_new_tokens: int, proposer: Proposer | None) -> Decode:
    def decode(ids: list[int]) -> list[int]:
        if proposer is None:
            return plain_generate(target, [ids], max_new_tokens=max_new_tokens).sequences[0]
        result = speculative_generate(target, proposer, [ids], max_new_tokens=max_new_tokens)
        return result.sequences[0]

    return decode


def race(target: TargetModel, pair: Pair, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Decode every prompt both ways, the first of the two in turns, after one to warm up."""
    for decode in (pair.theirs, pair.ours):
        decode(prompts[0].ids)
    seconds: dict[str, list[float]] = {"theirs": [], "ours": []}
    tokens = {"theirs": 0, "ours": 0}
    identical, near_ties, failures = 0, 0, []
    for number, prompt in enumerate(tqdm(prompts, desc=pair.name, disable=None)):
        sides = [("theirs", pair.theirs), ("ours", pair.ours)]
        texts = {}
        for side, decode in sides if number % 2 else sides[::-1]:
            start = time.perf_counter()
            texts[side] = decode(prompt.ids)
            seconds[side].append(time.perf_counter() - start)
            tokens[side] += len(texts[side])
        found = explain_difference(
            target, prompt.ids, texts["theirs"], texts["ours"], SamplingParams()
        )
        identical += found is None
        near_ties += found is not None and found.near_tie
        if found is not None and not found.near_tie:
            failures.append(prompt.id)
    ratios = [their / our for their, our in zip(seconds["theirs"], seconds["ours"], strict=True)]
    return {
        "pair": pair.name,
        "prompts": len(prompts),
        "identical": identical,
        "near_ties": near_ties,
        "failures": failures,
        "theirs_tokens_per_second": tokens["theirs"] / sum(seconds["theirs"]),
        "ours_tokens_per_second": tokens["ours"] / sum(seconds["ours"]),
        "ratio": statistics.median(ratios),
    }


if __name__ == "__main__":
    run(main)
