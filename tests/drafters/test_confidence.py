"""The confidence head: what it reads, how it is calibrated, what chains of it mean."""

import math

import pytest
import torch

from drafters import build_drafter
from drafters.confidence import ConfidenceHead, calibrated, survival
from tests.tiny import tiny_target


def test_one_number_per_row() -> None:
    head = ConfidenceHead(4)
    hidden = torch.randn(2, 3, 4)
    wanted = hidden @ head.proj.weight[0] + head.proj.bias
    assert head(hidden).shape == (2, 3)
    assert (head(hidden) - wanted).abs().max() < 1e-6


def test_no_gradient_goes_into_the_draft() -> None:
    head = ConfidenceHead(4)
    hidden = torch.randn(3, 4, requires_grad=True)
    head(hidden).sum().backward()
    assert hidden.grad is None
    assert head.proj.weight.grad is not None


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_heads_carry_it_only_on_request(family: str) -> None:
    target = tiny_target()
    assert build_drafter(family, target).confidence is None
    carried = build_drafter(family, target, confidence_head=True)
    assert isinstance(carried.confidence, ConfidenceHead)
    extra = (
        carried.num_parameters_trained() - build_drafter(family, target).num_parameters_trained()
    )
    assert extra == 33


@pytest.mark.parametrize("temperatures", [None, []])
def test_uncalibrated_is_the_plain_sigmoid(temperatures: list[float] | None) -> None:
    logit = torch.tensor([0.0, math.log(3)])
    for position in (0, 5):
        found = calibrated(logit, position, temperatures)
        assert found.tolist() == pytest.approx([0.5, 0.75])


def test_each_position_has_its_temperature_and_the_last_serves_the_rest() -> None:
    logit = torch.tensor(2.0, dtype=torch.bfloat16)
    temperatures = [2.0, 0.5]
    wanted = [1 / (1 + math.exp(-1.0)), *[1 / (1 + math.exp(-4.0))] * 3]
    found = [calibrated(logit, position, temperatures).item() for position in range(4)]
    assert found == pytest.approx(wanted, rel=1e-6)
    assert calibrated(logit, 0, temperatures).dtype == torch.float32


def test_survival_is_the_running_product() -> None:
    found = survival(torch.tensor([[0.5, 0.4, 1.0], [1.0, 0.0, 0.9]]))
    assert found.flatten().tolist() == pytest.approx([0.5, 0.2, 0.2, 1.0, 0.0, 0.0])
