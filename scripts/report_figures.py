"""What the sections of a report share: figures by group, tabs, rows of points, missing parts."""

from collections.abc import Callable, Sequence

from scripts.report_data import Group, Loaded, Series
from scripts.report_html import Html, details, joined, tag
from scripts.report_svg import Axis, Dot, dots, legend, scale_strip


def absent(text: str) -> Html:
    """In place of a section: one line that says what gives it."""
    return tag("p", text, class_="absent")


def figures(
    loaded: Loaded, name: str, draw: Callable[[Sequence[Series]], Html | None]
) -> Html | None:
    """Draw each group; several become tabs.

    Args:
        loaded: everything.
        name: of the section, letters only; prefix of ids.
        draw: of the series of one group; None where they have nothing to show.

    Returns:
        None if no group has.
    """
    found = [(group, draw(group.series)) for group in loaded.groups]
    drawn = [(group, body) for group, body in found if body is not None]
    return tabs(name, drawn) if drawn else None


def tabs(name: str, panels: Sequence[tuple[Group, Html]]) -> Html:
    """One panel at a time, chosen by radio buttons, which work without any script."""
    if len(panels) == 1:
        group, body = panels[0]
        return tag("div", tag("p", group.title, class_="setting") if group.title else None, body)
    parts = []
    for place, (group, body) in enumerate(panels):
        key = f"{name}-tab-{place}"
        parts.append(tag("input", type="radio", name=f"{name}-tab", id=key, checked=place == 0))
        parts.append(tag("label", group.title, for_=key))
        parts.append(tag("div", body, class_="panel"))
    return tag("div", *parts, class_="tabs", role="radiogroup", aria_label="setting")


def forest(rows: Sequence[tuple[str, Sequence[Dot], str]], scale: Axis) -> Html:
    """Rows of points with intervals on one scale.

    Args:
        rows: name, points, and the number that is written behind them; a row without points is a
            heading.
        scale: of all.
    """
    strips = dots([points for _, points, _ in rows], scale)
    items = []
    for (name, points, text), strip in zip(rows, strips, strict=True):
        if not points:
            items.append(tag("li", name, class_="heading"))
            continue
        items.append(
            tag("li", tag("span", name, class_="name"), strip, tag("span", text, class_="value"))
        )
    items.append(
        tag("li", tag("span", class_="name"), scale_strip(scale), tag("span", class_="value"),
            class_="scale", aria_hidden="true")
    )  # fmt: skip
    return tag("ul", *items, class_="forest")


def figure_set(series: Sequence[Series], charts: Sequence[Html], numbers: Html) -> Html:
    """A legend, charts side by side, and their numbers folded away."""
    return joined(
        [
            legend([(each.name, each.style) for each in series]),
            tag("div", *charts, class_="charts"),
            details("Numbers", numbers),
        ]
    )


def beside(series: Sequence[Series], chart: Html, numbers: Html) -> Html:
    """A legend, and one chart with a table at its side where there is room."""
    both = tag("div", chart, numbers, class_="beside")
    return joined([legend([(each.name, each.style) for each in series]), both])
