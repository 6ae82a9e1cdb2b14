"""Shards are whole or not there, and a stopped extraction continues as if it had not been."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafters import TargetModel
from tests.tiny import tiny_target
from tests.training.store.stores import (
    LAYERS,
    ROWS,
    SHARD_TOKENS,
    contents,
    extract,
    flip,
    planned,
    row,
)
from training.store import Manifest, StoreError
from training.store import manifest as manifest_module
from training.store import writer as writer_module
from training.store.documents import documents_of, read_keys
from training.store.encoding import DTYPES
from training.store.manifest import NAME
from training.store.writer import (
    check_room,
    claim,
    merge,
    predict_bytes,
    predict_seconds,
    similar,
    write_shards,
)


class Killed(BaseException):
    """The process is gone."""


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, target: TargetModel) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "store"
    extract(folder, target)
    return folder


def test_shards_hold_all_documents_in_order(whole: Path, target: TargetModel) -> None:
    manifest = Manifest.read(whole)
    keys = [key for shard in manifest.shards for key in read_keys(whole, shard)]
    assert keys == [document.key for document in documents_of(ROWS, 512)]
    assert len(manifest.shards) == 4
    assert all(shard.tokens <= SHARD_TOKENS for shard in manifest.shards)
    assert manifest.counts() == {
        "documents": len(ROWS),
        "tokens": sum(len(one.ids) for one in ROWS),
        "supervised": sum(sum(one.supervised) for one in ROWS),
        "bytes": sum((whole / shard.file).stat().st_size for shard in manifest.shards),
    }
    record = json.loads((whole / NAME).read_text())
    assert record["target_fingerprint"] == target.fingerprint()
    assert record["counts"] == manifest.counts()
    assert set(contents(whole)) == {NAME, *(shard.file for shard in manifest.shards)}


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_sizes_are_predicted(tmp_path: Path, target: TargetModel, dtype: str) -> None:
    rows = [row(60 + number, number) for number in range(40)]
    manifest = Manifest.of(target, LAYERS, dtype)
    jobs = [writer_module.Job(0, documents_of(rows, 512))]
    tensors = writer_module.compute(target, jobs[0].documents, LAYERS, dtype, 500)
    shard = writer_module.write_shard(tmp_path, jobs[0], tensors)
    assert predict_bytes(manifest, jobs) == pytest.approx(shard.bytes, rel=0.005)


def kill_at(monkeypatch: pytest.MonkeyPatch, moment: int, late: bool) -> list[str]:
    """Be killed when the file of that number is given its name, before or after; what was named."""
    named: list[str] = []
    put = manifest_module.put

    def dying(temporary: Path, final: Path) -> None:
        if len(named) == moment and not late:
            raise Killed
        put(temporary, final)
        named.append(final.name)
        if len(named) > moment:
            raise Killed

    monkeypatch.setattr(manifest_module, "put", dying)
    monkeypatch.setattr(writer_module, "put", dying)
    return named


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("moment", range(13))
def test_killed_at_any_moment_it_continues(
    tmp_path: Path,
    target: TargetModel,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: int,
    late: bool,
) -> None:
    """1 + 3 files per shard are given names: shard, record, manifest."""
    folder = tmp_path / "store"
    with monkeypatch.context() as patch:
        named = kill_at(patch, moment, late)
        with pytest.raises(Killed):
            extract(folder, target)
    if (folder / NAME).exists():
        finished = sum(name.startswith("shard") and name.endswith(".json") for name in named)
        assert len(Manifest.read(folder).shards) == finished
    extract(folder, target)
    assert contents(folder) == contents(whole)
    assert extract(folder, target) == []


def test_any_number_of_processes_continues_with_the_same_shards(
    tmp_path: Path, target: TargetModel, whole: Path
) -> None:
    """The first of three processes was slower: its shards are the ones that are left. Dealt anew,
    the documents of both would not be split where they were.
    """
    folder = tmp_path / "store"
    folder.mkdir()
    manifest, jobs = planned(folder, target)
    write_shards(target, folder, manifest, jobs[1:3], 64, lambda job: None)
    assert len(list(folder.glob("shard-*.json"))) == 2, "nobody has merged the records"
    assert extract(folder, target) == [0, 3]
    assert contents(folder) == contents(whole)


def test_other_data_is_added_behind(tmp_path: Path, target: TargetModel) -> None:
    folder = tmp_path / "store"
    extract(folder, target, ROWS[:4])
    before = contents(folder)
    assert extract(folder, target, [ROWS[6], *ROWS[:6]]) == [2]
    after = contents(folder)
    assert {name: after[name] for name in before if name != NAME} == {
        name: data for name, data in before.items() if name != NAME
    }
    assert Manifest.read(folder).counts()["documents"] == 7


def test_a_plan_for_other_data_is_made_anew(tmp_path: Path, target: TargetModel) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    planned(folder, target)
    extract(folder, target, ROWS[5:])
    found = Manifest.read(folder)
    assert found.counts()["documents"] == 5 and not found.pending


def test_the_same_text_is_stored_once_and_cut_where_asked(target: TargetModel) -> None:
    documents = documents_of([ROWS[2], ROWS[0], ROWS[2]], 10)
    assert [document.ids for document in documents] == [ROWS[2].ids[:10], ROWS[0].ids]
    assert Manifest.of(target, LAYERS, "fp8", 100).max_length == 100
    assert Manifest.of(target, LAYERS, "fp8", 1000).max_length == target.max_length


@pytest.mark.parametrize("kind", ["gone", "torn", "flipped"])
def test_a_damaged_shard_is_made_anew(
    tmp_path: Path,
    target: TargetModel,
    whole: Path,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "store"
    extract(folder, target)
    path = folder / "shard-00002.safetensors"
    if kind == "gone":
        path.unlink()
    elif kind == "torn":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        flip(path, 100)
        assert extract(folder, target) == [], "only reading the file can tell"
    with caplog.at_level(logging.WARNING):
        assert extract(folder, target, verify=kind == "flipped") == [2]
    assert str(path) in caplog.text
    assert contents(folder) == contents(whole)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", [1, 3]),
        ("dtype", "float32"),
        ("max_length", 7),
        ("target_dtype", "float32"),
        ("hidden_size", 33),
    ],
)
def test_other_settings_are_refused(
    whole: Path, target: TargetModel, field: str, value: object
) -> None:
    manifest = Manifest.read(whole)
    wanted = replace(Manifest.of(target, LAYERS, "float64"), **{field: value})
    with pytest.raises(StoreError) as caught:
        manifest.check_same(wanted, whole)
    assert field in str(caught.value)
    assert str(getattr(manifest, field)) in str(caught.value) and str(value) in str(caught.value)


def test_another_target_or_template_is_refused(tmp_path: Path, target: TargetModel) -> None:
    folder = tmp_path / "store"
    extract(folder, target)
    other = tiny_target(seed=1)
    with pytest.raises(StoreError, match="another target: its weights hash is") as caught:
        extract(folder, other)
    for one in (target, other):
        assert one.fingerprint()["weights"] in str(caught.value)
    talker = tiny_target()
    talker.tokenizer.chat_template += " "
    with pytest.raises(StoreError, match=r"chat_template hash .* the same data\.chat_template"):
        extract(folder, talker)


def test_layers_and_dtypes_without_effect_are_refused(target: TargetModel) -> None:
    for layers in ([3, 1], [1, 1], [6], [-1]):
        with pytest.raises(StoreError, match=r"layers must rise and lie in 0\.\.5"):
            Manifest.of(target, layers, "bfloat16")
    with pytest.raises(StoreError, match="fp8 has no effect without layers"):
        Manifest.of(target, [], "fp8")


@pytest.mark.parametrize("text", ["{", '{"format": 1}', "[]"])
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(StoreError, match=r"manifest\.json is damaged"):
        Manifest.read(tmp_path)
    (tmp_path / NAME).write_text('{"format": 2}')
    with pytest.raises(StoreError, match="has format 2, this version reads 1"):
        Manifest.read(tmp_path)


def test_shards_without_a_manifest_are_left_alone(tmp_path: Path, target: TargetModel) -> None:
    extract(tmp_path, target)
    (tmp_path / NAME).unlink()
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=r"has shards but no manifest\.json"):
        extract(tmp_path, target)
    assert contents(tmp_path) == before


def test_a_full_disk_loses_nothing(
    tmp_path: Path, target: TargetModel, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    save, written = writer_module.save_file, []

    def full(tensors: dict, path: Path) -> None:
        written.append(path)
        if len(written) == 3:
            path.write_bytes(b"half a shard")
            raise OSError(28, "No space left on device")
        save(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "save_file", full)
        with pytest.raises(StoreError, match=r"shard-00002.* No space left .* the same command"):
            extract(folder, target)
    assert len(Manifest.read(folder).shards) == 2
    assert not list(folder.glob("*.tmp"))
    assert extract(folder, target) == [2, 3]
    assert contents(folder) == contents(whole)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StoreError, match=r"cannot write to .*file/store"),
        claim(tmp_path / "file" / "store"),
    ):
        pass


def test_two_extractions_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        claim(tmp_path),
        pytest.raises(StoreError, match="another extraction is writing"),
        claim(tmp_path),
    ):
        pass


def test_quota_and_disk_are_asked_first(tmp_path: Path) -> None:
    check_room(tmp_path / "new", 1000, 0, 1000.0)
    with pytest.raises(StoreError, match=r"exceed the quota of 0\.000 GB: raise --quota-gb"):
        check_room(tmp_path, 600, 500, 1000.0)
    with pytest.raises(StoreError, match="are needed and the disk of"):
        check_room(tmp_path, 10**18, 0, None)


def test_hidden_states_that_are_not_finite_stop_it(tmp_path: Path) -> None:
    broken = tiny_target()
    with torch.no_grad():
        broken.decoder_layers()[2].mlp.down_proj.weight[0, 0] = float("inf")
    with pytest.raises(StoreError, match="layer_3: hidden states of the target are not finite"):
        extract(tmp_path, broken)
    assert Manifest.read(tmp_path).shards == []


def test_batches_are_of_similar_length() -> None:
    documents = documents_of(ROWS, 512)
    batches = similar(documents, 40)
    assert sorted(place for batch in batches for place in batch) == list(range(len(ROWS)))
    sizes = [[len(documents[place].ids) for place in batch] for batch in batches]
    assert sizes == [[30], [22], [17, 12], [11, 9, 8], [6, 5, 4]]
    sizes = [[len(documents[p].ids) for p in batch] for batch in similar(documents, 400, 11)]
    assert sizes == [[30, 22, 17, 12], [11, 9, 8, 6, 5, 4]]


def test_time_is_a_sum_over_batches(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that says a millisecond per token with padding."""
    clock, ran = [0.0], []

    def compute(*args: object) -> None:
        documents = args[1]
        size = max(len(d.ids) for d in documents) * len(documents)  # type: ignore[attr-defined]
        clock[0] += size / 1000
        ran.append(size)

    monkeypatch.setattr(writer_module, "compute", compute)
    monkeypatch.setattr(writer_module.time, "perf_counter", lambda: clock[0])
    manifest = Manifest.of(target, LAYERS, "bfloat16")
    jobs = [writer_module.Job(0, documents_of(ROWS, 512))]
    assert predict_seconds(target, manifest, jobs, 40) == pytest.approx(0.137)
    assert len(ran) == 5
    assert predict_seconds(target, manifest, [], 40) == 0


def test_records_are_merged_once(tmp_path: Path, target: TargetModel) -> None:
    manifest, jobs = planned(tmp_path, target)
    write_shards(target, tmp_path, manifest, jobs[:1], 64, lambda job: None)
    assert [shard.number for shard in Manifest.read(tmp_path).shards] == [0]
    merge(tmp_path, manifest)
    assert not list(tmp_path.glob("shard-*.json"))
    assert [shard.number for shard in Manifest.read(tmp_path).shards] == [0]
