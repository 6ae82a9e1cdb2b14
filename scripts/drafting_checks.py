"""Which options of where drafts come from go together."""

import argparse
import json
from pathlib import Path

from drafters import Drafter
from inference.shapes.static_tree import StaticTree, static_tree

NAMED = {"head": "head", "draft-model": "draft_model"}
"""Kinds that need a model's name, and the option that gives it."""


def read_tree(path: Path) -> StaticTree:
    """A shape from a JSON file.

    Args:
        path: a list of rank paths such as [[0], [0, 0], [1]], or an object with one as `tree`, as
            the config of a head is.

    Raises:
        ValueError: the file holds none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found = found["tree"] if isinstance(found, dict) else found
        paths = [tuple(int(rank) for rank in ranks) for ranks in found]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"--tree {path}: neither grown nor static nor a JSON file with a list of rank paths "
            f"such as [[0], [0, 0], [1]] ({error})"
        ) from error
    return static_tree(paths)


def fixed_options(drafter: Drafter | None, tree: str | None) -> dict[str, str]:
    """The options that have no effect, and why.

    Args:
        drafter: the head, if drafts come from one.
        tree: value of `--tree`.
    """
    fixed: dict[str, str] = {}
    own = None if drafter is None else drafter.config.tree
    if tree in (None, "grown"):
        return fixed
    if tree != "static":
        why = f"whose shape is that of {tree}"
    elif own is not None:
        why = f"whose head brings its own tree of {len(own)} draft tokens along (--tree grown)"
    else:
        return {**fixed, "branch": "whose shape is static, chosen by --size (or --tree grown)"}
    return {**fixed, "size": why, "depth": why, "branch": why}


def check_head(args: argparse.Namespace, drafter: Drafter) -> None:
    """Options that a head must be made for.

    Args:
        args: of a parser with `add_drafting_options`.
        drafter: the head.

    Raises:
        ValueError: it is not made for them.
    """
    most = drafter.num_drafts
    if args.depth is not None and most is not None and args.depth > most:
        raise ValueError(f"--depth {args.depth}: this head drafts {most} tokens, no more: lower it")
    if args.min_confidence and drafter.confidence is None:
        raise ValueError(
            "--min-confidence needs a head with a confidence output, and this one has none: train "
            "one with confidence_head, or drop it"
        )


def check_names(args: argparse.Namespace, kind: str) -> None:
    """The models and layers that a kind needs are there, and no others.

    Args:
        args: of a parser with `add_drafting_options`.
        kind: of drafts, a value of `--proposer`.

    Raises:
        ValueError: one is missing, or has no effect.
    """
    for other, name in NAMED.items():
        given, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if kind == other and given is None:
            raise ValueError(
                f"{flag} NAME is needed for drafts of a {kind}; or choose drafts that need no "
                "training with --proposer"
            )
        if kind != other and given is not None:
            raise ValueError(f"{flag} has no effect with --proposer {kind}: drop one of them")
    layers = [args.exit_layer, args.draft_layers]
    if kind == "layer-skip" and (layers[0] is None) == (layers[1] is None):
        raise ValueError("--proposer layer-skip needs either --exit-layer or --draft-layers")
    if kind != "layer-skip" and layers != [None, None]:
        raise ValueError("--exit-layer and --draft-layers belong to --proposer layer-skip")


def check_laws(args: argparse.Namespace) -> None:
    """Options of drafts at a temperature have no effect where none are chosen so.

    Args:
        args: of a parser with `add_drafting_options`.

    Raises:
        ValueError: one is given where it has no effect.
    """
    sampled = args.temperature > 0
    if args.draws is not None and not (sampled and args.rule in ("all", "rejection", "block")):
        raise ValueError("--draws has an effect with --rule rejection at a --temperature only")
    if args.sharpness is not None and not (sampled and args.rule in ("all", "coupled")):
        raise ValueError("--sharpness has an effect with --rule coupled at a --temperature only")
    if args.draft_temperature is not None and not sampled:
        raise ValueError("--draft-temperature has no effect at temperature 0: drop it")
