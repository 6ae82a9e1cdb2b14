"""Packing by hand and against a slow twin; sequences survive being written as JSON."""

import json

import pytest
import torch

from training.data.chat import TokenizedRow
from training.data.packing import WINDOW, Packer, cut, pack, pack_state, size_of, unpack_state


def row(length: int, first: int = 0, prompt: int = 1, number: int = -1) -> TokenizedRow:
    ids = list(range(first, first + length))
    return TokenizedRow(ids, [i >= prompt for i in range(length)], number)


def sizes(groups: list[list[TokenizedRow]]) -> list[list[int]]:
    return [[len(one.ids) for one in group] for group in groups]


def random_rows(count: int, seed: int = 0) -> list[TokenizedRow]:
    drawn = torch.randint(2, 11, (count,), generator=torch.Generator().manual_seed(seed))
    return [row(size, 100 * place, number=place) for place, size in enumerate(drawn.tolist())]


def naive(rows: list[TokenizedRow], length: int) -> list[list[TokenizedRow]]:
    """The slow twin: all sequences are kept, and a row looks through the last of them."""
    groups: list[list[TokenizedRow]] = []
    for one in rows:
        for group in groups[-WINDOW:]:
            if size_of(group) + len(one.ids) <= length:
                group.append(one)
                break
        else:
            groups.append([one])
    return groups


def test_rows_go_to_the_first_sequence_with_room() -> None:
    assert sizes(pack([row(6), row(5), row(4), row(5), row(9)], 10)) == [[6, 4], [5, 5], [9]]


def test_packing_loses_and_repeats_nothing() -> None:
    rows = random_rows(40)
    groups = pack(rows, 10)
    packed = sorted(one.number for group in groups for one in group)
    assert packed == list(range(40))
    assert all(sum(size) <= 10 for size in sizes(groups))
    assert len(groups) < len(rows)


@pytest.mark.parametrize("seed", range(3))
def test_packing_is_the_slow_twin_s(seed: int) -> None:
    rows = random_rows(900, seed)
    assert pack(rows, 12) == naive(rows, 12)


def test_sequences_leave_in_the_order_in_which_they_were_opened() -> None:
    """And no more than the window is ever held."""
    packer, rows, left = Packer(12), random_rows(900), []
    for one in rows:
        left += packer.add(one)
        assert len(packer._open) <= WINDOW
    assert left == naive(rows, 12)[: len(left)]
    assert left + packer.flush() == naive(rows, 12)
    assert packer.flush() == []


def test_long_rows_are_cut_with_their_mask() -> None:
    ((one,),) = pack([row(15, prompt=8)], 10)
    assert one == TokenizedRow(list(range(10)), [False] * 8 + [True] * 2)
    assert cut(row(4, prompt=4), 10) is None
    short = row(4)
    assert cut(short, 10) is short


def test_rows_left_with_nothing_supervised_are_dropped() -> None:
    assert sizes(pack([row(15, prompt=12), row(3)], 10)) == [[3]]


@pytest.mark.parametrize("packed", [True, False])
def test_nothing_left_is_refused(packed: bool) -> None:
    with pytest.raises(ValueError, match=r"data\.max_length"):
        pack([row(15, prompt=12)], 10, packed)
    with pytest.raises(ValueError, match="nothing to train on"):
        pack([], 10, packed)


def test_unpacked_rows_stand_alone() -> None:
    assert sizes(pack([row(3), row(4), row(15)], 10, packed=False)) == [[3], [4], [10]]


def test_sequences_as_json() -> None:
    groups = [[row(3, 10, number=4), row(2, 2_000_000, prompt=2, number=9)], [row(9, 7, prompt=0)]]
    state = json.loads(json.dumps(pack_state(groups)))
    assert unpack_state(state) == groups
    assert unpack_state(json.loads(json.dumps(pack_state([])))) == []


def test_a_checkpoint_holds_a_few_bytes_per_token() -> None:
    ids = torch.randint(49_152, (50_000,), generator=torch.Generator().manual_seed(0)).tolist()
    groups = [[TokenizedRow(ids[i : i + 500], [True] * 500, i)] for i in range(0, 50_000, 500)]
    assert len(json.dumps(pack_state(groups))) < 5 * 50_000


def test_a_packer_goes_on_from_its_state() -> None:
    rows = random_rows(300)
    for stop in (0, 1, 150, 299):
        packer, left = Packer(12), []
        for one in rows[:stop]:
            left += packer.add(one)
        other = Packer(12)
        other.restore(json.loads(json.dumps(packer.state())))
        for one in rows[stop:]:
            left += other.add(one)
        assert left + other.flush() == naive(rows, 12)
