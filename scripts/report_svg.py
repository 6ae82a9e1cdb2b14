"""Charts as inline SVG: lines, reliability squares, rows of points with intervals.

Colours are CSS classes (s0, s1, ...), so that light and dark share one drawing; every series also
has a mark and a dash of its own. Every point carries its numbers as a title. A chart of many series
is drawn as one small chart each, with the others pale behind it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scripts.report_html import Html, joined, number, tag

MANY = 6
"""More series than this are drawn apart."""
MARKS = ("circle", "square", "triangle", "diamond", "cross", "ring")
DASHES = (None, "6 3", "2 3", "8 3 2 3", "1 2.5", "10 4")
WIDTH, HEIGHT = 340, 216
SMALL_WIDTH, SMALL_HEIGHT = 230, 150
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 14, 34
END_LABEL = 44
"""Room on the right where curves are labelled."""
FILLED, HOLLOW = 3.4, 5.0
"""Sizes of marks."""
COLOURS = 12
"""Classes s0, s1, ... of the style sheet."""


@dataclass(frozen=True)
class Line:
    """One series.

    Attributes:
        label: its name.
        points: (x, y).
        style: number of its colour, mark and dash.
        intervals: of y at each point; empty without.
        marks: draw a mark at each point.
        joined: draw the line between them.
        hollow: draw the marks as outlines.
    """

    label: str
    points: Sequence[tuple[float, float]]
    style: int = 0
    intervals: Sequence[tuple[float, float] | None] = ()
    marks: bool = True
    joined: bool = True
    hollow: bool = False


@dataclass(frozen=True)
class Axis:
    """One direction of a chart.

    Attributes:
        title: with the unit.
        low, high: where it starts and ends.
        ticks: value and text of each.
        logarithmic: scale; low is above 0.
    """

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]] = field(default_factory=tuple)
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Where a value lies, 0 to 1, kept inside."""
        low, high, value = (
            math.log(max(each, 1e-12)) if self.logarithmic else each
            for each in (self.low, self.high, value)
        )
        return min(max((value - low) / ((high - low) or 1.0), 0.0), 1.0)


def axis(
    title: str, values: Sequence[float], low: float | None = None, high: float | None = None
) -> Axis:
    """An axis around values, with round numbers.

    Args:
        title: with the unit.
        values: to show.
        low, high: fixed ends.
    """
    least = min(values, default=0.0) if low is None else low
    most = max(values, default=1.0) if high is None else high
    if most <= least:
        most = least + 1.0
    step = _round_step((most - least) / 5)
    start = least if low is not None else step * math.floor(least / step + 1e-9)
    end = most if high is not None else step * math.ceil(most / step - 1e-9)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first = math.ceil(start / step - 1e-9)
    last = math.floor(end / step + 1e-9)
    ticks = [(step * n, _short(step * n, digits)) for n in range(first, last + 1)]
    return Axis(title, start, end, ticks)


def named_axis(title: str, names: Sequence[str]) -> Axis:
    """An axis of names at 0, 1, 2, ...; where there are many, only some are written."""
    every = math.ceil(len(names) / 8)
    ticks = [(place, name) for place, name in enumerate(names) if place % every == 0]
    pad = 0.3 if len(names) > 1 else 0.5
    return Axis(title, -pad, len(names) - 1 + pad, ticks)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= rough - 1e-12)


def _short(value: float, digits: int) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:.{digits}f}"


# Charts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backdrop:
    """What is drawn behind the series, in grey.

    Attributes:
        curves: lines with their label at the right end.
        diagonal: the line y = x.
        verticals: x, and what is written beside it.
    """

    curves: Sequence[Line] = ()
    diagonal: bool = False
    verticals: Sequence[tuple[float, str]] = ()


NOTHING = Backdrop()


def line_chart(
    lines: Sequence[Line], x: Axis, y: Axis, title: str, backdrop: Backdrop = NOTHING
) -> Html:
    """A chart, or small ones beside each other if there are many lines.

    Args:
        lines: the series. Many that are joined are drawn apart.
        x, y: the axes.
        title: what it shows; drawn above, and read aloud.
        backdrop: behind them.
    """
    if len(lines) > MANY and any(line.joined for line in lines):
        small = [
            tag(
                "figure",
                tag("figcaption", _swatch(line.style), line.label),
                _drawing([line], x, y, f"{title}: {line.label}", backdrop, others=lines),
                class_="small",
            )
            for line in lines
        ]
        heading = tag("figcaption", title)
        return tag("figure", heading, tag("div", *small, class_="smalls"), class_="wide")
    drawing = _drawing(lines, x, y, title, backdrop)
    return tag("figure", tag("figcaption", title), drawing)


