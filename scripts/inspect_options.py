"""What `scripts.inspect_mask` looks at: its own options, over those of a recipe."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from training.config import parse_config
from training.options.drafter import DecoderOptions, DFlashOptions


@dataclass(frozen=True)
class Inspection:
    """Target and data, as a run has them; the defaults are those of a run.

    Attributes:
        target: hub id or folder.
        sources: names as `training.data.sources.parse_source` takes them.
        split: of hub data sets.
        limit: rows used of each source.
        chat_template: replaces the tokenizer's.
        streaming, shuffle_buffer, packed, buckets, max_length, skip_bad: of the data section.
        batch_size, seed: of the run.
        family: of the head, or None.
        window: sliding window of its layers, or None.
    """

    target: str
    sources: list[str]
    split: str = "train"
    limit: int | None = None
    chat_template: Path | None = None
    streaming: bool = False
    shuffle_buffer: int = 0
    packed: bool = True
    buckets: list[int] = field(default_factory=list)
    max_length: int = 1024
    skip_bad: bool = False
    batch_size: int = 1
    seed: int = 0
    family: str | None = None
    window: int | None = None


def inspection(args: argparse.Namespace) -> Inspection:
    """The recipe's settings with what the command line says instead.

    Raises:
        ValueError: something is missing, out of range or without effect.
    """
    check(args)
    found = from_recipe(args.recipe) if args.recipe is not None else None
    given = {
        "target": args.target,
        "sources": args.data,
        "split": args.split,
        "chat_template": args.chat_template,
        "max_length": args.max_length,
    }
    settings = {} if found is None else vars(found)
    settings = settings | {name: value for name, value in given.items() if value is not None}
    for name, option in (("target", "--target"), ("sources", "--data")):
        if name not in settings:
            raise ValueError(f"{option} is needed, or --recipe")
    if args.max_length is not None and settings.get("buckets"):
        raise ValueError("--max-length contradicts the recipe's data.buckets: drop it")
    if args.mask == "" and settings.get("family") is None:
        raise ValueError("--mask needs a family here, or --recipe: --mask eagle3")
    return Inspection(**settings)


def check(args: argparse.Namespace) -> None:
    """Refuse values out of range and options without effect.

    Raises:
        ValueError: naming the option.
    """
    for name, least in (("limit", 1), ("row", 0), ("document", 0), ("sequence", 0), ("depth", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}")
    if args.max_length is not None and args.max_length < 4:
        raise ValueError(f"--max-length must be at least 4, got {args.max_length}")
    if args.sequence is None:
        for name in ("mask", "max_length"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} has no effect without --sequence")


def from_recipe(path: Path) -> Inspection:
    """The settings of a run.

    Raises:
        ValueError: the file is no config, or its answers are not there yet.
    """
    config = parse_config(["--config", str(path)])
    data, head = config.data, config.drafter
    sources = list(data.train)
    if data.regenerate:
        answers = Path(data.answers or Path(config.run.out) / "answers.jsonl")
        if not answers.is_file():
            raise ValueError(
                f"{path}: data.regenerate has the target answer the prompts first, and {answers} "
                "is not there yet: start the run, or look at other rows with --data"
            )
        sources = [str(answers)]
    jetspec = isinstance(head, DFlashOptions) and head.causal
    return Inspection(
        target=config.target.name,
        sources=sources,
        split=data.split,
        limit=None if data.regenerate else data.limit,
        chat_template=None if data.chat_template is None else Path(data.chat_template),
        streaming=data.streaming,
        shuffle_buffer=data.shuffle_buffer,
        packed=data.pack,
        buckets=data.buckets,
        max_length=data.max_length,
        skip_bad=data.skip_bad_rows,
        batch_size=config.run.batch_size,
        seed=config.run.seed,
        family="jetspec" if jetspec else head.family,
        window=head.sliding_window if isinstance(head, DecoderOptions) else None,
    )
