"""Packing, collation, and an order that depends on nothing but seed and step."""

from typing import Any

import pytest
import torch

from training.data.batches import PackedDataset, collate, draw_numbers
from training.data.chat import TokenizedRow


def row(length: int, first: int = 0, prompt: int = 1) -> TokenizedRow:
    ids = list(range(first, first + length))
    return TokenizedRow(ids, [i >= prompt for i in range(length)])


def dataset(
    lengths: list[int],
    batch_size: int = 2,
    seed: int = 0,
    packed: bool = True,
    buckets: tuple[int, ...] = (),
) -> PackedDataset:
    rows = [row(length, 100 * number) for number, length in enumerate(lengths)]
    return PackedDataset(rows, 10, batch_size, seed, packed, buckets)


# --- packing


def sizes(groups: list[list[TokenizedRow]]) -> list[list[int]]:
    return [[len(one.ids) for one in group] for group in groups]


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


def test_many_rows_are_counted_as_few() -> None:
    """Counting goes on in pieces."""
    rows = [TokenizedRow([3] * 600_000, [True] * 600_000), TokenizedRow([3, 4] * 2, [True] * 4)] * 2
    assert PackedDataset(rows, 600_000, 1).token_counts(5).tolist() == [0, 0, 0, 1_200_004, 4]


def test_documents_of_a_sequence_are_named() -> None:
    """By their own numbers, or by their places."""
    data = dataset([6, 5, 4, 5])
    assert [data.rows_of(index) for index in range(2)] == [[0, 2], [1, 3]]
    numbered = [TokenizedRow([1, 2], [False, True], number) for number in (7, 3)]
    assert PackedDataset(numbered, 10, 1).rows_of(0) == [7, 3]
    assert data.head(1) == data.groups[:1]


def test_the_step_is_all_of_the_position() -> None:
    data = dataset([10] * 4)
    assert data.state() == {}
    before = data.step_indices(3)
    data.restore({})
    assert data.step_indices(3) == before


def test_identity_tells_data_apart() -> None:
    data, long = dataset([3, 9, 9]), dataset([3, 9, 9], buckets=(4, 10))
    rows = [one for group in data.groups for one in group]
    masked = [TokenizedRow(one.ids, [*one.supervised[:-1], False]) for one in rows]
    other = PackedDataset(masked, 10, 2)
    assert data.identity() == dataset([3, 9, 9]).identity()
    assert len({str(one.identity()) for one in (data, long, other, dataset([3, 9]))}) == 4


def test_draws_of_other_steps_and_seeds_are_others() -> None:
    numbers = [n for seed in range(3) for step in range(5) for n in draw_numbers(seed, step, 4)]
    assert len(set(numbers)) == 60


# --- length buckets

LENGTHS = [3] * 13 + [5] * 9 + [9] * 7 + [2] * 6 + [10]
BUCKETS = (3, 6, 10)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_sequences_of_a_step_are_padded_to_one_bucket(batch_size: int, epoch: int) -> None:
    """The shortest that holds them all; and no longer than a step's worth sits in a longer one."""
    data = dataset(LENGTHS, batch_size, packed=False, buckets=BUCKETS)
    first, longer = epoch * data.steps_per_epoch, 0
    for step in range(first, first + data.steps_per_epoch):
        (batch,) = data.micro_batches(step, 0, 1, batch_size)
        longest = max(LENGTHS[i] for i in data.step_indices(step))
        width = batch.input_ids.shape[1]
        assert width == data.step_length(step) == next(b for b in BUCKETS if b >= longest)
        for ids, index in zip(batch.input_ids, batch.index.tolist(), strict=True):
            assert ids[: LENGTHS[index]].tolist() == data.groups[index][0].ids
            longer += width > next(b for b in BUCKETS if b >= LENGTHS[index])
    assert longer <= (len(BUCKETS) - 1) * (batch_size - 1)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8])
def test_buckets_leave_out_no_more_than_without_and_never_the_same(batch_size: int) -> None:
    data = dataset(LENGTHS, batch_size, packed=False, buckets=BUCKETS)
    assert data.steps_per_epoch == len(LENGTHS) // batch_size
    missed = []
    for epoch in range(40):
        first = epoch * data.steps_per_epoch
        steps = range(first, first + data.steps_per_epoch)
        seen = [i for step in steps for i in data.step_indices(step)]
        assert len(set(seen)) == len(seen) == data.steps_per_epoch * batch_size
        missed.append(set(range(len(LENGTHS))) - set(seen))
    assert not set.intersection(*missed)


def test_steps_of_several_lengths_are_mixed() -> None:
    data = dataset(LENGTHS, 2, packed=False, buckets=BUCKETS)
    lengths = [data.step_length(step) for step in range(2 * data.steps_per_epoch)]
    assert lengths != sorted(lengths)
    assert lengths[: data.steps_per_epoch] != lengths[data.steps_per_epoch :]


def test_small_sets_wrap_around_in_the_bucket_of_their_longest() -> None:
    data = dataset([3, 5], 8, packed=False, buckets=BUCKETS)
    assert data.steps_per_epoch == 1
    assert sorted(data.step_indices(0)) == [0] * 4 + [1] * 4
    assert data.step_length(0) == 6


def test_buckets_of_packed_sequences() -> None:
    """Packing fills sequences to the longest bucket; what is left of it is padded to its own."""
    data = dataset([6, 4, 5, 5, 3], 1, buckets=BUCKETS)
    assert sizes(data.groups) == [[6, 4], [5, 5], [3]]
    assert sorted(data.step_length(step) for step in range(3)) == [3, 10, 10]


def test_buckets_at_any_number_of_processes() -> None:
    data = dataset(LENGTHS, 4, packed=False, buckets=BUCKETS)
    for step in range(2 * data.steps_per_epoch):
        (whole,) = data.micro_batches(step, 0, 1, 4)
        shares = [b for rank in range(2) for b in data.micro_batches(step, rank, 2, 1)]
        assert {b.input_ids.shape[1] for b in shares} == {whole.input_ids.shape[1]}
        assert sorted(flat(shares)) == sorted(flat([whole]))
        wanted = dict(zip(whole.draw.tolist(), whole.index.tolist(), strict=True))
        assert {int(b.draw): int(b.index) for b in shares} == wanted


def test_buckets_pad_less() -> None:
    """38 tokens: padded to 8 x 10, or to 4 x 3 + 2 x 6 + 2 x 10."""
    lengths = [3, 3, 3, 3, 6, 6, 9, 5]
    assert dataset(lengths, 4, packed=False).padding == pytest.approx(1 - 38 / 80)
    buckets = dataset(lengths, 2, packed=False, buckets=BUCKETS)
    assert buckets.padding == pytest.approx(1 - 38 / (4 * 3 + 2 * 6 + 2 * 10))
