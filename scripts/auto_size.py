"""`--size auto`: what a command line's drafts cost here, and who decides by it."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from inference.auto import CONTEXTS, WIDTHS, auto_proposer, measured_costs
from inference.engine import Engine
from inference.proposers import Proposer


def decided_by_costs(
    args: argparse.Namespace, arms: Mapping[str, Proposer], engine: Engine, batch_size: int
) -> Proposer:
    """A proposer that chooses among arms in every round, by costs measured on the engine.

    Args:
        args: with `--head` and `--costs`, which say where the table is kept: in the head's folder,
            one for each engine, unless a path is given. A head from the hub keeps none.
        arms: proposers by name.
        engine: that will decode.
        batch_size: of its calls.
    """
    path = args.costs
    if path is None and args.head is not None and Path(args.head).is_dir():
        path = Path(args.head) / f"costs-{engine.name}.json"
    room = engine.target.max_length - WIDTHS[-1] - 1
    costs = measured_costs(
        engine,
        arms,
        path,
        contexts=[context for context in CONTEXTS if context < room] or [16],
        batches=sorted({1, batch_size}),
        say=lambda line: print(line, file=sys.stderr),
    )
    return auto_proposer(engine, arms, costs)
