"""scripts.benchmark_report: verdicts on texts, what is excluded, predictions, tables."""

from typing import Any

import pytest
import torch

from drafters import TargetModel
from inference.generate import plain_generate
from inference.measuring.evaluation import Prompt
from inference.scheduling.costs import CostTable, MachineKey
from scripts.benchmark_contenders import parse_contenders
from scripts.benchmark_protocol import Answer
from scripts.benchmark_race import Batch, Cell, Heat
from scripts.benchmark_report import cell_record, judge, print_cell, reference_name
from tests.tiny import tiny_target

KEY = MachineKey("cpu", 1, "cpu", "2", "float32", "t", "eager")
PARTS = ["draft", "verify", "host"]
NAMES = ["plain", "prompt-lookup", "ours:as-prompt-lookup", "ours:ngram"]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    given = ([5, 6, 7], "a"), ([9, 8], "a"), ([11, 12, 13], "b"), ([20, 21], "b")
    return [Batch([Prompt(ids, category, f"p{ids[0]}")], category) for ids, category in given]


def answers(
    target: TargetModel, batches: list[Batch], seconds: float = 2.0, **options: Any
) -> list[Answer]:
    """The target's own texts of 8 tokens, with a prefill of a second."""
    texts = plain_generate(target, [batch.ids[0] for batch in batches], max_new_tokens=8).sequences
    return [Answer([text], seconds, 1.0, 1, **options) for text in texts]


def test_equal_texts_are_identical(target: TargetModel, batches: list[Batch]) -> None:
    found = answers(target, batches)
    verdict = judge(target, batches, found, found, 1e-4)
    assert (verdict.identical, verdict.near_ties, verdict.lossless) == (4, 0, True)


def test_a_wrong_token_is_found_unless_rounding_explains_it(
    target: TargetModel, batches: list[Batch]
) -> None:
    right, wrong = answers(target, batches), answers(target, batches)
    wrong[1].tokens[0][3] = (wrong[1].tokens[0][3] + 1) % 96
    verdict = judge(target, batches, right, wrong, 1e-4)
    [where] = verdict.differences
    assert (verdict.identical, verdict.lossless) == (3, False)
    assert (where["id"], where["position"], where["near_tie"]) == ("p9", 3, False)
    with torch.no_grad():
        ids = torch.tensor([[*batches[1].ids[0], *right[1].tokens[0][:3]]])
        logits = target.forward(ids).logits[0, -1]
    gap = float(logits.max() - logits[wrong[1].tokens[0][3]])
    assert where["gap"] == pytest.approx(gap)
    assert judge(target, batches, right, wrong, gap * 1.01).lossless
    assert not judge(target, batches, right, wrong, gap * 0.99).lossless


def test_a_text_that_ends_early_is_a_difference(target: TargetModel, batches: list[Batch]) -> None:
    right, short = answers(target, batches), answers(target, batches)
    del short[0].tokens[0][5:]
    assert not judge(target, batches, right, short, 1e9).lossless


def test_the_reference_decodes_plainly() -> None:
    contenders = parse_contenders(["ours:ngram", "plain-compiled", "ours", "plain"])
    heat = Heat(Cell(1, None, []), {one.name: [] for one in contenders})
    assert reference_name(contenders, heat, "ours:ngram") == "plain"
    del heat.answers["plain"]
    assert reference_name(contenders, heat, "ours:ngram") == "ours"
    del heat.answers["ours"], heat.answers["plain-compiled"]
    assert reference_name(contenders, heat, "ours:ngram") == "ours:ngram"
    heat.answers = {"ours": []}
    assert reference_name(contenders[:1], heat, "ours:ngram") == "ours"
    heat.answers.clear()
    assert reference_name(contenders, heat, "ours:ngram") is None


def record(target: TargetModel, batches: list[Batch], heat: Heat, **options: Any) -> dict:
    given = {"baseline": "plain", "tolerance": 1e-4, "costs": None, **options}
    return cell_record(target, parse_contenders(NAMES), heat, **given)


