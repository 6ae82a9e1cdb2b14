"""A contender of `scripts.benchmark` in a process of its own, or several of ours in one, on top of
this project's packages.

The first line of standard input says which one it is and how the target is loaded; see
`scripts.benchmark_protocol` for the others.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from drafters import TargetModel
from inference.counts import RoundCounts
from inference.engine import Engine
from inference.engines import build_engine
from inference.generate import Generation, plain_generate, speculative_generate
from inference.proposers import Proposer, TreeOptions
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.layer_skip import LayerSkipProposer
from inference.proposers.ngram import NgramProposer
from inference.scheduling.auto import AutoProposer, Predicted
from scripts.benchmark_contenders import AS, LENGTH, MATCH, Contender, drafting_arguments
from scripts.benchmark_protocol import Answer, Crew, Handler, serve
from scripts.benchmark_transformers import build_theirs, check_layers, load_draft
from scripts.common import load_target, open_engine
from scripts.drafting import add_drafting_options, load_proposer

HOST_ENGINES = ("packed", "compiled")
"""Engines whose speed depends on the number of threads in ways that are measured."""
PLAIN_ROUND = 2
"""Tokens of a text whose only round has no drafts: the first is the prefill's."""


def build(settings: dict[str, Any]) -> Handler | OursTogether:
    """Load the target, and what the contender needs beside it.

    Args:
        settings: "contender" as `Contender.to_dict`, "name" of it, and the model options of
            `scripts.common`. With "together", the name of an engine, there is no contender yet.
    """
    args = argparse.Namespace(**settings["model"])
    template = settings["model"]["chat_template"]
    target = load_target(args, None if template is None else Path(template))
    if "together" in settings:
        engine = opened(target, settings["together"], choose_threads=args.threads is None)
        return OursTogether(target, engine, args.target)
    found = Contender(settings["name"], **settings["contender"])
    if found.kind == "ours":
        engine = opened(target, found.settings.get("engine"), choose_threads=args.threads is None)
        return Ours(target, found, args.target, engine)
    return build_theirs(target, found, args.target)


class Ours:
    """This project's decoder, greedy.

    Args:
        target: the model.
        found: which drafts.
        name: folder or hub id of the target.
        engine: that decodes; None decodes by the target itself.
    """

    def __init__(
        self, target: TargetModel, found: Contender, name: str, engine: Engine | None
    ) -> None:
        self.target, self.found, self._engine = target, found, engine
        self._make = proposer_maker(target, found, name, self._engine)
        self._proposer: Proposer | None = None

    def warm_up(self, prompts: list[list[int]], longest: int, new_tokens: int) -> None:
        """Decode once, with drafts that remember nothing of earlier measurements, and a text so
        short that its only round is a plain step, which engine `compiled` has another graph for.

        What `--size auto` learns from it, it forgets: the warm-up's text is none.
        """
        self._proposer = None if self._make is None else self._make()
        self.decode(prompts, new_tokens)
        self.decode(prompts, PLAIN_ROUND)
        if isinstance(self._proposer, AutoProposer):
            self._proposer = self._proposer.fresh()

    def decode(self, prompts: list[list[int]], new_tokens: int) -> Answer:
        """Decode one batch."""
        count = Rounds(self._proposer if isinstance(self._proposer, AutoProposer) else None)
        start = time.perf_counter()
        made = self._generate(prompts, new_tokens, count)
        self._drain()
        seconds = time.perf_counter() - start
        prefill = min(made.seconds["prefill"], seconds)
        return Answer(
            made.sequences,
            seconds,
            prefill,
            len(prompts),
            parts_of(made.seconds, seconds - prefill),
            None if self._proposer is None else count.forwards[1:],
            *count.told,
        )

    def _generate(self, prompts: list[list[int]], new_tokens: int, count: Rounds) -> Generation:
        if self._proposer is None:
            return plain_generate(
                self.target, prompts, max_new_tokens=new_tokens, engine=self._engine
            )
        return speculative_generate(
            self.target,
            self._proposer,
            prompts,
            max_new_tokens=new_tokens,
            engine=self._engine,
            on_token=count.on_token,
            on_counts=count.on_counts,
        )

    def _drain(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)


class OursTogether(Crew):
    """Several decoders of this project that share the target and an engine.

    Args:
        target: the model.
        engine: that decodes; None decodes by the target itself.
        name: folder or hub id of the target.
    """

    def __init__(self, target: TargetModel, engine: Engine | None, name: str) -> None:
        self.target, self.engine, self.name = target, engine, name
        self._members: dict[str, Ours] = {}

    def join(self, who: str, contender: dict[str, Any]) -> None:
        """One more.

        Args:
            who: its name.
            contender: as `Contender.to_dict`.
        """
        found = Contender(who, **contender)
        self._members[who] = Ours(self.target, found, self.name, self.engine)

    def member(self, who: str) -> Ours:
        """One of them.

        Args:
            who: its name.
        """
        return self._members[who]


