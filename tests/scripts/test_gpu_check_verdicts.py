"""What the check says of what it was asked."""

from typing import Any

import pytest

from scripts.gpu_check_verdicts import CRITERIA, verdicts

ROWS: dict[str, list[dict[str, Any]]] = {
    "agreement": [
        {"case": "a", "dtype": "bfloat16", "error": 0.01, "tolerance": 0.02, "ok": True},
        {"case": "b", "dtype": "float32", "error": 1e-6, "tolerance": 1e-5, "ok": True},
        {"case": "c", "dtype": "float32", "not served": "heads of 256"},
    ],
    "kernel": [
        {"B": "copy", "GB/s": 4000.0},
        {"B": 16, "P": 8192, "N": 16, "kernel µs": 170.0, "of copy": 0.74},
        {"B": 16, "P": 8192, "N": 8, "kernel µs": 170.0, "of copy": 0.4},
    ],
    "rivals": [
        {"B": 1, "P": 1024, "N": 8, "faster by": 1.7},
        {"B": 4, "P": 2048, "N": 16, "faster by": 1.2},
        {"B": 4, "P": 2048, "N": 64, "SDPA µs": "OutOfMemoryError"},
    ],
    "decode": [
        {"what": "whole round, least by bytes", "plain steps": 1.22},
        {"what": "verify 16 nodes", "plain steps": 1.9, "graphs": "no"},
        {"what": "verify 16 nodes", "plain steps": 1.1, "graphs": "yes"},
        {"what": "tree of 16: draft", "plain steps": 0.2, "graphs": "yes"},
        {"what": "tree of 16: verify", "plain steps": 1.1, "graphs": "yes"},
        {"what": "tree of 16: accept, commit", "plain steps": 0.02, "graphs": "yes"},
        {"what": "chain of 5: whole round, host's part included", "plain steps": 9.0,
         "graphs": "yes"},
        {"what": "tree of 16: whole round, host's part included", "plain steps": 1.33,
         "graphs": "yes"},
    ],
    "sizes": [
        {"what": "captured forward of one token, bare", "plain steps": 0.98},
        {"what": "waits of the host: plain step", "is": 1},
        {"what": "waits of the host: 4 nodes, depth 3", "is": 1},
        {"what": "rounds ordered by size", "ms": 5.0, "quartiles apart": 0.004},
        {"what": "mixed over ordered, less 1", "is": 0.001},
        {"what": "accept 0", "auto over it": 0.99, "auto over plain": 0.99},
        {"what": "accept 0.8", "auto over it": 0.97, "auto over plain": 2.5},
    ],
    "target": [{"engine": "plain", "ok": True}, {"engine": "device", "ok": True}],
    "training": [{"family": str(k)} for k in range(8)],
}  # fmt: skip


def said(changed: dict[str, list[dict[str, Any]]] | None = None, dry_run: bool = False) -> Any:
    sections = {name: {"rows": rows} for name, rows in {**ROWS, **(changed or {})}.items()}
    found = verdicts(sections, dry_run)
    assert len(found) == len(CRITERIA)
    return {one["asked"]: one for one in found}


def test_all_that_is_asked_is_met_by_good_rows() -> None:
    found = said()
    assert {one["met"] for one in found.values()} == {True}
    measured = [one["measured"] for one in found.values()]
    assert measured == pytest.approx(
        [1.0, 0.74, 1.1, 1.33, 1.2, 1.0, 0.001, 1 / 0.98, 0.97, 1.0, 8.0]
    )
    notes = " ".join(one["note"] for one in found.values())
    assert "2 cases, bfloat16, float32; largest error 0.01 of 0.02" in notes
    assert "faster at 2 of 2 sizes; least at B 4, P 2048, N 16" in notes
    assert "draft 0.2; verify 1.1; accept, commit 0.02; least by bytes 1.22" in notes
    assert "least at accept 0.8; over plain 0.99, 2.50" in notes


@pytest.mark.parametrize(
    ("section", "place", "change"),
    [
        ("agreement", 0, {"ok": False}),
        ("kernel", 1, {"of copy": 0.69}),
        ("rivals", 1, {"faster by": 0.99}),
        ("decode", 2, {"plain steps": 1.16}),
        ("decode", 7, {"plain steps": 1.36}),
        ("sizes", 0, {"plain steps": 0.9}),
        ("sizes", 2, {"is": 2}),
        ("sizes", 4, {"is": 0.03}),
        ("sizes", 6, {"auto over it": 0.94}),
        ("target", 1, {"ok": False}),
    ],
)
def test_each_can_be_missed(section: str, place: int, change: dict[str, Any]) -> None:
    rows = [dict(row) for row in ROWS[section]]
    rows[place] |= change
    missed = [one for one in said({section: rows}).values() if one["met"] is False]
    assert len(missed) == 1


def test_what_was_not_reached_is_not_measured() -> None:
    found = said({name: [] for name in ROWS})
    assert {one["measured"] for one in found.values()} == {"not measured"}
    assert {one["met"] for one in found.values()} == {None}


def test_times_of_a_dry_run_mean_nothing() -> None:
    found = said(dry_run=True)
    met = [one["asked"] for one in found.values() if one["met"]]
    assert met == [
        "kernel agrees with plain attention, share of cases",
        "engine device: waits of the host per round",
        "engines give plain decoding's texts, share",
        "families whose training step was timed",
    ]


def test_sections_that_were_not_asked_for_are_not_mentioned() -> None:
    [one] = verdicts({"kernel": {"rows": ROWS["kernel"]}}, dry_run=False)
    assert one["met"] is True and one["limit"] == "≥ 0.7"
