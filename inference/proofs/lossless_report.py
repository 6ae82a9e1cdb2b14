"""One page, in Markdown, on whether drafts changed what a target says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from inference.proofs.law_check import COUNTED, REFUTED
from inference.proofs.law_statistics import POWER

MEANING = {
    "lossless": "No check found a difference that rounding does not explain.",
    "not lossless": "At least one check found a difference that rounding does not explain.",
    "inconclusive": "No check refuted the decoder, but at least one could not confirm it either.",
}

NOT_TESTED = (
    "Other prompts, options and devices, and texts longer than those of the settings below.",
    "Rules that draw with numbers of their own (`rejection`, `block`) beyond the first tokens, and "
    "total variations below the one stated for each of them.",
)
"""What no run of these checks says anything about."""


def render(result: Mapping[str, Any]) -> str:
    """The page.

    Args:
        result: "verdict", "negative_control", "checks" (dicts of `TokenReport` and `LawReport`),
            "not_tested" (further remarks), "engine", "settings" and "provenance".
    """
    checks = result["checks"]
    tokens = [check for check in checks if check["check"] != "law"]
    laws = [check for check in checks if check["check"] == "law"]
    parts = [
        f"# Verdict: {result['verdict']}",
        MEANING[result["verdict"]],
        f"Decoded by engine `{result['engine']}`; nothing is said about other engines.",
        *(
            [
                "**Negative control**: the drafts' law was made wrong, so the verdict must be `not "
                "lossless`."
            ]
            if result["negative_control"]
            else []
        ),
        "## Checks",
        table(
            ("check", "rule", "verdict", "why"),
            [(c["check"], c["rule"], c["verdict"], c["reason"]) for c in checks],
        ),
    ]
    if tokens:
        parts += ["## Token for token", TOKEN_TEXT, _token_table(tokens), *_differences(tokens)]
    if laws:
        parts += ["## In law", LAW_TEXT, _law_table(laws)]
    remarks = [*result["not_tested"], *NOT_TESTED]
    parts += [
        "## Not tested",
        "\n".join(f"- {remark}" for remark in remarks),
        "## Settings",
        table(("option", "value"), _shown(result["settings"])),
        "## Made with",
        table(("what", "value"), _shown(_flat(result["provenance"]))),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


TOKEN_TEXT = (
    "Every text was decoded with drafts, alone and as a row of a batch of all prompts, and "
    "compared with plain decoding of the same prompt and seed. Every token was also audited: the "
    "text was run through the target at once, and each token must be what the target chooses "
    "there. A miss is given in units in the last place (ulp) of the logits; `plain` is the largest "
    "of plain decoding itself."
)

LAW_TEXT = (
    f"One prompt was continued many times. The {COUNTED} tokens after the first were counted and "
    "tested against the target's exact law by chi-square and by total variation (TV). A decoder "
    "whose law over the cells is off by the TV in the last column, or more, would have been "
    f"refuted with probability {POWER}; a lossless one is refuted with probability {REFUTED:g}. "
    f"`rejected` counts the rounds that rejected all drafts of depth 1 to {COUNTED}."
)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def number(value: float | None) -> str:
    """Three digits; a dash for none."""
    return "–" if value is None else f"{value:.3g}"


def _token_table(checks: Sequence[Mapping[str, Any]]) -> str:
    head = ("check", "rule", "texts", "in batch", "drafts accepted", "near ties", "different")
    rows = []
    for c in checks:
        wrong = len(c["differences"]) - c["near_ties"]
        rows.append(
            (
                c["check"],
                c["rule"],
                c["texts"],
                c["batched"],
                c["num_accepted_tokens"],
                c["near_ties"],
                wrong,
                c["tokens"],
                c["exact"],
                _ulp(c["worst_ulp"]),
                _ulp(c["plain_ulp"]),
            )
        )
    return table((*head, "tokens audited", "exact", "worst ulp", "plain"), rows)


def _ulp(value: float | None) -> str:
    return "beyond rounding" if value is None else number(value)


def _differences(checks: Sequence[Mapping[str, Any]], most: int = 8) -> list[str]:
    """The first places that differ by more than rounding; empty if there is none."""
    found = [
        f"- `{c['rule']}`, {c['check']}, prompt {d['id']}, seed {d['seed']}"
        f"{', in a batch' if d['batched'] else ''}: new token {d['position']} is {d['found']} "
        f"instead of {d['expected']} (gap {number(d['gap'])})"
        for c in checks
        for d in c["differences"]
        if not d["near_tie"]
    ]
    if not found:
        return []
    left = len(found) - most
    more = [f"- and {left} more"] if left > 0 else []
    return ["Differences:", "\n".join([*found[:most], *more])]


def _law_table(checks: Sequence[Mapping[str, Any]]) -> str:
    head = ("rule", "prompt", "samples", "cells", "chi-square", "its p", "TV", "its p", "p of both")
    rows = []
    for c in checks:
        names = ("chi_square", "p_chi_square", "total_variation", "p_total_variation")
        tests: Mapping[str, float] = c["tests"] or {}
        finds = [value for name, value in tests.items() if name.startswith("finds")]
        rows.append(
            (
                *(c[name] for name in ("rule", "prompt", "samples", "cells")),
                *(number(tests.get(name)) for name in names),
                number(c["p_value"]),
                c["accepting"],
                ", ".join(map(str, c["rejected_at"])),
                number(min(finds, default=None)),
            )
        )
    return table((*head, "accepting", "rejected", "TV that is found"), rows)


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings with their keys joined; lists as words."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat |= {str(name): inner for name, inner in value.items()}
        else:
            flat[key] = " ".join(map(str, value)) if isinstance(value, list) else value
    return flat


def _shown(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, str(value)) for key, value in record.items() if value is not None]