def opened(target: TargetModel, engine: str | None, choose_threads: bool) -> Engine | None:
    """An engine by name; None for the target itself.

    Args:
        target: the model.
        engine: its name.
        choose_threads: measure how many are fastest, where the engine is one that does.
    """
    if engine in HOST_ENGINES and choose_threads:
        return open_engine(argparse.Namespace(engine=engine, threads=None), target)
    return None if engine is None else build_engine(target, engine)


class Rounds:
    """Counts what every forward did: [sequences, nodes, depth, tokens emitted], the prefill first.

    Args:
        auto: what decided in every round, if anything did.

    Attributes:
        forwards: the counts; of the largest and the deepest tree.
        drafted: with `auto`, of each forward the sequences whose drafts a network made.
    """

    def __init__(self, auto: AutoProposer | None = None) -> None:
        self.forwards: list[list[int]] = []
        self.drafted: list[int] = []
        self._expected = Predicted()
        self._auto, self._row = auto, -1
        self._seen = Predicted() if auto is None else auto.predicted

    @property
    def told(self) -> tuple[list[int] | None, list[float] | None]:
        """For `Answer`: drafted and expected, the prefill's left out."""
        if self._auto is None:
            return None, None
        found = self._expected
        return self.drafted[1:], [found.tokens, found.seconds, found.plain_seconds]

    def on_token(self, row: int, tokens: list[int]) -> None:
        """Called for each running sequence after each forward, in the order of the rows."""
        if row <= self._row or not self.forwards:  # the next forward starts over
            self.forwards.append([0, 0, 0, 0])
            self._look()
        self._row = row
        self.forwards[-1][0] += 1
        self.forwards[-1][3] += len(tokens)

    def _look(self) -> None:
        """What was decided for the forward whose first tokens come now."""
        if self._auto is None:
            return
        new, self._seen = self._auto.predicted - self._seen, self._auto.predicted
        self.drafted.append(new.drafted)
        self._expected += new

    def on_counts(self, done: RoundCounts) -> None:
        """Called after `on_token`."""
        now = self.forwards[-1]
        now[1] = max(now[1], done.width)
        now[2] = max(now[2], done.depth)


def parts_of(seconds: dict[str, float], decoding: float) -> dict[str, float]:
    """`Generation.seconds` by part of the step; what is not told apart is the host's.

    Args:
        seconds: by phase, with "prefill" and the "total" of what comes after it.
        decoding: seconds after the prefill, by our clock.
    """
    parts = {name: value for name, value in seconds.items() if name not in ("prefill", "total")}
    parts["verify"] = parts.pop("target", 0.0) + parts.get("verify", 0.0)
    return {**parts, "host": max(decoding - sum(parts.values()), 0.0)}


def proposer_maker(
    target: TargetModel, found: Contender, name: str, engine: Engine | None = None
) -> Callable[[], Proposer] | None:
    """Makes the drafts' source anew; None for decoding without.

    Args:
        target: the model.
        found: one of ours.
        name: folder or hub id of the target.
        engine: that will decode; None is the eager one.

    Raises:
        ValueError: settings that say nothing or contradict each other.
    """
    if found.source is None:
        return None
    if found.source in AS:
        return _as_theirs(target, found, name)
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_drafting_options(parser)
    parser.set_defaults(rule="match", temperature=0.0)
    words = drafting_arguments(found)
    try:
        parser.parse_args(words)
    except argparse.ArgumentError as error:
        raise ValueError(f"{found.name}: {error}") from error
    return lambda: load_proposer(parser.parse_args(words), target, engine)


def _as_theirs(target: TargetModel, found: Contender, name: str) -> Callable[[], Proposer]:
    """The drafts of transformers' decoder with the same settings."""
    settings = found.settings
    kind = AS[found.source or ""]
    if kind == "prompt-lookup":
        count, match = int(settings.get("length", LENGTH)), int(settings.get("match", MATCH))
        return lambda: NgramProposer(count + 1, count, 1, max_ngram=match, occurrence="first")
    if "length" not in settings:
        raise ValueError(
            f"{found.name}: length=K is needed; transformers' own lengths change with its guesses"
        )
    count = int(settings["length"])
    if kind == "early-exit":
        first = int(settings["first"])
        check_layers(target, found.name, first)
        return lambda: LayerSkipProposer(first, width=1, depth=count)
    draft = load_draft(target, found, name)
    options = TreeOptions(size=count + 1, depth=count, top_k=1)
    return lambda: DraftModelProposer(draft, options)


if __name__ == "__main__":
    serve(build, torch.get_num_threads)