def _drawing(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    title: str,
    backdrop: Backdrop,
    others: Sequence[Line] = (),
) -> Html:
    width, height = (SMALL_WIDTH, SMALL_HEIGHT) if others else (WIDTH, HEIGHT)
    right = END_LABEL if backdrop.curves else RIGHT

    def at(point: tuple[float, float]) -> tuple[float, float]:
        across = LEFT + x.place(point[0]) * (width - LEFT - right)
        return across, height - BOTTOM - y.place(point[1]) * (height - TOP - BOTTOM)

    parts = [_frame(x, y, width, height, right), _behind(backdrop, x, y, at)]
    for other in others:
        if other not in lines:
            parts.append(_path([at(point) for point in other.points], "behind", None))
    for line in lines:
        style = f"s{line.style % COLOURS}"
        places = [at(point) for point in line.points]
        if line.joined and len(places) > 1:
            parts.append(_path(places, f"line {style}", DASHES[line.style % len(DASHES)]))
        for place, span in zip(line.points, line.intervals, strict=False):
            if span is not None:
                low, high = at((place[0], span[0])), at((place[0], span[1]))
                parts.append(_segment(low, high, f"bar {style}"))
        for place, point in zip(places, line.points, strict=True):
            if line.marks:
                text = f"{line.label}: {_named(x, point[0])}, {number(point[1], 3)}"
                size = HOLLOW if line.hollow else FILLED
                parts.append(mark(line.style, *place, text, size, line.hollow))
    shape = {"viewBox": f"0 0 {width} {height}", "role": "img", "aria_label": title}
    return tag("svg", *parts, class_="chart", **shape)


def _behind(
    backdrop: Backdrop,
    x: Axis,
    y: Axis,
    at: Callable[[tuple[float, float]], tuple[float, float]],
) -> Html:
    parts = []
    if backdrop.diagonal:
        parts.append(_segment(at((x.low, x.low)), at((x.high, x.high)), "diagonal"))
    for row, (value, text) in enumerate(backdrop.verticals):  # texts below each other
        low, high = at((value, y.low)), at((value, y.high))
        parts.append(_segment(low, high, "vertical"))
        beyond = x.place(value) > 0.6
        side = {"x": f"{high[0] + (-4 if beyond else 4):.1f}", "y": f"{high[1] + 9 + 10 * row:.1f}"}
        parts.append(tag("text", text, class_=f"note {'end' if beyond else 'start'}", **side))
    labels: list[tuple[float, float]] = []
    for curve in backdrop.curves:
        places = [at(point) for point in curve.points]
        parts.append(_path(places, "curve", None))
        end = places[-1]
        if all(
            abs(end[0] - across) >= 30 or abs(end[1] - up) >= 9 for across, up in labels
        ):  # none overlap
            labels.append(end)
            inside = x.place(curve.points[-1][0]) < 0.99  # it left through the top
            dx, dy, anchor = (0, -4, "middle") if inside else (4, 3, "start")
            side = {"x": f"{end[0] + dx:.1f}", "y": f"{end[1] + dy:.1f}"}
            parts.append(tag("text", curve.label, class_=f"note {anchor}", **side))
    return joined(parts)


def _frame(x: Axis, y: Axis, width: int, height: int, right: int) -> Html:
    base, inner = height - BOTTOM, width - LEFT - right
    parts = []
    for value, text in y.ticks:
        level = base - y.place(value) * (base - TOP)
        parts.append(_segment((LEFT, level), (width - right, level), "grid"))
        parts.append(tag("text", text, x=LEFT - 6, y=f"{level + 3.5:.1f}", class_="tick end"))
    for value, text in x.ticks:
        place = LEFT + x.place(value) * inner
        parts.append(tag("text", text, x=f"{place:.1f}", y=base + 14, class_="tick middle"))
    parts.append(_segment((LEFT, base), (width - right, base), "base"))
    middle = LEFT + inner / 2
    parts.append(tag("text", x.title, x=f"{middle:.1f}", y=height - 5, class_="title middle"))
    turned = f"translate(10 {(TOP + base) / 2:.0f}) rotate(-90)"
    parts.append(tag("text", y.title, transform=turned, class_="title middle"))
    return joined(parts)


