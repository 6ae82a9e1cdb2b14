"""Write a trained head for serving, read it back as an engine would, and compare logits.

    python -m scripts.export outputs/eagle3/head --to sglang --target targets/smollm2-135m \\
        --out exports/eagle3
    python -m scripts.export exports/eagle3 --check --target targets/smollm2-135m

The second line writes nothing: it reads a folder as strictly as no engine does, and fails on
unknown, missing, mis-shaped, never-trained or non-finite tensors and on a contradicting config.
--to says as what; left out, it is told from the folder. Every export travels with
`golden.safetensors`, logits that tell later whether a loaded head is still the same. An export
already at --out is replaced once the new one is whole; any other folder there is refused. The last
line is one JSON object.
"""

import argparse
from pathlib import Path

from drafters import TargetModel
from drafters.export import (
    FORMATS,
    NATIVE,
    Export,
    check_folder,
    check_golden,
    dialect_named,
    dialect_of,
    golden_inputs,
    golden_logits,
    read_as,
    read_head,
    write_as,
)
from drafters.export.folder import ExportError
from drafters.export.golden import GOLDEN
from scripts.common import add_options, load_target, parser_for, print_json, run
from training.provenance import provenance


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    parser.add_argument("head", metavar="HEAD", help="folder or hub id of the head")
    add_options(parser, "--target", "--dtype", "--device", "--threads")
    parser.add_argument("--to", choices=FORMATS, metavar="DIALECT", help=", ".join(FORMATS))
    parser.add_argument("--out", metavar="DIR", help="folder to write")
    parser.add_argument("--check", action="store_true", help="read HEAD strictly, write nothing")
    parser.add_argument(
        "--with-embeddings",
        action="store_true",
        help="also write the target's embedding, for engines that do not share it",
    )
    args = parser.parse_args(argv)
    if args.check and (args.out or args.with_embeddings):
        parser.error("--check writes nothing: --out and --with-embeddings have no effect")
    if not args.check and not (args.to and args.out):
        parser.error("--to DIALECT and --out DIR are needed to write, or --check to read")
    return args


def main(argv: list[str] | None = None) -> None:
    """Export or check, print the summary."""
    args = parse_args(argv)
    target = load_target(args)
    if args.check:
        check(Path(args.head), args.to, target)
        return
    head = read_head(args.head, target, target.dtype)
    export = write_as(args.to, head, args.out, args.with_embeddings, provenance())
    again = read_as(args.to, args.out, target, target.dtype)
    inputs = golden_inputs(head)
    difference = (golden_logits(again, inputs) - golden_logits(head, inputs)).abs().max().item()
    report(export, difference)


def report(export: Export, difference: float) -> None:
    """Print what was written, for people, and as the last line.

    Args:
        export: that was written.
        difference: of the logits of the head read back.
    """
    print(f"wrote {export.folder}: {export.num_tensors} tensors, {export.bytes / 1e6:.1f} MB")
    print(f"for {', '.join(export.served)}; read back: logits differ by {difference:.1g}")
    if export.left_out:
        print(f"left out, this dialect has no place for it: {', '.join(export.left_out)}")
    for note in export.notes:
        print(f"note: {note}")
    print_json(
        {
            "format": export.format,
            "served": export.served,
            "path": str(export.folder),
            "num_tensors": export.num_tensors,
            "bytes": export.bytes,
            "logits_equal": difference == 0.0,
            "left_out": export.left_out,
            "notes": export.notes,
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
    if name == NATIVE:
        raise ExportError("--check --to native: native heads are checked whenever they are loaded")
    dialect = dialect_of(folder) if name is None else dialect_named(name)
    tensors = check_folder(folder, target, dialect)
    head = read_as(dialect.name, folder, target)
    golden = check_golden(head, folder) if (folder / GOLDEN).is_file() else None
    said = "no golden logits" if golden is None else f"golden logits differ by {golden:.1g}"
    print(f"{folder}: a whole {dialect.name} export, {len(tensors)} tensors, {said}")
    print_json({"format": dialect.name, "tensors": len(tensors), "golden": golden})


if __name__ == "__main__":
    run(main)
