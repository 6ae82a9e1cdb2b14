"""Figures of a confidence output against counts by hand, and a calibration that was made up."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from drafters.confidence import calibrated, survival
from inference.measuring.confidence import (
    JudgedDrafts,
    auc,
    expected_calibration_error,
    fit_calibration,
    fitting_label,
    label_note,
    predicted_survival,
    survival_error,
    threshold_sweep,
)
from inference.tree import Proposal, TokenTree

D = torch.float64


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


# AUC --------------------------------------------------------------------------------------------


def counted_auc(scores: list[float], labels: list[float]) -> float:
    """Over all pairs of an accepted part and a rejected part."""
    won = total = 0.0
    for (a, x), (b, y) in itertools.product(zip(scores, labels, strict=True), repeat=2):
        weight = x * (1 - y)
        total += weight
        won += weight * (1.0 if a > b else 0.5 if a == b else 0.0)
    return won / total


@pytest.mark.parametrize("labels", [[0, 1, 0, 1, 1, 0], [0.2, 0.9, 0.5, 0.0, 1.0, 0.3]])
def test_auc_counts_pairs_and_halves_ties(labels: list[float]) -> None:
    scores = [0.1, 0.7, 0.7, -2.0, 3.0, 0.1]
    found = auc(torch.tensor(scores), torch.tensor(labels, dtype=D))
    assert found == pytest.approx(counted_auc(scores, labels), abs=1e-12)


def test_auc_of_the_best_the_worst_and_no_scores() -> None:
    labels = torch.tensor([True, False, True, False])
    assert auc(labels.float(), labels) == 1.0
    assert auc(-labels.float(), labels) == 0.0
    assert auc(torch.zeros(4), labels) == 0.5
    assert math.isnan(auc(torch.zeros(3), torch.ones(3)))
    assert math.isnan(auc(torch.zeros(0), torch.zeros(0)))


@pytest.mark.parametrize("labels", [[0, 1, 0, 1], [0.2, 0.9, 0.5, 0.0]])
def test_a_row_of_weight_two_counts_as_two(labels: list[float]) -> None:
    scores = torch.tensor([0.1, 0.7, 0.7, 0.3], dtype=D)
    hits, weights = torch.tensor(labels, dtype=D), torch.tensor([2, 0, 1, 3])
    for measure in (auc, expected_calibration_error):
        repeated = measure(scores.repeat_interleave(weights), hits.repeat_interleave(weights))
        assert measure(scores, hits, weights=weights) == pytest.approx(repeated, abs=1e-12)
        assert measure(scores, hits) != pytest.approx(repeated, abs=1e-3)


# Calibration error ------------------------------------------------------------------------------


def test_calibration_error_by_hand() -> None:
    probabilities = torch.tensor([0.1, 0.2, 0.7, 0.9, 1.0], dtype=D)
    labels = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.5], dtype=D)
    # halves: the gaps 0.1 and -0.8 in one, -0.3, -0.1 and 0.5 in the other
    found = expected_calibration_error(probabilities, labels, bins=2)
    assert found == pytest.approx((0.7 + 0.1) / 5, abs=1e-12)
    # equally many: {0.1, 0.2, 0.7} and {0.9, 1.0}
    found = expected_calibration_error(probabilities, labels, bins=2, equal_mass=True)
    assert found == pytest.approx((1.0 + 0.4) / 5, abs=1e-12)


@pytest.mark.parametrize("equal_mass", [False, True])
def test_calibration_error_of_what_is_right(equal_mass: bool) -> None:
    probabilities = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    found = expected_calibration_error(probabilities, probabilities, equal_mass=equal_mass)
    assert found == pytest.approx(0.0, abs=1e-9)
    off = expected_calibration_error(probabilities, probabilities - 0.03, equal_mass=equal_mass)
    assert off == pytest.approx(0.03, abs=1e-6)
    assert math.isnan(expected_calibration_error(torch.zeros(0), torch.zeros(0)))


def test_survival_error_is_that_of_the_product_over_valid_rows() -> None:
    logits, labels = noise(200, 3), noise(200, 3, seed=1).sigmoid()
    valid = torch.ones(200, 3, dtype=torch.bool)
    valid[:50, 2] = False
    found = survival_error(logits, labels, valid, [2.0, 0.5], [0.1, -0.2])
    chance = torch.stack([calibrated(logits[:, k], k, [2.0, 0.5], [0.1, -0.2]) for k in range(3)])
    for depth, rows in enumerate([slice(None), slice(None), slice(50, None)]):
        product = chance[: depth + 1].prod(0)[rows]
        happened = labels[:, : depth + 1].prod(1)[rows]
        assert found[depth] == pytest.approx(expected_calibration_error(product, happened))
    assert math.isnan(survival_error(logits, labels, torch.zeros_like(valid))[0])


# Fitting ----------------------------------------------------------------------------------------

TEMPERATURES, BIASES = [2.0, 0.5, 1.3], [-0.7, 0.4, 0.2]


def made_up(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits that are off by known temperatures and biases, and labels without noise."""
    logits = 1.5 * noise(rows, 3, seed=seed)
    columns = [calibrated(logits[:, k], k, TEMPERATURES, BIASES) for k in range(3)]
    return logits, torch.stack(columns, 1), torch.ones(rows, 3, dtype=torch.bool)


