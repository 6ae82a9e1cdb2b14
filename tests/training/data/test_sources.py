"""Sources by name, whole and streamed; streams go on from where they were left."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from training.data import sources
from training.data.sources import Interleaved, RowStream, Source, load_rows, parse_source


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no trace in the user's cache of datasets."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


# --- whole

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


def parts(folder: Path, kind: str, sizes: tuple[int, ...] = (4, 3, 5)) -> list[dict[str, Any]]:
    """Several files of numbered rows."""
    folder.mkdir(exist_ok=True)
    rows = [{"text": f"row {i}"} for i in range(sum(sizes))]
    start = 0
    for number, size in enumerate(sizes):
        some, start = rows[start : start + size], start + size
        if kind == "parquet":
            path = folder / f"part-{number}.parquet"
            datasets.Dataset.from_list(some).to_parquet(path, batch_size=2)
        else:
            text = "".join(json.dumps(one) + "\n" for one in some)
            (folder / f"part-{number}.{kind}").write_text(text)
    return rows


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_folders_and_patterns_of_files(tmp_path: Path, kind: str) -> None:
    rows = parts(tmp_path / "data", kind)
    assert load_rows(str(tmp_path / "data")) == rows
    assert load_rows(str(tmp_path / "data" / f"*.{kind}")) == rows
    assert load_rows(str(tmp_path / "**" / f"part-[02].{kind}")) == rows[:4] + rows[7:]


def test_a_folder_s_splits_are_not_mixed(tmp_path: Path) -> None:
    """Files named after a split are that split."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, text in (("train-0", "a"), ("train-1", "b"), ("test-0", "c")):
        datasets.Dataset.from_list([{"text": text}]).to_parquet(folder / f"{name}.parquet")
    assert load_rows(str(folder)) == [{"text": "a"}, {"text": "b"}]
    assert load_rows(str(folder), "test") == [{"text": "c"}]


