"""Draw what one or more runs wrote to metrics.jsonl.

    python -m scripts.plot_run outputs/eagle3 outputs/hass --out runs.png

Panels: the loss, and by position in the draft; acceptance by position (lines: how often the draft
is the target's own choice in training; dots: what the decoder accepted); acceptance length by the
decoder; supervised tokens per second; learning rate; gradient norm. A panel without numbers is left
out. Of several runs each has a colour, and later positions are paler. --out FILE.png draws all
panels into one picture, --out FOLDER one picture each. A run that is still going may be drawn.
Needs matplotlib: pip install 'headway[plots]'. The last line is one JSON object that names the
files.
"""

import argparse
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.common import parser_for, print_json, run
from training.records import read_lines

Points = list[tuple[float, float]]
"""(step, value), in the order of the steps."""


@dataclass(frozen=True)
class Panel:
    """What is drawn into one coordinate system.

    Attributes:
        name: of its file.
        title: what it shows.
        pattern: of the metrics it shows; a group is the position in the draft.
        logarithmic: of the values.
    """

    name: str
    title: str
    pattern: str
    logarithmic: bool = False


PANELS = (
    Panel("loss", "loss", r"train/loss"),
    Panel("loss_by_position", "loss by position", r"train/loss_(\d+)"),
    Panel(
        "acceptance_by_position",
        "acceptance by position",
        r"train/accuracy_(\d+)|eval/acceptance_(\d+)",
    ),
    Panel("acceptance_length", "acceptance length (decoder)", r"eval/acceptance_length"),
    Panel("throughput", "supervised tokens per second", r"tokens_per_second"),
    Panel("learning_rate", "learning rate", r"train/lr"),
    Panel("gradient_norm", "gradient norm", r"train/grad_norm", logarithmic=True),
)


def main(argv: list[str] | None = None) -> None:
    """Read the runs, draw them, name the files."""
    args = parse_args(argv)
    drawn = {}
    for label, path in labels(args.runs).items():
        found = series(read_lines(path))
        if not found:
            raise ValueError(f"{path} holds no metrics yet: the first come at step run.log_every")
        drawn[label] = found
    panels = {panel: panel_lines(panel, drawn) for panel in PANELS}
    panels = {panel: lines for panel, lines in panels.items() if any(lines.values())}
    if args.out.suffix == ".png":
        pictures = {args.out: panels}
    else:
        pictures = {args.out / f"{p.name}.png": {p: lines} for p, lines in panels.items()}
    for path, chosen in pictures.items():
        draw(chosen, path)
    print_json(
        {
            "files": [str(path) for path in pictures],
            "panels": [panel.name for panel in panels],
            "last_step": {label: last_step(found) for label, found in drawn.items()},
        }
    )


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The runs and where to draw them."""
    parser = parser_for(__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folder, or its metrics.jsonl"
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="PATH", help="a .png file, or a folder"
    )
    args = parser.parse_args(argv)
    if args.out.suffix not in ("", ".png") and not args.out.is_dir():
        raise ValueError(f"--out {args.out}: name a .png file or a folder")
    return args


# Reading ----------------------------------------------------------------------------------------


def labels(runs: Sequence[Path]) -> dict[str, Path]:
    """metrics.jsonl of each run by the shortest name that tells it from the others.

    Raises:
        ValueError: a run has none, or is given twice.
    """
    files = [path / "metrics.jsonl" if path.is_dir() else path for path in runs]
    for path in files:
        if not path.is_file():
            raise ValueError(f"{path} is not there: a run folder holds metrics.jsonl")
    folders = [path.resolve().parent for path in files]
    names = [path.name if path.name != "metrics.jsonl" else "" for path in files]
    if len({path.resolve() for path in files}) < len(files):
        raise ValueError("a run is given twice")
    for depth in range(1, 1 + max(len(folder.parts) for folder in folders)):
        short = [
            "/".join((*folder.parts[-depth:], *([name] if name else [])))
            for folder, name in zip(folders, names, strict=True)
        ]
        if len(set(short)) == len(short):
            break
    return dict(zip(short, files, strict=True))


def series(lines: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Every metric's points, and ``tokens_per_second`` of the steps since the line before.

    Values that are no finite number are left out.
    """
    found: dict[str, Points] = {}
    for line in lines:
        for name, value in line.items():
            if name != "step" and _is_number(value):
                found.setdefault(name, []).append((line["step"], value))
    timed = [line for line in lines if "train/tokens" in line and "train/seconds" in line]
    start = {"step": 0, "train/tokens": 0, "train/seconds": 0.0}
    for before, line in pairwise([start, *timed]):
        seconds = line["train/seconds"] - before["train/seconds"]
        if seconds > 0:
            rate = (line["train/tokens"] - before["train/tokens"]) / seconds
            found.setdefault("tokens_per_second", []).append((line["step"], rate))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Line:
    """One metric of one run.

    Attributes:
        run: its label.
        position: in the draft, or None.
        decoded: measured by the decoder.
        points: its values.
    """

    run: str
    position: int | None
    decoded: bool
    points: Points


def panel_lines(panel: Panel, runs: Mapping[str, Mapping[str, Points]]) -> dict[str, list[Line]]:
    """What of every run belongs into a panel, by position."""
    chosen: dict[str, list[Line]] = {}
    for label, metrics in runs.items():
        chosen[label] = []
        for name, points in metrics.items():
            match = re.fullmatch(panel.pattern, name)
            if match:
                place = next((int(group) for group in match.groups() if group is not None), None)
                chosen[label].append(Line(label, place, name.startswith("eval/"), points))
        chosen[label].sort(key=lambda line: (line.decoded, line.position or 0))
    return chosen


def last_step(metrics: Mapping[str, Points]) -> int:
    """The last step that any metric has."""
    return int(max(points[-1][0] for points in metrics.values()))


# Drawing ----------------------------------------------------------------------------------------


def draw(panels: Mapping[Panel, Mapping[str, Sequence[Line]]], out: Path) -> None:
    """Draw panels side by side into a PNG file, which is whole or not touched.

    Raises:
        ValueError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install 'headway[plots]'") from error
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.8 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (panel, lines) in enumerate(panels.items()):
        draw_panel(figure.add_subplot(rows, columns, place + 1), panel, lines)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}")
    try:
        figure.savefig(temporary, format="png", dpi=110)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)


def draw_panel(axes: Any, panel: Panel, runs: Mapping[str, Sequence[Line]]) -> None:
    """Draw one panel into matplotlib axes.

    One run has a colour for each position; of several each has a colour of its own.
    """
    for number, lines in enumerate(runs.values()):
        deepest = max((line.position or 0 for line in lines), default=0)
        for line in lines:
            place = line.position or 0
            several = len(runs) > 1
            axes.plot(
                *zip(*line.points, strict=True),
                color=f"C{(number if several else place) % 10}",
                alpha=1 - 0.75 * place / max(deepest, 1) if several else 1.0,
                linestyle=":" if line.decoded and line.position is not None else "-",
                marker="o" if line.decoded or len(line.points) == 1 else "",
                markersize=3.5,
                linewidth=1.3,
                label=_legend(line, several),
            )
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel("optimizer step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if panel.logarithmic:
        axes.set_yscale("log")
    axes.legend(fontsize=7)


def _legend(line: Line, several: bool) -> str | None:
    """A run is named once; the positions of a single run each."""
    if several:
        first = (line.position or 0) == 0 and not (line.decoded and line.position is not None)
        return line.run if first else None
    if line.position is None:
        return line.run
    return f"position {line.position + 1}" + (" (decoder)" if line.decoded else "")


if __name__ == "__main__":
    run(main)