def test_a_known_calibration_is_found() -> None:
    found = fit_calibration(*made_up(2000))
    assert found.temperatures == pytest.approx(TEMPERATURES, rel=0.02)
    assert found.biases == pytest.approx(BIASES, abs=0.02)


def test_it_holds_for_other_rows_with_hard_labels() -> None:
    logits, chances, valid = made_up(20000, seed=2)
    hard = (torch.rand(chances.shape, generator=torch.Generator().manual_seed(3)) < chances).to(D)
    fitted, held_out = slice(0, 10000), slice(10000, None)
    found = fit_calibration(logits[fitted], hard[fitted], valid[fitted])
    rows = (logits[held_out], hard[held_out], valid[held_out])
    assert min(survival_error(*rows)[:2]) > 0.05
    assert max(survival_error(*rows, found.temperatures, found.biases)) < 0.02


def test_a_later_position_makes_up_for_an_earlier_one_only_in_the_product() -> None:
    """Labels of depth 2 depend on those of depth 1: products are what is fitted."""
    logits = noise(4000, 2)
    first = logits[:, 0].sigmoid()
    labels = torch.stack([first, torch.where(first > 0.5, 0.9, 0.1).to(D)], 1)
    valid = torch.ones(4000, 2, dtype=torch.bool)
    found = fit_calibration(logits, labels, valid)
    predicted = predicted_survival(logits, found.temperatures, found.biases)
    assert float(predicted[:, 1].mean()) == pytest.approx(
        float(survival(labels)[:, 1].mean()), abs=1e-6
    )


def test_ranks_survive_a_fit_that_could_win_by_saying_one_number() -> None:
    """Of a noisy output the calibration error alone is least where all rows get the mean."""
    logits = noise(500, 1)
    labels = (noise(500, 1, seed=5) + 0.5 * logits > 0).to(D)
    found = fit_calibration(logits, labels, torch.ones(500, 1, dtype=torch.bool))
    assert 0.5 < found.temperatures[0] < 4.0


def test_positions_without_rows_take_over_the_last() -> None:
    logits, labels, valid = made_up(500)
    valid[:, 2] = False
    found = fit_calibration(logits, labels, valid)
    assert found.temperatures[2] == found.temperatures[1] and found.biases[2] == found.biases[1]
    with pytest.raises(ValueError, match="no draft"):
        fit_calibration(logits, labels, torch.zeros_like(valid))


def test_thresholds_keep_less_and_less_that_is_better_and_better() -> None:
    logits, labels, valid = made_up(5000)
    predicted = predicted_survival(logits, TEMPERATURES, BIASES)
    valid[:100] = False
    sweep = threshold_sweep(predicted, labels, valid, [0.0, 0.3, 0.6, 1.0])
    assert sweep[0].kept == 1.0
    assert sweep[0].acceptance == pytest.approx(float(survival(labels)[100:].mean()))
    kept = predicted[100:] >= 0.3
    assert sweep[1].kept == pytest.approx(float(kept.double().mean()))
    assert sweep[1].acceptance == pytest.approx(float(survival(labels)[100:][kept].mean()))
    rates = [step.acceptance for step in sweep if step.acceptance is not None]
    assert len(rates) == 3 and rates[0] < rates[1] < rates[2]
    assert (sweep[3].kept, sweep[3].acceptance) == (0.0, None)


# What a decoder saw -----------------------------------------------------------------------------


def tree(parents: list[int], survival: list[float]) -> TokenTree:
    tokens = torch.arange(10, 10 + len(parents))
    predicted = torch.tensor(survival, dtype=D)
    return TokenTree(tokens, torch.tensor(parents), Proposal.ONE_HOT, survival=predicted)


CHAIN = ([-1, 0, 1, 2], [1.0, 0.8, 0.4, 0.1])


def test_a_chain_is_judged_behind_its_first_rejection_too() -> None:
    judged = JudgedDrafts()
    judged.add_round(tree(*CHAIN), [11], ended=False)
    assert judged.predicted == [0.8, 0.4, 0.1] and judged.survived == [True, False, False]
    assert judged.chances == pytest.approx([0.8, 0.5]) and judged.accepted == [True, False]


