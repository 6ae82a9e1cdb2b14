"""The folder of an evaluation: what goes into result.json and records.jsonl."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafters import Drafter, TargetModel
from inference.measuring.evaluation import Report
from inference.measuring.run_records import FORMAT, Run, write_run
from inference.prediction.formulas import expected_tokens
from inference.prediction.rounds import geometric
from inference.proposers import HeadProposer, Proposer
from inference.proposers.adaptive import AdaptiveProposer
from inference.proposers.compose import ComposedProposer
from inference.scheduling.auto import AutoProposer
from scripts.evaluate_grid import GridCell, plain_options
from training.provenance import provenance
from training.records import read_lines

TRAINING = {
    "train/tokens": "tokens",
    "train/loss": "loss",
    "eval/acceptance_length": "acceptance_length",
    "eval/accepted_per_round": "accepted_per_round",
}
"""What of a training run's metrics is kept, and its name here."""


def check_out(folder: Path) -> None:
    """Refuse, before anything is measured, a place that no folder can be written to.

    Raises:
        ValueError: it is a file or named like one, lies in one, or may not be written to.
    """
    if folder.suffix == ".json" or folder.is_file():
        raise ValueError(
            f"--out {folder}: a run is a folder with result.json and records.jsonl: name a folder"
        )
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"--out {folder}: {there} is no folder that can be written to")


def cell_result(one: GridCell, report: Report) -> dict[str, Any]:
    """A cell of `result.json`."""
    return {
        "temperature": one.args.temperature,
        "rule": one.args.rule,
        "size": one.args.size,
        "name": one.name,
        **report.to_dict(),
        "options": one.options(),
        "prediction": None,
        "reliability": report.reliability(),
        "simulated": simulated(one, report),
    }


def simulated(one: GridCell, report: Report) -> dict[str, float | None] | None:
    """What theory says of simulated drafts; None of others.

    Returns:
        "alpha", "depth"; "formula" of arXiv:2211.17192, and what is "expected" of texts that end,
        both tokens per round; None without a round.
    """
    alpha, depth = one.args.simulate, one.args.depth
    if alpha is None:
        return None
    most = one.args.max_new_tokens
    walks = [geometric(len(each.tokens) - 1, most, alpha, depth) for each in report.requests]
    rounds = sum(walk.rounds for walk in walks)
    return {
        "alpha": alpha,
        "depth": depth,
        "formula": expected_tokens(alpha, depth),
        "expected": sum(walk.tokens for walk in walks) / rounds if rounds else None,
    }


def run_result(
    args: argparse.Namespace,
    target: TargetModel,
    grid: Sequence[GridCell],
    cells: list[dict[str, Any]],
) -> dict[str, Any]:
    """All of `result.json`."""
    proposers = [one.cell.proposer for one in grid]
    tables = [each.costs for each in proposers if isinstance(each, AutoProposer)]
    heads = [head for each in proposers if (head := head_of(each)) is not None]
    return {
        "format": FORMAT,
        "settings": plain_options(args),
        **provenance(),
        "target": {
            "name": args.target,
            "fingerprint": target.fingerprint(),
            "dtype": str(target.dtype).removeprefix("torch."),
        },
        "head": described(args.head, heads[0]) if heads else None,
        "cells": cells,
        "costs": tables[0].to_dict() if tables else None,
        "training": None if args.head is None else training_history(Path(args.head)),
    }


def head_of(proposer: Proposer) -> Drafter | None:
    """The trained head that drafts, alone or among others; None if there is none."""
    if isinstance(proposer, HeadProposer):
        return proposer.drafter
    parts: list[Proposer] = []
    if isinstance(proposer, ComposedProposer):
        parts = list(proposer.proposers)
    elif isinstance(proposer, AdaptiveProposer):
        parts = list(proposer.proposers.values())
    return next((head for part in parts if (head := head_of(part)) is not None), None)


def described(name: str, head: Drafter) -> dict[str, Any]:
    """What a reader wants to know of a head."""
    return {"name": name, "type": head.family, "parameters": head.num_parameters_trained()}


def training_history(head: Path) -> list[dict[str, Any]] | None:
    """What the run that trained a head wrote about it, if the head still lies in its folder.

    Args:
        head: its folder.
    """
    path = head.parent / "metrics.jsonl"
    if not path.is_file():
        return None
    by_step: dict[int, dict[str, Any]] = {}
    for row in read_lines(path):
        kept = {name: row[key] for key, name in TRAINING.items() if key in row}
        if kept and "step" in row:
            by_step.setdefault(row["step"], {"step": row["step"]}).update(kept)
    return list(by_step.values()) or None


def write_out(
    folder: Path, result: dict[str, Any], reports: Sequence[Report], target: TargetModel
) -> None:
    """Write the folder.

    Raises:
        ValueError, OSError: it cannot be written.
    """
    tokenizer = target.tokenizer
    requests = [
        request.record(number, tokenizer)
        for number, report in enumerate(reports)
        for request in report.requests
    ]
    rounds = [each for report in reports for request in report.requests for each in request.rounds]
    write_run(folder, Run(result, requests, rounds))
