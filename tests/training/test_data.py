"""Packing, collation, and an order that depends on nothing but seed and step."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from training.chat import TokenizedRow
from training.data import PackedDataset, collate, load_rows, pack


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no trace in the user's cache of datasets."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def row(length: int, first: int = 0, prompt: int = 1) -> TokenizedRow:
    ids = list(range(first, first + length))
    return TokenizedRow(ids, [i >= prompt for i in range(length)])


def dataset(
    lengths: list[int], batch_size: int = 2, seed: int = 0, packed: bool = True
) -> PackedDataset:
    rows = [row(length, 100 * number) for number, length in enumerate(lengths)]
    return PackedDataset(rows, 10, batch_size, seed, packed)


# --- packing


def sizes(groups: list[list[TokenizedRow]]) -> list[list[int]]:
    return [[len(one.ids) for one in group] for group in groups]


def test_rows_go_to_the_first_sequence_with_room() -> None:
    assert sizes(pack([row(6), row(5), row(4), row(5), row(9)], 10)) == [[6, 4], [5, 5], [9]]


def test_packing_loses_and_repeats_nothing() -> None:
    lengths = torch.randint(2, 11, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [row(length, 100 * number) for number, length in enumerate(lengths)]
    groups = pack(rows, 10)
    packed = sorted(tuple(one.ids) for group in groups for one in group)
    assert packed == sorted(tuple(one.ids) for one in rows)
    assert all(sum(size) <= 10 for size in sizes(groups))
    assert len(groups) < len(rows)


def test_long_rows_are_cut_with_their_mask() -> None:
    ((cut,),) = pack([row(15, prompt=8)], 10)
    assert cut == TokenizedRow(list(range(10)), [False] * 8 + [True] * 2)


def test_rows_left_with_nothing_supervised_are_dropped() -> None:
    groups = pack([row(15, prompt=12), row(3)], 10)
    assert sizes(groups) == [[3]]


def test_nothing_left_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.max_length"):
        pack([row(15, prompt=12)], 10)
    with pytest.raises(ValueError, match="nothing to train on"):
        pack([], 10)


def test_unpacked_rows_stand_alone() -> None:
    data = dataset([3, 4, 15, 2], packed=False)
    assert sizes(data.groups) == [[3], [4], [10], [2]]


@pytest.mark.parametrize("packed", [True, False])
def test_a_row_too_long_to_use_does_not_stop_the_others(packed: bool) -> None:
    """Its prompt alone fills the sequence: it is dropped, packed or not."""
    rows = [row(15, prompt=12), row(5, 100)]
    assert sizes(PackedDataset(rows, 10, 1, packed=packed).groups) == [[5]]


# --- collation


def test_collate() -> None:
    groups = [[row(3, 10, prompt=2), row(2, 20)], [row(5, 30, prompt=4)]]
    batch = collate(groups, 7, [4, 9], [70, 71], 99)
    assert batch.input_ids.tolist() == [
        [10, 11, 12, 20, 21, 99, 99],
        [30, 31, 32, 33, 34, 99, 99],
    ]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, -1, -1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 0, 1]]
    assert batch.supervised.int().tolist() == [[0, 0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0, 0]]
    assert batch.index.tolist() == [4, 9]
    assert batch.draw.tolist() == [70, 71]
    alone = collate([[row(3)]], 4)
    assert (alone.index.tolist(), alone.draw.tolist()) == ([-1], [0])
    moved = batch.to(torch.device("cpu"))
    assert all(
        torch.equal(a, b) for a, b in zip(vars(batch).values(), vars(moved).values(), strict=True)
    )


# --- order


def flat(batches: list[Any]) -> list[int]:
    return [int(index) for batch in batches for index in batch.index]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2])
def test_the_global_batch_does_not_depend_on_the_processes(world: int, micro: int) -> None:
    """The union over ranks is the batch of one process, each sequence once."""
    data = dataset([10] * 23, batch_size=8)
    for step in range(2 * data.steps_per_epoch):
        (whole,) = data.micro_batches(step, 0, 1, 8)
        shares = [list(data.micro_batches(step, rank, world, micro)) for rank in range(world)]
        assert sorted(flat([b for share in shares for b in share])) == sorted(flat([whole]))
        assert {len(flat(share)) for share in shares} == {8 // world}
        for share in shares:
            for batch in share:
                assert len(batch.input_ids) == micro
                for ids, index in zip(batch.input_ids, batch.index, strict=True):
                    assert ids.tolist() == data.groups[index][0].ids


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2])
def test_what_is_drawn_does_not_depend_on_the_processes(world: int, micro: int) -> None:
    """Each use of a sequence has a number of its own, the same in any arrangement."""
    data = dataset([10] * 23, batch_size=8)
    numbers: list[int] = []
    for step in range(2 * data.steps_per_epoch):
        (whole,) = data.micro_batches(step, 0, 1, 8)
        wanted = dict(zip(whole.draw.tolist(), whole.index.tolist(), strict=True))
        found: dict[int, int] = {}
        for rank in range(world):
            for batch in data.micro_batches(step, rank, world, micro):
                found |= zip(batch.draw.tolist(), batch.index.tolist(), strict=True)
        assert found == wanted
        numbers += wanted
    assert len(set(numbers)) == len(numbers) == 2 * data.steps_per_epoch * 8
    (other,) = dataset([10] * 23, batch_size=8, seed=1).micro_batches(0, 0, 1, 8)
    assert not set(other.draw.tolist()) & set(numbers)


def test_order_depends_on_the_step_alone() -> None:
    """A run that starts at step 5 sees what it would have seen."""
    data, again = dataset([10] * 23, batch_size=4), dataset([10] * 23, batch_size=4)
    straight = [data.step_indices(step) for step in range(12)]
    assert [again.step_indices(step) for step in range(11, -1, -1)] == straight[::-1]
    torch.manual_seed(99)
    assert again.step_indices(3) == straight[3]
    assert dataset([10] * 23, batch_size=4, seed=1).step_indices(0) != straight[0]


def test_an_epoch_shows_each_sequence_once_in_a_new_order() -> None:
    data = dataset([10] * 24, batch_size=4)
    assert data.steps_per_epoch == 6
    epochs = [
        [i for step in range(e * 6, e * 6 + 6) for i in data.step_indices(step)] for e in range(3)
    ]
    for epoch in epochs:
        assert sorted(epoch) == list(range(24))
        assert epoch != list(range(24))
    assert epochs[0] != epochs[1] != epochs[2]


def test_small_sets_wrap_around() -> None:
    data = dataset([10] * 3, batch_size=8)
    assert data.steps_per_epoch == 1
    chosen = data.step_indices(0)
    assert sorted(chosen.count(i) for i in range(3)) == [2, 3, 3]


def test_counts() -> None:
    rows = [TokenizedRow([5, 6, 6, 7], [False, True, True, False]), row(3, prompt=2)]
    data = PackedDataset(rows, 10, 1)
    assert data.supervised_tokens == 3
    assert data.token_counts(9).tolist() == [0, 0, 1, 0, 0, 0, 2, 0, 0]


# --- loading


ROWS = [{"prompt": "one", "category": "a"}, {"prompt": "two", "category": None}, {"prompt": "3"}]


def written(path: Path, kind: str) -> str:
    path = path / kind
    if kind == "rows.jsonl":
        path.write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    elif kind == "rows.json":
        path.write_text(json.dumps(ROWS))
    elif kind == "rows.parquet":
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    elif kind == "folder":
        datasets.Dataset.from_list(ROWS).save_to_disk(path)
    else:
        split = datasets.Dataset.from_list(ROWS)
        datasets.DatasetDict({"train": split, "test": split.select([0])}).save_to_disk(path)
    return str(path)


@pytest.mark.parametrize("kind", ["rows.jsonl", "rows.json", "rows.parquet", "folder", "splits"])
def test_rows_are_read_from(tmp_path: Path, kind: str) -> None:
    source = written(tmp_path, kind)
    wanted = [{k: v for k, v in one.items() if v is not None} for one in ROWS]
    assert load_rows(source) == wanted
    assert load_rows(source, limit=2) == wanted[:2]
    assert load_rows(source, limit=9) == wanted
    if kind == "splits":
        assert load_rows(source, split="test") == wanted[:1]


def test_conversations_keep_their_shape(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"messages": talk, "answer_ids": [1, 2]}) + "\n")
    assert load_rows(str(path)) == [{"messages": talk, "answer_ids": [1, 2]}]


@pytest.mark.parametrize(
    ("name", "content"), [("rows.jsonl", ""), ("rows.jsonl", "\n"), ("rows.json", "[]")]
)
def test_empty_files_are_refused(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match="is empty") as caught:
        load_rows(str(path))
    assert name in str(caught.value)


def test_empty_datasets_are_refused(tmp_path: Path) -> None:
    nothing = datasets.Dataset.from_dict({"prompt": []})
    nothing.save_to_disk(tmp_path / "folder")
    nothing.to_parquet(tmp_path / "rows.parquet")
    for name in ("folder", "rows.parquet"):
        with pytest.raises(ValueError, match="is empty"):
            load_rows(str(tmp_path / name))
    with pytest.raises(ValueError, match="is empty"):
        load_rows(written(tmp_path, "rows.jsonl"), limit=0)


def test_unreadable_sources_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "one"}\n{"prompt": "tw')
    empty = tmp_path / "no-dataset"
    empty.mkdir()
    for source in (str(broken), str(empty), str(tmp_path / "missing.jsonl"), "no/such-dataset"):
        with pytest.raises(ValueError, match="data: cannot read") as caught:
            load_rows(source)
        assert Path(source).name in str(caught.value)
