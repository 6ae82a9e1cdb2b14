"""Doubt covers what rounding can do, and no more."""

import math
from typing import Any

import pytest
import torch

from inference.measuring.doubt import NEAR_TIE, gap_below_best, tokens_kept
from inference.sampling import SamplingParams, gumbel, probabilities

OPTIONS: list[dict[str, Any]] = [
    {"top_k": 7},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_k": 12, "top_p": 0.6},
    {"min_p": math.exp(-3.0)},
    {"min_p": 1.0},
    {"min_p": 0.0},
    {"typical_p": 0.2},
    {"typical_p": 0.9},
    {"top_k": 20, "min_p": math.exp(-4.25)},
    {"top_k": 7, "typical_p": 0.5},
    {"top_k": 25, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.6},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_in_doubt_is_what_rounding_can_change(options: dict[str, Any]) -> None:
    """Logits wrong by up to NEAR_TIE / 2 keep all beyond doubt, and nothing that is ruled out."""
    params = SamplingParams(1.0, **options)
    generator = torch.Generator().manual_seed(0)
    undecided = 0
    for _ in range(300):
        logits = torch.randn(40, generator=generator, dtype=torch.float64)
        logits = (8 * logits).round() / 4  # many exact ties
        wrong = logits + NEAR_TIE * (torch.rand(40, generator=generator).double() - 0.5)
        log_probs = logits.log_softmax(-1)
        surely, maybe = (tokens_kept(log_probs, params, doubtful=flag) for flag in (False, True))
        kept = probabilities(wrong, params) > 0
        assert bool((surely <= kept).all()) and bool((kept <= maybe).all())
        undecided += int((surely != maybe).sum())
    if options != {"min_p": 0.0}:  # which keeps everything
        assert 0 < undecided < 300 * 40 / 5


@pytest.mark.parametrize("options", OPTIONS)
def test_without_ties_nothing_is_in_doubt(options: dict[str, Any]) -> None:
    params = SamplingParams(1.0, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        logits = 2 * torch.randn(40, generator=generator, dtype=torch.float64)
        kept = probabilities(logits, params) > 0
        for flag in (False, True):
            found = tokens_kept(logits.log_softmax(-1), params, doubtful=flag, tolerance=1e-9)
            assert torch.equal(found, kept)


def test_gaps_are_those_of_the_perturbed_scores() -> None:
    logits = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    greedy = gap_below_best(logits, [3, 4], 7, SamplingParams())
    assert greedy == float(logits.max() - logits[[3, 4]].min())
    params = SamplingParams(0.7, seed=5)
    scores = (logits / 0.7).log_softmax(-1) + gumbel(5, 7, 40)
    best, second = scores.topk(2).indices.tolist()
    assert gap_below_best(logits, [best], 7, params) == 0.0
    found = gap_below_best(logits, [second], 7, params)
    assert found == pytest.approx(float(scores[best] - scores[second]), rel=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_cannot_come_has_no_gap(temperature: float) -> None:
    logits = torch.randn(40, dtype=torch.float64)
    logits[3] = -torch.inf
    params = SamplingParams(temperature, typical_p=0.9, min_p=0.001)
    assert gap_below_best(logits, [3], 7, params) is None
    assert gap_below_best(logits.fill_(torch.nan), [4], 7, params) is None
