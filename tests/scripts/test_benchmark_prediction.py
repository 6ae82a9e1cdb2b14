"""scripts.benchmark_prediction: what was expected of rounds, by hand."""

from pathlib import Path
from typing import Any

import pytest

from inference.measuring.evaluation import Prompt
from inference.scheduling.costs import CostTable, MachineKey
from scripts.benchmark_contenders import Contender, parse_contender, parse_contenders
from scripts.benchmark_prediction import (
    add_measured_speedups,
    draft_name,
    own_costs,
    prediction,
    print_predictions,
)
from scripts.benchmark_protocol import Answer
from scripts.benchmark_race import Batch, Cell, Heat

KEY = MachineKey("cpu", 1, "cpu", "2", "float32", "t", "eager")
VERIFY = {(1, 0, 1): 0.1, (4, 0, 1): 0.2, (1, 10, 1): 0.2, (4, 10, 1): 0.3}
DRAFTS = {("head", 3, 8, 1): 0.05, ("head", 3, 1, 1): 0.01}
COSTS = CostTable(KEY, VERIFY, DRAFTS, {1: 0.01})
ROUNDS = [[1, 4, 3, 2], [1, 4, 3, 5]]


def predicted(text: str, costs: CostTable | None = COSTS, **answer: Any) -> dict[str, Any]:
    """Of one prompt of 3 tokens: two rounds of 4 nodes, the second behind 2 more tokens."""
    one = parse_contender(text)
    batches = [Batch([Prompt([5, 6, 7], "a", "p")], "a")]
    told = Answer([[1] * 8], 2.0, 1.0, 1, **{"rounds": ROUNDS, **answer})
    return prediction(one, Heat(Cell(1, None, batches), {text: [told]}), costs, 1)


def verifying() -> float:
    return sum(0.2 + 0.01 * context + 0.01 for context in (3, 5))


def plain() -> float:
    return sum(tokens * (0.1 + 0.01 * p + 0.01) for tokens, p in ((2, 3), (5, 5)))


def test_the_cost_of_every_round_is_summed() -> None:
    found = predicted("ours:ngram")  # copied drafts cost nothing
    assert found["predicted_tokens_per_second"] == pytest.approx(7 / verifying())
    assert found["predicted_speedup"] == pytest.approx(plain() / verifying())
    found = predicted("ours:head:4")
    assert found["predicted_tokens_per_second"] == pytest.approx(7 / (verifying() + 2 * 0.05))
    found = predicted("ours:head:4:branch=1")
    assert found["predicted_tokens_per_second"] == pytest.approx(7 / (verifying() + 2 * 0.01))


def test_rounds_whose_drafts_were_copied_are_not_charged_for_drafting() -> None:
    found = predicted("ours:head:4", drafted=[1, 0])
    assert found["predicted_tokens_per_second"] == pytest.approx(7 / (verifying() + 0.05))


def test_what_decides_in_every_round_says_itself_what_it_expects() -> None:
    for costs in (COSTS, None):
        found = predicted("ours:head:auto", costs, expected=[9.0, 3.0, 6.0])
        assert found == {
            "predicted_tokens_per_second": 3.0,
            "predicted_plain_tokens_per_second": 1.5,
            "predicted_speedup": 2.0,
        }


@pytest.mark.parametrize("text", ["plain", "ours", "ours:as-prompt-lookup"])
def test_without_drafts_of_a_size_nothing_is_predicted(text: str) -> None:
    assert predicted(text) == {}
    assert predicted("ours:head:4", None) == {}


def test_of_wider_trees_than_the_table_has_nothing_is_said() -> None:
    """A race is over by then, and must not be lost."""
    assert predicted("ours:head:32", rounds=[[1, 4, 3, 2], [1, 5, 3, 5]]) == {}


def test_whose_drafts_the_table_knows() -> None:
    head, ngram, model = parse_contenders(["ours:head", "ours:ngram", "ours:draft-model"])
    one = CostTable(KEY, {(1, 0, 1): 0.1}, {("eagle3", 1, 1, 1): 0.1})
    two = CostTable(KEY, {(1, 0, 1): 0.1}, {(name, 1, 1, 1): 0.1 for name in ("head", "b")})
    assert [draft_name(x, one) for x in (head, ngram, model)] == ["eagle3", "", None]
    assert draft_name(head, two) == "head"


def test_the_table_of_auto_serves_fixed_sizes_of_its_engine(tmp_path: Path) -> None:
    def one(engine: str) -> Contender:
        return Contender("x", "ours", str(tmp_path), {"engine": engine})

    COSTS.save(tmp_path / "costs-packed.json")
    assert own_costs(one("packed"), 1) == COSTS
    assert own_costs(one("packed"), 2) is None  # other threads
    assert own_costs(one("compiled"), 1) is None
    assert own_costs(Contender("x", "ours", "ngram"), 1) is None
    (tmp_path / "costs-packed.json").write_text("{")
    assert own_costs(one("packed"), 1) is None


def test_speedups_are_over_the_same_engine_without_drafts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = ["ours:engine=packed", "ours", "ours:head:auto:engine=packed", "ours:ngram:4"]
    records: list[dict[str, Any]] = [
        {"name": name, "tokens_per_second": speed}
        for name, speed in zip(texts, (10.0, 5.0, 20.0, 8.0), strict=True)
    ]
    for record in records[2:]:
        record |= {
            "predicted_tokens_per_second": 22.0,
            "predicted_plain_tokens_per_second": 12.5,
            "predicted_speedup": 2.1,
        }
    del records[3]["tokens_per_second"]  # excluded
    add_measured_speedups(records, parse_contenders(texts))
    assert [record.get("measured_speedup") for record in records] == [None, None, 2.0, None]
    print_predictions(records, 30)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].split()[1:] == ["22.0", "20.0", "+10.0%", "2.10", "2.00", "+5.0%"]
    assert lines[-2].split()[1:] == ["22.0", "-", "-", "2.10", "-", "-"]
    assert lines[-1].startswith("plain decoding runs at 0.80 to 0.80 of the speed")
