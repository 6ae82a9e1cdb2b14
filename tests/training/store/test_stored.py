"""Training from a store is training online: same batches, same losses, same gradients."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import TargetModel, build_drafter
from tests.tiny import tiny_target
from tests.training.store.stores import LAYERS, ROWS, extract, flip, row
from training.data.batches import Batch, PackedDataset
from training.features import Features, OnlineFeatures, TargetBatch
from training.objectives import ObjectiveOptions, build_objective
from training.store import FeatureStore, StoredFeatures, StoreError
from training.store.writer import run_alone


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target: TargetModel) -> Path:
    folder = tmp_path_factory.mktemp("stored") / "store"
    extract(folder, target)
    return folder


def dataset_of(length: int = 32, packed: bool = True, **options: Any) -> PackedDataset:
    return PackedDataset(ROWS, length, 2, packed=packed, **options)


def stored(
    folder: Path, target: TargetModel, dataset: PackedDataset, length: int = 32
) -> StoredFeatures:
    return StoredFeatures(FeatureStore(folder, target, length), dataset)


def batches(dataset: PackedDataset, steps: int = 6) -> list[Batch]:
    return [batch for step in range(steps) for batch in dataset.micro_batches(step, 0, 1, 2)]


def documents(data: TargetBatch) -> list[Tensor]:
    """What is not padding."""
    inside = data.batch.document_ids >= 0
    assert data.features is not None
    return [data.features[inside], data.last_hidden[inside]]


@pytest.mark.parametrize(
    ("length", "packed", "buckets"),
    [(32, True, []), (32, False, []), (10, True, []), (10, False, []), (32, True, [8, 16, 32])],
)
@pytest.mark.parametrize("layers", [LAYERS, (3,), (1, 4)])
def test_hidden_states_are_those_of_the_target(
    folder: Path,
    target: TargetModel,
    length: int,
    packed: bool,
    buckets: list[int],
    layers: tuple[int, ...],
) -> None:
    """Packed and alone, whole and cut, all layers and some."""
    dataset = dataset_of(length, packed, buckets=buckets)
    online = OnlineFeatures(target, layers).of(layers)
    store = stored(folder, target, dataset, length).of(layers)
    for batch in batches(dataset):
        wanted, found = online(batch), store(batch)
        assert found.batch is batch
        assert found.features is not None and wanted.features is not None
        assert found.features.shape == wanted.features.shape
        for one, other in zip(documents(found), documents(wanted), strict=True):
            assert (one - other).abs().max() < 1e-6  # Llama norms are float32 inside
        padding = batch.document_ids < 0
        assert (found.features[padding] == 0).all() and (found.last_hidden[padding] == 0).all()


FAMILIES = {
    "medusa": {"num_heads": 2},
    "hydra": {"num_heads": 2},
    "eagle1": {},
    "eagle3": {},
    "dflash": {"feature_layers": list(LAYERS), "block_size": 4},
    "peagle": {},
}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_losses_and_gradients_are_the_same(folder: Path, target: TargetModel, family: str) -> None:
    """Of every kind of objective, in double precision; a store of other values would show."""
    fields = dict(FAMILIES[family])
    if family in ("eagle3", "peagle"):
        fields["feature_layers"] = list(LAYERS)
    dataset = dataset_of()
    results = []
    for source in ("online", "store", "wrong"):
        drafter = build_drafter(family, target, 0, **fields)  # type: ignore[arg-type]
        drafter.set_draft_vocab(dataset.token_counts(target.vocab_size))
        objective = build_objective(drafter.double().train(), ObjectiveOptions())
        layers = drafter.feature_layers
        features: Features = stored(folder, target, dataset)
        if source == "online":
            features = OnlineFeatures(target, layers)
        read, losses = features.of(layers), []
        for batch in batches(dataset, 3):
            data = read(batch)
            if source == "wrong":
                features_of = data.features if data.features is None else -data.features
                data = TargetBatch(batch, features_of, data.last_hidden.roll(1, 1))
            loss, _ = objective(data)
            loss.backward()
            losses.append(loss.item())
        gradients = [p.grad.clone() for p in objective.parameters() if p.grad is not None]
        results.append((losses, gradients))
    (online, first), (store, second), (wrong, _) = results
    assert store == pytest.approx(online, rel=1e-12)
    assert wrong != pytest.approx(online, rel=1e-3)
    for one, other in zip(first, second, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_store_in_the_dtype_of_the_target_keeps_its_bits(tmp_path: Path, dtype: str) -> None:
    """Of the batch that was run: other batches differ by the rounding of the target itself."""
    target = tiny_target(getattr(torch, dtype))
    rows = [row(20, number) for number in range(2)]
    extract(tmp_path, target, rows, dtype=dtype)
    dataset = PackedDataset(rows, 20, 2, packed=False)
    (batch,) = dataset.micro_batches(0, 0, 1, 2)
    found = stored(tmp_path, target, dataset).of(LAYERS)(batch)
    states = list(run_alone(target, batch.input_ids.tolist(), LAYERS).values())
    assert found.features is not None
    assert torch.equal(found.features, torch.cat(states[:-1], dim=-1))
    assert torch.equal(found.last_hidden, states[-1])


def test_a_layer_that_is_not_stored_is_named(folder: Path, target: TargetModel) -> None:
    features = stored(folder, target, dataset_of())
    with pytest.raises(ValueError, match=r"holds the layers \[1, 3, 4\], not \[2\]"):
        features.of([1, 2])


def test_heads_without_layers_read_the_last_hidden_state_only(
    folder: Path, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = dataset_of()
    features = stored(folder, target, dataset)
    asked: list[list[str]] = []
    read = features.store.read
    monkeypatch.setattr(
        features.store,
        "read",
        lambda place, size, parts: asked.append(list(parts)) or read(place, size, parts),
    )
    data = features.of(())(batches(dataset, 1)[0])
    assert data.features is None and data.last_hidden.shape == (2, 32, 32)
    assert {tuple(parts) for parts in asked} == {("last_hidden",)}


class Counted(FeatureStore):
    """Writes down which thread reads what."""

    def read(self, *args: Any) -> dict[str, Tensor]:
        self.reads = [*getattr(self, "reads", []), (threading.current_thread().name, args[0])]
        return super().read(*args)


def test_reading_ahead_equals_not_reading_ahead(folder: Path, target: TargetModel) -> None:
    """As the loop asks for it: for the next step, before this one is used."""
    dataset = dataset_of()
    plain = stored(folder, target, dataset).of(LAYERS)
    store = Counted(folder, target, 32)
    ahead = StoredFeatures(store, dataset)
    read = ahead.of(LAYERS)
    for step in range(8):
        (batch,) = dataset.micro_batches(step, 0, 1, 2)
        ahead.ahead(dataset.step_indices(step + 1))
        found, wanted = read(batch), plain(batch)
        assert torch.equal(found.features, wanted.features)  # type: ignore[arg-type]
        assert torch.equal(found.last_hidden, wanted.last_hidden)
    assert {name.rpartition("_")[0] for name, _ in store.reads} == {"feature-store"}


def test_what_is_read_ahead_is_read_once_and_forgotten(folder: Path, target: TargetModel) -> None:
    dataset = dataset_of()
    store = Counted(folder, target, 32)
    features = StoredFeatures(store, dataset)
    read = features.of(LAYERS)
    (batch,) = dataset.micro_batches(0, 0, 1, 2)
    features.ahead(dataset.step_indices(0))
    read(batch)
    size = sum(len(dataset.groups[i]) for i in dataset.step_indices(0))
    assert len(store.reads) == size and not features._coming
    for index in range(len(dataset.groups)):
        features.ahead([index])
    assert set(features._coming) == {len(dataset.groups) - 2, len(dataset.groups) - 1}


def test_layers_asked_for_later_are_read_then(folder: Path, target: TargetModel) -> None:
    """Two heads share a store; the second came after the first had read ahead."""
    dataset = dataset_of()
    features = stored(folder, target, dataset)
    features.of((1,))
    features.ahead(dataset.step_indices(0))
    (batch,) = dataset.micro_batches(0, 0, 1, 2)
    found = features.of(LAYERS)(batch).features
    wanted = OnlineFeatures(target, LAYERS)(batch).features
    inside = batch.document_ids >= 0
    assert found is not None and wanted is not None
    assert (found[inside] - wanted[inside]).abs().max() < 1e-6


def test_damage_found_ahead_stops_the_step_that_needs_it(
    tmp_path: Path, target: TargetModel
) -> None:
    extract(tmp_path, target)
    for path in tmp_path.glob("shard-*.safetensors"):
        flip(path, 300)
    dataset = dataset_of()
    features = stored(tmp_path, target, dataset)
    read = features.of(LAYERS)
    features.ahead(dataset.step_indices(0))
    with pytest.raises(StoreError, match=r"wrong checksum at .* delete this file"):
        for batch in batches(dataset, 5):
            read(batch)
