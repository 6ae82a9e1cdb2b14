"""The test of laws itself: exact cells, known tail probabilities, wrong rules it must refute."""

from collections import Counter

import pytest
import torch

import inference.law_check as law_check_module
import inference.verify as verify_module
from drafters import TargetModel
from inference.evaluation import Prompt
from inference.law_check import (
    INCONCLUSIVE,
    LOSSLESS,
    MIN_EXPECTED,
    NOT_LOSSLESS,
    WrongLaw,
    check_law,
    chi_square,
    expected_cells,
)
from inference.proposers import Proposer, TreeOptions, build_proposer
from inference.sampling import SamplingParams, probabilities
from tests.scripts.heads import tiny_head
from tests.tiny import tiny_target

PROMPTS = [Prompt([5, 6, 7, 8], id="one"), Prompt([20, 21], id="two")]
SAMPLED = SamplingParams(temperature=0.8)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(layers=3, hidden=16, vocab=64)


@pytest.fixture(scope="module")
def proposer(target: TargetModel) -> Proposer:
    return build_proposer(tiny_head(target), TreeOptions(6, 2, 3))


def test_chi_square_has_the_known_tails() -> None:
    observed = Counter({(1,): 60, (): 40})
    assert chi_square(observed, {(1,): 50.0, (): 50.0}) == pytest.approx((4.0, 0.0455003), rel=1e-6)
    five = {(n,): 20.0 for n in range(5)}
    counts = Counter({(0,): 30, (1,): 10, (2,): 20, (3,): 25, (4,): 15})
    assert chi_square(counts, five) == pytest.approx((12.5, 0.0139959), rel=1e-4)


@pytest.mark.parametrize("temperature", [0.3, 0.8, 2.0])
def test_cells_are_a_partition_with_the_exact_law(target: TargetModel, temperature: float) -> None:
    """Every pair of tokens, enumerated, falls into the cell that the counting would put it in."""
    sampling, samples, prefix = SamplingParams(temperature), 400, [5, 6, 7]
    cells = expected_cells(target, prefix, sampling, samples)
    second = probabilities(target.forward(torch.tensor([prefix])).logits[0, -1], sampling)
    texts = torch.tensor([[*prefix, token] for token in range(64)])
    third = probabilities(target.forward(texts).logits[:, -1], sampling)
    joint = samples * second[:, None] * third  # (64, 64)
    exact: Counter[tuple[int, ...]] = Counter()
    for one in range(64):
        for two in range(64):
            cell = next(c for c in ((one, two), (one,), ()) if c in cells)
            exact[cell] += float(joint[one, two])
    assert dict(exact) == pytest.approx(cells, abs=1e-6)
    assert min(cells.values()) >= MIN_EXPECTED
    assert any(len(cell) == 2 for cell in cells) or temperature == 2.0


def test_a_peaked_law_leaves_nothing_to_test(target: TargetModel, proposer: Proposer) -> None:
    report = check_law(target, proposer, PROMPTS, SamplingParams(1.0, top_k=1), 20)
    assert (report.verdict, report.p_value) == (INCONCLUSIVE, None)
    assert "no two outcomes" in report.reason


def test_a_rule_that_was_hardly_tried_is_not_called_lossless(
    target: TargetModel, proposer: Proposer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(law_check_module, "MIN_ROUNDS", 1000)
    report = check_law(target, proposer, PROMPTS, SAMPLED, 40)
    assert report.verdict == INCONCLUSIVE and "each must happen" in report.reason


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_rejection_is_lossless(target: TargetModel, family: str) -> None:
    proposer = build_proposer(tiny_head(target, family), TreeOptions(6, 2, 3))
    report = check_law(target, proposer, PROMPTS, SAMPLED, 150)
    assert report.verdict == LOSSLESS, report
    assert report.samples == 150 and report.cells > 5
    assert min(report.accepting, report.rejecting) >= 10


def test_a_wrong_draft_law_is_refuted(target: TargetModel, proposer: Proposer) -> None:
    report = check_law(target, WrongLaw(proposer, target.vocab_size), PROMPTS, SAMPLED, 150)
    assert report.verdict == NOT_LOSSLESS and report.rejecting == 0


def test_drawing_from_the_target_after_a_rejection_is_refuted(
    target: TargetModel, proposer: Proposer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The classic mistake: the residual law forgotten."""
    monkeypatch.setattr(verify_module, "residual_law", lambda residual, proposed: residual)
    report = check_law(target, proposer, PROMPTS, SAMPLED, 200)
    assert report.verdict == NOT_LOSSLESS, report
