"""What was found: one entry per (program, head, dialect, check), as JSON and as a Markdown table.

An entry says what ran, with the versions it ran with. Two kinds of entries did not run, and are
told apart: what was refused, because the dialect cannot hold the head or the engine cannot serve it
(an answer), and what was skipped, because an environment or a head is missing (a gap). Both say
why; nothing is passed that did not run.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

FAILED, PASSED, REFUSED, SKIPPED = "failed", "passed", "refused", "skipped"
STATUSES = (FAILED, PASSED, REFUSED, SKIPPED)
"""In the order in which a cell has them."""

WRITTEN = "written"
READ = "read"
ROUND_TRIP = "round trip exact"
STRICT = "strict check"
SIMULATED = "loader simulated"
LOADED = "loaded by its code"
SERVED = "served"
CHECKS = (WRITTEN, READ, ROUND_TRIP, STRICT, SIMULATED, LOADED, SERVED)
"""In the order of the table's columns."""

HEADWAY = "Headway"
"""Name of entries that no other program has a part in."""

BY_PROGRAMS = (SIMULATED, LOADED, SERVED)
"""Checks whose cells always name programs."""

MARKS = {FAILED: "**no**", PASSED: "yes", REFUSED: "refused", SKIPPED: "not run"}
LEGEND = (
    "yes: all that ran passed; refused: the dialect cannot hold the head, or the engine cannot "
    "serve it; not run: a head or an environment is missing; empty: no check here tries it. Heads "
    "are named by their labels, in a cell where they fared differently."
)


@dataclass(frozen=True)
class Entry:
    """One thing that was tried.

    Attributes:
        name: the program it was tried with, such as "llama.cpp", or ``HEADWAY``.
        dialect: a key of ``drafters.export.FORMATS``.
        check: one of ``CHECKS``.
        status: one of ``STATUSES``.
        detail: what was measured, what failed, why it was refused, or what stopped it; one line.
        versions: of every program that had a part in it.
        command: that does it again, if not ``make interop``.
        head: label of the head; empty where no given one has a part in it.
        limit: what a pass does not cover, in a few words for the cell: "without draft vocabulary".
    """

    name: str
    dialect: str
    check: str
    status: str
    detail: str
    versions: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    head: str = ""
    limit: str = ""

    def __post_init__(self) -> None:
        if self.check not in CHECKS:
            raise ValueError(f"check {self.check!r} is unknown: choose one of {', '.join(CHECKS)}")
        if self.status not in STATUSES:
            raise ValueError(
                f"status {self.status!r} is unknown: choose one of {', '.join(STATUSES)}"
            )
        if not self.detail or "\n" in self.detail:
            raise ValueError(f"detail must be one line that says something, got {self.detail!r}")
        if self.limit and self.status != PASSED:
            raise ValueError(f"limit is what a pass does not cover, and this one {self.status}")

    @property
    def place(self) -> tuple[str, str, str]:
        """What it is an entry of, whichever the head."""
        return self.name, self.dialect, self.check

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Of which there is one entry."""
        return *self.place, self.head

    @property
    def mark(self) -> str:
        """What it says in a cell."""
        return f"{MARKS[self.status]}, {self.limit}" if self.limit else MARKS[self.status]


def merged(former: Iterable[Entry], latest: Iterable[Entry]) -> list[Entry]:
    """Former entries, those that were found again replaced; new ones at the end.

    A skipped entry stays only where nothing else is known of its place, with any head.
    """
    found = (*former, *latest)
    known = {entry.place for entry in found if entry.status != SKIPPED}
    kept = (entry for entry in found if entry.status != SKIPPED or entry.place not in known)
    return list({entry.key: entry for entry in kept}.values())


def save(entries: Iterable[Entry], path: Path) -> None:
    """Write all entries as a JSON list."""
    rows = [asdict(entry) for entry in entries]
    path.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: Path) -> list[Entry]:
    """Read :func:`save`'s file; no entries if there is none."""
    if not path.is_file():
        return []
    return [Entry(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def markdown(entries: Iterable[Entry]) -> str:
    """The table of dialects by checks, and below it every entry with its versions.

    A cell has every mark of its entries once, failures first; with programs where the check is of
    theirs, and with the labels of heads where these have different marks.
    """
    entries = list(entries)
    columns = [check for check in CHECKS if any(entry.check == check for entry in entries)]
    lines = [_row(["dialect", *columns]), _row(["---"] * (len(columns) + 1))]
    for dialect in dict.fromkeys(entry.dialect for entry in entries):
        mine = [entry for entry in entries if entry.dialect == dialect]
        cells = [_cell([e for e in mine if e.check == check]) for check in columns]
        lines.append(_row([dialect, *cells]))
    lines += ["", LEGEND, ""]
    lines.append(_row(["dialect", "with", "head", "check", "", "what was found", "versions"]))
    lines.append(_row(["---"] * 7))
    for entry in sorted(entries, key=lambda entry: entry.dialect):
        versions = ", ".join(f"{name} {number}" for name, number in entry.versions.items())
        detail = f"{entry.detail} (`{entry.command}`)" if entry.command else entry.detail
        about = [entry.dialect, entry.name, entry.head, entry.check]
        lines.append(_row([*about, entry.mark, detail, versions]))
    return "\n".join(lines) + "\n"


def _cell(entries: list[Entry]) -> str:
    """The marks of one dialect and check."""
    marks: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda e: (STATUSES.index(e.status), e.limit)):
        marks.setdefault(entry.mark, []).append(entry)
    named = {mark: _names(mine, entries) for mark, mine in marks.items()}
    return "; ".join(f"{mark}: {who}" if who else mark for mark, who in named.items())


def _names(marked: list[Entry], entries: list[Entry]) -> str:
    """Who has one mark.

    Args:
        marked: entries with it.
        entries: of the whole cell.
    """
    labels: dict[str, list[str]] = {}
    for entry in marked:
        mine = labels.setdefault(entry.name, [])
        alike = all(other.mark == entry.mark for other in entries if other.name == entry.name)
        if entry.head and not alike:
            mine.append(entry.head)
    found = []
    for name, mine in labels.items():
        if marked[0].check in BY_PROGRAMS or (name != HEADWAY and len(marked) < len(entries)):
            found.append(f"{name} ({', '.join(mine)})" if mine else name)
        else:
            found += mine
    return ", ".join(found)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
