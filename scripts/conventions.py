"""What other papers and programs would call this: their acceptance numbers, from a run's records.

    python -m scripts.conventions RUN

RUN is a folder of `scripts.evaluate --out`. "My acceptance length is 1.9, the paper says 5" is
often one measurement under two definitions: with the target's own token or without, pooled over
rounds or averaged over texts, with the prefill's token or without. Every number is computed from
the recorded rounds of each cell by the function of inference/measuring/conventions.py that it is
named after; docs/evaluation.md says what each one means, and how sure that is. A dash: not defined
for this cell, and the reason below the table. The last line is one JSON object.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inference.measuring import conventions
from inference.measuring.run_records import Run, read_run
from scripts.common import parser_for, print_json, run

OF_ROUNDS: dict[str, Callable[..., Any]] = {
    "acceptance_length": conventions.acceptance_length,
    "accepted_per_round": conventions.accepted_per_round,
    "eagle_tau": conventions.eagle_tau,
    "eagle_n_alpha": conventions.eagle_n_alpha,
    "spec_bench_mean_accepted_tokens": conventions.spec_bench_mean_accepted_tokens,
    "speed_bench_joint_rates": conventions.speed_bench_joint_rates,
    "speed_bench_conditional_rates": conventions.speed_bench_conditional_rates,
    "specforge_simulated_acc_len": conventions.specforge_simulated_acc_len,
    "automodel_tau_sim": conventions.automodel_tau_sim,
    "vllm_mean_acceptance_length": conventions.vllm_mean_acceptance_length,
    "vllm_per_position_acceptance_rates": conventions.vllm_per_position_acceptance_rates,
    "vllm_draft_acceptance_rate": conventions.vllm_draft_acceptance_rate,
}
OF_RUNS: dict[str, Callable[[Run, int], float]] = {
    "acceptance_length_per_request": conventions.acceptance_length_per_request,
    "spec_bench_speedup": conventions.spec_bench_speedup,
    "speed_bench_average_al": conventions.speed_bench_average_al,
    "dflash_average_acceptance_length": conventions.dflash_average_acceptance_length,
    "deepspec_tau": conventions.deepspec_tau,
    "sglang_accept_length": conventions.sglang_accept_length,
}


def main(argv: list[str] | None = None) -> None:
    """Print a table of every cell and the JSON line."""
    parser = parser_for(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of an evaluation")
    args: argparse.Namespace = parser.parse_args(argv)
    recorded = read_run(args.run)
    cells = []
    for number, cell in enumerate(recorded.cells):
        values, reasons = numbers(recorded, number)
        print(f"\n== {cell['name']}\n")
        width = max(map(len, values))
        for name, value in values.items():
            print(f"{name:<{width}}  {shown(value)}")
        for reason, names in reasons.items():
            print(f"- {', '.join(names)}: {reason}")
        cells.append({"name": cell["name"], **values})
    print_json({"cells": cells})


def numbers(recorded: Run, cell: int) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Every convention of one cell, and why some have no number.

    Args:
        recorded: the run.
        cell: index of the cell.

    Returns:
        Numbers, lists of them by position, or None, by name; and reason -> names.
    """
    rounds = conventions.rounds_of_cell(recorded, cell)
    values: dict[str, Any] = {}
    reasons: dict[str, list[str]] = {}
    for name in (*OF_ROUNDS, *OF_RUNS):
        try:
            of_rounds = name in OF_ROUNDS
            values[name] = OF_ROUNDS[name](rounds) if of_rounds else OF_RUNS[name](recorded, cell)
        except ValueError as error:
            values[name] = None
            reasons.setdefault(str(error), []).append(name)
    return values, reasons


def shown(value: Any) -> str:
    """A number, those of each position, or a dash."""
    if isinstance(value, list):
        return " ".join(shown(each) for each in value) or "-"
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    run(main)
