"""The figures of a report as PNG files, by matplotlib: pip install 'headway[plots]'."""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.report_data import (
    Loaded,
    Series,
    bucket_name,
    bucket_names,
    interval_of,
    ordered,
    verify_costs,
)
from scripts.report_svg import MANY

MARKERS = "osvDX^<>ph*P"
LENGTH = "tokens per target forward"


def plots(loaded: Loaded, folder: Path) -> list[Path]:
    """Draw what there is.

    Args:
        loaded: the runs.
        folder: to write into.

    Returns:
        The files.

    Raises:
        ValueError: matplotlib is missing.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "PNG files need matplotlib: pip install 'headway[plots]', or leave them out: --no-plots"
        ) from error
    by_group: list[tuple[str, Callable[[Any, Sequence[Series]], bool]]] = [
        ("acceptance_length", _lengths),
        ("acceptance_by_position", _positions),
        ("acceptance_by_category", _categories),
        ("acceptance_by_context", _contexts),
        ("reliability", _reliability),
        ("prediction", _prediction),
    ]
    files = []
    for name, draw in by_group:
        panels = [(group.title, group.series) for group in loaded.groups]
        files += _save(folder / f"{name}.png", panels, draw)
    runs = list(loaded.runs.items())
    with_costs = [(label, run.result["costs"]) for label, run in runs if run.result["costs"]]
    files += _save(folder / "costs.png", with_costs, _costs)
    trained = [(label, run.result["training"]) for label, run in runs if run.result["training"]]
    return files + _save(folder / "training.png", [("", trained)] if trained else [], _training)


def _save(
    path: Path, panels: Sequence[tuple[str, Any]], draw: Callable[[Any, Any], bool]
) -> list[Path]:
    """One picture with a panel each; none if no panel has anything to show."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(panels), 3)
    if not columns:
        return []
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.6 * columns, 4.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    drawn = 0
    for place, (title, what) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=8)
        if draw(axes, what):
            drawn += 1
            axes.set_title(_plain(title), fontsize=10)
            named = len(axes.get_legend_handles_labels()[1])
            if named > 1:
                beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if named > MANY else {}
                axes.legend(fontsize=7, frameon=False, **beside)
        else:
            axes.set_visible(False)
    if not drawn:
        return []
    temporary = path.with_name(f".{path.name}")
    try:
        figure.savefig(temporary, format="png", dpi=120)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return [path]


def _plain(text: str) -> str:
    """A dollar sign would start a formula."""
    return text.replace("$", r"\$")


def _style(series: Series) -> dict[str, Any]:
    return {
        "color": f"C{series.style % 10}",
        "marker": MARKERS[series.style % len(MARKERS)],
        "markersize": 5,
    }


def _errors(value: float, span: Sequence[float] | None) -> list[list[float]] | None:
    return None if span is None else [[value - span[0]], [span[1] - value]]


