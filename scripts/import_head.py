"""Take over a head of another trainer: read it strictly and keep it as Headway's own.

    python -m scripts.import_head yuhuili/EAGLE3-LLaMA3.1-Instruct-8B \\
        --target meta-llama/Llama-3.1-8B-Instruct --out heads/eagle3

What comes out decodes, evaluates, trains on and is exported like any head trained here. --from is
told from the folder where it is left out; the other scripts read foreign folders as they are, too.
The last line is one JSON object.
"""

import argparse

from drafters.export import FORMATS, NATIVE
from scripts import convert
from scripts.common import add_options, parser_for, run


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    parser.add_argument("head", metavar="HEAD", help="folder or hub id of the head")
    add_options(parser, "--target", "--dtype", "--device", "--threads")
    parser.add_argument("--from", dest="source", choices=FORMATS, help="dialect of HEAD")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """As a conversion to the native format."""
    args = parse_args(argv)
    convert.take(args, NATIVE, with_embeddings=False)


if __name__ == "__main__":
    run(main)
