"""Where drafts come from, by the options of a command line.

`--proposer` names the kind: a trained `head` (the default when `--head` is given), or one that
needs no training: `ngram` copies what followed the last tokens before, `suffix` does so from a
suffix automaton over prompt, output and earlier outputs, `draft-model` asks a smaller model with
the same tokenizer, `layer-skip` asks the target's own first layers. `--with-ngram` adds copied
children to the trees of a head or a draft model.

`--tree` says where the shape of a head's trees comes from: they are `grown` anew in each round
towards its likeliest paths, or they have one `static` shape, the head's own or that of a file.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from drafters import Drafter, MedusaDrafter, TargetModel
from drafters.export import read_head
from inference.engine import EagerEngine, Engine
from inference.engines import DeviceEngine
from inference.measuring.confidence import label_note
from inference.proposers import HeadProposer, Proposer, TreeOptions, build_proposer
from inference.proposers.compose import ComposedProposer
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.heads import default_tree
from inference.proposers.laws import proposal_kind
from inference.proposers.layer_skip import LayerSkipProposer
from inference.proposers.ngram import NgramProposer, by_match
from inference.proposers.options import DRAWS
from inference.proposers.suffix import SuffixProposer
from inference.sampling import SamplingParams
from inference.shapes.static_tree import StaticTree, static_tree
from scripts.auto_decided import decided_by_costs
from scripts.auto_device import decided_on_device
from scripts.drafting_checks import (
    check_head,
    check_laws,
    check_names,
    fixed_options,
    read_tree,
)

TREE: dict[str, Any] = {
    "size": 32,
    "depth": 5,
    "branch": 8,
    "draws": "all",
    "draft_temperature": None,
    "sharpness": 0.8,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "head": {**TREE, "draws": None, "min_confidence": 0.0, "with_ngram": False},
    "ngram": {"size": 32, "depth": 10, "branch": 8},
    "suffix": {"size": 32, "depth": 16, "branch": 8},
    "draft-model": {**TREE, "branch": 1, "with_ngram": False},
    "layer-skip": {"depth": 3, "branch": 1, "draws": "all", "draft_temperature": None},
}
"""The options of each kind, with their defaults; all others have no effect on it."""

AUTO_COPIES: dict[str, Any] = {"size": 16, "depth": 15, "branch": 1, "max_ngram": 10}
"""Of the copied drafts beside others under `--size auto`."""


OPTIONS = (
    "size",
    "depth",
    "branch",
    "draws",
    "draft_temperature",
    "sharpness",
    "min_confidence",
    "with_ngram",
)

FIELDS = {"branch": "top_k", "min_confidence": "min_survival"}
"""Options that `TreeOptions` has under another name."""


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
        "--tree",
        metavar="grown|static|FILE",
        help="the shape of the trees: grown in each round, static, or a JSON list of rank paths "
        "(default: the head's own where it has one, static for Medusa, else grown)",
    )
    add(
        "--size",
        type=size_option,
        metavar="N|auto",
        help="nodes per tree, root included (default: 32, or the tree that a head brings along); "
        "with --with-ngram half of them are copied; auto decides in every round what to draft, "
        "nothing included, and whether to copy instead",
    )
    add(
        "--costs",
        type=Path,
        metavar="PATH",
        help="--size auto: file with what rounds cost here, measured if it is not there or not of "
        "this machine (default: costs-ENGINE.json in the head's folder)",
    )
    add(
        "--no-clock",
        action="store_true",
        default=None,
        help="--size auto: decide by --costs alone, so that a run repeats choice for choice; "
        "otherwise rounds are timed, and decided about by what they take",
    )
    add(
        "--depth",
        type=int,
        metavar="N",
        help="longest drafted path, for heads of K drafts at most K (default: K, or 5; ngram 10, "
        "suffix 16, layer-skip 3)",
    )
    add(
        "--branch",
        type=int,
        metavar="N",
        help="children of a node, 1 drafts chains (default: 8; 1 for models and layers)",
    )
    _add_law_options(add)
    add(
        "--with-ngram",
        action="store_true",
        default=None,
        help="add children copied from the text so far",
    )


def _add_law_options(add: Any) -> None:
    """Options of how drafts are chosen from a draft law."""
    add(
        "--draws",
        choices=DRAWS,
        help="rule rejection or block at a temperature: draw all children of a node, or one beside "
        "its likeliest, or none (default: all; none for heads that draft several tokens at once)",
    )
    add(
        "--draft-temperature",
        type=float,
        metavar="F",
        help="factor on the temperature of the draft law (default: the head's calibrated one)",
    )
    add(
        "--sharpness",
        type=float,
        metavar="S",
        help="rule coupled at a temperature: how far the draft law is trusted beside the target's "
        "noise, less is more (default: 0.8)",
    )
    add(
        "--min-confidence",
        type=float,
        metavar="F",
        help="draft nothing behind a node from which the whole path would be accepted less often "
        "than this, by the head's confidence output (default: 0, draft all)",
    )


def load_proposer(
    args: argparse.Namespace,
    target: TargetModel,
    engine: Engine | None = None,
    batch_size: int = 1,
    drafter: Drafter | None = None,
) -> Proposer:
    """The proposer that the options ask for.

    Options that were not given get their values in `args`, so that what is recorded is what was
    used; None stays where an option does not apply.

    Args:
        args: of a parser with `add_drafting_options`.
        target: that will verify.
        engine: that will decode, which `--size auto` measures; None is the eager one.
        batch_size: of its calls; `--size auto` measures at it.
        drafter: of `--head`, where it was read before.

    Raises:
        ValueError: an option is missing, or has no effect.
    """
    if args.size == "auto":
        return _load_auto(args, target, engine or EagerEngine(target), batch_size, drafter)
    if args.costs is not None:
        raise ValueError("--costs has an effect with --size auto only: drop it")
    if args.no_clock:
        raise ValueError("--no-clock has an effect with --size auto only: drop it")
    kind = args.proposer or "head"
    check_names(args, kind)
    defaults = dict(DEFAULTS[kind])
    fixed = {name: f"not an option of {kind} drafts" for name in OPTIONS if name not in defaults}
    if kind == "head" and drafter is None:
        drafter = read_head(args.head, target, target.dtype)
    shape, tree = _tree(args, kind, drafter)
    fixed |= fixed_options(drafter, tree)
    if drafter is not None:
        check_head(args, drafter)
        defaults["depth"] = drafter.num_drafts or defaults["depth"]
    options: dict[str, Any] = {}
    for name in OPTIONS:
        given = getattr(args, name)
        if name not in fixed:
            options[name] = defaults[name] if given is None else given
        elif given is not None:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} has no effect on these drafts, {fixed[name]}: drop it")
    check_laws(args)
    vars(args).update(options, proposer=kind, tree=tree)
    proposer = _build(args, kind, drafter, target, options, shape)
    if args.min_confidence and args.rule != "all":
        note = confidence_note(proposer, args.rule, args.temperature)
        if note is not None:
            print(f"--min-confidence: {note}", file=sys.stderr)
    return proposer


def _tree(
    args: argparse.Namespace, kind: str, drafter: Drafter | None
) -> tuple[StaticTree | None, str | None]:
    """The shape, if it is known, and the value of `--tree`; None without such an option."""
    given = args.tree
    if kind not in ("head", "draft-model"):
        if given is not None:
            raise ValueError(
                f"--tree has no effect on these drafts, not an option of {kind} drafts"
            )
        return None, None
    own = None if drafter is None else drafter.config.tree
    if given is None:
        static = own is not None or isinstance(drafter, MedusaDrafter)
        given = "static" if static and args.branch != 1 else "grown"
    if given == "grown":
        return None, given
    if given == "static":
        return None if own is None else static_tree([tuple(path) for path in own]), given
    return read_tree(Path(given)), given


def _build(
    args: argparse.Namespace,
    kind: str,
    drafter: Drafter | None,
    target: TargetModel,
    options: dict[str, Any],
    shape: StaticTree | None,
) -> Proposer:
    tree = {FIELDS.get(name, name): value for name, value in options.items()}
    with_ngram = tree.pop("with_ngram", False)
    if with_ngram and "size" in tree:
        tree["size"] = max(2, (tree["size"] + 1) // 2)  # the other half is for copied children
    if kind == "ngram":
        return NgramProposer(**options)
    if kind == "suffix":
        return SuffixProposer(**options)
    proposer: HeadProposer | DraftModelProposer
    if kind == "layer-skip":
        width = tree.pop("top_k")
        return LayerSkipProposer(args.exit_layer, args.draft_layers, width=width, **tree)
    if args.tree == "static" and shape is None:  # of no head's own
        columns = target.vocab_size if drafter is None else drafter.config.draft_vocab_size
        shape = default_tree(tree["depth"], tree["size"], columns or target.vocab_size)
    tree |= {"shape": shape} if shape is not None else {"grown": True}
    if drafter is not None:
        proposer = build_proposer(drafter, TreeOptions(**tree))
    else:
        draft = TargetModel.load(args.draft_model, target.dtype, target.device)
        proposer = DraftModelProposer(draft, TreeOptions(**tree))
    if not with_ngram:
        return proposer
    if "size" in options:
        size = options["size"]
    else:
        assert shape is not None
        size = shape.num_nodes + TREE["size"] // 2
    return ComposedProposer(proposer, NgramProposer(size=size), size=size)


def confidence_note(proposer: Proposer, rule: str, temperature: float) -> str | None:
    """One line if a head's confidence output does not predict what this decoder will do.

    Args:
        proposer: of a head, alone or in a composed one; others have no confidence output.
        rule: of acceptance.
        temperature: of the sampling.
    """
    heads = proposer.proposers if isinstance(proposer, ComposedProposer) else (proposer,)
    for head in heads:
        if isinstance(head, HeadProposer) and head.drafter.confidence is not None:
            kind = proposal_kind(rule, SamplingParams(temperature), head.draws)
            return label_note(head.drafter.config.confidence_rule, rule, kind, temperature)
    return None


def _load_auto(
    args: argparse.Namespace,
    target: TargetModel,
    engine: Engine,
    batch_size: int,
    drafter: Drafter | None,
) -> Proposer:
    """What `--size auto` decides among: the drafts that the other options ask for, copied ones and
    none.
    """
    if args.proposer == "layer-skip" or args.tree not in (None, "grown"):
        raise ValueError(
            "--size auto grows trees of any size: it goes with trained heads, ngram, suffix and "
            "draft models, and not with --tree"
        )
    if args.with_ngram:
        raise ValueError("--with-ngram has no effect with --size auto, which copies: drop it")
    kind = args.proposer or "head"
    alone = argparse.Namespace(**{**vars(args), "size": None, "costs": None, "no_clock": None})
    if kind == "head":
        alone.tree = "grown"
    arms = {kind: load_proposer(alone, target, drafter=drafter)}
    if isinstance(engine, DeviceEngine):
        if args.no_clock:
            raise ValueError(
                "--no-clock has no effect with engine 'device', which times no rounds: drop it"
            )
        vars(args).update({**vars(alone), "size": "auto", "costs": args.costs})
        return decided_on_device(args, arms[kind], engine, batch_size)
    if args.min_confidence:
        raise ValueError(
            "--min-confidence has no effect with --size auto, which itself tells where going on "
            "cannot pay: drop it"
        )
    if kind == "ngram":
        arms = dict(by_match(arms[kind]))
    elif kind != "suffix":
        arms |= by_match(NgramProposer(**AUTO_COPIES))
    vars(args).update(
        {**vars(alone), "size": "auto", "costs": args.costs, "no_clock": args.no_clock}
    )
    return decided_by_costs(args, arms, engine, batch_size)


def size_option(text: str) -> int | str:
    """A value of `--size`."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number of nodes or auto, not {text!r}") from None


def _layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"layers are numbers separated by commas, not {text!r}"
        ) from None
