"""`--size auto` on engine "device": what whole rounds cost here, and who decides by it."""

import argparse
from pathlib import Path

from inference.engine import Engine
from inference.engines import DeviceEngine
from inference.proposers import HeadProposer, Proposer
from inference.static.accept import STATIC_RULES
from inference.static.size_costs import CONTEXTS, ROOM, fastest_proposer, measured_rounds
from inference.static.sizes import ARM, SizedProposer, default_forms
from scripts.auto_decided import memory_of, say
from scripts.common import sampling_params


def decided_on_device(
    args: argparse.Namespace, proposer: Proposer, engine: DeviceEngine, batch_size: int
) -> SizedProposer:
    """A proposer that chooses a size for the whole batch before every round, plain steps included.

    Args:
        args: with `--head` and `--costs`, which say where seconds are kept: in the head's folder,
            one file for each rule, unless a path is given; with `--rule` and the options of
            sampling, at which they are measured.
        proposer: of the largest trees.
        engine: that will decode.
        batch_size: of its calls.

    Raises:
        ValueError: no head drafts, or not under one rule.
    """
    if not isinstance(proposer, HeadProposer):
        raise ValueError(
            "--size auto on engine device drafts with trained heads alone: use engine packed or "
            "compiled"
        )
    if args.rule not in STATIC_RULES:
        raise ValueError(
            f"--size auto on engine device is for one of the rules {', '.join(STATIC_RULES)}, not "
            f"{args.rule!r}: give a size, or use engine packed"
        )
    room = engine.target.max_length - ROOM
    table = measured_rounds(
        engine,
        proposer,
        default_forms(proposer.options),
        rounds_file(args, engine),
        rule=args.rule,
        sampling=sampling_params(argparse.Namespace(**{"seed": 0, **vars(args)})),
        contexts=[context for context in CONTEXTS if context < room] or [16],
        batches=sorted({1, batch_size}),
        say=say,
    )
    memory = memory_of(args, {ARM: proposer}, engine)
    priors = {} if memory is None else memory.read(say)
    return fastest_proposer(proposer, table, priors.get(ARM), memory=memory)


def rounds_file(args: argparse.Namespace, engine: Engine) -> Path | None:
    """Where seconds are kept: in the head's folder, or the path given; None if nowhere."""
    law = "sampled" if args.temperature > 0 else "greedy"
    if args.costs is None and args.head is not None and Path(args.head).is_dir():
        return Path(args.head) / f"rounds-{engine.name}-{args.rule}-{law}.json"
    return None if args.costs is None else Path(args.costs)
