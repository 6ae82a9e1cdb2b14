"""The parts that measure a training step, on things whose cost is known."""

import pytest
import torch
from torch import nn

from drafters import TargetModel, build_drafter
from scripts.training_cost import (
    LiveBytes,
    Phases,
    Rates,
    counted_flops,
    eagle3_flops,
    moved_bytes,
    target_flops,
)
from tests.tiny import tiny_target
from training.data.batches import Batch
from training.features import run_target
from training.objectives import ObjectiveOptions, build_objective

CPU = torch.device("cpu")


def test_live_bytes_counts_storages_once_and_forgets_them() -> None:
    before = torch.zeros(1000)
    with LiveBytes() as live:
        first = torch.zeros(100)  # 400 bytes
        view = first.view(10, 10)[3:]
        outside = before.view(10, 100)
        assert live.now == 400
        second = first + 1
        assert (live.now, live.peak) == (800, 800)
        del first
        assert live.now == 800, "a view keeps it"
        del view
        assert live.now == 400
        del second, outside
    assert (live.now, live.peak) == (0, 800)


def test_live_bytes_sees_what_autograd_keeps() -> None:
    x = torch.zeros(100, requires_grad=True)
    with LiveBytes() as live:
        y = x.exp().exp()
        kept = live.now
        y.sum().backward()
        assert kept == 800
        del y
    assert live.now == 400, "the gradient"
    assert live.peak >= 1200, "that of the second exponential beside both results"


def test_wide_tensors_are_told_apart() -> None:
    with LiveBytes([7]) as live:
        a, b, c = torch.zeros(2, 7), torch.zeros(7, 2), torch.zeros(7)
        d = torch.zeros(3, 7)
    assert live.wide_peak == 5 * 7 * 4
    del a, b, c, d


def one_document(rows: int, length: int, first_label: int) -> Batch:
    ids = torch.randint(3, 90, (rows, length))
    positions = torch.arange(length).expand(rows, length)
    number = torch.arange(rows)
    return Batch(ids, positions, torch.zeros_like(ids), positions >= first_label, number, number)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    target = tiny_target(torch.float32, layers=3, attn="eager")
    for parameter in target.model.parameters():
        parameter.requires_grad_(False)
    return target


def test_formula_of_the_target_is_what_is_counted(target: TargetModel) -> None:
    batch = one_document(2, 12, 4)
    counted = counted_flops(lambda: run_target(target, batch, (1,)))
    rotary = 2 * 2 * 12 * 4  # of one row: its angles are a product
    config = target.config
    config.head_dim = config.hidden_size // config.num_attention_heads
    formula = target_flops(config, rows=24, pairs=2 * 12 * 12, projected=2)
    assert formula <= counted <= formula + rotary


@pytest.mark.parametrize("trained", [True, False])
def test_formula_of_eagle3_is_what_is_counted(target: TargetModel, trained: bool) -> None:
    head = build_drafter("eagle3", target, draft_vocab_size=40)
    head.set_draft_vocab(torch.arange(96))
    head.lm_head.weight.requires_grad_(trained)
    objective = build_objective(head, ObjectiveOptions(steps=2, chunk=6)).train()
    batch = one_document(2, 12, 4)
    data = run_target(target, batch, head.feature_layers)
    counted = counted_flops(lambda: objective(data)[0].backward())
    formula = eagle3_flops(head.config, 24, 2 * 12 * 12, 2 * 8, 2, trained)
    # The scores of the first step are a fused kernel's, which computes them again.
    again = 2 * 2 * 12 * 12 * head.config.num_attention_heads * head.config.head_dim
    assert counted in (formula, formula + again)


def test_bytes_and_floor() -> None:
    assert moved_bytes(100, 10) == 200
    rates = Rates(flops=50.0, bandwidth=10.0)
    assert rates.floor(flops=100, moved=10) == 2.0
    assert rates.floor(flops=100, moved=50) == 5.0


def test_phases_hold_no_time_of_those_inside_them() -> None:
    now = [0.0]
    phases = Phases(CPU, lambda: now[0])

    def work(seconds: float) -> None:
        now[0] += seconds

    with phases.phase("other"):
        work(1)
        with phases.phase("vocabulary"):
            work(2)
            phases.timed("trunk", work)(4)
        work(8)
        phases.timed("trunk", work)(16)
    assert dict(phases.seconds) == {"other": 9, "vocabulary": 2, "trunk": 20}


def test_flops_of_a_linear_layer() -> None:
    layer = nn.Linear(5, 7, bias=False)
    x = torch.zeros(3, 5)
    assert counted_flops(lambda: layer(x).sum().backward()) == 2 * 2 * 3 * 5 * 7