def test_what_is_behind_the_end_of_the_text_is_not_judged() -> None:
    judged = JudgedDrafts()
    judged.add_round(tree(*CHAIN), [11], ended=True)
    assert (judged.predicted, judged.survived) == ([0.8], [True])
    assert (judged.chances, judged.accepted) == ([0.8], [True])


def test_of_a_tree_the_path_of_first_children_counts() -> None:
    """Nodes 11 and 12 below the root, 13 and 14 below 11, 15 below 12."""
    branches = tree([-1, 0, 0, 1, 1, 2], [1.0, 0.6, 0.6, 0.3, 0.3, 0.4])
    assert branches.first_path() == [0, 1, 3]
    judged = JudgedDrafts()
    judged.add_round(branches, [12, 15], ended=True)  # left the path, so that is judged
    assert judged.predicted == [0.6, 0.3] and judged.survived == [False, False]
    assert judged.accepted == [False]
    judged.add_round(branches, [11, 14], ended=False)
    assert judged.survived[2:] == [True, False] and judged.accepted == [False, True, False]


def test_a_merged_tree_counts_as_far_as_its_path_is_predicted() -> None:
    judged = JudgedDrafts()
    judged.add_round(tree([-1, 0, 1, 2], [1.0, 0.8, math.nan, math.nan]), [11, 12], ended=False)
    assert (judged.predicted, judged.survived) == ([0.8], [True])
    judged.add_round(tree([-1, 0, 1, 0], [1.0, math.nan, 0.5, 0.8]), [13], ended=False)
    assert len(judged.predicted) == len(judged.chances) == 1
    found = judged.to_dict()
    assert found["confidence_drafts"] == 1 and found["confidence_error"] == pytest.approx(0.2)


# Which label fits -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "proposal", "temperature", "wanted"),
    [
        ("match", Proposal.ONE_HOT, 0.0, ("agreement", True)),
        ("coupled", Proposal.COUPLED, 0.0, ("agreement", True)),
        ("match", Proposal.ONE_HOT, 0.7, ("draft_mass", True)),
        ("rejection", Proposal.ONE_HOT, 0.7, ("draft_mass", True)),
        ("lossy_typical", Proposal.ONE_HOT, 0.7, ("draft_mass", False)),
        ("rejection", Proposal.DENSE, 0.7, ("overlap", True)),
        ("block", Proposal.DENSE, 0.7, ("overlap", True)),
        ("rejection", Proposal.MIXED, 0.7, ("overlap", False)),
        ("coupled", Proposal.COUPLED, 0.7, ("overlap", False)),
    ],
)
def test_the_label_that_fits(
    rule: str, proposal: Proposal, temperature: float, wanted: tuple[str, bool]
) -> None:
    assert fitting_label(rule, proposal, temperature) == wanted
    for own in ("agreement", "draft_mass", "overlap"):
        note = label_note(own, rule, proposal, temperature)
        assert (note is None) == ((own, True) == wanted)
        assert note is None or ("\n" not in note and f"confidence predicts {own}" in note)


def test_coupled_drafts_have_no_exact_label() -> None:
    near = label_note("overlap", "coupled", Proposal.COUPLED, 1.0)
    far = label_note("agreement", "coupled", Proposal.COUPLED, 1.0)
    assert near is not None and "is near acceptance" in near
    assert far is not None and far.endswith("with coupled drafts is overlap")


def test_trees_without_predictions_count_nothing() -> None:
    judged = JudgedDrafts()
    judged.add_round(TokenTree.chain(torch.tensor([1, 2])), [2], ended=False)
    assert judged == JudgedDrafts()
    assert judged.to_dict() == {
        "confidence_auc": None,
        "confidence_error": None,
        "confidence_drafts": 0,
    }


def test_figures_of_many_rounds() -> None:
    judged = JudgedDrafts()
    for accepted in ([], [11], [11, 12], [11, 12, 13]):
        judged = judged.merge(_one(accepted))
    found = judged.to_dict()
    assert found["confidence_drafts"] == 12
    # survival: 0.8 against 3 of 4, 0.4 against 2 of 4, 0.1 against 1 of 4
    wanted = (4 * 0.05 + 4 * 0.1 + 4 * 0.15) / 12
    assert found["confidence_error"] == pytest.approx(wanted, abs=1e-6)
    # chances 0.8, 0.5, 0.25 of which 3 of 4, 2 of 3, 1 of 2 were accepted
    wins = 3 * 1 + 3 * 1 + 2 * 1 + 0.5 * (3 * 1 + 2 * 1 + 1 * 1)
    assert found["confidence_auc"] == pytest.approx(wins / (6 * 3), abs=1e-6)


def _one(accepted: list[int]) -> JudgedDrafts:
    judged = JudgedDrafts()
    judged.add_round(tree(*CHAIN), accepted, ended=False)
    return judged
