"""Turn a head of one dialect into one of another.

    python -m scripts.convert HEAD --to speculators-dspark --target Qwen/Qwen3-4B --out converted

--from is told from the folder where it is left out. A head is read strictly, so that a damaged or
foreign one is refused and not carried on, and what is written is read back. What the new dialect
has no place for is said. The last line is one JSON object.
"""

import argparse

from drafters.export import FORMATS, CardFacts, read_as, read_head
from scripts.common import add_options, load_target, parser_for, run
from scripts.export import report, write


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    parser.add_argument("head", metavar="HEAD", help="folder or hub id of the head")
    add_options(parser, "--target", "--dtype", "--device", "--threads")
    parser.add_argument("--from", dest="source", choices=FORMATS, help="dialect of HEAD")
    parser.add_argument("--to", choices=FORMATS, required=True, help="dialect to write")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--with-embeddings",
        action="store_true",
        help="also write the target's embedding, for engines that do not share it",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Read, write, read back, print the summary."""
    args = parse_args(argv)
    take(args, args.to, args.with_embeddings)


def take(args: argparse.Namespace, name: str, with_embeddings: bool) -> None:
    """Read one dialect, write another.

    Args:
        args: with HEAD, ``source``, ``--out`` and the options of the target.
        name: of the dialect to write.
        with_embeddings: see ``drafters.export.writing.write_folder``.
    """
    target = load_target(args)
    if args.source is None:
        head = read_head(args.head, target, target.dtype)
    else:
        head = read_as(args.source, args.head, target, target.dtype)
    facts = CardFacts(place=args.out)
    report(write(args.head, head, name, args.out, with_embeddings, facts))


if __name__ == "__main__":
    run(main)
