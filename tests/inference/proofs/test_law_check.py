"""The test of laws itself: exact cells, wrong rules it must refute, right ones it must not."""

from collections import Counter

import pytest
import torch

import inference.proofs.law_check as law_check_module
import inference.rules.block as block_module
import inference.verify as verify_module
from drafters import TargetModel
from inference.measuring.evaluation import Prompt
from inference.proofs.law_check import (
    COUNTED,
    INCONCLUSIVE,
    LOSSLESS,
    MIN_EXPECTED,
    NOT_LOSSLESS,
    WrongLaw,
    check_law,
    expected_cells,
    in_cells,
    law_cells,
)
from inference.proofs.law_statistics import compare_counts
from inference.proposers import Proposer, TreeOptions, build_proposer
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.layer_skip import LayerSkipProposer
from inference.proposers.ngram import NgramProposer
from inference.sampling import SamplingParams, probabilities
from tests.inference.drafting import noisy_copy
from tests.inference.oracles import Prefix, random_laws, sequence_law
from tests.scripts.heads import tiny_head
from tests.tiny import tiny_target

PROMPTS = [Prompt([5, 6, 7, 8], id="one"), Prompt([20, 21], id="two")]
SAMPLED = SamplingParams(temperature=0.8)
PENALISED = SamplingParams(0.8, top_k=12, repetition_penalty=1.4, frequency_penalty=0.8)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(layers=3, hidden=16, vocab=64)


@pytest.fixture(scope="module")
def proposer(target: TargetModel) -> Proposer:
    return build_proposer(tiny_head(target), TreeOptions(8, 3, 3))


@pytest.fixture(scope="module")
def chains(target: TargetModel) -> Proposer:
    return build_proposer(tiny_head(target), TreeOptions(4, 3, 1))


def cell(text: Prefix, cells: dict[Prefix, float]) -> Prefix:
    places = in_cells(Counter([text]), cells)
    return list(cells)[places.index(1)]


# Cells ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [3, 40, 400, 5000])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("sharpness", [0.3, 2.0])
def test_cells_are_a_partition_with_the_exact_law(
    samples: int, depth: int, sharpness: float
) -> None:
    """Every text, enumerated, falls into one cell, and the cell's mean is what fell into it."""
    law = random_laws(1, 6, sharpness)
    cells = law_cells(law, samples, depth)
    exact: Counter[Prefix] = Counter()
    for text, probability in sequence_law(law, depth).items():
        exact[cell(text, cells)] += samples * probability  # type: ignore[assignment]
    assert dict(exact) == pytest.approx({c: m for c, m in cells.items() if m > 1e-9}, abs=1e-6)
    assert sum(cells.values()) == pytest.approx(samples)
    if len(cells) > 1:
        assert min(cells.values()) >= MIN_EXPECTED
    if samples == 5000:
        assert max(map(len, cells)) == depth


@pytest.mark.parametrize("sampling", [SamplingParams(0.3), SAMPLED, SamplingParams(2.0)])
def test_cells_of_a_target(target: TargetModel, sampling: SamplingParams) -> None:
    prefix, samples = [5, 6, 7], 400
    cells = expected_cells(target, prefix, sampling, samples)
    second = probabilities(target.forward(torch.tensor([prefix])).logits[0, -1], sampling)
    texts = torch.tensor([[*prefix, token] for token in range(64)])
    third = probabilities(target.forward(texts).logits[:, -1], sampling)
    joint = samples * second[:, None] * third  # (64, 64)
    exact: Counter[Prefix] = Counter()
    for one in range(64):
        for two in range(64):
            exact[cell((one, two), cells)] += float(joint[one, two])  # type: ignore[assignment]
    assert dict(exact) == pytest.approx(cells, abs=1e-6)


def test_processors_see_the_text_behind_the_prompt(target: TargetModel) -> None:
    """With an infinite penalty no token comes twice, and the cells know."""
    sampling = SamplingParams(1.0, presence_penalty=1e6)
    cells = expected_cells(target, [5, 6, 7], sampling, 4000, depth=3, prompt_length=2)
    deep = [c for c in cells if len(c) == 3]
    assert deep and all(len({7, *c}) == 4 for c in deep)
    free = expected_cells(target, [5, 6, 7], SamplingParams(1.0), 4000, depth=3)
    assert any(len({7, *c}) < 4 for c in free)


def test_chi_square_counts_in_cells() -> None:
    cells = {(1,): 50.0, (1, 2): 20.0, (): 30.0}
    texts = Counter({(1, 2): 10, (1, 3): 25, (1, 9): 35, (2, 2): 30})
    assert in_cells(texts, cells) == [60, 10, 30]
    found = compare_counts(in_cells(texts, cells), list(cells.values()), 1e-4)
    assert found.chi_square == pytest.approx(100 / 50 + 100 / 20)


# Verdicts ---------------------------------------------------------------------------------------


