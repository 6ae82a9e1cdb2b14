"""`size: auto`: costs of a real engine, and decoding by them."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.engine import EagerEngine, Engine
from inference.engines import build_engine
from inference.generate import plain_generate, speculative_generate
from inference.proposers import TreeOptions, build_proposer
from inference.proposers.base import Proposer
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.heads import HeadProposer
from inference.proposers.ngram import NgramProposer
from inference.sampling import SamplingParams
from inference.scheduling.auto import (
    AutoProposer,
    Predicted,
    acceptance_hashes,
    cost_grid,
    drafters_hash,
    measured_costs,
)
from inference.scheduling.costs import FILE, CostTable
from inference.scheduling.pace import RoundSeconds
from inference.scheduling.priors import Law, Memory
from inference.scheduling.round_parts import Calibration
from inference.scheduling.schedule import Arm, plain_step
from inference.scheduling.survival import Prior
from inference.static.engine import StaticEngine
from inference.static.graphs import BUCKETS, Graphs
from tests.blocks import block_head
from tests.inference.scheduling.costs import cost_table
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
    proposer = AutoProposer(arms, table(engine, arms))
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


class InBuckets(StaticEngine):
    """Rows are filled up as CUDA graphs have them."""

    @property
    def widths(self) -> tuple[int, ...]:
        return BUCKETS


def test_rows_that_run_in_buckets_are_measured_in_buckets(tmp_path: Path) -> None:
    """Those that the arms' trees run in; the same engine without them is another."""
    target = tiny_target()
    engine, arms = InBuckets(target), arms_of(target)
    costs = table(engine, arms, tmp_path)
    assert costs.buckets == (1, 2, 4, 8) == tuple(costs.widths())
    assert costs.verify(5, 8) == costs.verify(8, 8)
    said: list[str] = []
    grid: Any = {"contexts": (8, 24), "batches": (1, 2), "budget_seconds": 0.0, "say": said.append}
    assert measured_costs(engine, arms, tmp_path, **grid) == costs and not said
    found = speculative_generate(
        target, AutoProposer(arms, costs), PROMPTS, max_new_tokens=30, engine=engine
    )
    assert found.sequences == plain_generate(target, PROMPTS, max_new_tokens=30).sequences
    assert not measured_costs(StaticEngine(target), arms, tmp_path, **grid).buckets
    assert said


def test_captures_that_are_made_anew_are_not_what_a_round_takes() -> None:
    """Where more forms are measured than are kept; those of a draft model, too."""
    target, slow = tiny_target(), 0.2

    def capture(function: Callable[[], Any]) -> Callable[[], Any]:
        time.sleep(slow)
        return function

    engine = StaticEngine(target)
    proposer = DraftModelProposer(tiny_target(layers=1), TreeOptions(top_k=1, depth=3))
    beside = engine.beside(proposer.draft)
    assert isinstance(beside, StaticEngine)
    for one in (engine, beside):
        one.graphs = Graphs(one.run, capture, kept=1)
    calibration = Calibration(engine, {"draft-model": proposer})
    with torch.inference_mode():
        for width in (1, 4, 1):
            assert 0.0 < calibration.verify(width, 8, 1) < slow
        assert 0.0 < calibration.draft("draft-model", 3, 1, 1) < slow
    assert engine.captured_seconds > 5 * slow


def test_costs_are_of_the_networks_that_draft() -> None:
    """Also of a draft model: a larger one is not as cheap as the one that was measured."""

    def hashed(*arms: Proposer) -> str:
        return drafters_hash({str(number): arm for number, arm in enumerate(arms)})

    small, large = (
        DraftModelProposer(tiny_target(layers=n), TreeOptions(top_k=1, depth=3)) for n in (1, 3)
    )
    again = DraftModelProposer(tiny_target(layers=1, seed=5), TreeOptions(top_k=1, depth=3))
    assert hashed(small) == hashed(again) != hashed(large)
    assert hashed(small) != hashed(NgramProposer(6, 5, 1))


