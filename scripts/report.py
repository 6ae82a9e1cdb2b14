"""Draw what `scripts.evaluate --out RUN` left behind: one HTML file, pictures, a table.

    python -m scripts.report runs/eagle3 --out report
    python -m scripts.report runs/eagle3 runs/medusa runs/dflash --out report

FOLDER gets report.html, which is self-contained (no network; light and dark; opens from disk, on a
phone too), report.md, a table for a model card, and one PNG per figure. Sections: every cell with
both conventions of acceptance length, intervals, speed-up and whether the output is unchanged;
acceptance by position, category and context length; prediction beside measurement; what verifying
costs and the size chosen; reliability of the confidence output; training curves; and the decode
trace, a row per round, each with its draft tree. What was not recorded says what records it. Of a
single run its cells are compared, of several those of the same setting. PNG files need matplotlib:
pip install 'headway[plots]'. The last line is one JSON object that names the files.
"""

import argparse
from pathlib import Path

from scripts.common import parser_for, print_json, run
from scripts.report_data import load
from scripts.report_markdown import markdown
from scripts.report_page import page
from scripts.report_plots import plots


def main(argv: list[str] | None = None) -> None:
    """Read the runs, write the files, name them."""
    args = parse_args(argv)
    loaded = load(args.runs)
    text = page(loaded, args.traces)
    args.out.mkdir(parents=True, exist_ok=True)
    pictures = [] if args.no_plots else plots(loaded, args.out)
    html, card = args.out / "report.html", args.out / "report.md"
    card.write_text(markdown(loaded, pictures), encoding="utf-8")
    html.write_text(text, encoding="utf-8")
    print_json(
        {
            "html": str(html),
            "markdown": str(card),
            "pictures": [str(path) for path in pictures],
            "runs": list(loaded.runs),
            "cells": len(loaded.series),
        }
    )


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The runs, and where to draw them."""
    parser = parser_for(__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder that scripts.evaluate --out wrote"
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="write the report here"
    )
    parser.add_argument(
        "--traces",
        type=int,
        default=2,
        metavar="N",
        help="texts per cell whose trace is shown, of those recorded (default: %(default)s)",
    )
    parser.add_argument("--no-plots", action="store_true", help="no PNG files, no matplotlib")
    args = parser.parse_args(argv)
    if args.traces < 0:
        raise ValueError(f"--traces must be at least 0, got {args.traces}")
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is a file; name a folder")
    return args


if __name__ == "__main__":
    run(main)