def test_a_peaked_law_leaves_nothing_to_test(target: TargetModel, proposer: Proposer) -> None:
    report = check_law(target, proposer, PROMPTS, SamplingParams(1.0, top_k=1), 20)
    assert (report.verdict, report.tests, report.p_value) == (INCONCLUSIVE, None, None)
    assert "no two outcomes" in report.reason


def test_a_rule_that_was_hardly_tried_is_not_called_lossless(
    target: TargetModel, proposer: Proposer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(law_check_module, "MIN_ROUNDS", 1000)
    report = check_law(target, proposer, PROMPTS, SAMPLED, 40)
    assert report.verdict == INCONCLUSIVE and "each must happen" in report.reason


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        *((kind, SAMPLED) for kind in ("eagle3", "medusa", "block", "layer-skip", "ngram")),
        *((kind, PENALISED) for kind in ("eagle3", "block")),
    ],
)
def test_the_sampled_rules_are_lossless(
    target: TargetModel, kind: str, sampling: SamplingParams
) -> None:
    proposer: Proposer
    if kind == "layer-skip":
        proposer = LayerSkipProposer(exit_layer=2, width=2, depth=3)
    elif kind == "ngram":
        proposer = NgramProposer(min_ngram=1)
    else:
        head = tiny_head(target, "medusa" if kind == "medusa" else "eagle3")
        proposer = build_proposer(head, TreeOptions(8, 3, 1 if kind == "block" else 3))
    rule = "block" if kind == "block" else "rejection"
    prompts = [Prompt([5, 6, 7, 5, 6, 7, 5, 6, 7], id="three")] if kind == "ngram" else PROMPTS
    report = check_law(target, proposer, prompts, sampling, 150, rule)
    assert report.tests is not None and report.tests.p_value > 0.01, report
    assert report.samples == 150 and report.cells > 5 and report.rule == rule
    assert 0.1 < report.tests.finds < 0.5
    if kind not in ("ngram", "layer-skip"):  # whose drafts are hardly ever right here
        assert report.verdict == LOSSLESS and report.reason == ""
        assert min(report.accepting, report.rejecting) >= 10


def test_the_batch_changes_nothing(target: TargetModel, proposer: Proposer) -> None:
    alone, together = (
        check_law(target, proposer, PROMPTS, SAMPLED, 40, batch_size=size) for size in (1, 16)
    )
    assert alone == together


def test_rejections_are_counted_at_all_depths(target: TargetModel, chains: Proposer) -> None:
    report = check_law(target, chains, PROMPTS, SAMPLED, 150)
    assert len(report.rejected_at) == COUNTED and report.rejected_at[0] == report.rejecting
    assert min(report.rejected_at) > 0


# Wrong decoders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_wrong_draft_law_is_refuted(target: TargetModel, chains: Proposer, rule: str) -> None:
    wrong = WrongLaw(chains, target.vocab_size)
    report = check_law(target, wrong, PROMPTS, SAMPLED, 150, rule)
    assert report.verdict == NOT_LOSSLESS and report.rejecting == 0


def test_the_negative_control_takes_any_drafts(target: TargetModel) -> None:
    for inner in (LayerSkipProposer(exit_layer=1, width=2, depth=2), NgramProposer(min_ngram=1)):
        report = check_law(target, WrongLaw(inner, 64), [Prompt([5, 6, 5, 6])], SAMPLED, 60)
        assert report.accepting > report.rejecting == 0


@pytest.mark.parametrize("sampling", [SAMPLED, PENALISED], ids=["sampled", "penalised"])
def test_drawing_from_the_target_after_a_rejection_is_refuted(
    target: TargetModel,
    proposer: Proposer,
    sampling: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The classic mistake: the residual law forgotten."""
    monkeypatch.setattr(verify_module, "residual_law", lambda residual, proposed: residual)
    report = check_law(target, proposer, PROMPTS, sampling, 250)
    assert report.verdict == NOT_LOSSLESS, report


def test_a_chain_weighed_draft_by_draft_is_refuted(
    target: TargetModel, chains: Proposer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block verification that stops at every draft with its weight alone."""
    monkeypatch.setattr(block_module, "_stop_probability", lambda weight, law, draft: weight)
    report = check_law(target, chains, PROMPTS, SAMPLED, 300, "block")
    assert report.verdict == NOT_LOSSLESS, report


def test_a_bug_at_depth_three_alone_is_refuted(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind two accepted drafts the law of the first is used again."""
    walk = verify_module._accept_or_reject
    laws: dict[int, torch.Tensor] = {}

    def deep(tree, node, law, coins, position):  # type: ignore[no-untyped-def]
        laws[node] = law
        return walk(tree, node, laws[min(node, 1)], coins, position)

    monkeypatch.setattr(verify_module, "_accept_or_reject", deep)
    draft = noisy_copy(target, lambda: tiny_target(layers=3, hidden=16, vocab=64), 0.02)
    drafts = DraftModelProposer(draft, TreeOptions(4, 3, 1))
    report = check_law(target, drafts, PROMPTS[:1], SamplingParams(1.2, top_k=4), 250)
    assert report.verdict == NOT_LOSSLESS, report