def _segment(start: tuple[float, float], end: tuple[float, float], style: str) -> Html:
    ends = {"x1": start[0], "y1": start[1], "x2": end[0], "y2": end[1]}
    return tag("line", class_=style, **{key: f"{value:.1f}" for key, value in ends.items()})


def _path(places: Sequence[tuple[float, float]], style: str, dash: str | None) -> Html:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return tag("polyline", points=points, class_=style, stroke_dasharray=dash)


def mark(
    style: int,
    x: float,
    y: float,
    title: str | None = None,
    size: float = FILLED,
    hollow: bool = False,
) -> Html:
    """The mark of a series, with its numbers as a title that shows under the mouse."""
    kind = MARKS[style % len(MARKS)]
    text = None if title is None else tag("title", title)
    name = {"class_": f"mark s{style % COLOURS} {kind}" + (" hollow" if hollow else "")}
    if kind in ("circle", "ring"):
        return tag("circle", text, cx=f"{x:.1f}", cy=f"{y:.1f}", r=size, **name)
    half = size * 1.15
    corners = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "triangle": ((0, -1.25), (1.2, 0.95), (-1.2, 0.95)),
        "diamond": ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
        "cross": ((-1.2, -1.2), (0, -0.3), (1.2, -1.2), (0.3, 0), (1.2, 1.2), (0, 0.3), (-1.2, 1.2),
                  (-0.3, 0)),
    }[kind]  # fmt: skip
    points = " ".join(f"{x + half * right:.1f},{y + half * down:.1f}" for right, down in corners)
    return tag("polygon", text, points=points, **name)


def legend(labels: Sequence[tuple[str, int]]) -> Html:
    """Names of the series with their marks; nothing for a single one."""
    if len(labels) < 2:
        return Html("")
    return tag(
        "ul",
        *(tag("li", _swatch(style), label) for label, style in labels),
        class_="legend",
    )


def _swatch(style: int) -> Html:
    line = _path([(0, 7), (26, 7)], f"line s{style % COLOURS}", DASHES[style % len(DASHES)])
    shape = {"viewBox": "0 0 26 14", "class_": "swatch", "aria_hidden": "true"}
    return tag("svg", line, mark(style, 13, 7), **shape)


def _named(x: Axis, value: float) -> str:
    """A place on the axis as the ticks name it."""
    return dict(x.ticks).get(value, f"{value:.4g}")


# Rows of points ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dot:
    """A number with its interval.

    Attributes:
        value: where it is.
        interval: around it, or None.
        style: of the mark.
        title: its numbers in words.
        hollow: drawn as an outline.
    """

    value: float
    interval: Sequence[float] | None
    style: int
    title: str
    hollow: bool = False


def dots(rows: Sequence[Sequence[Dot]], scale: Axis) -> list[Html]:
    """A strip for each row, as wide as its place; marks keep their size at any width.

    Args:
        rows: the points of each.
        scale: shared by all.
    """
    strips = []
    for row in rows:
        height = 10 + 12 * max(len(row), 1)
        parts = [_level(scale.place(value), 0, height, "grid") for value, _ in scale.ticks]
        for place, dot in enumerate(row):
            middle = 11 + 12 * place
            style = f"s{dot.style % COLOURS}"
            if dot.interval is not None:
                ends = [f"{100 * scale.place(end):.2f}%" for end in dot.interval]
                across = {"x1": ends[0], "x2": ends[1], "y1": middle, "y2": middle}
                parts.append(tag("line", class_=f"bar {style}", **across))
            inner = mark(dot.style, 0, 0, dot.title, size=4.4, hollow=dot.hollow)
            at = {"x": f"{100 * scale.place(dot.value):.2f}%", "y": middle}
            parts.append(tag("svg", inner, overflow="visible", **at))
        shape = {"height": height, "role": "img", "aria_label": "; ".join(d.title for d in row)}
        strips.append(tag("svg", *parts, class_="strip", **shape))
    return strips


def scale_strip(scale: Axis) -> Html:
    """The numbers under such strips."""
    parts = []
    for value, text in scale.ticks:
        place = scale.place(value)
        parts.append(tag("text", text, x=f"{100 * place:.2f}%", y=11, class_="tick middle"))
    title = tag("text", scale.title, x="100%", y=26, class_="title end")
    return tag("svg", *parts, title, class_="strip", height=30, aria_hidden="true")


def _level(place: float, top: float, bottom: float, style: str) -> Html:
    x = f"{100 * place:.2f}%"
    return tag("line", x1=x, x2=x, y1=top, y2=bottom, class_=style)
