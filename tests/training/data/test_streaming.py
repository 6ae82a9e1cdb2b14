"""A stream gives the sequences of data in memory, in bounded memory, from any step again."""

import json
import logging
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_tokenizer
from training.data.batches import Batch, Dataset, PackedDataset, collate, draw_numbers
from training.data.chat import TokenizedRow
from training.data.encoding import encode_all, encode_checked
from training.data.messages import MaskError
from training.data.packing import WINDOW, pack
from training.data.sources import load_rows
from training.data.streaming import _SHUFFLE, StreamedDataset
from training.draws import generator

LENGTH = 24
ENCODE = partial(encode_checked, tiny_tokenizer(), 96)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no trace in the user's cache of datasets."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def source(tmp_path: Path) -> str:
    return written(tmp_path, rows_of_text(400))


def rows_of_text(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Texts of 2 to 30 characters, some longer than a sequence."""
    seeded = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, 31, (count,), generator=seeded).tolist()
    letters = [torch.randint(26, (size,), generator=seeded).tolist() for size in sizes]
    return [{"text": "".join(chr(97 + letter) for letter in row)} for row in letters]


def written(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def streamed(source: str | list[str], batch_size: int = 4, **rest: Any) -> StreamedDataset:
    sources = [source] if isinstance(source, str) else source
    return StreamedDataset(sources, ENCODE, LENGTH, batch_size, **rest)


def steps(data: Dataset, count: int, first: int = 0, size: int = 4) -> list[Batch]:
    return [b for i in range(first, first + count) for b in data.micro_batches(i, 0, 1, size)]


def same(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y)
        for one, other in zip(a, b, strict=True)
        for x, y in zip(vars(one).values(), vars(other).values(), strict=True)
    )


def ids(batches: list[Batch]) -> list[Tensor]:
    return [row for batch in batches for row in batch.input_ids]


# --- the slow twin: read everything, tokenise, pack, shuffle


def twin(
    rows: list[dict[str, Any]], epochs: int, packed: bool = True, buffer: int = 0, seed: int = 0
) -> list[list[TokenizedRow]]:
    """Sequences in the order in which a stream of ``epochs`` epochs draws them."""
    encoded = [one for row in rows for one in encode_all([row], ENCODE)] * epochs
    groups = pack(encoded, LENGTH, packed)
    groups = groups[: len(groups) - WINDOW] if packed else groups
    held, drawn = groups[:buffer], []
    if not buffer:
        return groups
    for number, follows in enumerate([*groups[buffer:], None]):
        key = draw_numbers(seed, number, 1)[0]
        place = int(torch.randint(len(held), (), generator=generator(key, _SHUFFLE)))
        drawn.append(held[place])
        held[place] = held[-1]
        held.pop()
        held += [] if follows is None else [follows]
    return drawn


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("buffer", [0, 1, 9])
def test_a_stream_is_the_slow_twin(source: str, packed: bool, buffer: int) -> None:
    """Beyond the first epoch too."""
    wanted = twin(load_rows(source), 2, packed, buffer, seed=3)
    count = len(wanted) // 4
    assert count * 4 > len(twin(load_rows(source), 1, packed)) + 40
    data = streamed(source, packed=packed, shuffle_buffer=buffer, seed=3)
    for step, batch in enumerate(steps(data, count)):
        part = slice(4 * step, 4 * step + 4)
        index = list(range(4 * step, 4 * step + 4))
        draws = draw_numbers(3, step, 4)
        assert same([batch], [collate(wanted[part], LENGTH, index, draws)]), step


def test_several_sources_are_one_row_of_each_in_turn(tmp_path: Path) -> None:
    first, second = rows_of_text(60, 1), rows_of_text(40, 2)
    names = [written(tmp_path, first, "a.jsonl"), written(tmp_path, second, "b.jsonl")]
    mixed = [row for pair in zip(first, second, strict=False) for row in pair] + first[40:]
    wanted = [[one] for row in mixed for one in encode_all([row], ENCODE)]
    found = ids(steps(streamed(names, packed=False), 25))
    assert all(
        torch.equal(a, collate([b], LENGTH).input_ids[0])
        for a, b in zip(found, pack([g[0] for g in wanted], LENGTH, False), strict=True)
    )


def test_shuffling_depends_on_the_seed_and_loses_nothing(tmp_path: Path) -> None:
    source = written(tmp_path, rows_of_text(40))
    plain = ids(steps(streamed(source, packed=False), 30))
    for seed in range(2):
        mixed = ids(steps(streamed(source, packed=False, shuffle_buffer=9, seed=seed), 30))
        assert [row.tolist() for row in mixed] != [row.tolist() for row in plain]
        # All but what the buffer still holds has come as often as without it.
        seen = sorted(row.tolist() for row in mixed)
        missing = [row.tolist() for row in plain if row.tolist() not in seen]
        assert len(missing) <= 8
    again = ids(steps(streamed(source, packed=False, shuffle_buffer=9, seed=1), 30))
    assert all(torch.equal(a, b) for a, b in zip(mixed, again, strict=True))


# --- any number of processes


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("micro", [1, 2])
def test_the_global_batch_does_not_depend_on_the_processes(
    source: str, world: int, micro: int
) -> None:
    whole = streamed(source, 8, shuffle_buffer=5)
    ranks = [streamed(source, 8, shuffle_buffer=5) for _ in range(world)]
    for step in range(6):
        (batch,) = whole.micro_batches(step, 0, 1, 8)
        wanted = {int(batch.draw[i]): batch.input_ids[i].tolist() for i in range(8)}
        found: dict[int, list[int]] = {}
        for rank, data in enumerate(ranks):
            for part in data.micro_batches(step, rank, world, micro):
                assert len(part.input_ids) == micro
                found |= zip(part.draw.tolist(), part.input_ids.tolist(), strict=True)
        assert found == wanted


def test_draws_and_sequences_are_numbered_by_step(source: str) -> None:
    data, other = streamed(source), PackedDataset([TokenizedRow([1, 2], [False, True])] * 9, 8, 4)
    for step in (0, 1, 2):
        (batch,) = data.micro_batches(step, 0, 1, 4)
        assert batch.index.tolist() == data.step_indices(step) == [4 * step + i for i in range(4)]
        (memory,) = other.micro_batches(step, 0, 1, 4)
        assert torch.equal(batch.draw, memory.draw)


# --- resuming


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("buffer", [0, 9])
@pytest.mark.parametrize("done", [0, 1, 7, 30])
def test_a_resumed_stream_goes_on_exactly(
    source: str, packed: bool, buffer: int, done: int
) -> None:
    """Half-filled sequences, the shuffle buffer and the epoch are in its state."""
    straight = streamed(source, packed=packed, shuffle_buffer=buffer)
    before = steps(straight, done)
    kept = json.dumps(straight.state())
    wanted = steps(straight, 80, done)
    resumed = streamed(source, packed=packed, shuffle_buffer=buffer)
    resumed.restore(json.loads(kept))
    assert same(steps(resumed, 80, done), wanted)
    assert json.dumps(resumed.state()) == json.dumps(straight.state())
    assert same(before, steps(resumed, done))  # and back again, from the beginning


def test_without_its_state_a_stream_reads_up_to_the_step(source: str) -> None:
    wanted = steps(streamed(source, shuffle_buffer=9), 12)
    assert same(steps(streamed(source, shuffle_buffer=9), 2, 10), wanted[10:])
    data = streamed(source, shuffle_buffer=9)
    for step in (5, 5, 3, 11, 0):
        assert same(steps(data, 1, step), wanted[step : step + 1])


def test_checks_before_training_do_not_move_the_position(source: str) -> None:
    data, other = streamed(source), streamed(source)
    for step in range(4):
        assert same(steps(data, 1, step), steps(other, 1, step))
        data.head(3), data.token_counts(96), data.identity(), data.step_indices(40)
        assert data.state() == other.state()


def test_a_state_holds_the_open_sequences_and_the_buffer_alone(source: str) -> None:
    data = streamed(source, shuffle_buffer=9)
    lengths = []
    for step in range(0, 200, 50):
        steps(data, 50, step)
        lengths.append(len(json.dumps(data.state())))
    assert max(lengths) < 1.2 * min(lengths)
    state = data.state()
    assert len(state["buffer"]["documents"]) == 8
    assert len(state["open"]["documents"]) == WINDOW


@pytest.mark.slow
def test_another_process_goes_on(tmp_path: Path) -> None:
    """Sources of all kinds, from the state that the first process left."""
    rows = rows_of_text(300)
    names = [written(tmp_path, rows[:100]), str(tmp_path / "*.parquet"), str(tmp_path / "saved")]
    for number in range(2):
        some = datasets.Dataset.from_list(rows[100 + 50 * number : 150 + 50 * number])
        some.to_parquet(tmp_path / f"part-{number}.parquet", batch_size=7)
    datasets.Dataset.from_list(rows[200:]).save_to_disk(tmp_path / "saved")
    code = (
        "import json, sys\n"
        "from tests.training.data.test_streaming import streamed, steps\n"
        "names, state, done, count = json.load(sys.stdin)\n"
        "data = streamed(names, shuffle_buffer=9)\n"
        "if state: data.restore(state)\n"
        "found = [row.tolist() for batch in steps(data, count, done) for row in batch.input_ids]\n"
        "print(json.dumps([found, data.state()]))\n"
    )
    found, state, done = [], None, 0
    for count in (13, 40):
        asked = json.dumps([names, state, done, count])
        ran = subprocess.run(
            [sys.executable, "-c", code], input=asked, capture_output=True, text=True, check=True
        )
        assert "Traceback" not in ran.stderr, ran.stderr
        rows_found, state = json.loads(ran.stdout.splitlines()[-1])
        found, done = found + rows_found, done + count
    straight = ids(steps(streamed(names, shuffle_buffer=9), done))
    assert found == [row.tolist() for row in straight]


# --- rows without a mask

BAD = [{"prompt": "no answer"}, {"text": "abc"}, {"text": "x"}, {"text": "abcd"}]


def test_a_row_without_a_mask_is_named_with_its_source(tmp_path: Path) -> None:
    names = [written(tmp_path, BAD[1:2], "a.jsonl"), written(tmp_path, BAD[1:], "b.jsonl")]
    data = streamed(names, packed=False)
    message = r"^data row 1 of .*b\.jsonl: the text of this row is too short.*skip_bad_rows=true$"
    with pytest.raises(MaskError, match=message):
        data.micro_batches(0, 0, 1, 1)
    for check in (lambda: data.head(1), lambda: data.token_counts(96), data.identity):
        with pytest.raises(MaskError, match=message):
            check()


def test_or_left_out_and_counted_through_a_resumption(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = written(tmp_path, BAD)
    data = streamed(source, 2, packed=False, skip_bad=True)
    with caplog.at_level(logging.WARNING):
        batches = steps(data, 10, size=2)
    wanted = [[ENCODE(row)[0]] for row in (BAD[1], BAD[3])]
    wanted_ids = collate(wanted, LENGTH).input_ids
    assert all(torch.equal(batch.input_ids, wanted_ids) for batch in batches)
    assert data.num_refused == 20
    said = [one.getMessage().split(" whose")[0] for one in caplog.records]
    assert said == ["data: left out 1 rows", "data: left out 10 rows"]
    other = streamed(source, 2, packed=False, skip_bad=True)
    other.restore(json.loads(json.dumps(data.state())))
    steps(other, 1, 10, 2)
    assert other.num_refused == 22


def test_rows_with_nothing_supervised_within_the_length_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"prompt_ids": [5] * LENGTH, "answer_ids": [6, 7]}
    data = streamed(written(tmp_path, [long, BAD[1]]), 1, packed=False)
    with caplog.at_level(logging.WARNING):
        steps(data, 3, size=1)
    assert data.num_unusable == 3
    assert "left out 1 rows with nothing supervised within data.max_length" in caplog.text


@pytest.mark.parametrize(
    "rows", [BAD[:1], [{"prompt_ids": [5] * LENGTH, "answer_ids": [6]}]], ids=["masks", "length"]
)
def test_a_source_without_a_usable_row_does_not_turn_for_ever(
    tmp_path: Path, rows: list[dict]
) -> None:
    data = streamed(written(tmp_path, rows), skip_bad=True)
    for check in (lambda: data.micro_batches(0, 0, 1, 4), lambda: data.head(2)):
        with pytest.raises(ValueError, match="nothing to train on"):
            check()


def test_a_row_that_makes_several(tmp_path: Path) -> None:
    """As where a template rewrites history: all of them, in order, also across a resumption."""
    source = written(tmp_path, rows_of_text(30))

    def thrice(row: dict[str, Any]) -> list[TokenizedRow]:
        (one,) = ENCODE(row)
        return [TokenizedRow([token, *one.ids[1:]], one.supervised) for token in (10, 11, 12)]

    def data() -> StreamedDataset:
        return StreamedDataset([source], thrice, LENGTH, 2, packed=False)

    found = ids(steps(data(), 60, size=2))
    assert [int(row[0]) for row in found] == [10, 11, 12] * 40
    first = data()
    before = ids(steps(first, 20, size=2))
    second = data()
    second.restore(json.loads(json.dumps(first.state())))
    after = ids(steps(second, 40, 20, 2))
    assert [row.tolist() for row in before + after] == [row.tolist() for row in found]


# --- what a run asks


def test_documents_of_a_sequence_are_named(source: str) -> None:
    data = streamed(source)
    groups, found = twin(load_rows(source), 1)[:40], []
    for step in range(10):
        steps(data, 1, step)
        found += [data.rows_of(index) for index in data.step_indices(step)]
    assert [len(numbers) for numbers in found] == [len(group) for group in groups]
    first = {n: one for numbers, group in zip(found, groups, strict=True)
             for n, one in zip(numbers, group, strict=True)}  # fmt: skip
    encoded = encode_all(load_rows(source), ENCODE)
    assert all(encoded[n].ids[:LENGTH] == one.ids for n, one in first.items())
    assert data.rows_of(0) == []  # no longer held
    assert [one.number for one in data.sequence(41)] == data.rows_of(41)


def test_token_counts_are_those_of_the_first_rows(source: str) -> None:
    rows = load_rows(source)
    memory = PackedDataset(encode_all(rows, ENCODE), 40, 4)
    assert torch.equal(streamed(source).token_counts(96), memory.token_counts(96))
    some = PackedDataset(encode_all(rows[:50], ENCODE), 40, 4)
    assert torch.equal(streamed(source).token_counts(96, rows=50), some.token_counts(96))
    assert torch.equal(streamed(source, limit=50).token_counts(96), some.token_counts(96))


def test_the_first_sequences(source: str) -> None:
    rows = encode_all(load_rows(source)[:256], ENCODE)
    wanted = [[one.ids for one in group] for group in pack(rows, LENGTH)[:5]]
    assert [[one.ids for one in group] for group in streamed(source).head(5)] == wanted


def test_identity_tells_streams_apart(source: str, tmp_path: Path) -> None:
    other = written(tmp_path, rows_of_text(400, 1), "rows2.jsonl")
    variants = [
        streamed(source),
        streamed(other),
        streamed([source, other]),
        streamed(source, packed=False),
        streamed(source, shuffle_buffer=2),
        streamed(source, limit=50),
        streamed(source, skip_bad=True),
    ]
    found = [json.dumps(one.identity()) for one in variants]
    assert len(set(found)) == len(found)
    assert found[0] == json.dumps(streamed(source).identity())


def test_a_changed_file_is_another_data_set(tmp_path: Path) -> None:
    source = written(tmp_path, rows_of_text(40))
    before = streamed(source).identity()
    written(tmp_path, rows_of_text(40, 1))
    assert streamed(source).identity() != before


def test_an_epoch_has_no_known_length(source: str) -> None:
    with pytest.raises(ValueError, match=r"data\.streaming needs run\.steps"):
        streamed(source).steps_per_epoch  # noqa: B018
