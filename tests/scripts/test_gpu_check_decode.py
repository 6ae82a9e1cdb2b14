"""Sections about decoding, on tiny models where there is no GPU."""

import math
from typing import Any

import pytest
import torch

from inference.generate import speculative_generate
from inference.proposers import build_proposer
from inference.static.decoding import DeviceEngine
from inference.stopping import Stop
from scripts import gpu_check_decode, gpu_check_timing
from scripts.gpu_check_models import (
    TINY,
    parts_of,
    random_head,
    random_target,
    restarted,
    rounds_of,
    tree_of,
)
from scripts.gpu_check_verdicts import verdicts

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings are not repeated."""
    monkeypatch.setattr(gpu_check_timing, "REPEATS", 1)


def test_the_parts_of_a_round_are_told_apart() -> None:
    rows = list(gpu_check_decode.decode(dry_run=True))
    with_graphs, without = ([r for r in rows if r.get("graphs") == m] for m in ("yes", "no"))
    assert [r["what"] for r in with_graphs] == [r["what"] for r in without]
    assert with_graphs[0]["what"] == "plain step" and with_graphs[0]["plain steps"] == 1
    assert all(r["ms"] > 0 and math.isfinite(r["plain steps"]) for r in rows)
    names = {r["what"] for r in rows}
    assert {f"tree of 16: {part}" for part in ("draft", "verify", "accept, commit")} <= names
    sections = {"decode": {"rows": rows}}
    assert all(one["measured"] != "not measured" for one in verdicts(sections, dry_run=True))


def test_the_least_by_bytes_counts_what_is_read() -> None:
    target = random_target(TINY, torch.float32, CPU)
    head, engine = random_head(target), DeviceEngine(target, pack=False)
    plain, whole = gpu_check_decode.least_rows(engine, head, context=10)
    layers = sum(p.numel() for p in target.decoder_layers().parameters())
    read = layers + 96 * 32 + 32 + 10 * 4 * 2 * 2 * 8  # output matrix, norm, keys and values
    drafted = 5 * sum(p.numel() for p in head.parameters())
    assert plain["plain steps"] == 1 and plain["ms"] > 0
    assert whole["plain steps"] == pytest.approx((read + drafted) / read)


def test_costs_cover_batch_context_and_size() -> None:
    rows = list(gpu_check_decode.costs(dry_run=True))
    points = [(r["B"], r["P"], r["N"]) for r in rows if "B" in r]
    assert points == [(b, 12, n) for b in (1, 2) for n in (4, 8)]
    assert all(r["pays above"] == r["round ms"] / r["plain ms"] for r in rows if "B" in r)
    assert [r["tokens per round"] for r in rows if "B" not in r] == [2.0, 3.0, 4.0]


def test_where_drafts_stop_paying() -> None:
    def row(batch: int, size: int, pays_above: float) -> dict[str, Any]:
        return {"B": batch, "P": 1024, "N": size, "pays above": pays_above}

    rows = [row(1, 8, 1.3), row(1, 16, 1.5), row(4, 8, 2.5), row(4, 16, 3.5), row(16, 8, 4.5)]
    found = {
        r["tokens per round"]: (r["pays up to batch"], r["with N up to"])
        for r in gpu_check_decode.stops_paying(rows)
    }
    assert found == {2.0: (1, 16), 3.0: (4, 8), 4.0: (4, 16)}


@torch.inference_mode()
def test_parts_make_up_the_rounds_of_the_engine() -> None:
    """Rounds put together by hand are of the engine's own form, and go on from their text."""
    target = random_target(TINY, torch.float32, CPU, std=0.3)
    head, engine = random_head(target), DeviceEngine(target, pack=False)
    tree = tree_of(8, 3, 2)
    speculative_generate(
        target,
        build_proposer(head, tree),
        [[5, 6, 7, 8, 9, 5, 6, 7]],
        max_new_tokens=12,
        stop=Stop(token_ids=()),
        engine=engine,
    )
    [real] = engine._rounds.values()
    rounds = rounds_of(engine, head, [tree], (1, 9))
    assert rounds.drafter.growth.widths == real.drafter.growth.widths
    parts, before = parts_of(rounds, graphs=True), int(rounds.state.lengths)
    assert before >= 9 + 2  # two rounds so far
    for part in parts:
        part()
    assert int(rounds.state.lengths) > before == int(rounds.drafter.caches[0].lengths)
    restarted(rounds, 9)
    assert int(rounds.state.lengths) == 9
