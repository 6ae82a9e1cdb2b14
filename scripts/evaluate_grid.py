"""The cells of an evaluation: every temperature, rule and size asked for that means something.

At temperature 0 every rule follows the target's argmax, and without drafts (size 1) no rule decides
anything, so one rule, `match`, stands for all. `block` takes chains, simulated drafts rules that
promise the tokens of plain decoding, and options of drafting go to the cells that they have an
effect in. What is left out is said.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafters import Drafter, TargetModel
from drafters.export import read_head
from inference.engine import Engine
from inference.measuring.evaluation import Cell
from inference.proposers import Proposer
from inference.proposers.simulated import SimulatedProposer, check_simulated
from inference.proposers.undrafted import UndraftedProposer
from scripts.common import sampling_params
from scripts.drafting import load_proposer
from scripts.drafting_checks import check_laws

LAW_OPTIONS = ("draws", "sharpness", "draft_temperature")
"""Options of drafting that have an effect under some rules and temperatures only."""
OTHER_DRAFTS = (
    "head",
    "proposer",
    "draft_model",
    "exit_layer",
    "draft_layers",
    "tree",
    "branch",
    "min_confidence",
    "with_ngram",
    "costs",
    "no_clock",
    *LAW_OPTIONS,
)
"""Options that have no effect on simulated drafts."""
SIMULATED_DEPTH = 5


@dataclass(frozen=True)
class GridCell:
    """A cell, and the options that made it.

    Attributes:
        args: the command line with one temperature, rule and size, defaults filled in.
        cell: to measure.
    """

    args: argparse.Namespace
    cell: Cell

    @property
    def name(self) -> str:
        """Short, and different for each cell of a grid."""
        size = "" if self.args.size is None else f" size {self.args.size}"
        if self.args.simulate is not None:
            size = f" alpha {self.args.simulate:g}"
        return f"T={self.args.temperature:g} {self.args.rule}{size}"

    def options(self) -> dict[str, Any]:
        """What this cell was decoded with, as plain values."""
        return {**plain_options(self.args), "threads": torch.get_num_threads()}


def plain_options(args: argparse.Namespace) -> dict[str, Any]:
    """All options as plain values."""
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()
    }


def grid(args: argparse.Namespace) -> tuple[list[argparse.Namespace], list[str]]:
    """The command lines of all cells, and what was left out.

    Args:
        args: with lists in `temperature`, `rule` and `size`; an empty list of sizes leaves the size
            to the drafts.

    Raises:
        ValueError: nothing is left, or an option has no effect in any cell.
    """
    several = len(args.rule) > 1
    notes: list[str] = []
    wanted: dict[tuple[float, str, Any], None] = {}
    for temperature, rule, size in itertools.product(
        args.temperature, args.rule, args.size or [None]
    ):
        if several and (temperature == 0 or size == 1):
            why = "at temperature 0" if temperature == 0 else "without drafts (size 1)"
            note = f"{why} every rule gives the same: match stands for all"
            notes += [note] if note not in notes else []
            rule = "match"
        wanted[temperature, rule, size] = None
    cells = []
    for temperature, rule, size in wanted:
        one = argparse.Namespace(**vars(args))
        one.temperature, one.rule, one.size = temperature, rule, size
        if size != "auto" and "auto" in (args.size or ()):
            one.costs = None  # of the cells that decide by them
        if args.simulate is not None and len(wanted) > 1:
            try:
                check_simulated(rule, temperature)
            except ValueError as error:
                notes.append(f"T={temperature:g} {rule}: left out: {error}")
                continue
        cells.append(one)
    if not cells:
        raise ValueError("--rule, --temperature: no combination is left; " + "; ".join(notes))
    _share_law_options(args, cells)
    return cells, notes


def _share_law_options(args: argparse.Namespace, cells: Sequence[argparse.Namespace]) -> None:
    """Options of draft laws stay in the cells where they have an effect, and must have one."""
    for name in LAW_OPTIONS:
        given, errors = getattr(args, name), []
        for one in cells if given is not None else ():
            alone = {other: given if other == name else None for other in LAW_OPTIONS}
            try:
                check_laws(argparse.Namespace(**{**vars(one), **alone}))
            except ValueError as error:
                errors.append(error)
                setattr(one, name, None)
        if errors and len(errors) == len(cells):
            raise errors[0]


def load_cells(
    args: argparse.Namespace, target: TargetModel, engine: Engine | None
) -> tuple[list[GridCell], list[str]]:
    """Proposers of all cells, and what was left out.

    Args:
        args: see `grid`.
        target: that will verify.
        engine: that will decode; None is the eager one.

    Raises:
        ValueError: an option is missing, or has no effect.
    """
    wanted, notes = grid(args)
    found: list[GridCell] = []
    drafter = None
    if len(wanted) > 1 and args.head is not None and args.proposer in (None, "head"):
        drafter = read_head(args.head, target, target.dtype)  # once for all
    for one in wanted:
        proposer = _proposer(one, target, engine, drafter)
        if one.rule == "block" and not proposer.chains and len(wanted) > 1:
            notes.append(
                f"T={one.temperature:g} block size {one.size}: left out, block takes chains "
                "(--branch 1)"
            )
            continue
        found.append(GridCell(one, Cell(proposer, one.rule, sampling_params(one))))
    if not found:
        raise ValueError("--rule block takes chains: give --branch 1")
    return found, notes


def _proposer(
    args: argparse.Namespace, target: TargetModel, engine: Engine | None, drafter: Drafter | None
) -> Proposer:
    if args.simulate is not None:
        given = [name for name in OTHER_DRAFTS if getattr(args, name) is not None]
        if given or args.size is not None:
            flag = (given or ["size"])[0].replace("_", "-")
            raise ValueError(f"--{flag} has no effect on simulated drafts: drop it")
        check_simulated(args.rule, args.temperature)
        args.depth = SIMULATED_DEPTH if args.depth is None else args.depth
        return SimulatedProposer(args.simulate, args.depth)
    if args.size == 1:
        return UndraftedProposer()
    return load_proposer(args, target, engine, args.batch_size, drafter)
