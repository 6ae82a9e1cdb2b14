"""Judge `--size auto` without the noise of a machine: its choices replayed over recorded drafts.

    python -m scripts.auto_replay --target targets/smollm2-135m --head outputs/eagle3/head \\
        --prompts questions.jsonl --max-new-tokens 48 --engine packed --out outputs/replay
    python -m scripts.auto_replay --target targets/smollm2-135m --head outputs/eagle3/head \\
        --records outputs/replay/records.jsonl --engine packed --costs other.json

The target answers the prompts at temperature 0, and along each answer it is recorded what the head
drafts at every position, for all sizes (records.jsonl in `--out`; `--records` replays them in
seconds). Then the proposer that decodes with `--size auto` goes through the answers, its rounds
taken from the records and their seconds from the cost table: from nothing ("cold"), and from the
counts that `scripts.auto_size` or earlier runs left beside the table ("priors"). What it does in an
answer depends on those before it, so it goes through them in several orders, and the mean counts.
Beside it are all sizes that it may choose from, each in every round of every answer; the best of
them for each answer; and a bound that knows what every size would accept. Ratios have 95 %
intervals over the questions. The best fixed size is found on the very questions, which flatters it.

The last line is one JSON object.
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from drafters import TargetModel
from inference.engine import EagerEngine, Engine
from inference.generate import plain_generate
from inference.measuring.evaluation import Prompt
from inference.measuring.intervals import Estimate, ratio
from inference.prediction.contenders import (
    PLAIN,
    label,
    least_seconds,
    look_up,
    play_fixed,
    sizes_of,
)
from inference.prediction.recording import Recorded, read_records, record, write_records
from inference.prediction.replay import Played, Same, player
from inference.prediction.text import Answer
from inference.proposers import HeadProposer
from inference.scheduling.auto import AutoProposer, acceptance_hashes
from scripts.auto_decided import say
from scripts.common import (
    add_options,
    encode_prompts,
    fitting,
    load_prompts,
    load_target,
    open_engine,
    parser_for,
    print_json,
    run,
    write_json_atomic,
)
from scripts.drafting import add_drafting_options, load_proposer

RECORDS, REPLAY = "records.jsonl", "replay.json"
"""Files in the folder of `--out`."""
TOGETHER = 8
"""Prompts that are answered at once."""
SHOWN = 6
"""Fixed sizes in the table."""


def main(argv: list[str] | None = None) -> int:
    """Record or read, replay, print the tables and the JSON line."""
    args = parse_args(argv)
    target = load_target(args, args.chat_template)
    engine = open_engine(args, target) or EagerEngine(target)
    proposer = load_proposer(args, target, engine)
    assert isinstance(proposer, AutoProposer), "--size auto"
    records = records_of(args, target, engine, proposer)
    found = replayed(target, proposer, records, args.orders)
    print_results(found)
    result = record_of(found, proposer, args)
    if args.out is not None:
        write_json_atomic(args.out / REPLAY, result)
    print_json(result)
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add_drafting_options(parser)
    add_options(parser, "--target", "--limit", "--max-new-tokens", max_new_tokens=48)
    add_options(parser, "--engine", "--dtype", "--device", "--threads", "--chat-template")
    add = parser.add_argument
    add("--prompts", metavar="FILE", help="as in scripts.evaluate; decoded and recorded")
    add("--records", type=Path, metavar="FILE", help="of an earlier run, instead of --prompts")
    add(
        "--orders",
        type=int,
        default=8,
        metavar="N",
        help="to go through the answers in: their own, then drawn ones (default: %(default)s)",
    )
    add("--out", type=Path, metavar="DIR", help="folder for records.jsonl and replay.json")
    args = parser.parse_args(argv)
    if (args.prompts is None) == (args.records is None):
        parser.error("give --prompts to record anew, or --records to replay what was recorded")
    if args.size not in (None, "auto"):
        parser.error("--size: it is auto here, drop it")
    if args.orders < 1:
        parser.error(f"--orders must be at least 1, got {args.orders}")
    vars(args).update(size="auto", rule="match", temperature=0.0)
    return args


# Records ------------------------------------------------------------------------------------------


def records_of(
    args: argparse.Namespace, target: TargetModel, engine: Engine, proposer: AutoProposer
) -> list[Recorded]:
    """Read, or made and kept."""
    arms = proposer.proposers
    heads = {name: arm for name, arm in arms.items() if isinstance(arm, HeadProposer)}
    described = {name: [proposer.arms[name].depth, proposer.arms[name].top_k] for name in heads}
    of = {
        "target": target.fingerprint(),
        "heads": {name: acceptance_hashes(heads)[name] for name in heads},
        "depth and branch": described,
    }
    if args.records is not None:
        return read_records(args.records, of)[: args.limit]
    rows = load_prompts(args.prompts, args.limit)
    prompts = fitting(target, encode_prompts(target, rows), args.max_new_tokens)
    start = time.perf_counter()
    answers = answered(target, engine, prompts, args.max_new_tokens)
    for head in heads.values():
        engine.prepare(head.drafter)
    middle = time.perf_counter()
    records = [
        record(target, heads, answer)
        for answer in tqdm(answers, unit="text", desc="record", disable=None)
        if len(answer.tokens) > 1
    ]
    if not records:
        raise ValueError("--prompts: no answer has a second token, where rounds begin")
    say(f"answered in {middle - start:.0f} s, recorded in {time.perf_counter() - middle:.0f} s")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        write_records(args.out / RECORDS, of, records)
    return records


def answered(
    target: TargetModel, engine: Engine, prompts: Sequence[Prompt], most: int
) -> list[Answer]:
    """The target's answers at temperature 0."""
    found = []
    parts = range(0, len(prompts), TOGETHER)
    for start in tqdm(parts, unit="batch", desc="answer", disable=None):
        some = prompts[start : start + TOGETHER]
        ids = [prompt.ids for prompt in some]
        made = plain_generate(target, ids, max_new_tokens=most, engine=engine).sequences
        found += [
            Answer(prompt.ids, tokens, most, id=str(prompt.id), category=prompt.category)
            for prompt, tokens in zip(some, made, strict=True)
        ]
    return found


