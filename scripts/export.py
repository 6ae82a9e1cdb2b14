"""Write a trained head for serving, read it back as an engine would, and compare logits.

    python -m scripts.export outputs/eagle3/head --to sglang --target targets/smollm2-135m \\
        --out exports/eagle3 --runs outputs/eagle3/evaluation
    python -m scripts.export exports/eagle3 --check --target targets/smollm2-135m

The second line writes nothing: it reads a folder as strictly as no engine does, and fails on
unknown, missing, mis-shaped, never-trained or non-finite tensors and on a contradicting config.
--to says as what; left out, it is told from the folder. Every export travels with
`golden.logits`, logits that tell later whether a loaded head is still the same, and with a model
card, `README.md` (`HEADWAY.md` in the folder of a whole target, whose own card stays): serving
lines for each engine, the training data, and of --runs (folders of `scripts.evaluate --out`) the
acceptance table with its commands. An export already at --out is replaced once the new one is
whole; any other folder there is refused.

    python -m scripts.export outputs/eagle3/head --to sglang --target Qwen/Qwen3-4B \\
        --out exports/eagle3 --push-to-hub me/qwen3-4b-eagle3 --private

pushes the folder, in one commit, once it has passed every check. The last line is one JSON object.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from drafters import Drafter, TargetModel
from drafters.export import (
    FORMATS,
    NATIVE,
    CardFacts,
    Export,
    check_as,
    check_golden,
    dialect_named,
    format_of,
    read_as,
    read_head,
    write_as,
)
from drafters.export.card import base_model_of
from drafters.export.engines import engine_problems
from drafters.export.folder import CONFIG, ExportError, read_json
from drafters.export.golden import GOLDEN
from drafters.export.stitched.mtp_forms import STITCHED
from drafters.hub import check_can_push, head_folder, is_hub_id, push_folder, split_revision
from scripts.card_facts import results, training_record, training_text
from scripts.common import add_options, load_target, parser_for, print_json, run
from training.provenance import provenance

ROUNDING = 0.01
"""What logits may differ by where a dialect leaves out the draft vocabulary: other sizes of a
product round differently. What was written is compared bit for bit before the folder gets its name.
"""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("head", metavar="HEAD", help="folder or hub id of the head (user/name[@revision])")
    add_options(parser, "--target", "--dtype", "--device", "--threads")
    add("--to", choices=FORMATS, metavar="DIALECT", help=", ".join(FORMATS))
    add("--out", metavar="DIR", help="folder to write")
    add("--check", action="store_true", help="read HEAD strictly, write nothing")
    add(
        "--with-embeddings",
        action="store_true",
        help="also write the target's embedding, for engines that do not share it",
    )
    add("--runs", nargs="+", default=[], type=Path, metavar="RUN", help="evaluations for the card")
    add("--base-model", metavar="ID", help="hub id of the target, for the card")
    add("--push-to-hub", metavar="REPO", help="push what was written there (user/name)")
    add("--private", action="store_true", help="a repository that is created is private")
    args = parser.parse_args(argv)
    writing = (args.out, args.with_embeddings, args.runs, args.base_model, args.push_to_hub)
    if args.check and any(writing):
        parser.error(
            "--check writes nothing: --out, --with-embeddings, --runs, --base-model and "
            "--push-to-hub have no effect"
        )
    if not args.check and not (args.to and args.out):
        parser.error("--to DIALECT and --out DIR are needed to write, or --check to read")
    if args.private and not args.push_to_hub:
        parser.error("--private has no effect without --push-to-hub")
    return args


def main(argv: list[str] | None = None) -> None:
    """Export or check, print the summary."""
    args = parse_args(argv)
    if args.push_to_hub:
        check_can_push(args.push_to_hub, args.private)
    target = load_target(args)
    if args.check:
        check(head_folder(args.head), args.to, target)
        return
    head = read_head(args.head, target, target.dtype)
    base = base_model(args, head)
    place = args.push_to_hub or args.out
    facts = CardFacts(base_model=base, place=place, results=results(args.runs, head))
    export = write(args.head, head, args.to, args.out, args.with_embeddings, facts)
    report(export, push(args, export) if args.push_to_hub else None)


def base_model(args: argparse.Namespace, head: Drafter) -> str | None:
    """The hub id of the target: as it was said, as the head recorded it, or as it was loaded.

    Raises:
        ValueError: no hub id, or none is known and the head is to be pushed.
    """
    name, _ = split_revision(args.target)
    loaded = name if is_hub_id(name) and not Path(args.target).is_dir() else None
    base = args.base_model or base_model_of(head) or loaded
    if args.base_model and not is_hub_id(args.base_model):
        raise ValueError(f"--base-model {args.base_model}: that is no hub id (user/name)")
    if args.push_to_hub and base is None:
        raise ValueError(
            f"--push-to-hub: the head's target is recorded as {head.config.target_name!r}, which "
            "nobody finds on the hub: say what it is there with --base-model user/name"
        )
    return base


def write(
    name: str, head: Drafter, to: str, out: str, with_embeddings: bool, facts: CardFacts
) -> Export:
    """Write a head with what its folder records of its training.

    Args:
        name: of the head: folder or hub id.
        head: read from there.
        to: the format.
        out: the folder.
        with_embeddings: see `drafters.export.writing.write_folder`.
        facts: for the card, all but the training.
    """
    source = head_folder(name)
    if Path(out).resolve() == source.resolve():
        raise ValueError(f"--out {out} is the head itself, which would be replaced: name another")
    training = training_record(source)
    facts = replace(facts, training=training_text(training))
    record = provenance() | ({"training": training} if training else {})
    return write_as(to, head, out, with_embeddings, record, facts)


def push(args: argparse.Namespace, export: Export) -> str:
    """Push what was written; the address of the commit.

    Raises:
        ValueError: the head read back is another, or the hub refuses.
    """
    rounds = "draft_vocab" in export.left_out  # more rows are multiplied then
    if not export.difference <= (ROUNDING if rounds else 0.0):
        raise ValueError(
            f"--push-to-hub: nothing was pushed: logits of the head read back from {export.folder} "
            f"differ by {export.difference:.1g}"
        )
    message = f"{export.format} export by Headway"
    return push_folder(export.folder, args.push_to_hub, args.private, message)


def report(export: Export, pushed: str | None = None) -> None:
    """Print what was written, for people, and as the last line.

    Args:
        export: that was written.
        pushed: where to.
    """
    print(f"wrote {export.folder}: {export.num_tensors} tensors, {export.bytes / 1e6:.1f} MB")
    served = ", ".join(export.served) or "no engine as it is"
    print(f"for {served}; read back: logits differ by {export.difference:.1g}")
    print(f"how to serve it: {export.folder / export.card}")
    if export.left_out:
        print(f"left out, this dialect has no place for it: {', '.join(export.left_out)}")
    for note in export.notes:
        print(f"note: {note}")
    if pushed is not None:
        print(f"pushed: {pushed}")
    print_json(
        {
            "format": export.format,
            "served": export.served,
            "path": str(export.folder),
            "num_tensors": export.num_tensors,
            "bytes": export.bytes,
            "logits_equal": export.difference == 0.0,
            "left_out": export.left_out,
            "notes": export.notes,
            "pushed": pushed,
        }
    )


def check(folder: Path, name: str | None, target: TargetModel) -> None:
    """Read an export strictly, and its golden logits where it has some.

    Args:
        folder: of the export.
        name: of the dialect; None tells it from the folder.
        target: it is to be served with.

    Raises:
        ExportError: naming everything that is wrong.
    """
    name = name or format_of(folder)
    if name == NATIVE:
        read_json(folder / CONFIG)  # raises where it is damaged
        raise ExportError(f"{folder} is a native head, which is checked whenever it is loaded")
    tensors = check_as(name, folder, target)
    head = read_as(name, folder, target)
    engines = {} if name in STITCHED else engines_say(folder, name, head)
    golden = check_golden(head, folder) if (folder / GOLDEN).is_file() else None
    said = "no golden logits" if golden is None else f"golden logits differ by {golden:.1g}"
    print(f"{folder}: a whole {name} export, {len(tensors)} tensors, {said}")
    for engine, faults in engines.items():
        print(f"{engine}: {'; '.join(faults) or 'uses all of it, and as the head does'}")
    print_json({"format": name, "tensors": len(tensors), "golden": golden, "engines": engines})


def engines_say(folder: Path, name: str, head: Drafter) -> dict[str, list[str]]:
    """What the loaders of engines, as read in their sources, would not use of an export.

    Args:
        folder: of the export.
        name: of its dialect.
        head: that was read from it.

    Returns:
        By engine and version; an empty list where the engine computes what the head does.

    Raises:
        ExportError: the newest version of an engine that the dialect is for would not.
    """
    found = engine_problems(folder, head)
    served = dialect_named(name).served(read_json(folder / CONFIG))
    newest = {loader.engine: (loader, faults) for loader, faults in found.items()}
    wrong = [
        f"{engine} {loader.versions[-1]}: {'; '.join(faults)}"
        for engine, (loader, faults) in newest.items()
        if engine in served and faults
    ]
    if wrong:
        raise ExportError(f"{folder}: {'; '.join(wrong)}")
    return {
        f"{loader.engine} {', '.join(loader.versions)}": faults for loader, faults in found.items()
    }


if __name__ == "__main__":
    run(main)
