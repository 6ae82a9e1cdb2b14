"""Sections about decoding, on tiny models where there is no GPU."""

import math
from typing import Any

import pytest
import torch

from inference.generate import speculative_generate
from inference.proposers import build_proposer
from inference.static.decoding import DeviceEngine
from inference.stopping import Stop
from scripts import gpu_check_decode, gpu_check_models
from scripts.gpu_check_models import TINY, Work, filled_cache, parts_of, random_head, random_target

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings are not repeated."""
    monkeypatch.setattr(gpu_check_models, "REPEATS", 1)


def test_the_parts_of_a_round_are_told_apart() -> None:
    rows = list(gpu_check_decode.decode(dry_run=True))
    with_graphs, without = ([r for r in rows if r["graphs"] == mode] for mode in ("yes", "no"))
    assert [r["what"] for r in with_graphs] == [r["what"] for r in without]
    assert with_graphs[0]["what"] == "plain step" and with_graphs[0]["plain steps"] == 1
    asked = {r["what"].partition(",")[0]: r["asked"] for r in rows if r.get("asked")}
    assert asked == {
        "verify 16 nodes": 1.15,
        "chain of 5: whole round": 1.35,
        "tree of 16: whole round": 1.35,
    }
    assert all(r["ms"] > 0 and math.isfinite(r["plain steps"]) for r in rows)
    names = {r["what"] for r in rows}
    assert {f"tree of 16: {part}" for part in ("draft", "verify", "accept, commit")} <= names


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
    work = Work(1, 9, 8, 3, 2)
    speculative_generate(
        target,
        build_proposer(head, work.options),
        [[5, 6, 7, 8, 9, 5, 6, 7]],
        max_new_tokens=12,
        stop=Stop(token_ids=()),
        engine=engine,
    )
    [real] = engine._rounds.values()
    gpu_check_decode.use_graphs(engine, True)
    cache = filled_cache(engine, 1, work.context)
    rounds = gpu_check_models.rounds_of(engine, cache, head, work, graphs=True)
    assert rounds.drafter.growth.widths == real.drafter.growth.widths
    parts, before = parts_of(rounds, graphs=True), int(rounds.state.lengths)
    assert before >= work.context + 2  # two rounds so far
    for part in parts:
        part()
    assert int(rounds.state.lengths) > before == int(rounds.drafter.caches[0].lengths)
    gpu_check_models.restarted(rounds, work.context)
    assert int(rounds.state.lengths) == work.context
