"""The page on losslessness: its verdict, its tables, and what it says was not tested."""

from typing import Any

import pytest

from inference.proofs.lossless_report import MEANING, NOT_TESTED, number, render, table

TOKENS = {
    "check": "greedy",
    "rule": "match",
    "verdict": "lossless",
    "reason": "",
    "texts": 4,
    "batched": 3,
    "num_accepted_tokens": 17,
    "near_ties": 0,
    "differences": [],
    "tokens": 120,
    "exact": 118,
    "worst_ulp": 1.25,
    "plain_ulp": 0.5,
}
LAW = {
    "check": "law",
    "rule": "rejection",
    "verdict": "lossless",
    "reason": "",
    "prompt": "one",
    "samples": 500,
    "cells": 31,
    "tests": {
        "chi_square": 28.31,
        "p_chi_square": 0.554,
        "total_variation": 0.0712,
        "p_total_variation": 0.61,
        "finds_chi_square": 0.172,
        "finds_total_variation": 0.181,
    },
    "p_value": 1.0,
    "accepting": 300,
    "rejecting": 200,
    "rejected_at": (200, 40, 12),
}
DIFFERENCE = {
    "id": "q7",
    "seed": 3,
    "batched": True,
    "position": 5,
    "expected": 11,
    "found": 12,
    "gap": 0.75,
    "ulp": 96.0,
    "near_tie": False,
}


def page(*checks: dict[str, Any], **changes: Any) -> str:
    result: dict[str, Any] = {
        "verdict": "lossless",
        "negative_control": False,
        "engine": "packed",
        "checks": list(checks),
        "not_tested": ["rule `block`"],
        "settings": {"target": "tiny|one", "top_k": None, "seeds": 3},
        "provenance": {"command": ["verify", "--seed"], "versions": {"torch": "2.x"}},
    }
    return render({**result, **changes})


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize("verdict", list(MEANING))
def test_the_verdict_comes_first(verdict: str) -> None:
    text = page(TOKENS, LAW, verdict=verdict)
    assert text.startswith(f"# Verdict: {verdict}\n\n{MEANING[verdict]}")


def test_the_figures_are_in_the_tables() -> None:
    found = rows(page(TOKENS, LAW))
    tokens = ["greedy", "match", "4", "3", "17", "0", "0", "120", "118", "1.25", "0.5"]
    assert tokens in found
    law = ["rejection", "one", "500", "31", "28.3", "0.554", "0.0712", "0.61", "1", "300"]
    assert [*law, "200, 40, 12", "0.172"] in found


def test_every_table_is_square() -> None:
    """As many cells in a row as in its head."""
    text = page({**TOKENS, "differences": [DIFFERENCE]}, LAW, {**LAW, "tests": None})
    for block in text.split("\n\n"):
        if block.startswith("|"):
            widths = {len(cells) for cells in rows(block)}
            assert len(widths) == 1, block


def test_differences_are_named() -> None:
    tie = {**DIFFERENCE, "near_tie": True}
    text = page({**TOKENS, "near_ties": 1, "differences": [tie, DIFFERENCE]})
    assert text.count("prompt q7") == 1
    assert "prompt q7, seed 3, in a batch: new token 5 is 12 instead of 11 (gap 0.75)" in text
    assert ["greedy", "match", "4", "3", "17", "1", "1", "120", "118", "1.25", "0.5"] in rows(text)
    many = page({**TOKENS, "differences": [DIFFERENCE] * 20})
    assert many.count("prompt q7") == 8 and "and 12 more" in many


def test_misses_that_no_rounding_explains_have_no_number() -> None:
    assert "beyond rounding" in page({**TOKENS, "worst_ulp": None})


def test_a_law_that_could_not_be_tested_has_dashes() -> None:
    found = rows(page({**LAW, "tests": None, "p_value": None}))
    assert ["rejection", "one", "500", "31", *["–"] * 5, "300", "200, 40, 12", "–"] in found


def test_what_was_not_tested_is_said() -> None:
    text = page(TOKENS)
    for remark in ("rule `block`", *NOT_TESTED):
        assert f"- {remark}" in text
    assert "## In law" not in text and "## Token for token" not in page(LAW)


def test_the_negative_control_is_marked() -> None:
    assert "Negative control" in page(LAW, negative_control=True)
    assert "Negative control" not in page(LAW)


def test_settings_and_versions() -> None:
    found = rows(page(TOKENS))
    assert ["target", "tiny\\|one"] in found and ["torch", "2.x"] in found
    assert ["command", "verify --seed"] in found
    assert not any(cells[0] == "top_k" for cells in found), "options that are off"


def test_it_fits_on_a_page() -> None:
    assert len(page(*[TOKENS] * 6, *[LAW] * 2).splitlines()) < 70


def test_small_parts() -> None:
    assert number(None) == "–" and number(0.000123456) == "0.000123"
    assert table(("a", "b"), [(1, "x\ny")]) == "| a | b |\n| --- | --- |\n| 1 | x y |"
