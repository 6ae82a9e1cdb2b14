"""Write a trained head for serving, read it back as an engine would, and compare logits.

    python -m scripts.export --head outputs/eagle3/head --target targets/smollm2-135m \\
        --format sglang --out exports/eagle3

`sglang` is the EAGLE-3 dialect of SGLang, vLLM and llama.cpp; `native` is Headway's own format.
Both travel with `golden.safetensors`, logits that tell later whether a loaded head is still the
same. An export already at --out is replaced once the new one is whole; any other folder there is
refused. The last line is one JSON object.
"""

import argparse

import torch

from drafters import Drafter, TargetModel
from drafters.export import (
    FORMATS,
    Export,
    ExportError,
    check_golden,
    golden_inputs,
    golden_logits,
    read_head,
    read_native,
    read_sglang,
    write_native,
    write_sglang,
)
from scripts.common import add_options, load_target, parser_for, print_json, run
from training.provenance import provenance


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    add_options(parser, "--target", "--head", "--dtype", "--device", "--threads")
    parser.add_argument("--format", choices=FORMATS, required=True, help="dialect to write")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--with-embeddings",
        action="store_true",
        help="sglang: also write the target's embedding, for engines that do not share it",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Export, read back, print the summary."""
    args = parse_args(argv)
    if args.with_embeddings and args.format != "sglang":
        raise ValueError("--with-embeddings has no effect on --format native: drop it")
    target = load_target(args)
    head = read_head(args.head, target, target.dtype)
    if args.format == "sglang":
        export = write_sglang(head, args.out, args.with_embeddings, provenance())
        again: Drafter = read_sglang(args.out, target)
    else:
        export = write_native(head, args.out, provenance())
        again = read_native(args.out, target, target.dtype)
    equal = same_logits(head, again)
    print_summary(head, target, export, check_golden(again, args.out))
    print_json(
        {
            "format": export.format,
            "served": list(export.served),
            "path": str(export.folder),
            "num_tensors": export.num_tensors,
            "bytes": export.bytes,
            "logits_equal": equal,
            "left_out": list(export.left_out),
            "notes": list(export.notes),
        }
    )


def same_logits(head: Drafter, again: Drafter) -> bool:
    """Whether both heads give the very same golden logits.

    Raises:
        ExportError: they do not.
    """
    inputs = golden_inputs(head)
    if not torch.equal(golden_logits(head, inputs), golden_logits(again, inputs)):
        raise ExportError("the exported head gives other logits than the original")
    return True


def print_summary(head: Drafter, target: TargetModel, export: Export, difference: float) -> None:
    """What was written, for people."""
    megabytes = export.bytes / 1e6
    print(f"head      {head.family}, for target {target.name}")
    print(f"format    {export.format}, for {', '.join(export.served)}")
    print(f"written   {export.folder}: {export.num_tensors} tensors, {megabytes:.1f} MB")
    print(f"read back logits equal to the original's; golden logits differ by {difference:.1g}")
    if export.left_out:
        print(f"left out  {', '.join(export.left_out)}: the dialect has no place for them")
    for note in export.notes:
        print(f"note      {note}")


if __name__ == "__main__":
    run(main)
