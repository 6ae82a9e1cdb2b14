"""What a store says is what the target says; damage is found and named, in every byte."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import TargetModel, TargetOutput
from tests.tiny import tiny_target
from tests.training.store.stores import LAYERS, ROWS, SIZES, contents, extract, flip, row
from training.store import FeatureStore, StoreError
from training.store import reader as reader_module
from training.store.documents import key_of
from training.store.encoding import LAST, SCALES, decode
from training.store.manifest import Manifest

PARTS = [*(f"layer_{layer}" for layer in LAYERS), LAST]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture
def folder(tmp_path: Path, target: TargetModel) -> Path:
    extract(tmp_path / "store", target)
    return tmp_path / "store"


def everything(folder: Path, dtype: torch.dtype) -> dict[bytes, dict[str, Tensor]]:
    """The slow twin: all shards in memory, documents cut out of them."""
    found = {}
    for shard in Manifest.read(folder).shards:
        tensors = load_file(folder / shard.file)
        offsets = tensors["offsets"].tolist()
        for start, stop in pairwise(offsets):
            rows = {name: tensor[start:stop] for name, tensor in tensors.items()}
            key = key_of(rows["ids"])
            found[key] = {part: decode(part, rows, dtype) for part in PARTS}
    return found


@pytest.mark.parametrize("dtype", ["float64", "fp8"])
def test_random_access_equals_everything_in_memory(
    tmp_path: Path, target: TargetModel, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one file open at a time, so that files are closed and opened again."""
    monkeypatch.setattr(reader_module, "OPEN_FILES", 1)
    extract(tmp_path, target, dtype=dtype)
    store = FeatureStore(tmp_path, target, 512)
    slow = everything(tmp_path, torch.float64)
    assert store.documents == len(slow) == len(ROWS)
    for number in torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(0)).tolist():
        ids = ROWS[number].ids
        size = min(7, len(ids))
        found = store.read(store.find(ids), size, PARTS)
        assert list(found) == PARTS
        for part, values in found.items():
            assert values.dtype == torch.float64
            assert torch.equal(values, slow[key_of(ids)][part][:size]), part


def test_values_are_those_of_the_target(folder: Path, target: TargetModel) -> None:
    """Each document alone, which is what the decoder sees."""
    store = FeatureStore(folder, target, 512)
    for one in ROWS:
        alone = target.forward(torch.tensor([one.ids]), feature_layers=LAYERS)
        wanted = [*alone.features[0].split(32, -1), alone.last_hidden[0]]
        found = store.read(store.find(one.ids), len(one.ids), PARTS)
        for part, value in zip(PARTS, wanted, strict=True):
            assert (found[part] - value).abs().max() < 1e-12 * value.abs().max() + 1e-6 * (
                part == LAST
            )


def test_cut_rows_are_beginnings(folder: Path, target: TargetModel) -> None:
    store = FeatureStore(folder, target, 10)
    kept = store.present(ROWS)
    assert kept == ROWS
    for one in ROWS:
        place = store.find(one.ids[:10])
        assert place.document < store._shards[place.shard].shard.documents
        alone = target.forward(torch.tensor([one.ids[:10]]), feature_layers=LAYERS).features[0]
        found = store.read(place, len(one.ids[:10]), PARTS[:1])["layer_1"]
        assert (found - alone[:, :32]).abs().max() < 1e-12
    with pytest.raises(KeyError):
        store.find(ROWS[2].ids[:9])


def test_a_missing_row_is_named_with_the_fix(folder: Path, target: TargetModel) -> None:
    store = FeatureStore(folder, target, 512)
    new = replace(row(13, 77), number=41)
    with pytest.raises(StoreError, match=r"lacks 1 of the rows, the first is row 41 .*--out") as e:
        store.present([*ROWS, new])
    assert "scripts.extract_features" in str(e.value)
    extract(folder, target, [*ROWS, new])
    assert FeatureStore(folder, target, 512).present([*ROWS, new])[-1] is new


def test_every_bit_of_hidden_states_is_checked(folder: Path, target: TargetModel) -> None:
    """One flipped bit in each tensor, found when that document is read and not before."""
    path = folder / "shard-00001.safetensors"
    tensors = load_file(path)
    for part in PARTS:
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        changed[part].view(torch.uint8)[3, 7] ^= 4
        save_file(changed, path)
        store = FeatureStore(folder, target, 512)
        bad = tensors["offsets"].tolist().index(0)
        ids = tensors["ids"][: int(tensors["offsets"][1])].tolist()
        place = store.find(ids)
        assert (place.shard, place.document) == (1, bad)
        for other in PARTS:
            if other != part:
                store.read(place, 2, [other])
        with pytest.raises(StoreError) as caught:
            store.read(place, 2, [part])
        assert f"{path} has a wrong checksum at {part} of document 0" in str(caught.value)
        assert "delete this file" in str(caught.value)
        assert "data.skip_damaged=true" in str(caught.value)
    extract(folder, target, verify=True)
    assert load_file(path).keys() == tensors.keys()


