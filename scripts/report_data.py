"""What a report is drawn from: runs with names, their cells as series, numbers by context.

A series is one cell (temperature, rule, size) of one run. Of a single run the cells are compared
with each other; of several runs those that decoded under the same setting.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.measuring.run_records import Run, read_run


@dataclass(frozen=True, eq=False)
class Series:
    """One cell of one run.

    Attributes:
        run: label of the run.
        setting: what it decoded under, as `settings` names it.
        name: label in figures: the setting of a single run, the run of several.
        style: number of its colour and mark.
        number: of the cell in its run.
        cell: its numbers.
        source: the run.
    """

    run: str
    setting: str
    name: str
    style: int
    number: int
    cell: dict[str, Any]
    source: Run

    @property
    def full_name(self) -> str:
        """Run and setting."""
        return f"{self.run}, {self.setting}"


@dataclass(frozen=True)
class Group:
    """Series that are drawn into one figure.

    Attributes:
        title: what they have in common; "" for all of a single run.
        series: of the figure.
    """

    title: str
    series: list[Series]


@dataclass(frozen=True)
class Loaded:
    """All runs of a report.

    Attributes:
        runs: by label, in the order given.
        series: every cell of every run.
    """

    runs: dict[str, Run]
    series: list[Series]

    @property
    def groups(self) -> list[Group]:
        """One figure of a single run; of several one for each setting, in order of appearance."""
        if len(self.runs) == 1:
            return [Group("", self.series)]
        found: dict[str, list[Series]] = {}
        for each in self.series:
            found.setdefault(each.setting, []).append(each)
        return [Group(title, series) for title, series in found.items()]


def load(folders: Sequence[Path]) -> Loaded:
    """Read the runs.

    Raises:
        ValueError: one is no run, has no cell, or is given twice.
    """
    runs = {label: read_run(folder) for label, folder in labels(folders).items()}
    for label, run in runs.items():
        if not run.cells:
            raise ValueError(f"{label}: no cells in its result.json; evaluate it again")
    names = settings([cell for run in runs.values() for cell in run.cells])
    series: list[Series] = []
    for place, (label, run) in enumerate(runs.items()):
        for number, cell in enumerate(run.cells):
            setting = names[len(series)]
            one = len(runs) == 1
            name, style = (setting, number) if one else (label, place)
            series.append(Series(label, setting, name, style, number, cell, run))
    return Loaded(runs, series)


def labels(folders: Sequence[Path]) -> dict[str, Path]:
    """Folders by the shortest end of their path that tells them apart.

    Raises:
        ValueError: a run is given twice.
    """
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError("RUN: a run is given twice; name each once")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return {
        "/".join(path.parts[-depth:]): folder for path, folder in zip(paths, folders, strict=True)
    }


def settings(cells: Sequence[dict[str, Any]]) -> list[str]:
    """A name for the setting of each cell: what differs among them, or all of it."""
    parts = [parts_of(cell) for cell in cells]
    differing = [key for key in parts[0] if len({part[key] for part in parts}) > 1]
    return [" · ".join(part[key] for key in differing or part) for part in parts]


def shared_settings(cells: Sequence[dict[str, Any]]) -> list[str]:
    """What is the same in all cells, and so in no name of theirs; nothing if all of it is."""
    parts = [parts_of(cell) for cell in cells]
    same = [key for key in parts[0] if len({part[key] for part in parts}) == 1]
    return [parts[0][key] for key in same] if len(same) < len(parts[0]) else []


def parts_of(cell: dict[str, Any]) -> dict[str, str]:
    """A cell's setting in words."""
    theory = cell.get("simulated")
    return {
        "temperature": f"T = {cell['temperature']:g}",
        "rule": str(cell["rule"]),
        "size": size_name(cell["size"]) if theory is None else f"alpha {theory['alpha']:g}",
    }


def size_name(size: int | str | None) -> str:
    """The size of a grid's cell; None is what the drafts bring along."""
    names: dict[int | str | None, str] = {None: "default size", 1: "no drafts"}
    return names.get(size, f"size {size}")


# Numbers ----------------------------------------------------------------------------------------


def bucket_name(bucket: dict[str, Any]) -> str:
    """The committed tokens of a bucket of contexts."""
    start, end = bucket["from"], bucket["to"]
    return f"{start}+" if end is None else f"{start}–{end - 1}"


def bucket_names(series: Iterable[Series]) -> list[str]:
    """Of all buckets that somebody has, in order."""
    starts = {b["from"]: bucket_name(b) for each in series for b in each.cell["by_context"]}
    return [starts[start] for start in sorted(starts)]


def ordered(names: Iterable[Sequence[str]]) -> list[str]:
    """Every name once, in order of first appearance."""
    return list(dict.fromkeys(name for some in names for name in some))


def verify_costs(costs: dict[str, Any]) -> dict[tuple[int, int], dict[int, float]]:
    """(batch B, context P) -> rows N -> seconds, of a cost table as `inference.scheduling.costs`
    saves it."""
    found: dict[tuple[int, int], dict[int, float]] = {}
    for rows, context, batch, seconds in costs["verify"]:
        found.setdefault((batch, context), {})[rows] = seconds
    return {key: dict(sorted(found[key].items())) for key in sorted(found)}


def widths_used(series: Series, measured: Sequence[int]) -> dict[int, float]:
    """Share of a cell's rounds by the rows N that they verified.

    Args:
        series: the cell.
        measured: N in ascending order; rounds count for the first that is not below theirs, and
            those wider than all for the last.
    """
    counts: Counter[int] = Counter()
    for each in series.source.rounds:
        if each.cell == series.number:
            counts[next((n for n in measured if n >= each.width), measured[-1])] += 1
    return {rows: counts[rows] / counts.total() for rows in sorted(counts)}


def interval_of(value: dict[str, Any] | None) -> tuple[float, float] | None:
    """Ends of an interval as predictions hold it; None where there is none."""
    if value is None or value["low"] is None or value["high"] is None:
        return None
    return value["low"], value["high"]
