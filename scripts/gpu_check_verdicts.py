"""What `scripts.gpu_check` was asked, what it measured, and whether that is enough.

Pure: rows of sections in, one row per criterion out. A criterion whose section did not come so far
says "not measured"; where only some of its cases were, it says of how many.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Measured = tuple[float | None, str]
"""A number, None where nothing tells, and what to know about it."""
NOTHING: Measured = (None, "")


@dataclass(frozen=True)
class Criterion:
    """Something that is asked.

    Attributes:
        section: whose rows tell.
        asked: in words.
        limit: of the number.
        at_least: the number has to reach the limit; otherwise it must not exceed it.
        measured: the number, from the rows.
        timed: it is about time, of which a dry run says nothing.
    """

    section: str
    asked: str
    limit: float
    at_least: bool
    measured: Callable[[Sequence[Row]], Measured]
    timed: bool = True


def verdicts(sections: Mapping[str, Mapping[str, Any]], dry_run: bool) -> list[Row]:
    """One row per criterion of the sections that were asked for.

    Args:
        sections: by name, with their `rows`.
        dry_run: times mean nothing.
    """
    found = []
    for criterion in CRITERIA:
        if criterion.section in sections:
            value, note = criterion.measured(sections[criterion.section]["rows"])
            sign = "≥" if criterion.at_least else "≤"
            found.append({
                "asked": criterion.asked,
                "limit": f"{sign} {criterion.limit:g}",
                "measured": "not measured" if value is None else value,
                "met": met(criterion, value, dry_run),
                "note": note,
            })  # fmt: skip
    return found


def met(criterion: Criterion, value: float | None, dry_run: bool) -> bool | None:
    """Whether it is; None where that cannot be said."""
    if value is None or (dry_run and criterion.timed):
        return None
    return value >= criterion.limit if criterion.at_least else value <= criterion.limit


# Numbers from rows --------------------------------------------------------------------------------


def value_of(rows: Sequence[Row], what: str, key: str) -> Any:
    """Of the first row of this name that was captured, or has no such column; None if none has."""
    for row in rows:
        if row.get("what") == what and row.get("graphs", "yes") == "yes":
            return row.get(key)
    return None


def agreeing(rows: Sequence[Row]) -> Measured:
    """The share of cases in which the kernel agrees, repeats and follows replays."""
    compared = [row for row in rows if "ok" in row]
    if not compared:
        return NOTHING
    worst = max(compared, key=lambda row: row["error"] / row["tolerance"])
    dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in compared))
    note = f"{len(compared)} cases, {dtypes}; largest error {worst['error']:.2g} of "
    note += f"{worst['tolerance']:.2g} allowed"
    return sum(row["ok"] for row in compared) / len(compared), note


def bandwidth(rows: Sequence[Row]) -> Measured:
    """Of copying's, at the size that was named."""
    for row in rows:
        if (row.get("B"), row.get("P"), row.get("N")) == (16, 8192, 16):
            return row["of copy"], f"{row['kernel µs']:.0f} µs"
    return NOTHING


def faster(rows: Sequence[Row]) -> Measured:
    """How much faster than the faster alternative, where that is least."""
    compared = [row for row in rows if "faster by" in row]
    if not compared:
        return NOTHING
    worst = min(compared, key=lambda row: row["faster by"])
    ahead = sum(row["faster by"] > 1 for row in compared)
    place = ", ".join(f"{key} {worst[key]}" for key in "BPN")
    return worst["faster by"], f"faster at {ahead} of {len(compared)} sizes; least at {place}"


def verification(rows: Sequence[Row]) -> Measured:
    """In plain steps."""
    return value_of(rows, "verify 16 nodes", "plain steps"), ""


def whole_round(rows: Sequence[Row]) -> Measured:
    """In plain steps, with its parts."""
    parts = {
        name: value_of(rows, f"tree of 16: {name}", "plain steps")
        for name in ("draft", "verify", "accept, commit")
    }
    note = "; ".join(f"{name} {value:.3g}" for name, value in parts.items() if value is not None)
    least = value_of(rows, "whole round, least by bytes", "plain steps")
    note += "" if least is None else f"; least by bytes {least:.3g}"
    return value_of(rows, "tree of 16: whole round, host's part included", "plain steps"), note


def waiting(rows: Sequence[Row]) -> Measured:
    """The most of any kind of round."""
    found = [row["is"] for row in rows if str(row.get("what")).startswith("waits of the host")]
    if not found or None in found:
        return NOTHING
    return float(max(found)), f"{len(found)} kinds of rounds"


def changing(rows: Sequence[Row]) -> Measured:
    """What a round costs more where sizes change."""
    apart = value_of(rows, "rounds ordered by size", "quartiles apart")
    note = "" if apart is None else f"quartiles of the same rounds lie {apart:.2g} apart"
    return value_of(rows, "mixed over ordered, less 1", "is"), note


def plain_on_device(rows: Sequence[Row]) -> Measured:
    """The engine's plain step over the bare forward."""
    share = value_of(rows, "captured forward of one token, bare", "plain steps")
    return (None if share is None else 1 / share), ""


def auto(rows: Sequence[Row]) -> Measured:
    """Over the best fixed size, at the quality of drafts where that is least."""
    compared = [row for row in rows if "auto over it" in row]
    if not compared:
        return NOTHING
    worst = min(compared, key=lambda row: row["auto over it"])
    gains = ", ".join(f"{row['auto over plain']:.2f}" for row in compared)
    return worst["auto over it"], f"least at {worst['what']}; over plain {gains}"


def same_texts(rows: Sequence[Row]) -> Measured:
    """The share of engines that gave plain decoding's texts."""
    compared = [row["ok"] for row in rows if "ok" in row]
    return (sum(compared) / len(compared), f"{len(compared)} ways") if compared else NOTHING


def trained(rows: Sequence[Row]) -> Measured:
    """Families whose step was timed."""
    return (float(len(rows)), "") if rows else NOTHING


CRITERIA = (
    Criterion("agreement", "kernel agrees with plain attention, share of cases", 1, True,
              agreeing, timed=False),
    Criterion("kernel", "kernel, of copy bandwidth at B 16, P 8192, N 16", 0.7, True, bandwidth),
    Criterion("decode", "8B, B 1, P 2048: verification of 16 nodes, plain steps", 1.15, False,
              verification),
    Criterion("decode", "8B, B 1, P 2048: whole round of 16 nodes, plain steps", 1.35, False,
              whole_round),
    Criterion("rivals", "kernel faster than both alternatives at every size, least factor", 1, True,
              faster),
    Criterion("sizes", "engine device: waits of the host per round", 1, False, waiting,
              timed=False),
    Criterion("sizes", "engine device: changing the size, share of a round", 0.02, False,
              changing),
    Criterion("sizes", "engine device: its plain step over a bare captured forward", 1.1, False,
              plain_on_device),
    Criterion("sizes", "--size auto over the best fixed size, least of all qualities", 0.95, True,
              auto),
    Criterion("target", "engines give plain decoding's texts, share", 1, True, same_texts,
              timed=False),
    Criterion("training", "families whose training step was timed", 8, True, trained, timed=False),
)  # fmt: skip
