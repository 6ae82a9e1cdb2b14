"""What `scripts.benchmark` expected of a contender, beside what it measured.

`--size auto` says itself what it expected of every round that it chose. Of drafts of a fixed size
the rounds are known that were made, and a cost table says what they take: the one of `--costs`, or
the one that `--size auto` keeps in the folder of the head, if it is of the same engine and threads.

A table is of the time when it was measured. Where a machine is faster or slower meanwhile, as one
that is shared, speeds are off and the speed-up over plain decoding is not: both are compared.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference.scheduling.costs import CostTable
from inference.scheduling.schedule import plain_step
from scripts.benchmark_contenders import Contender
from scripts.benchmark_protocol import Answer
from scripts.benchmark_race import Heat
from scripts.benchmark_statistics import predicted_speed

BRANCH = 8
"""Children of a node, where a contender does not say."""


def prediction(
    one: Contender, heat: Heat, costs: CostTable | None, threads: int | None = None
) -> dict[str, Any]:
    """Tokens per second and speed-up over plain decoding as expected, for ours with drafts.

    Args:
        one: that took part.
        heat: what it did.
        costs: of `--costs`.
        threads: that the contender computes with.

    Returns:
        Nothing where nothing can be said.
    """
    if not one.drafts:
        return {}
    told = [answer.expected for answer in heat.answers[one.name] if answer.expected is not None]
    if told:
        tokens, seconds, plain = (sum(parts) for parts in zip(*told, strict=True))
        return _record(tokens, seconds, plain)
    table = costs or own_costs(one, threads)
    name = None if table is None else draft_name(one, table)
    if table is None or name is None or not _covers(table, heat.answers[one.name]):
        return {}
    return _record(*_by_table(one, heat, table, name))


def _covers(costs: CostTable, answers: Sequence[Answer]) -> bool:
    """Whether rounds as wide as those that were made are in the table."""
    rounds = [made for answer in answers for made in answer.rounds or []]
    return all(nodes <= costs.widest(rows) for rows, nodes, *_ in rounds)


def _record(tokens: float, seconds: float, plain: float) -> dict[str, Any]:
    speedup = plain / seconds if seconds > 0 else None
    return {
        "predicted_tokens_per_second": predicted_speed(tokens, seconds),
        "predicted_plain_tokens_per_second": predicted_speed(tokens, plain),
        "predicted_speedup": speedup,
    }


def _by_table(
    one: Contender, heat: Heat, costs: CostTable, name: str
) -> tuple[float, float, float]:
    """Tokens, seconds, and seconds of plain decoding for as many, of the rounds that were made.

    Drafting is charged for the sequences whose drafts a network made.
    """
    width = int(one.settings.get("branch", BRANCH))
    emitted = seconds = plain = 0.0
    for batch, answer in zip(heat.cell.batches, heat.answers[one.name], strict=True):
        context = sum(map(len, batch.ids)) / heat.cell.batch_size
        rounds = answer.rounds or []
        drafted = answer.drafted or [rows for rows, *_ in rounds]
        for (rows, nodes, depth, tokens), drafting in zip(rounds, drafted, strict=True):
            seconds += costs.verify(nodes, context, rows) + costs.rest(rows)
            if name and drafting:
                seconds += costs.draft(name, depth, width, drafting)
            plain += plain_step(costs, context, rows).seconds * tokens / rows
            emitted += tokens
            context += tokens / rows
    return emitted, seconds, plain


def own_costs(one: Contender, threads: int | None) -> CostTable | None:
    """The table in the folder of a contender's head, if it is of its engine and threads.

    Args:
        one: of ours, with drafts.
        threads: that it computes with.
    """
    path = Path(one.source or "") / f"costs-{one.settings.get('engine', 'eager')}.json"
    if one.source is None or not path.is_file():
        return None
    try:
        found = CostTable.load(path)
    except ValueError:  # whoever decides by it says so and measures anew
        return None
    return found if threads is None or found.key.threads == threads else None


def draft_name(one: Contender, costs: CostTable) -> str | None:
    """Under which name the table has the drafts of a contender.

    Args:
        one: of ours, with drafts.
        costs: the table.

    Returns:
        "" for drafts that cost nothing but the host's time; None if the table does not know them.
    """
    known = {name for name, *_ in costs.draft_points}
    if one.source in known:
        return one.source
    if one.source in ("ngram", "suffix"):
        return ""
    return known.pop() if len(known) == 1 and one.source not in ("draft-model",) else None


def add_measured_speedups(records: list[dict[str, Any]], contenders: list[Contender]) -> None:
    """Beside predicted speed-ups the measured ones: decoding over that of the same engine without
    drafts, where it takes part; and the speed of that over what the table says of it.

    Args:
        records: of the contenders, with their speeds; added to.
        contenders: all.
    """
    by_name = {one.name: one for one in contenders}
    speeds = {
        one.settings.get("engine"): record["tokens_per_second"]
        for record in records
        for one in [by_name[record["name"]]]
        if one.kind == "ours" and one.source is None and record.get("tokens_per_second")
    }
    for record in records:
        plain = speeds.get(by_name[record["name"]].settings.get("engine"))
        if "predicted_speedup" in record and plain and record.get("tokens_per_second"):
            record["measured_speedup"] = record["tokens_per_second"] / plain
            if expected := record["predicted_plain_tokens_per_second"]:
                record["machine_speed"] = plain / expected


def print_predictions(records: list[dict[str, Any]], wide: int) -> None:
    """Predicted against measured.

    Args:
        records: of the contenders.
        wide: the first column.
    """
    told = [one for one in records if "predicted_tokens_per_second" in one]
    if not told:
        return
    columns = ("tok/s", "measured", "off", "over plain", "measured", "off")
    print(f"\n{'predicted':<{wide}}" + "".join(f"{name:>12}" for name in columns))
    for one in told:
        cells = ""
        for part, digits in (("tokens_per_second", 1), ("speedup", 2)):
            predicted = one[f"predicted_{part}"]
            found = one.get(part) if part == "tokens_per_second" else one.get(f"measured_{part}")
            off = predicted / found - 1.0 if predicted and found else None
            for value, shape in ((predicted, f".{digits}f"), (found, f".{digits}f"), (off, "+.1%")):
                cells += f"{'-' if value is None else format(value, shape):>12}"
        print(f"{one['name']:<{wide}}{cells}")
    drifts = [one["machine_speed"] for one in told if "machine_speed" in one]
    if drifts:
        print(
            f"plain decoding runs at {min(drifts):.2f} to {max(drifts):.2f} of the speed that the "
            "table was measured at"
        )