# Replays ------------------------------------------------------------------------------------------


@dataclass
class Replays:
    """What was replayed; lists by text are in the order of the records.

    Attributes:
        records: the texts.
        autos: by start ("cold", "priors"), by text, the rounds of `--size auto`, in all orders.
        fixed: by size, by text, the seconds.
        bound: by text, the least seconds.
        orders: that the texts were gone through in.
        choice_ms: of a replayed round of `--size auto`, on this machine; not in the seconds.
    """

    records: list[Recorded]
    autos: dict[str, list[list[Played]]] = field(default_factory=dict)
    fixed: dict[Same, list[float]] = field(default_factory=dict)
    bound: list[float] = field(default_factory=list)
    orders: int = 1
    choice_ms: float = 0.0

    def auto_seconds(self, start: str) -> list[float]:
        """By text, the mean over orders."""
        return [sum(done.seconds for done in rounds) / self.orders for rounds in self.autos[start]]


def replayed(
    target: TargetModel, proposer: AutoProposer, records: list[Recorded], orders: int
) -> Replays:
    """All replays of the same texts.

    Args:
        target: of the texts.
        proposer: with arms, costs and what is known beforehand; it is left alone.
        records: the texts.
        orders: to go through them in.
    """
    arms, costs, found = proposer.proposers, proposer.costs, Replays(records, orders=orders)
    starts = {"cold": None} | ({"priors": proposer.priors} if proposer.priors else {})
    began = time.perf_counter()
    for start, priors in starts.items():
        found.autos[start] = [[] for _ in records]
        for order in orders_of(len(records), orders):
            auto = player(target, arms, costs, priors)
            for place in order:
                found.autos[start][place] += auto.play(records[place])
    rounds = sum(len(text) for texts in found.autos.values() for text in texts)
    found.choice_ms = 1000 * (time.perf_counter() - began) / rounds
    sizes = sizes_of(list(proposer.arms.values()), costs)
    steps = look_up(target, arms, sizes, records)
    for does in sizes:
        found.fixed[does] = [
            sum(done.seconds for done in play_fixed(one, own, does, costs))
            for one, own in zip(records, steps, strict=True)
        ]
    found.bound = [least_seconds(one, own, costs) for one, own in zip(records, steps, strict=True)]
    return found


def orders_of(count: int, orders: int) -> list[list[int]]:
    """Places of so many texts: in their own order, then in drawn ones, the same in every run."""
    own, source = list(range(count)), random.Random(0)
    return [own, *(source.sample(own, count) for _ in range(orders - 1))]


# Results ------------------------------------------------------------------------------------------


def groups_of(records: Sequence[Recorded]) -> dict[str, list[int]]:
    """Places of all texts, and of those of every category."""
    found = {"all": list(range(len(records)))}
    categories = dict.fromkeys(one.answer.category for one in records)
    if len(categories) > 1:
        for category in categories:
            own = [n for n, one in enumerate(records) if one.answer.category == category]
            found[category] = own
    return found


def best_fixed(found: Replays, places: Sequence[int]) -> Same:
    """The size with the fewest seconds over some texts."""
    return min(found.fixed, key=lambda does: sum(found.fixed[does][place] for place in places))


