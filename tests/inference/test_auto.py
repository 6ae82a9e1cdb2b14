"""`size: auto`: costs of a real engine, and decoding by them."""

from pathlib import Path

import pytest
import torch

from inference.auto import auto_proposer, cost_grid, measured_costs
from inference.costs import FILE, CostTable
from inference.engine import EagerEngine, Engine
from inference.engines import build_engine
from inference.generate import plain_generate, speculative_generate
from inference.proposers import TreeOptions, build_proposer
from inference.proposers.base import Proposer
from inference.proposers.ngram import NgramProposer
from inference.sampling import SamplingParams
from inference.schedule import Arm
from tests.blocks import block_head
from tests.tiny import tiny_target

PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 3, 9, 3]]


def arms_of(target: object) -> dict[str, Proposer]:
    head = block_head(target, "eagle3", dtype=torch.float64, draft_vocab_size=40)
    return {
        "head": build_proposer(head, TreeOptions(size=8, depth=3, top_k=2)),
        "ngram": NgramProposer(6, 5, 1),
    }


def table(engine: Engine, arms: dict[str, Proposer], path: Path | None = None) -> CostTable:
    return measured_costs(engine, arms, path, contexts=(8, 24), batches=(1, 2), budget_seconds=0.0)


@pytest.mark.parametrize("name", ["eager", "packed"])
def test_costs_of_an_engine_cover_what_may_be_drafted(name: str) -> None:
    target = tiny_target()
    engine, arms = build_engine(target, name), arms_of(target)
    costs = table(engine, arms)
    assert costs.key.engine == name
    widths = {n for n, _, _ in costs.verify_points}
    assert {1, 2, 4, 8} <= widths
    assert {(d, k, b) for _, d, k, b in costs.draft_points} == {
        (d, k, b) for d in (1, 3) for k in (1, 2) for b in (1, 2)
    }
    assert all(seconds > 0 for seconds in costs.verify_points.values())
    assert all(seconds > 0 for seconds in costs.draft_points.values())


def test_copies_cost_nothing_to_measure() -> None:
    grid = cost_grid([Arm("ngram", 5, 1, 6, copies=True)], (8,))
    assert not grid.drafts
    assert max(grid.widths) == 6


@pytest.mark.parametrize("sampling", [None, SamplingParams(0.8, seed=3)])
@pytest.mark.parametrize("name", ["eager", "packed"])
def test_what_is_decoded_is_plain_decoding_s(name: str, sampling: SamplingParams | None) -> None:
    target = tiny_target()
    engine, arms = build_engine(target, name), arms_of(target)
    proposer = auto_proposer(engine, arms, table(engine, arms))
    options = {"max_new_tokens": [40, 23], "sampling": sampling}
    plain = plain_generate(target, PROMPTS, **options)
    for _ in range(2):
        found = speculative_generate(target, proposer, PROMPTS, engine=engine, **options)
        assert found.sequences == plain.sequences
    assert sum(proposer.made.values()) > 0


def test_a_table_is_kept_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    engine, arms = EagerEngine(target), arms_of(target)
    said: list[str] = []
    first = table(engine, arms, tmp_path)
    assert (tmp_path / FILE).exists()

    def again(arms: dict[str, Proposer], engine: Engine = engine) -> CostTable:
        said.clear()
        return measured_costs(
            engine,
            arms,
            tmp_path,
            contexts=(8, 24),
            batches=(1, 2),
            budget_seconds=0.0,
            say=said.append,
        )

    assert again(arms) == first
    assert not said
    wider = {**arms, "ngram": NgramProposer(12, 11, 1)}
    assert again(wider) != first
    assert "does not cover" in said[0]
    other = build_engine(target, "packed")
    assert again(wider, other).key.engine == "packed"
    assert "eager in the table" in said[0]


def test_a_confident_head_is_cut_by_what_it_costs() -> None:
    target = tiny_target()
    head = block_head(target, "eagle3", dtype=torch.float64, confidence_head=True)
    head.config.confidence_temperatures = [1.0] * 3
    arms = {"head": build_proposer(head, TreeOptions(size=8, depth=3, top_k=2))}
    engine = EagerEngine(target)
    proposer = auto_proposer(engine, arms, table(engine, arms))
    assert proposer.confident == {"head"}
    head.config.confidence_temperatures = None
    assert not auto_proposer(engine, arms, table(engine, arms)).confident
