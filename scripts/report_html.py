"""Building HTML from Python values, with everything escaped that is not already HTML.

Text of tokens can be anything: markup, half characters, control and bidirectional characters. It
reaches the page through `tag` alone, which escapes it, and through `visible`, which shows what
would be invisible or would turn the line around.
"""

import html
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

HIDDEN_KINDS = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}
"""Unicode categories that are shown by their number."""
SPACES = {"\n": "↵", "\t": "⇥", "\r": "␍", " ": "␣"}
EMPTY = "∅"
"""Shown for a token that adds no text, such as the first part of a character."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """One element.

    Args:
        name: of the element.
        *children: `Html` is taken as it is, anything else is escaped text; None is left out.
        **attributes: `class_` is class, `aria_label` is aria-label; True is an attribute without a
            value, None and False are left out.
    """
    parts = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(f" {key}" if value is True else f' {key}="{html.escape(str(value))}"')
    opening = f"<{name}{''.join(parts)}>"
    if name in ("br", "col", "input", "meta"):
        return Html(opening)
    return Html(f"{opening}{joined(children)}</{name}>")


def joined(children: Iterable[Any]) -> Html:
    """Several pieces behind each other; escaped as by `tag`."""
    found = [
        child if isinstance(child, Html) else html.escape(str(child))
        for child in children
        if child is not None
    ]
    return Html("".join(found))


def visible(piece: str) -> str:
    """A token's text with everything in it to be seen; the result still has to be escaped.

    A space before or between letters stays a space; of a token that is nothing but white space each
    character is drawn. Line ends always are. Control and formatting characters become ⟨U+202E⟩.
    """
    if not piece:
        return EMPTY
    blank = piece.isspace()
    shown = []
    for char in piece:
        if char in "\n\t\r" or (blank and char == " "):
            shown.append(SPACES[char])
        elif unicodedata.category(char) in HIDDEN_KINDS or (char.isspace() and char != " "):
            shown.append(f"⟨U+{ord(char):04X}⟩")
        else:
            shown.append(char)
    return "".join(shown)


# Numbers ----------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """Fixed digits, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def percent(value: float | None, digits: int = 0) -> str:
    """A share in percent, or a dash."""
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def interval(pair: Sequence[float] | None, digits: int = 2) -> str:
    """Both ends of an interval, or a dash."""
    return "–" if pair is None else f"{pair[0]:.{digits}f} to {pair[1]:.{digits}f}"


# Tables -----------------------------------------------------------------------------------------


def table(
    head: Sequence[Any],
    rows: Iterable[Sequence[Any]],
    caption: str,
    groups: dict[int, str] | None = None,
) -> Html:
    """A table whose first column names the rows; it scrolls sideways within the page.

    Args:
        head: names of the columns.
        rows: cells of each row; all but the first are set as numbers.
        caption: what it shows; read aloud, and the name of the scrolled region.
        groups: row number -> a heading above this row.
    """
    body = []
    for place, row in enumerate(rows):
        assert len(row) == len(head), (caption, row)
        if groups and place in groups:
            title = tag("th", groups[place], colspan=len(head), scope="colgroup")
            body.append(tag("tr", title, class_="group"))
        cells = [tag("td", cell) for cell in row[1:]]
        body.append(tag("tr", tag("th", row[0], scope="row"), *cells))
    heads = [tag("th", name, scope="col") for name in head]
    whole = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *heads)),
        tag("tbody", *body),
    )
    return tag("div", whole, class_="scroll", role="region", aria_label=caption, tabindex="0")


def details(title: str, *children: Any) -> Html:
    """Something folded away under its title."""
    return tag("details", tag("summary", title), *children)