def test_blank_files_of_a_pattern_do_not_stop_the_others(tmp_path: Path) -> None:
    rows = parts(tmp_path, "jsonl")
    (tmp_path / "part-00.jsonl").write_text("\n")
    assert load_rows(str(tmp_path / "*.jsonl")) == rows


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/*.parquet", "no file has such a name"),
        ("{}/mixed.*", "must all end in"),
        ("{}/mixed.*l", "must all end in"),
        ("missing.parquet", "there is no such file"),
        ("{}/splits", r"it has the splits \['test', 'train'\], not 'dev'"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, name: str, message: str) -> None:
    for ending in ("jsonl", "parquet", "xml"):
        (tmp_path / f"mixed.{ending}").write_text("something long")
    written(tmp_path, "splits")
    with pytest.raises(ValueError, match=message):
        load_rows(name.format(tmp_path), "dev")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("owner/name", ("owner/name", None, "dev")),
        ("name", ("name", None, "dev")),
        ("owner/name:config", ("owner/name", "config", "dev")),
        ("owner/name:config:train_sft", ("owner/name", "config", "train_sft")),
        ("owner/name::train[:10%]", ("owner/name", None, "train[:10%]")),
    ],
)
def test_hub_ids(
    name: str, wanted: tuple[str, str | None, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def load(path: str, config: str | None, **rest: Any) -> datasets.Dataset:
        asked.update(path=path, config=config, **rest)
        found = datasets.Dataset.from_list([{"text": "a"}])
        return found.to_iterable_dataset() if rest["streaming"] else found

    monkeypatch.setattr(sources.datasets, "load_dataset", load)
    assert load_rows(name, "dev") == [{"text": "a"}]
    path, config, split = wanted
    assert asked == {"path": path, "config": config, "split": split, "streaming": False}
    assert RowStream(parse_source(name, "dev")).next() == {"text": "a"}
    assert asked["streaming"] is True


def test_a_config_of_a_folder_that_is_laid_out_like_a_hub_repository(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: one\n  data_files: a.jsonl\n"
        "- config_name: two\n  data_files:\n  - split: dev\n    path: b.jsonl\n---\n"
    )
    assert load_rows(f"{folder}:one") == [{"text": "a"}]
    assert load_rows(f"{folder}:two:dev") == [{"text": "b"}]
    with pytest.raises(ValueError, match="cannot read"):
        load_rows(f"{folder}:three")


# --- streamed


def kinds(tmp_path: Path) -> dict[str, str]:
    parts(tmp_path / "j", "jsonl")
    rows = parts(tmp_path / "p", "parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved", num_shards=3)
    return {
        "jsonl": str(tmp_path / "j" / "*.jsonl"),
        "parquet": str(tmp_path / "p" / "*.parquet"),
        "folder": str(tmp_path / "p"),
        "saved": str(tmp_path / "saved"),
    }


def all_of(stream: RowStream) -> list[dict[str, Any]]:
    return list(iter(stream.next, None))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder", "saved"])
@pytest.mark.parametrize("limit", [None, 6])
def test_a_stream_goes_on_from_any_row(tmp_path: Path, kind: str, limit: int | None) -> None:
    """Its state as JSON, restored in another object."""
    source = parse_source(kinds(tmp_path)[kind])
    whole = load_rows(source.name, limit=limit)
    stream = RowStream(source, limit)
    assert all_of(stream) == whole
    assert stream.next() is None
    stream.rewind()
    for read in range(len(whole) + 1):
        kept = json.loads(json.dumps(stream.state()))
        other = RowStream(source, limit)
        other.restore(kept)
        assert all_of(other) == whole[read:]
        stream.next()


def test_rows_that_cannot_be_read_end_a_stream_with_their_source_s_name(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "one"}\n{"text": "tw')
    with pytest.raises(ValueError, match=r"data: cannot read '.*broken\.jsonl'"):
        all_of(RowStream(parse_source(str(broken))))


def named(rows: Interleaved, count: int) -> list[tuple[int, str]]:
    found = []
    for _ in range(count):
        _, row = rows.next()
        found.append((rows.epoch, row["text"]))
    return found


def three(tmp_path: Path) -> list[Source]:
    for name, size in (("a", 3), ("b", 1), ("c", 2)):
        text = "".join(json.dumps({"text": f"{name}{i}"}) + "\n" for i in range(size))
        (tmp_path / f"{name}.jsonl").write_text(text)
    return [parse_source(str(tmp_path / f"{name}.jsonl")) for name in "abc"]


def test_sources_come_in_turn_until_all_have_ended(tmp_path: Path) -> None:
    epoch = ["a0", "b0", "c0", "a1", "c1", "a2"]
    found = named(Interleaved(three(tmp_path)), 14)
    assert found == [(i // 6, epoch[i % 6]) for i in range(14)]
    limited = ["a0", "b0", "c0", "a1", "c1"]
    found = named(Interleaved(three(tmp_path), limit=2), 10)
    assert found == [(i // 5, limited[i % 5]) for i in range(10)]


def test_rows_are_named_by_source_and_place(tmp_path: Path) -> None:
    rows = Interleaved(three(tmp_path))
    names = [rows.next()[0] for _ in range(7)]
    assert names[3] == f"row 1 of {tmp_path / 'a.jsonl'}"
    assert names[6] == f"row 0 of {tmp_path / 'a.jsonl'}"


def test_interleaved_sources_go_on_from_any_row(tmp_path: Path) -> None:
    parsed = three(tmp_path)
    whole, rows = named(Interleaved(parsed), 20), Interleaved(parsed)
    for read in range(0, 14, 3):
        other = Interleaved(parsed)
        other.restore(json.loads(json.dumps(rows.state())))
        assert named(other, 20 - read) == whole[read:], read
        named(rows, 3)


def test_empty_sources_do_not_turn_for_ever(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": []}).to_parquet(tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="are empty"):
        Interleaved([parse_source(str(tmp_path / "none.parquet"))]).next()
