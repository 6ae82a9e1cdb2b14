"""The draft temperature: known factors are recovered, and brute force finds nothing better."""

import math
from dataclasses import astuple

import pytest
import torch
from torch import Tensor

import inference.measuring.draft_temperature as module
from inference.measuring.draft_temperature import fit_draft_temperature, mean_overlap
from inference.sampling import SamplingParams, probabilities


def random_rows(seed: int, rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 2


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(1.0), SamplingParams(0.6), SamplingParams(0.8, top_k=5)]
)
def test_a_known_factor_is_recovered(scale: float, sampling: SamplingParams) -> None:
    """Logits scaled by a factor become the target's law at that temperature."""
    logits = random_rows(0, 20, 12)
    fit = fit_draft_temperature(probabilities(logits, sampling), logits * scale, None, sampling)
    assert fit.factor == pytest.approx(scale, rel=1e-3)
    assert fit.overlap_after == pytest.approx(1.0, abs=1e-3)
    if scale == 1.0:
        assert fit.overlap_before == pytest.approx(1.0)
    else:
        assert fit.overlap_before < 0.9


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1.0),
        SamplingParams(0.7, top_k=3),
        SamplingParams(1.2, top_p=0.8),
        SamplingParams(0.9, top_k=6, top_p=0.7),
    ],
)
def test_brute_force_finds_nothing_better(sampling: SamplingParams, seed: int) -> None:
    """Up to what falls between two points of the coarse grid where top-p makes steps."""
    logits = random_rows(10 + seed, 30, 8)
    draft = logits * 2.0 + random_rows(20 + seed, 30, 8)
    p = probabilities(logits, sampling)
    fit = fit_draft_temperature(p, draft, None, sampling)
    factors = torch.linspace(math.log(1 / 8), math.log(8), 1500).exp().tolist()
    overlaps = [
        mean_overlap(
            p, draft, SamplingParams(sampling.temperature * f, sampling.top_k, sampling.top_p)
        )
        for f in factors
    ]
    slack = 1e-6 if sampling.top_p is None else 5e-3
    assert fit.overlap_after > max(overlaps) - slack
    assert fit.overlap_after > fit.overlap_before


def test_overlap_by_hand() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.2, 0.7, 0.1], [0.5, 0.5, 0.0]])
    # (0.2 + 0.3 + 0.1) and 0.5
    assert mean_overlap(p, q.log(), SamplingParams(1.0)) == pytest.approx(0.55)


def test_overlap_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    p, logits = probabilities(random_rows(1, 7, 5), SamplingParams(1.0)), random_rows(2, 7, 5)
    whole = mean_overlap(p, logits, SamplingParams(1.0))
    monkeypatch.setattr(module, "ENTRIES_AT_ONCE", 10)  # two rows at a time
    assert mean_overlap(p, logits, SamplingParams(1.0)) == pytest.approx(whole, abs=1e-12)


def test_a_reduced_vocabulary_is_compared_at_its_ids() -> None:
    """Equal to a whole vocabulary whose other tokens the drafter never says."""
    columns = torch.tensor([6, 1, 4])
    sampling = SamplingParams(0.8)
    p = probabilities(random_rows(3, 15, 8), sampling)
    reduced = random_rows(4, 15, 3)
    whole = torch.full((15, 8), -torch.inf, dtype=torch.float64)
    whole[:, columns] = reduced
    fit = fit_draft_temperature(p, reduced, columns, sampling)
    expected = fit_draft_temperature(p, whole, None, sampling)
    assert astuple(fit) == pytest.approx(astuple(expected))


def test_an_aligned_draft_keeps_its_temperature() -> None:
    logits = random_rows(5, 10, 6)
    fit = fit_draft_temperature(
        probabilities(logits, SamplingParams(1.0)), logits, None, SamplingParams(1.0)
    )
    assert fit.factor == pytest.approx(1.0, abs=1e-3)


def test_a_useless_draft_does_not_leave_the_range() -> None:
    p = torch.full((4, 5), 0.2)
    fit = fit_draft_temperature(p, random_rows(6, 4, 5), None, SamplingParams(1.0))
    assert fit.factor == pytest.approx(module.HIGHEST)  # flat is best, and 8 is the flattest


@pytest.mark.parametrize(
    ("target", "draft", "vocab", "sampling", "message"),
    [
        ((2, 4), (2, 4), None, SamplingParams(0.0), "temperature is 0"),
        ((2, 4), (3, 4), None, SamplingParams(1.0), "3 rows"),
        ((2, 4), (2, 3), None, SamplingParams(1.0), "draft_vocab"),
        ((2, 4), (2, 3), torch.tensor([0, 1]), SamplingParams(1.0), "3 columns but 2"),
        ((4,), (4,), None, SamplingParams(1.0), "2-D"),
        ((0, 4), (0, 4), None, SamplingParams(1.0), "at least one row"),
    ],
)
def test_what_does_not_fit_is_refused(
    target: tuple[int, ...],
    draft: tuple[int, ...],
    vocab: Tensor | None,
    sampling: SamplingParams,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        fit_draft_temperature(torch.zeros(target), torch.zeros(draft), vocab, sampling)
