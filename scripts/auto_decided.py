"""`--size auto`: what a command line's drafts cost here, how good they were, and who decides."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from inference.engine import Engine
from inference.proposers import Proposer
from inference.scheduling.auto import (
    CONTEXTS,
    AutoProposer,
    acceptance_hashes,
    measured_costs,
)
from inference.scheduling.costs import CostTable
from inference.scheduling.priors import Law, Memory
from inference.scheduling.round_parts import WIDTHS
from inference.static.sizes import FastestSizes, SizedProposer
from inference.verify import ALL_RULES


def decided_by_costs(
    args: argparse.Namespace, arms: Mapping[str, Proposer], engine: Engine, batch_size: int
) -> AutoProposer:
    """A proposer that chooses among arms in every round, by costs measured on the engine and by
    what earlier runs have learnt of the arms.

    Args:
        args: with `--head` and `--costs`, which say where both are kept: in the head's folder,
            unless a path is given. A head from the hub keeps none. With `--no-clock`.
        arms: proposers by name.
        engine: that will decode.
        batch_size: of its calls.
    """
    costs = costs_of(args, arms, engine, batch_size)
    memory = memory_of(args, arms, engine)
    priors = {} if memory is None else memory.read(say)
    return AutoProposer(arms, costs, priors, memory, clock=not args.no_clock)


def costs_of(
    args: argparse.Namespace, arms: Mapping[str, Proposer], engine: Engine, batch_size: int
) -> CostTable:
    """The cost table, from disk or measured.

    Args:
        args, arms, engine, batch_size: as above.
    """
    room = engine.target.max_length - WIDTHS[-1] - 1
    return measured_costs(
        engine,
        arms,
        costs_file(args, engine),
        contexts=[context for context in CONTEXTS if context < room] or [16],
        batches=sorted({1, batch_size}),
        say=say,
    )


def memory_of(
    args: argparse.Namespace, arms: Mapping[str, Proposer], engine: Engine
) -> Memory | None:
    """Where counts of acceptance are kept; None if nowhere.

    Args:
        args: also with `--rule` and `--temperature`; several rules at once keep none.
        arms: proposers by name.
        engine: that will decode.
    """
    path = costs_file(args, engine)
    if path is None or args.rule not in ALL_RULES:
        return None
    law = Law(args.rule, args.temperature)
    return Memory.beside(path, engine.target.fingerprint(), law, acceptance_hashes(arms))


def costs_file(args: argparse.Namespace, engine: Engine) -> Path | None:
    """Where the cost table is kept: one for each engine in the head's folder, or the path given."""
    if args.costs is None and args.head is not None and Path(args.head).is_dir():
        return Path(args.head) / f"costs-{engine.name}.json"
    return None if args.costs is None else Path(args.costs)


def keep_learnt(proposer: Proposer) -> None:
    """At the end of a run: leave what `--size auto` learnt to the next one.

    Args:
        proposer: of the run; of others there is nothing to keep.
    """
    if isinstance(proposer, AutoProposer):
        proposer.keep(say)
    elif isinstance(proposer, SizedProposer) and isinstance(proposer.chooser, FastestSizes):
        proposer.chooser.keep(say)


def say(line: str) -> None:
    """Tell the user, beside the output."""
    print(line, file=sys.stderr)