def test_a_confident_head_is_cut_by_what_it_costs() -> None:
    target = tiny_target()
    head = block_head(target, "eagle3", dtype=torch.float64, confidence_head=True)
    head.config.confidence_temperatures = [1.0] * 3
    arms = {"head": build_proposer(head, TreeOptions(size=8, depth=3, top_k=2))}
    engine = EagerEngine(target)
    proposer = AutoProposer(arms, table(engine, arms))
    assert proposer.confident == {"head"}
    head.config.confidence_temperatures = None
    assert not AutoProposer(arms, table(engine, arms)).confident


def run_with_memory(folder: Path, rule: str, temperature: float) -> tuple[Memory, list[list[int]]]:
    """One run from start to end, as a script does it."""
    target = tiny_target()
    engine, arms = EagerEngine(target), arms_of(target)
    law = Law(rule, temperature)
    memory = Memory.beside(folder, target.fingerprint(), law, acceptance_hashes(arms))
    priors = memory.read(pytest.fail)
    proposer = AutoProposer(arms, table(engine, arms, folder), priors, memory)
    texts = []
    for _ in range(2):
        found = speculative_generate(
            target,
            proposer,
            PROMPTS,
            max_new_tokens=20,
            engine=engine,
            rule=rule,
            sampling=SamplingParams(temperature, seed=1),
        )
        texts += found.sequences
        assert memory.read(pytest.fail) == priors  # nothing is written in between
    proposer.keep(pytest.fail)
    return memory, texts


@pytest.mark.parametrize(("rule", "temperature"), [("match", 0.0), ("coupled", 1.0)])
def test_what_a_run_learnt_is_there_at_the_next(
    rule: str, temperature: float, tmp_path: Path
) -> None:
    memory, first = run_with_memory(tmp_path, rule, temperature)
    learnt = memory.read(pytest.fail)
    assert set(learnt) == {"head", "ngram"}
    assert learnt["ngram"].rounds[0][0] > 0
    _, second = run_with_memory(tmp_path, rule, temperature)
    assert second == first  # whatever is known, the text is plain decoding's
    more = memory.read(pytest.fail)
    assert more["ngram"].rounds[0][0] > learnt["ngram"].rounds[0][0]


def test_coins_that_were_tossed_teach_nothing(tmp_path: Path) -> None:
    """Another run with this seed tosses the same ones."""
    memory, first = run_with_memory(tmp_path, "rejection", 1.0)
    assert not memory.path.exists()
    _, second = run_with_memory(tmp_path, "rejection", 1.0)
    assert second == first


def test_hashes_tell_arms_apart_that_are_not_accepted_alike() -> None:
    target = tiny_target()
    base = acceptance_hashes(arms_of(target))
    assert acceptance_hashes(arms_of(target)) == base
    other = arms_of(target)
    head = other["head"]
    assert isinstance(head, HeadProposer)
    next(head.drafter.parameters()).data[0] += 1.0
    assert acceptance_hashes(other)["head"] != base["head"]
    longer = {"ngram": NgramProposer(9, 8, 1)}  # a longest draft changes no rate
    assert acceptance_hashes(longer)["ngram"] == base["ngram"]
    assert acceptance_hashes({"ngram": NgramProposer(6, 5, 1, max_ngram=5)}) != base


