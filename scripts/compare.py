"""Compare evaluations: which head, size or rule is better, by how much, and where.

    python -m scripts.compare outputs/eagle3-run outputs/medusa-run
    python -m scripts.compare outputs/grid-run --baseline "T=0 match 1"

Each RUN is a folder that `scripts.evaluate --out` wrote; each of its cells is a contender. Those of
equal temperature are paired question by question, so that what makes a question easy or hard leaves
the difference: acceptance length (bonus included), the difference from the baseline with its 95 %
interval (questions resampled, in both at once), questions won, tied and lost, the speed-up over
plain decoding of the contender's own run, and the winner of every category; a lead is "clear" if
its interval leaves out zero. Speeds of different runs are compared through their speed-ups alone.
Runs of another target, or of other prompts under the same name, are refused. The last line is one
JSON object.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inference.measuring.intervals import Estimate
from inference.measuring.pairing import (
    SAME,
    Contender,
    Versus,
    Winner,
    common_questions,
    contender,
    ranking,
    versus,
    winners,
)
from inference.measuring.run_records import Run, read_run
from scripts.common import (
    PENALTY_OPTIONS,
    WARPER_OPTIONS,
    add_options,
    parser_for,
    print_json,
    run,
    write_json_atomic,
)

LAW_OPTIONS = (*WARPER_OPTIONS, *PENALTY_OPTIONS, "--seed")
WATCHED = (
    "max_new_tokens",
    "limit",
    "turns",
    "chat_template",
    "no_plain",
    "dtype",
    "device",
    "engine",
    "threads",
    "batch_size",
    *(name.removeprefix("--").replace("-", "_") for name in LAW_OPTIONS),
)
"""Settings whose difference is worth a line."""


def main(argv: list[str] | None = None) -> None:
    """Print the tables and the JSON line."""
    args = parse_args(argv)
    runs = [(folder, read_run(folder)) for folder in args.runs]
    check_target(runs)
    found = contenders(runs)
    groups = by_temperature(found, args.baseline)
    for line in differing_settings(runs):
        print(line)
    record = {"groups": [compare(group) for group in groups]}
    if args.out is not None:
        write_json_atomic(args.out, record)
    print_json(record)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of evaluations")
    parser.add_argument(
        "--baseline", metavar="NAME", help="contender that the others are compared with (the first)"
    )
    add_options(parser, "--out")
    return parser.parse_args(argv)


# Who is compared --------------------------------------------------------------------------------


def check_target(runs: list[tuple[Path, Run]]) -> None:
    """Refuse runs of different targets.

    Raises:
        ValueError: naming both.
    """
    first, one = runs[0]
    for folder, each in runs[1:]:
        if each.result["target"]["fingerprint"] != one.result["target"]["fingerprint"]:
            raise ValueError(
                f"{first} and {folder} are of different targets "
                f"({one.result['target']['name']}, {each.result['target']['name']}): acceptance "
                "lengths say how well a head fits its own target"
            )


def contenders(runs: list[tuple[Path, Run]]) -> list[Contender]:
    """All cells of all runs, with names that tell them apart.

    Args:
        runs: folders and what they hold.

    Raises:
        ValueError: two have the same name.
    """
    found = []
    for folder, each in runs:
        for number, cell in enumerate(each.cells):
            parts = [folder.resolve().name] if len(runs) > 1 else []
            parts += [cell["name"]] if len(each.cells) > 1 or not parts else []
            found.append(contender(each, number, " ".join(parts)))
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two contenders are called {name!r}: rename one of the folders")
    return found


def by_temperature(found: list[Contender], baseline: str | None) -> list[list[Contender]]:
    """Contenders that can be compared, the baseline first in each group.

    Args:
        found: all.
        baseline: name of one; None is the first of each group.

    Raises:
        ValueError: nobody has an opponent, or there is no such baseline.
    """
    groups: dict[float, list[Contender]] = {}
    for each in found:
        groups.setdefault(each.temperature, []).append(each)
    kept = [group for group in groups.values() if len(group) > 1]
    if baseline is not None:
        if baseline not in {each.name for each in found}:
            names = ", ".join(repr(each.name) for each in found)
            raise ValueError(f"--baseline {baseline!r}: there is none; there are {names}")
        kept = [
            sorted(group, key=lambda each: each.name != baseline)
            for group in kept
            if baseline in {each.name for each in group}
        ]
    if not kept:
        raise ValueError(
            "RUN: two contenders of equal temperature are needed; there are "
            + ", ".join(f"{each.name} (T={each.temperature:g})" for each in found)
        )
    return kept


def differing_settings(runs: list[tuple[Path, Run]]) -> list[str]:
    """A line for every setting that the runs do not share.

    Args:
        runs: folders and what they hold.
    """
    lines = []
    for key in WATCHED:
        values = [each.result["settings"].get(key) for _, each in runs]
        if any(value != values[0] for value in values):
            shown = ", ".join(f"{f.name} {v}" for (f, _), v in zip(runs, values, strict=True))
            lines.append(f"note: {key} differs: {shown}")
    return lines


# Tables -----------------------------------------------------------------------------------------


def compare(group: list[Contender]) -> dict[str, Any]:
    """Print the tables of one temperature.

    Args:
        group: two contenders at least, the baseline first.

    Returns:
        The same as plain values.
    """
    ids = common_questions(group)
    left_out = {each.name: len(each.questions) - len(ids) for each in group}
    print(f"\nT={group[0].temperature:g}: {len(ids)} questions in common")
    for name, count in left_out.items():
        if count:
            print(
                f"note: {count} questions of {name} are left out: not all contenders have them "
                "with as many turns"
            )
    against = [versus(each, group[0], ids) for each in group]
    print_versus(against)
    best = winners(group, ids)
    print_winners(best, [each.name for each in group])
    duels = ranking(group, ids)
    print("\nduels won, over all questions and opponents:")
    print("  " + ", ".join(f"{name} {share:.0%}" for name, share in duels))
    return {
        "temperature": group[0].temperature,
        "baseline": group[0].name,
        "questions": len(ids),
        "contenders": [_plain(asdict(each)) for each in against],
        "by_category": [{**_plain(asdict(each)), "clear": each.clear} for each in best],
        "duels_won": dict(duels),
    }


def print_versus(against: list[Versus]) -> None:
    """Every contender beside the baseline, as a Markdown table."""
    over = f"over {against[0].baseline}"
    print()
    print_row(
        [
            "contender",
            "length",
            over,
            "won / tied / lost",
            "speed-up over plain",
            over,
            "equal texts",
        ]
    )
    print("|---" * 7 + "|")
    for number, each in enumerate(against):
        cells = [each.name, _estimate(each.length)]
        if number == 0:
            cells += ["", "", _estimate(each.speedup), "", ""]
        else:
            cells += [_estimate(each.difference, "+.2f")]
            cells += [f"{each.wins} / {each.ties} / {each.losses}", _estimate(each.speedup)]
            cells += [_estimate(each.speedup_difference, "+.2f")]
            cells += [f"{each.equal_texts} of {each.questions}"]
        print_row(cells)


def print_winners(best: list[Winner], names: list[str]) -> None:
    """Who wins where, as a Markdown table."""
    print()
    print_row(["category", "questions", *names, "best", "lead over the next"])
    print("|---" * (len(names) + 4) + "|")
    for each in best:
        lengths = [_estimate(Estimate(each.lengths[name])) for name in names]
        lead = _estimate(each.lead, "+.2f") + (", clear" if each.clear else "")
        name = "tie" if abs(each.lead.value) <= SAME else each.name
        print_row([each.category, str(each.questions), *lengths, name, lead])


def print_row(cells: Sequence[str]) -> None:
    """One line of a Markdown table; names may hold bars."""
    print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")


def _plain(value: Any) -> Any:
    """None for what could not be divided, as in texts without a round."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _estimate(found: Estimate | None, form: str = ".2f") -> str:
    if found is None or math.isnan(found.value):
        return "-"
    if found.low is None or found.high is None:
        return f"{found.value:{form}}"
    return f"{found.value:{form}} [{found.low:{form}}, {found.high:{form}}]"


if __name__ == "__main__":
    run(main)