def faster(found: Sequence[float], than: Sequence[float], places: Sequence[int]) -> Estimate:
    """How many times faster, over some texts.

    Args:
        found: seconds by text.
        than: seconds of what it is compared with.
        places: of the texts.
    """
    return ratio([than[place] for place in places], [found[place] for place in places])


def group_record(found: Replays, places: Sequence[int]) -> dict[str, Any]:
    """All figures of some texts; speed-ups are over plain decoding."""
    plain, best = found.fixed[PLAIN], best_fixed(found, places)
    each = [min(seconds[n] for seconds in found.fixed.values()) for n in range(len(plain))]
    tokens = sum(len(found.records[place].answer.tokens) - 1 for place in places)
    return {
        "questions": len(places),
        "tokens": tokens,
        "plain_tokens_per_second": tokens / sum(plain[place] for place in places),
        "best_fixed": {
            "does": label(best),
            "speedup": faster(found.fixed[best], plain, places).to_dict(),
        },
        "best_of_each_question": faster(each, plain, places).value,
        "bound": faster(found.bound, plain, places).value,
        "auto": {start: auto_record(found, start, best, places) for start in found.autos},
    }


def auto_record(found: Replays, start: str, best: Same, places: Sequence[int]) -> dict[str, Any]:
    """`--size auto` over some texts.

    Args:
        found: all replays.
        start: "cold" or "priors".
        best: fixed size that it is compared with.
        places: of the texts.
    """
    seconds, rounds = found.auto_seconds(start), found.autos[start]
    done = [one for place in places for one in rounds[place]]
    made = Counter(one.does[0] or "plain" for one in done)
    expected = sum(one.expected_tokens for one in done) / sum(one.expected_seconds for one in done)
    return {
        "speedup": faster(seconds, found.fixed[PLAIN], places).to_dict(),
        "over_best_fixed": faster(seconds, found.fixed[best], places).to_dict(),
        "of_bound": faster(seconds, found.bound, places).value,
        "tokens_per_round": sum(one.emitted for one in done) / len(done),
        "expected_over_replayed": expected
        * sum(one.seconds for one in done)
        / sum(one.emitted for one in done),
        "rounds": {arm: count / found.orders for arm, count in made.most_common()},
    }


def record_of(found: Replays, proposer: AutoProposer, args: argparse.Namespace) -> dict[str, Any]:
    """The last line."""
    groups = {
        name: group_record(found, places) for name, places in groups_of(found.records).items()
    }
    overall = groups.pop("all")
    everything = range(len(found.records))
    fixed = {
        label(does): faster(seconds, found.fixed[PLAIN], everything).value
        for does, seconds in found.fixed.items()
    }
    return {
        **overall,
        "by_category": groups,
        "fixed": dict(sorted(fixed.items(), key=lambda one: -one[1])),
        "orders": found.orders,
        "choice_ms": found.choice_ms,
        "engine": args.engine,
        "threads": torch.get_num_threads(),
        "confident": sorted(proposer.confident),
    }


def print_results(found: Replays) -> None:
    """Tables: by category, and the best fixed sizes."""
    starts = list(found.autos)
    head = ["", "texts", "plain t/s", *(f"auto, {start}" for start in starts)]
    head += [f"{start} / best" for start in starts]
    lines = [[*head, "bound", "best fixed size"]]
    for name, places in groups_of(found.records).items():
        row = group_record(found, places)
        autos: Mapping[str, Any] = row["auto"]
        best = row["best_fixed"]
        lines.append(
            [
                name,
                str(row["questions"]),
                f"{row['plain_tokens_per_second']:.2f}",
                *(f"{autos[start]['speedup']['value']:.3f}" for start in starts),
                *(shown(autos[start]["over_best_fixed"]) for start in starts),
                f"{row['bound']:.2f}",
                f"{best['speedup']['value']:.3f} {best['does']}",
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    everything = range(len(found.records))
    order = sorted(found.fixed, key=lambda does: sum(found.fixed[does]))[:SHOWN]
    plain = found.fixed[PLAIN]
    print("fixed sizes: ", end="")
    print(
        "; ".join(
            f"{label(does)} {faster(found.fixed[does], plain, everything).value:.3f}"
            for does in order
        )
    )
    print(f"a replayed round of auto takes {found.choice_ms:.1f} ms here, which is not counted")


def shown(estimate: Mapping[str, float | None]) -> str:
    """A ratio and its interval."""
    if estimate["low"] is None:
        return f"{estimate['value']:.3f}"
    return f"{estimate['value']:.3f} ({estimate['low']:.3f}-{estimate['high']:.3f})"


if __name__ == "__main__":
    run(main)