def test_what_is_expected_of_rounds_is_added_up() -> None:
    """Sequences of a batch share a round's seconds; a prompt that a head takes in counts once."""
    target = tiny_target()
    engine = EagerEngine(target)
    costs = replace(
        cost_table({n: 1.0 + n / 100 for n in (1, 2, 4, 8)}, step=0.02, rest=0.1, slope=1.0),
        absorb_points={("head", 64): 0.5},
    )
    for prompts in (PROMPTS[:1], [PROMPTS[0]] * 2):
        proposer = AutoProposer(arms_of(target), costs, clock=False)
        made = speculative_generate(target, proposer, prompts, max_new_tokens=20, engine=engine)
        found, rows = proposer.predicted, len(prompts)
        assert found.tokens == pytest.approx(proposer.expected_tokens)
        seconds = proposer.expected_seconds / rows + proposer.absorbed
        assert found.seconds == pytest.approx(seconds)
        assert 0 < found.drafted <= made.stats.num_drafts
        drafting = {what: n for what, n in proposer.made.items() if what[0] == "head"}
        assert found.drafted == sum(drafting.values())
        step = [plain_step(costs, context, rows).seconds for context in (7, 27)]
        seconds = found.plain_seconds / (found.tokens / rows)
        assert step[0] < seconds < step[1]


def test_a_fresh_one_knows_what_it_knew_at_the_start() -> None:
    target = tiny_target()
    engine, arms = EagerEngine(target), arms_of(target)
    priors = {"head": Prior.measured([[0.5, 0.1]] * 3)}
    proposer = AutoProposer(arms, table(engine, arms), priors)
    speculative_generate(target, proposer, PROMPTS, max_new_tokens=9, engine=engine)
    assert proposer.estimates and proposer.made
    again = proposer.fresh()
    assert not again.estimates and not again.made and again.predicted == Predicted()
    assert again.priors == priors and again.proposers == arms


class Watched(AutoProposer):
    """Notes what is chosen; its clock says what it is told to."""

    def __init__(self, pace: Callable[[int], float], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.chosen: list[tuple[int, int, tuple]] = []
        told = self.paced.observe

        def wrong(took: RoundSeconds) -> None:
            usual = self.costs.verify(took.width, took.context, took.batch)
            told(replace(took, forward=usual * pace(took.width), host=0.1))

        self.paced.observe = wrong  # type: ignore[method-assign]

    def propose(self, states: Any) -> Any:
        trees = super().propose(states)
        self.chosen += [(row, one.length, one.choice.same) for row, one in self._done.items()]
        return trees


@pytest.mark.parametrize("temperatures", [[1.0], [1.0, 0.0]])
def test_no_clock_reaches_a_text_that_would_depend_on_it(temperatures: list[float]) -> None:
    """Under `rejection` at a temperature; the greedy sequence beside it is decided about by it."""
    target = tiny_target()
    points = {n: 1.0 + n / 200 for n in (1, 2, 4, 8)}
    costs = replace(cost_table(points, step=0.01, rest=0.1), absorb_points={("head", 64): 0.1})
    runs = []
    for slow in (1.0, 3.0):  # forwards of several rows
        proposer = Watched(
            lambda rows, slow=slow: slow if rows > 1 else 1.0, arms_of(target), costs
        )
        found = speculative_generate(
            target,
            proposer,
            [PROMPTS[0]] * len(temperatures),
            max_new_tokens=30,
            engine=EagerEngine(target),
            rule="rejection",
            sampling=[SamplingParams(one, seed=7) for one in temperatures],
        )
        runs.append((found.sequences, proposer.chosen))
    assert runs[0][0] == runs[1][0]
    for row, temperature in enumerate(temperatures):
        first, second = ([one for one in chosen if one[0] == row] for _, chosen in runs)
        assert (first == second) == (temperature > 0)


@pytest.mark.parametrize("clock", [True, False])
def test_without_a_clock_nothing_has_to_be_watched(clock: bool) -> None:
    target = tiny_target()
    arms = arms_of(target)
    proposer = AutoProposer(arms, cost_table({1: 1.0, 8: 1.1}), clock=clock)
    deciding, described = proposer.deciding, list(proposer.arms.values())
    assert deciding._new_chooser(described, {}).costs.knows_plain() is not clock  # type: ignore
    assert deciding._new_alone(described, {}).costs.knows_plain()  # type: ignore
    assert (proposer.fresh()._watch is not None) == clock
