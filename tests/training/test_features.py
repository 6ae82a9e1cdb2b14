"""Features of packed documents are those of each document alone; leaks are found."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import TargetModel, TargetOutput
from tests.tiny import tiny_target
from training.data.batches import Batch, PackedDataset, collate
from training.data.chat import TokenizedRow
from training.features import OnlineFeatures, check_packing, run_target

LAYERS = (1, 4)


def row(length: int, seed: int) -> TokenizedRow:
    ids = torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return TokenizedRow(ids, [False] + [True] * (length - 1))


ROWS = [row(5, 0), row(4, 1), row(8, 2), row(3, 3)]
GROUPS = [[ROWS[0], ROWS[1]], [ROWS[2], ROWS[3]]]
LENGTH = 12


class LeakyTarget(TargetModel):
    """Forgets where documents begin."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> TargetOutput:
        return super().forward(input_ids, **kwargs | {"position_ids": None})


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def target(request: pytest.FixtureRequest) -> TargetModel:
    return tiny_target(attn=request.param)


def leaky() -> TargetModel:
    return LeakyTarget(tiny_target().model)


def packed() -> Batch:
    return collate(GROUPS, LENGTH)


def test_packed_documents_do_not_see_each_other(target: TargetModel) -> None:
    """In a batch of two sequences, with padding behind; float32 rounding under eager."""
    data = run_target(target, packed(), LAYERS)
    assert data.features.shape == (2, LENGTH, 64)
    for number, group in enumerate(GROUPS):
        start = 0
        for one in group:
            alone = target.forward(torch.tensor([one.ids]), feature_layers=LAYERS)
            span = slice(start, start + len(one.ids))
            assert (data.features[number, span] - alone.features[0]).abs().max() < 1e-4
            assert (data.last_hidden[number, span] - alone.last_hidden[0]).abs().max() < 1e-4
            start = span.stop


def test_without_documents_they_would(target: TargetModel) -> None:
    """Negative control of the test above."""
    batch = packed()
    running = torch.arange(LENGTH).expand(2, LENGTH)
    joined = run_target(target, replace(batch, position_ids=running), LAYERS)
    apart = run_target(target, batch, LAYERS)
    assert (joined.features[0, :5] - apart.features[0, :5]).abs().max() < 1e-4
    assert (joined.features[0, 5:9] - apart.features[0, 5:9]).abs().max() > 1e-2


def test_heads_without_layers_get_the_last_hidden_state_only(target: TargetModel) -> None:
    data = run_target(target, packed(), ())
    assert data.features is None
    assert data.last_hidden.shape == (2, LENGTH, 32)
    assert not data.last_hidden.requires_grad


def test_check_packing_passes_and_measures(target: TargetModel) -> None:
    assert check_packing(target, packed(), LAYERS) < 1e-5


def test_check_packing_finds_a_leak() -> None:
    with pytest.raises(ValueError, match=r"leaks across packed documents, set data\.pack=false"):
        check_packing(leaky(), packed(), LAYERS)


def test_single_documents_cannot_leak() -> None:
    assert check_packing(leaky(), collate([[ROWS[0]]], LENGTH), LAYERS) < 1e-12


# --- remembered features


def test_memory_gives_what_computing_gives(target: TargetModel) -> None:
    data = PackedDataset(ROWS, LENGTH, 2, packed=False)
    online, memory = OnlineFeatures(target, LAYERS), OnlineFeatures(target, LAYERS, 1.0)
    for step in range(6):
        (batch,) = data.micro_batches(step, 0, 1, 2)
        wanted, found = online(batch), memory(batch)
        assert (wanted.features - found.features).abs().max() < 1e-4
        assert (wanted.last_hidden - found.last_hidden).abs().max() < 1e-4
        assert found.batch is batch


def counting(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sequences per target forward from now on."""
    seen: list[int] = []
    forward = target.forward

    def counted(ids: Tensor, **kwargs: Any) -> TargetOutput:
        seen.append(len(ids))
        return forward(ids, **kwargs)

    monkeypatch.setattr(target, "forward", counted)
    return seen


def run_epochs(features: OnlineFeatures, data: PackedDataset, epochs: int) -> None:
    for step in range(epochs * data.steps_per_epoch):
        (batch,) = data.micro_batches(step, 0, 1, data.batch_size)
        features(batch)


def test_each_sequence_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    data = PackedDataset(ROWS, LENGTH, 2, packed=False)
    seen = counting(target, monkeypatch)
    run_epochs(OnlineFeatures(target, LAYERS, 1.0), data, 3)
    assert seen == [1] * 4
    seen.clear()
    run_epochs(OnlineFeatures(target, LAYERS), data, 3)
    assert seen == [2] * 6


def test_a_full_memory_computes_the_rest_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    data = PackedDataset(ROWS, LENGTH, 2, packed=False)
    one = LENGTH * (64 + 32) * 8
    seen = counting(target, monkeypatch)
    run_epochs(OnlineFeatures(target, LAYERS, 2.5 * one / 1e9), data, 3)
    assert seen == [1] * (4 + 2 + 2)


def test_sequences_without_a_number_are_never_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Index -1 says "unknown": two of them are not the same sequence."""
    target = tiny_target()
    features = OnlineFeatures(target, LAYERS, 1.0)
    first, second = collate([GROUPS[0]], LENGTH), collate([GROUPS[1]], LENGTH)
    one, other = features(first), features(second)
    assert not torch.equal(one.features, other.features)
    seen = counting(target, monkeypatch)
    features(first)
    assert seen == [1]


def test_remembered_values_do_not_depend_on_the_first_batch() -> None:
    """So that a resumed run, whose memory is empty, stays bit-identical."""
    target = tiny_target(torch.float32)
    alone, paired = OnlineFeatures(target, LAYERS, 1.0), OnlineFeatures(target, LAYERS, 1.0)
    first = alone(collate([GROUPS[1]], LENGTH, [1]))
    second = paired(collate(GROUPS, LENGTH, [0, 1]))
    assert torch.equal(first.features[0], second.features[1])
    assert torch.equal(first.last_hidden[0], second.last_hidden[1])