def full_heat(target: TargetModel, batches: list[Batch]) -> Heat:
    """Plain decoding at 7 tokens/s, ours at 14 and 28."""
    rounds = [[1, 4, 3, 2], [1, 4, 3, 5]]
    parts = {"draft": 0.05, "verify": 0.4, "host": 0.05}
    heat = Heat(Cell(1, None, batches), warm_up_seconds=dict.fromkeys(NAMES, 0.1))
    heat.answers["plain"] = answers(target, batches)
    heat.answers["prompt-lookup"] = answers(target, batches, 3.0)
    heat.answers["ours:as-prompt-lookup"] = answers(target, batches, 1.5)
    heat.answers["ours:ngram"] = answers(target, batches, 1.25, parts=parts, rounds=rounds)
    return heat


def test_the_record_of_a_cell(target: TargetModel, batches: list[Batch]) -> None:
    found = record(target, batches, full_heat(target, batches))
    assert (found["baseline"], found["reference"], found["batches"]) == ("plain", "plain", 4)
    plain, lookup, same, ngram = found["contenders"]
    assert [one["ratio"]["median"] for one in found["contenders"]] == [1.0, 0.5, 2.0, 4.0]
    assert ngram["acceptance_length"] == 3.5 and ngram["split"]["verify"] == pytest.approx(1.6)
    assert ngram["by_category"]["b"]["ratio"] == {"median": 4.0, "interval": None, "count": 2}
    assert same["counterpart"] == {"name": "prompt-lookup", "whole_ratio": 2.0}
    assert "counterpart" not in ngram and not plain["excluded"] and lookup["identical"] == 4


def test_one_with_other_texts_is_excluded(
    target: TargetModel, batches: list[Batch], capsys: pytest.CaptureFixture[str]
) -> None:
    heat = full_heat(target, batches)
    heat.answers["prompt-lookup"][2].tokens[0][0] = 95
    found = record(target, batches, heat)
    _, lookup, same, _ = found["contenders"]
    assert lookup["excluded"] and "ratio" not in lookup
    assert "counterpart" not in same
    print_cell(found)
    out = capsys.readouterr().out
    assert "EXCLUDED: 1 texts differ; prompt p11, new token 0" in out


def test_without_the_baseline_there_are_speeds_but_no_ratios(
    target: TargetModel, batches: list[Batch], capsys: pytest.CaptureFixture[str]
) -> None:
    heat = full_heat(target, batches)
    del heat.answers["plain"]
    found = record(target, batches, heat)
    assert "ratio" not in found["contenders"][-1]
    assert found["contenders"][-1]["tokens_per_second"] == 28.0
    print_cell(found)
    assert "28.0" in capsys.readouterr().out


def test_the_table_has_every_contender(
    target: TargetModel, batches: list[Batch], capsys: pytest.CaptureFixture[str]
) -> None:
    costs = CostTable(KEY, {(1, 0, 1): 0.1, (4, 0, 1): 0.2})
    print_cell(record(target, batches, full_heat(target, batches), costs=costs))
    lines = capsys.readouterr().out.splitlines()
    [row] = [line for line in lines if line.startswith("ours:ngram") and "equal" in line]
    assert row.split() == [
        *("ours:ngram", "28.0", "6.4", "3.50", "4.00", "4.00-4.00", "1.60"),
        *("2.22", "1.80", "4/4", "equal"),
    ]
    assert sum(line.startswith("ours:ngram") for line in lines) == 4
    assert any("2.00 x prompt-lookup, whole calls" in line for line in lines)
    assert any(line.split() == ["share", "of", "decoding", *PARTS] for line in lines)
    place = next(n for n, line in enumerate(lines) if line.startswith("predicted"))
    cells = lines[place + 1].split()  # 2 rounds of 0.2 s for 7 tokens
    assert cells[:4] == ["ours:ngram", "17.5", "28.0", "-37.5%"]