def _rows(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [_plain(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(f"{LENGTH}, bonus included", fontsize=8)


def _lengths(axes: Any, series: Sequence[Series]) -> bool:
    shown = [each for each in series if each.cell["acceptance_length"] is not None]
    for place, each in enumerate(shown):
        value = each.cell["acceptance_length"]
        errors = _errors(value, each.cell["acceptance_length_interval"])
        axes.errorbar(value, place, xerr=errors, capsize=3, linestyle="", **_style(each))
    _rows(axes, [each.name for each in shown])
    return bool(shown)


def _positions(axes: Any, series: Sequence[Series]) -> bool:
    """Conditional acceptance; of a few series also survival, dotted."""
    found = False
    for each in series:
        rates = each.cell["acceptance_by_position"]
        places = range(1, len(rates["survival"]) + 1)
        known = [(n, r) for n, r in zip(places, rates["conditional"], strict=True) if r is not None]
        if not known:
            continue
        found = True
        few, name = len(series) <= MANY, _plain(each.name)
        axes.plot(
            *zip(*known, strict=True), label=f"{name}, conditional" if few else name, **_style(each)
        )
        if few:
            label = f"{name}, survival"
            axes.plot(places, rates["survival"], linestyle=":", label=label, **_style(each))
    axes.set_ylim(0, 1)
    axes.set_xlabel("position in the draft", fontsize=8)
    axes.set_ylabel("share accepted, given the positions before", fontsize=8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return found


def _categories(axes: Any, series: Sequence[Series]) -> bool:
    names = ordered([list(each.cell["by_category"]) for each in series])
    if len(names) < 2:
        return False
    for each in series:
        shift = 0.6 * (series.index(each) / max(len(series) - 1, 1) - 0.5) if len(series) > 1 else 0
        found = [
            (cell, place + shift)
            for place, name in enumerate(names)
            if (cell := each.cell["by_category"].get(name))
            and cell["acceptance_length"] is not None
        ]
        for number, (cell, place) in enumerate(found):
            value = cell["acceptance_length"]
            axes.errorbar(value, place, xerr=_errors(value, cell["acceptance_length_interval"]),
                          linestyle="", label=None if number else _plain(each.name),
                          **_style(each))  # fmt: skip
    _rows(axes, names)
    return True


def _contexts(axes: Any, series: Sequence[Series]) -> bool:
    names = bucket_names(series)
    for each in series:
        found = each.cell["by_context"]
        places = [names.index(bucket_name(bucket)) for bucket in found]
        means = [bucket["acceptance_length"] for bucket in found]
        axes.plot(places, means, label=_plain(each.name), **_style(each))
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("committed tokens before the round", fontsize=8)
    axes.set_ylabel(f"{LENGTH}, bonus included", fontsize=8)
    return bool(names)


def _reliability(axes: Any, series: Sequence[Series]) -> bool:
    having = [each for each in series if each.cell["reliability"]]
    for each in having:
        bins = [one for one in each.cell["reliability"] if one["count"]]
        axes.plot([one["predicted"] for one in bins], [one["observed"] for one in bins],
                  label=_plain(each.name), **_style(each))  # fmt: skip
    axes.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1)
    axes.set_xlabel("predicted survival", fontsize=8)
    axes.set_ylabel("share that survived", fontsize=8)
    return bool(having)


def _prediction(axes: Any, series: Sequence[Series]) -> bool:
    having = [each for each in series if each.cell["prediction"]]
    for place, each in enumerate(having):
        tau = each.cell["prediction"]["tau"]
        axes.errorbar(tau["value"], place - 0.15, xerr=_errors(tau["value"], interval_of(tau)),
                      linestyle="", markerfacecolor="white", capsize=3,
                      label=None if place else "predicted", **_style(each))  # fmt: skip
        value = each.cell["acceptance_length"]
        if value is not None:
            errors = _errors(value, each.cell["acceptance_length_interval"])
            axes.errorbar(value, place + 0.15, xerr=errors, linestyle="", capsize=3,
                          label=None if place else "measured", **_style(each))  # fmt: skip
    _rows(axes, [each.name for each in having])
    return bool(having)


def _costs(axes: Any, costs: dict[str, Any]) -> bool:
    for (batch, context), seconds in verify_costs(costs).items():
        times = [1000 * value for value in seconds.values()]
        label = f"batch {batch}, context {context}"
        axes.plot(list(seconds), times, marker="o", markersize=4, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows verified", fontsize=8)
    axes.set_ylabel("ms of a target forward", fontsize=8)
    return True


def _training(axes: Any, runs: Sequence[tuple[str, list[dict[str, Any]]]]) -> bool:
    every = [row for _, rows in runs for row in rows]
    key = "tokens" if all(row.get("tokens") is not None for row in every) else "step"
    found = False
    for label, rows in runs:
        points = [
            (row[key], row["acceptance_length"])
            for row in rows
            if row.get("acceptance_length") is not None
        ]
        if points:
            found = True
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=_plain(label))
    axes.set_xlabel("supervised tokens" if key == "tokens" else "optimizer step", fontsize=8)
    axes.set_ylabel(f"{LENGTH}, bonus included", fontsize=8)
    return found
