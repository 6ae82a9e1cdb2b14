"""Tables of an evaluation, for people."""

from typing import Any


def print_report(result: dict[str, Any]) -> None:
    """One cell: by category, by position, by context, time, identity."""
    print(
        f"{'category':<18}{'prompts':>8}{'rounds':>8}{'length':>8}  {'95 % interval':<16}", end=""
    )
    print(f"{'accepted':>8}{'per request':>13}{'drafts':>8}{'width':>7}", end="")
    print(f"{'tokens/s':>10}{'plain':>8}{'speedup':>9}")
    for name, group in [*sorted(result["by_category"].items()), ("all", result)]:
        print(f"{name:<18.18}{group['num_prompts']:>8}{group['num_drafts']:>8}", end="")
        print(f"{_number(group['acceptance_length']):>8}  ", end="")
        print(f"{_interval(group['acceptance_length_interval']):<16}", end="")
        print(f"{_number(group['accepted_per_round']):>8}", end="")
        print(f"{_number(group['acceptance_length_per_request']):>13}", end="")
        print(f"{_number(group['draft_tokens_per_round'], 1):>8}", end="")
        print(f"{_number(group['verify_width'], 1):>7}", end="")
        print(f"{_number(group['tokens_per_second'], 1):>10}", end="")
        print(f"{_number(group['plain_tokens_per_second'], 1):>8}", end="")
        print(f"{_number(group['speedup']):>9}")
    rates = result["acceptance_by_position"]
    if rates["survival"]:
        print("\nposition   " + "".join(f"{n:>7}" for n in range(1, len(rates["survival"]) + 1)))
        for name in ("survival", "conditional"):
            print(f"{name:<11}" + "".join(f"{_number(rate, 3):>7}" for rate in rates[name]))
    buckets = result["by_context"]
    if len(buckets) > 1:
        print("\ncontext from " + "".join(f"{bucket['from']:>8}" for bucket in buckets))
        lengths = (f"{bucket['acceptance_length']:>8.2f}" for bucket in buckets)
        print("length       " + "".join(lengths))
    print_time(result)
    print_identity(result)


def print_time(result: dict[str, Any]) -> None:
    """Where the time went, and what confidence is worth."""
    seconds, total = result["seconds"], result["seconds"]["total"]
    if total:
        names = ("round",) if seconds["round"] else ("target", "draft")
        parts = (f"{name} {seconds[name] / total:.1%}" for name in (*names, "other"))
        print(f"\ndecoding time: {', '.join(parts)} of {total:.1f} s")
    if result["confidence_drafts"]:
        print(
            f"confidence: AUC {_number(result['confidence_auc'], 3)}, error of the predicted "
            f"survival {_number(result['confidence_error'], 3)} over "
            f"{result['confidence_drafts']} drafts"
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
    print(f"\n{'cell':<{width}}  {'length':>8}  {'95 % interval':<16}{'accepted':>8}", end="")
    print(f"{'predicted':>11}{'speedup':>9}  output")
    for cell in cells:
        same = {None: "not compared", True: "identical", False: "NOT identical"}[cell["identical"]]
        prediction = cell["prediction"]
        expected = None if prediction is None else prediction["tau"]["value"]
        print(f"{cell['name']:<{width}}  {_number(cell['acceptance_length']):>8}  ", end="")
        print(f"{_interval(cell['acceptance_length_interval']):<16}", end="")
        print(f"{_number(cell['accepted_per_round']):>8}{_number(expected):>11}", end="")
        print(f"{_number(cell['speedup']):>9}  {same}")


def _interval(ends: list[float] | None) -> str:
    return "-" if ends is None else f"[{ends[0]:.2f}, {ends[1]:.2f}]"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