def test_scales_are_checked_too(tmp_path: Path, target: TargetModel) -> None:
    extract(tmp_path, target, dtype="fp8")
    path = tmp_path / "shard-00000.safetensors"
    tensors = load_file(path)
    tensors["layer_3" + SCALES].view(torch.uint8)[0, 0] ^= 1
    save_file(tensors, path)
    store = FeatureStore(tmp_path, target, 512)
    with pytest.raises(StoreError, match="wrong checksum at layer_3"):
        store.read(store.find(ROWS[0].ids), 2, PARTS)


def damaged(folder: Path, kind: str) -> Path:
    path = folder / "shard-00001.safetensors"
    if kind == "missing":
        path.unlink()
    elif kind == "torn":
        path.write_bytes(path.read_bytes()[:-100])
    elif kind == "header":
        data = bytearray(path.read_bytes())
        data[9] = 0
        path.write_bytes(data)
    elif kind == "offsets":
        tensors = load_file(path)
        tensors["offsets"][1] = 1000
        save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("missing", "is missing"),
        ("torn", "bytes instead of"),
        ("header", "cannot be read"),
        ("offsets", "has an index that does not fit"),
    ],
)
def test_broken_shards_are_named_at_the_start(
    folder: Path, target: TargetModel, kind: str, reason: str
) -> None:
    path = damaged(folder, kind)
    with pytest.raises(StoreError, match=reason) as caught:
        FeatureStore(folder, target, 512)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", ["missing", "torn", "header", "flipped"])
def test_damaged_shards_are_left_out_when_asked(
    folder: Path, target: TargetModel, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "flipped":
        flip(folder / "shard-00001.safetensors", 300)
    else:
        damaged(folder, kind)
    lost = Manifest.read(folder).shards[1].documents
    with caplog.at_level(logging.WARNING):
        store = FeatureStore(folder, target, 512, skip_damaged=True)
        kept = store.present(ROWS)
    assert len(kept) == len(ROWS) - lost
    assert f"left out {lost} rows of damaged shards" in caplog.text
    assert "shard-00001.safetensors" in caplog.text
    for one in kept:
        store.read(store.find(one.ids), len(one.ids), PARTS)
    with pytest.raises(StoreError, match=r"lacks 3 of the rows"):
        store.present([*ROWS, row(13, 77)])


def test_a_store_without_a_whole_shard_is_refused(folder: Path, target: TargetModel) -> None:
    for path in folder.glob("shard-*"):
        path.unlink()
    store = FeatureStore(folder, target, 512, skip_damaged=True)
    with pytest.raises(StoreError, match="all shards are damaged"):
        store.present(ROWS)


def test_nothing_is_read_that_is_not_used(
    folder: Path, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening looks at sizes and indices; only skip_damaged hashes whole files."""
    hashed: list[Path] = []
    documents = reader_module.damage.__globals__
    monkeypatch.setitem(documents, "sha256", lambda path: hashed.append(path) or "")
    FeatureStore(folder, target, 512)
    assert hashed == []
    FeatureStore(folder, target, 512, skip_damaged=True)
    assert len(hashed) == 4


def test_another_target_is_refused(folder: Path) -> None:
    with pytest.raises(StoreError, match="is of another target: its weights hash"):
        FeatureStore(folder, tiny_target(seed=1), 512)


def test_another_dtype_of_the_target_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        store = FeatureStore(folder, tiny_target(torch.float32), 512)
    assert "run in float64, now it is in float32" in caplog.text
    found = store.read(store.find(ROWS[0].ids), 5, [LAST])
    assert found[LAST].dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "fp8"])
def test_the_target_is_asked_whether_it_still_says_the_same(
    tmp_path: Path, target: TargetModel, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers captured one later, as by another convention, are found."""
    extract(tmp_path, target, dtype=dtype)
    store = FeatureStore(tmp_path, target, 10)
    assert store.check(target, ROWS[2].ids) < (1e-12 if dtype == "float64" else 3e-2)
    forward = target.forward

    def later(ids: Tensor, feature_layers: Sequence[int], **kwargs: Any) -> TargetOutput:
        return forward(ids, feature_layers=[layer + 1 for layer in feature_layers], **kwargs)

    monkeypatch.setattr(target, "forward", later)
    with pytest.raises(StoreError, match=r"differs by .* from what the target says now"):
        store.check(target, ROWS[2].ids)


def test_a_folder_without_a_store_is_named(tmp_path: Path, target: TargetModel) -> None:
    with pytest.raises(StoreError, match=r"has no manifest\.json"):
        FeatureStore(tmp_path, target, 512)


def test_reading_changes_nothing(folder: Path, target: TargetModel) -> None:
    before = contents(folder)
    store = FeatureStore(folder, target, 512)
    for one in ROWS:
        values: Sequence[Tensor] = list(store.read(store.find(one.ids), 4, PARTS).values())
        values[0].fill_(7)
    assert contents(folder) == before
    assert sum(SIZES) == Manifest.read(folder).counts()["tokens"]
