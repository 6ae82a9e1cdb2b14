"""What was found: one entry per (subject, dialect, check), as JSON and as a Markdown table.

An entry says what ran, with the versions it ran with. What could not run is an entry too, skipped,
and says what stopped it; nothing is passed that did not run.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
STATUSES = (PASSED, FAILED, SKIPPED)

WRITTEN = "written"
READ = "read"
ROUND_TRIP = "round trip exact"
STRICT = "strict check"
SIMULATED = "loader simulated"
LOADED = "loaded by its code"
SERVED = "served"
CHECKS = (WRITTEN, READ, ROUND_TRIP, STRICT, SIMULATED, LOADED, SERVED)
"""In the order of the table's columns."""

MARKS = {PASSED: "yes", FAILED: "**no**", SKIPPED: "not run"}


@dataclass(frozen=True)
class Entry:
    """One thing that was tried.

    Attributes:
        name: what it was tried with: a program or a head, such as "llama.cpp" or "vLLM eagle3".
        dialect: a key of ``drafters.export.FORMATS``.
        check: one of ``CHECKS``.
        status: one of ``STATUSES``.
        detail: what was measured, what failed, or what stopped it; one line.
        versions: of every program that had a part in it.
        command: that does it again, if not ``make interop``.
    """

    name: str
    dialect: str
    check: str
    status: str
    detail: str
    versions: Mapping[str, str] = field(default_factory=dict)
    command: str = ""

    def __post_init__(self) -> None:
        if self.check not in CHECKS:
            raise ValueError(f"check {self.check!r} is unknown: choose one of {', '.join(CHECKS)}")
        if self.status not in STATUSES:
            raise ValueError(
                f"status {self.status!r} is unknown: choose one of {', '.join(STATUSES)}"
            )
        if not self.detail or "\n" in self.detail:
            raise ValueError(f"detail must be one line that says something, got {self.detail!r}")

    @property
    def key(self) -> tuple[str, str, str]:
        """Of which there is one entry."""
        return self.name, self.dialect, self.check


def merged(former: Iterable[Entry], latest: Iterable[Entry]) -> list[Entry]:
    """Former entries, those that were found again replaced; new ones at the end."""
    entries = {entry.key: entry for entry in former}
    return list((entries | {entry.key: entry for entry in latest}).values())


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

    A cell is "yes" if all that ran passed, "no" if anything failed, "not run" if all were skipped,
    and empty if nothing was tried.
    """
    entries = list(entries)
    columns = [check for check in CHECKS if any(entry.check == check for entry in entries)]
    lines = [_row(["dialect", *columns]), _row(["---"] * (len(columns) + 1))]
    for dialect in dict.fromkeys(entry.dialect for entry in entries):
        mine = [entry for entry in entries if entry.dialect == dialect]
        lines.append(_row([dialect, *(_cell(mine, check) for check in columns)]))
    lines += ["", _row(["dialect", "with", "check", "", "what was found", "versions"])]
    lines.append(_row(["---"] * 6))
    for entry in sorted(entries, key=lambda entry: entry.dialect):
        versions = ", ".join(f"{name} {number}" for name, number in entry.versions.items())
        mark = MARKS[entry.status]
        detail = f"{entry.detail} (`{entry.command}`)" if entry.command else entry.detail
        lines.append(_row([entry.dialect, entry.name, entry.check, mark, detail, versions]))
    return "\n".join(lines) + "\n"


def _cell(entries: list[Entry], check: str) -> str:
    mine = [entry for entry in entries if entry.check == check]
    if not mine:
        return ""
    found = {entry.status for entry in mine}
    mark = next(MARKS[status] for status in (FAILED, PASSED, SKIPPED) if status in found)
    who = dict.fromkeys(entry.name for entry in mine if MARKS[entry.status] == mark)
    return f"{mark}: {', '.join(who)}" if check in (SIMULATED, LOADED, SERVED) else mark


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
