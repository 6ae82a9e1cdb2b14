"""Where drafts come from, by the options of a command line.

`--proposer` names the kind: a trained `head` (the default when `--head` is given), or one that
needs no training: `ngram` copies what followed the last tokens before, `suffix` does so from a
suffix automaton over prompt, output and earlier outputs, `draft-model` asks a smaller model with
the same tokenizer, `layer-skip` asks the target's own first layers. `--with-ngram` adds copied
children to the trees of a head or a draft model.
"""

import argparse
from typing import Any

from drafters import Drafter, MedusaDrafter, TargetModel
from drafters.export import read_head
from inference.proposers import MedusaProposer, Proposer, TreeOptions, build_proposer
from inference.proposers.compose import ComposedProposer
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.growth import DRAWS
from inference.proposers.layer_skip import LayerSkipProposer
from inference.proposers.ngram import NgramProposer
from inference.proposers.suffix import SuffixProposer

TREE = {"size": 32, "depth": 5, "branch": 8, "draws": "all", "draft_temperature": None}
DEFAULTS: dict[str, dict[str, Any]] = {
    "head": {**TREE, "with_ngram": False},
    "ngram": {"size": 32, "depth": 10, "branch": 8},
    "suffix": {"size": 32, "depth": 16, "branch": 8},
    "draft-model": {**TREE, "branch": 1, "with_ngram": False},
    "layer-skip": {"depth": 3, "branch": 1, "draws": "all", "draft_temperature": None},
}
"""The options of each kind, with their defaults; all others have no effect on it."""

NAMED = {"head": "head", "draft-model": "draft_model"}
"""Kinds that need a model's name, and the option that gives it."""

OPTIONS = ("size", "depth", "branch", "draws", "draft_temperature", "with_ngram")


def add_drafting_options(parser: argparse.ArgumentParser) -> None:
    """All options that say where drafts come from."""
    group = parser.add_argument_group("drafts")
    add = group.add_argument
    add("--head", metavar="NAME", help="trained head: folder or hub id")
    add("--proposer", choices=tuple(DEFAULTS), help="kind of drafts (default: head)")
    add("--draft-model", metavar="NAME", help="draft-model: folder or hub id, same tokenizer")
    add("--exit-layer", type=int, metavar="E", help="layer-skip: draft with the first E layers")
    add(
        "--draft-layers",
        type=_layers,
        metavar="A,B,C",
        help="layer-skip: draft with these layers (from 0) instead of the first E",
    )
    add(
        "--size",
        type=int,
        metavar="N",
        help="nodes per tree, root included (default: 32, or the tree that a head brings along); "
        "with --with-ngram half of them are copied",
    )
    add(
        "--depth",
        type=int,
        metavar="N",
        help="longest drafted path; not for Medusa, which has its heads (default: 5; ngram 10, "
        "suffix 16, layer-skip 3)",
    )
    add(
        "--branch",
        type=int,
        metavar="N",
        help="children of a node, 1 drafts chains (default: 8; 1 for models and layers)",
    )
    add(
        "--draws",
        choices=DRAWS,
        help="rule rejection at a temperature: draw all children of a node, or one beside its "
        "likeliest (default: all)",
    )
    add(
        "--draft-temperature",
        type=float,
        metavar="F",
        help="factor on the temperature of the draft law (default: the head's calibrated one)",
    )
    add(
        "--with-ngram",
        action="store_true",
        default=None,
        help="add children copied from the text so far",
    )


def load_proposer(args: argparse.Namespace, target: TargetModel) -> Proposer:
    """The proposer that the options ask for.

    Options that were not given get their values in `args`, so that what is recorded is what was
    used; None stays where an option does not apply.

    Raises:
        ValueError: an option is missing, or has no effect.
    """
    kind = args.proposer or "head"
    _check_names(args, kind)
    fixed = {name: f"not an option of {kind} drafts" for name in OPTIONS}
    fixed = {name: why for name, why in fixed.items() if name not in DEFAULTS[kind]}
    drafter = read_head(args.head, target, target.dtype) if kind == "head" else None
    if drafter is not None:
        fixed |= fixed_options(drafter, args.branch)
    options: dict[str, Any] = {}
    for name in OPTIONS:
        given = getattr(args, name)
        if name not in fixed:
            options[name] = DEFAULTS[kind][name] if given is None else given
        elif given is not None:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} has no effect on these drafts, {fixed[name]}: drop it")
    _check_draws(args)
    vars(args).update(options, proposer=kind)
    return _build(args, kind, drafter, target, options)


def fixed_options(drafter: Drafter, branch: int | None) -> dict[str, str]:
    """The options that have no effect on a head, and why.

    Args:
        drafter: the head.
        branch: as given.
    """
    if not isinstance(drafter, MedusaDrafter):
        return {}
    fixed = {
        "depth": f"whose depth is its number of heads ({drafter.config.num_heads})",
        "draws": "which are the likeliest tokens of each head, none of them drawn",
    }
    if branch == 1:
        return {**fixed, "size": "which are a chain of the best token of each head"}
    fixed["branch"] = "whose tree has one shape, chosen by --size (or --branch 1: a chain)"
    if drafter.config.tree is not None:
        paths = len(drafter.config.tree)
        fixed["size"] = f"whose head brings its own tree of {paths} draft tokens along"
    return fixed


def _build(
    args: argparse.Namespace,
    kind: str,
    drafter: Drafter | None,
    target: TargetModel,
    options: dict[str, Any],
) -> Proposer:
    tree = {"top_k" if name == "branch" else name: value for name, value in options.items()}
    with_ngram = tree.pop("with_ngram", False)
    if with_ngram and "size" in tree:
        tree["size"] = max(2, (tree["size"] + 1) // 2)  # the other half is for copied children
    if kind == "ngram":
        return NgramProposer(**options)
    if kind == "suffix":
        return SuffixProposer(**options)
    proposer: Proposer
    if kind == "layer-skip":
        width = tree.pop("top_k")
        return LayerSkipProposer(args.exit_layer, args.draft_layers, width=width, **tree)
    if drafter is not None:
        proposer = build_proposer(drafter, TreeOptions(**tree))
    else:
        draft = TargetModel.load(args.draft_model, target.dtype, target.device)
        proposer = DraftModelProposer(draft, TreeOptions(**tree))
    if not with_ngram:
        return proposer
    if isinstance(proposer, MedusaProposer) and "size" not in options:  # a tree of its own
        size = len(proposer.shape.parents) + TREE["size"] // 2
    else:
        size = options["size"]
    return ComposedProposer(proposer, NgramProposer(size=size), size=size)


def _check_names(args: argparse.Namespace, kind: str) -> None:
    """The models and layers that a kind needs are there, and no others."""
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


def _check_draws(args: argparse.Namespace) -> None:
    """Options of drawn drafts have no effect where none are drawn."""
    drawn = args.rule in ("all", "rejection", "block") and args.temperature > 0
    if args.draws is not None and not drawn:
        raise ValueError("--draws has an effect with --rule rejection at a --temperature only")
    if args.draft_temperature is not None and args.temperature == 0:
        raise ValueError("--draft-temperature has no effect at temperature 0: drop it")


def _layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"layers are numbers separated by commas, not {text!r}"
        ) from None
