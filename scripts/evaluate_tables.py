"""Tables of an evaluation, for people."""

from typing import Any

from scripts.common import decimal

FEW = 6
"""Conversations below which intervals cover the truth less often than they say."""


def print_report(result: dict[str, Any]) -> None:
    """One cell: by category, by position, by context, time, identity."""
    print(f"{'':<35}{'tokens per round':>24}{'accepted':>10}{'per':>10}{'drafted':>9}", end="")
    print(f"{'rows':>9}{'tokens/s':>10}{'tokens/s':>10}{'speed-':>8}")
    print(f"{'category':<18}{'turns':>8}{'rounds':>9}{'(bonus in, 95 %)':>24}", end="")
    print(f"{'per round':>10}{'request':>10}{'a round':>9}{'verified':>9}{'drafts':>10}", end="")
    print(f"{'plain':>10}{'up':>8}")
    for name, group in [*sorted(result["by_category"].items()), ("all", result)]:
        interval = _interval(group["acceptance_length_interval"])
        print(f"{name:<18.18}{group['num_prompts']:>8}{group['num_drafts']:>9}", end="")
        print(f"{decimal(group['acceptance_length']):>10} {interval:>13}", end="")
        print(f"{decimal(group['accepted_per_round']):>10}", end="")
        print(f"{decimal(group['acceptance_length_per_request']):>10}", end="")
        print(f"{decimal(group['draft_tokens_per_round'], 1):>9}", end="")
        print(f"{decimal(group['verify_width'], 1):>9}", end="")
        print(f"{decimal(group['tokens_per_second'], 1):>10}", end="")
        print(f"{decimal(group['plain_tokens_per_second'], 1):>10}", end="")
        print(f"{decimal(group['speedup']):>8}")
    if result["num_conversations"] < FEW:
        print(f"note: {result['num_conversations']} conversations: intervals are rough")
    rates = result["acceptance_by_position"]
    if rates["survival"]:
        print("\ndraft      " + "".join(f"{n:>7}" for n in range(1, len(rates["survival"]) + 1)))
        for name in ("survival", "conditional"):
            print(f"{name:<11}" + "".join(f"{decimal(rate, 3):>7}" for rate in rates[name]))
    buckets = result["by_context"]
    if len(buckets) > 1:
        print("\ncontext from " + "".join(f"{bucket['from']:>8}" for bucket in buckets))
        lengths = (f"{bucket['acceptance_length']:>8.2f}" for bucket in buckets)
        print("length       " + "".join(lengths))
    print_time(result)
    print_simulated(result)
    print_identity(result)


def print_time(result: dict[str, Any]) -> None:
    """Where the time went, and what confidence is worth."""
    seconds, total = result["seconds"], result["seconds"]["total"]
    if total and result["num_drafts"]:
        names = ("round",) if seconds["round"] else ("target", "draft")
        parts = (f"{name} {seconds[name] / total:.1%}" for name in (*names, "other"))
        print(f"\ndecoding time: {', '.join(parts)} of {total:.1f} s")
    if result["confidence_drafts"]:
        print(
            f"confidence: AUC {decimal(result['confidence_auc'], 3)}, error of the predicted "
            f"survival {decimal(result['confidence_error'], 3)} over "
            f"{result['confidence_drafts']} drafts"
        )


def print_simulated(result: dict[str, Any]) -> None:
    """Theory beside drafts of a chosen quality."""
    theory = result["simulated"]
    if theory is not None:
        print(
            f"simulated drafts, alpha {theory['alpha']:g}, chains of {theory['depth']}: the "
            f"formula gives {theory['formula']:.2f} tokens per round, with the ends of these texts "
            f"{decimal(theory['expected'])}; measured {decimal(result['acceptance_length'])} "
            f"{_interval(result['acceptance_length_interval'])}"
        )


def print_identity(result: dict[str, Any]) -> None:
    """Whether the output is that of the reference, and every difference."""
    if result["num_skipped"]:
        print(f"skipped: {result['num_skipped']} prompts or turns too long for the target")
    if result["identical"] is None:
        return
    verdict = "identical" if result["identical"] else "NOT identical"
    print(f"output: {verdict} to decoding without drafts; near ties: {result['near_ties']}")
    for found in result["differences"]:
        gap = "no gap" if found["gap"] is None else f"gap {found['gap']:.2e}"
        kind = "near tie" if found["near_tie"] else "FAILURE"
        turn = f", turn {found['turn'] + 1}" if found["turn"] else ""
        print(
            f"  {kind}: prompt {found['id']}{turn}, new token {found['position']}: "
            f"{found['expected']} -> {found['found']}, {gap}"
        )


def print_summary(cells: list[dict[str, Any]]) -> None:
    """All cells of a grid, one line each."""
    width = max(len(cell["name"]) for cell in cells)
    print(f"\n{'':<{width}}{'tokens per round':>26}{'predicted':>11}{'accepted':>11}{'speed-':>9}")
    print(f"{'cell':<{width}}{'(bonus in, 95 %)':>26}{'':>11}{'per round':>11}{'up':>9}  output")
    for cell in cells:
        same = {None: "not compared", True: "identical", False: "NOT identical"}[cell["identical"]]
        prediction = cell["prediction"]
        expected = None if prediction is None else prediction["tau"]["value"]
        interval = _interval(cell["acceptance_length_interval"])
        print(
            f"{cell['name']:<{width}}{decimal(cell['acceptance_length']):>12} {interval:>13}",
            end="",
        )
        print(f"{decimal(expected):>11}{decimal(cell['accepted_per_round']):>11}", end="")
        print(f"{decimal(cell['speedup']):>9}  {same}")


def _interval(ends: list[float] | None) -> str:
    return "-" if ends is None else f"[{ends[0]:.2f}, {ends[1]:.2f}]"
