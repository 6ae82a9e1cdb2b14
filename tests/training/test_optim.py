"""Optimizers, learning rates by step, the moving average."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from drafters import build_drafter
from tests.tiny import tiny_target
from training.objectives import Objective, ObjectiveOptions, build_objective
from training.optim import MovingAverage, Rates, inner_matrices, make_optimizers
from training.options.run import OptimOptions


def objective(family: str = "eagle3", **options: Any) -> Objective:
    drafter = build_drafter(family, tiny_target(layers=3), 0, **options)
    return build_objective(drafter, ObjectiveOptions())


def rates(total: int = 100, **options: Any) -> list[float]:
    """The rate of each step."""
    chosen = OptimOptions(**({"lr": 1.0, "warmup": 0.1} | options))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=chosen.lr)
    schedule = Rates([optimizer], chosen, total)
    found = []
    for step in range(total):
        schedule.go_to(step)
        found.append(schedule.now)
    return found


def test_cosine() -> None:
    found = rates()
    assert found[:11] == pytest.approx([i / 10 for i in range(11)])
    assert found[55] == pytest.approx(0.5)
    assert found[-1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 89 / 90)))


def test_cosine_to_a_floor() -> None:
    found = rates(min_lr=0.2)
    assert found[55] == pytest.approx(0.6)
    assert 0.2 < found[-1] < 0.201


def test_warm_up_stable_decay() -> None:
    found = rates(schedule="wsd", decay=0.3, min_lr=0.1)
    assert found[5] == pytest.approx(0.55), "it rises from the floor too"
    assert found[10:70] == pytest.approx([1.0] * 60)
    assert found[71:] == sorted(found[71:], reverse=True)
    assert found[85] == pytest.approx(0.55, abs=0.01)
    assert found[-1] == pytest.approx(0.1, abs=0.01)


def test_rates_are_a_function_of_the_step_alone() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = Rates([optimizer], OptimOptions(lr=1.0), 50)
    schedule.go_to(40)
    late = schedule.now
    schedule.go_to(3)
    schedule.go_to(40)
    assert schedule.now == late


def test_adamw_takes_every_parameter_once() -> None:
    bare = objective()
    (optimizer,) = make_optimizers(bare, OptimOptions())
    assert type(optimizer) is torch.optim.AdamW
    given = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in given} == {id(p) for p in bare.parameters()}
    assert len(given) == len(set(map(id, given)))


@pytest.mark.parametrize(
    "family", ["eagle1", "eagle3", "hydra", "mtp", "peagle", "dflash", "dspark"]
)
def test_muon_takes_the_matrices_inside(family: str) -> None:
    options = (
        {"mask_token_id": 95, "feature_layers": [0, 1]} if family in ("dflash", "dspark") else {}
    )
    bare = objective(family, **options)
    muon, adamw = make_optimizers(bare, OptimOptions(name="muon"))
    assert type(muon) is torch.optim.Muon and type(adamw) is torch.optim.AdamW
    inner = {id(p) for group in muon.param_groups for p in group["params"]}
    rest = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert not inner & rest
    assert inner | rest == {id(p) for p in bare.parameters()}
    names = {name: id(p) for name, p in bare.named_parameters()}
    for name, parameter in bare.named_parameters():
        if parameter.ndim != 2 or "lm_head" in name or "norm" in name:
            assert names[name] in rest, name
        elif "proj" in name and "markov" not in name:
            assert names[name] in inner, name


def test_muon_without_matrices_is_refused() -> None:
    bare = objective("medusa", num_heads=1)
    for layers in bare.modules():
        if isinstance(layers, nn.Linear):
            layers.requires_grad_(False)
    with pytest.raises(ValueError, match=r"optim\.name=muon has no effect"):
        inner_matrices(bare)


def test_muon_lowers_a_loss() -> None:
    bare = objective()
    optimizers = make_optimizers(bare, OptimOptions(name="muon", lr=1e-2))
    wanted = {name: torch.randn_like(p) for name, p in bare.named_parameters()}
    values = []
    for _ in range(20):
        loss = sum((p - wanted[name]).square().mean() for name, p in bare.named_parameters())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        values.append(loss.item())
    assert values[-1] < values[0]


def test_moving_average() -> None:
    weight = nn.Parameter(torch.zeros(2))
    average = MovingAverage({"w": weight}, decay=0.9)
    for value in (1.0, 2.0):
        weight.data.fill_(value)
        average.update()
    assert average.values["w"].tolist() == pytest.approx([0.9 * 0.1 + 0.1 * 2.0] * 2)
    average.load({"w": torch.tensor([5.0, 6.0])})
    assert average.values["w"].tolist() == [5.0, 6.0]
