"""Training masks against drawn ones: rows are queries, columns are keys."""

import pytest
import torch
from torch import Tensor

from training.masks import (
    Rows,
    build_mask,
    causal,
    causal_mask,
    sequence_rows,
    training_time_test,
    unrolled_mask,
)


def drawn(text: str) -> list[list[bool]]:
    return [[cell == "1" for cell in line.split()] for line in text.split("\n") if line.strip()]


def test_causal_within_each_document() -> None:
    """Two documents and a padding, which sees itself so that no softmax is empty."""
    mask = causal_mask(torch.tensor([[0, 0, 0, 1, 1, -1]]))
    assert mask.shape == (1, 6, 6)
    assert mask[0].tolist() == drawn(
        """
        1 . . . . .
        1 1 . . . .
        1 1 1 . . .
        . . . 1 . .
        . . . 1 1 .
        . . . . . 1
        """
    )


def test_rows_of_a_batch_are_their_own() -> None:
    mask = causal_mask(torch.tensor([[0, 1, 1], [0, 0, -1]]))
    assert mask[0].tolist() == drawn("1 . .\n. 1 .\n. 1 1")
    assert mask[1].tolist() == drawn("1 . .\n1 1 .\n. . 1")


def test_padding_in_several_places_is_one_row_each() -> None:
    """Padding is no document: two paddings do not see each other."""
    mask = causal_mask(torch.tensor([[-1, 0, -1, -1]]))
    assert mask[0].tolist() == drawn(
        """
        1 . . .
        . 1 . .
        . . 1 .
        . . . 1
        """
    )


def test_training_time_test_of_one_document() -> None:
    """Three steps of three rows: causal step-0 keys, then the diagonals of later steps."""
    mask = unrolled_mask(torch.tensor([[0, 0, 0]]), 3)
    assert mask[0].tolist() == drawn(
        """
        1 . .   . . .   . . .
        1 1 .   . . .   . . .
        1 1 1   . . .   . . .

        1 . .   1 . .   . . .
        1 1 .   . 1 .   . . .
        1 1 1   . . 1   . . .

        1 . .   1 . .   1 . .
        1 1 .   . 1 .   . 1 .
        1 1 1   . . 1   . . 1
        """
    )


def test_training_time_test_of_packed_documents() -> None:
    """Later steps stay in their document too; padding sees its own row of its own step."""
    mask = unrolled_mask(torch.tensor([[0, 0, 1, -1]]), 2)
    assert mask[0].tolist() == drawn(
        """
        1 . . .   . . . .
        1 1 . .   . . . .
        . . 1 .   . . . .
        . . . 1   . . . .

        1 . . .   1 . . .
        1 1 . .   . 1 . .
        . . 1 .   . . 1 .
        . . . .   . . . 1
        """
    )


def test_one_step_is_the_causal_mask() -> None:
    documents = torch.tensor([[0, 0, 1, 1, -1], [0, 0, 0, 0, 0]])
    assert torch.equal(unrolled_mask(documents, 1), causal_mask(documents))


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_every_row_sees_something_and_nothing_later(steps: int) -> None:
    documents = torch.tensor([[0, 0, 0, 1, 2, 2, -1, -1]])
    mask = unrolled_mask(documents, steps)
    assert mask.any(-1).all()
    length = documents.shape[1]
    position = torch.arange(length).repeat(steps)
    later = position[None, :] > position[:, None]
    step = torch.arange(steps).repeat_interleave(length)
    future = step[None, :] > step[:, None]
    assert not (mask[0] & (later | future)).any()


def naive(query: Rows, key: Rows, index: tuple[int, int]) -> bool:
    """The rule for one pair, in words of the paper."""
    q, k = ((rows.position, rows.document, rows.step) for rows in (query, key))
    (q_pos, q_doc, q_step), (k_pos, k_doc, k_step) = (
        [int(x[0, i]) for x in side] for side, i in zip((q, k), index, strict=True)
    )
    if q_doc < 0:
        return (q_pos, q_step) == (k_pos, k_step)
    if q_doc != k_doc:
        return False
    if k_step == 0:
        return k_pos <= q_pos
    return k_step <= q_step and k_pos == q_pos


def test_rectangular_masks_by_the_rule() -> None:
    """Queries of step 2 alone against the keys of steps 0, 1 and 2."""
    documents = torch.tensor([[0, 0, 0, 1, 1, -1]])
    query = sequence_rows(documents, 2)
    parts = [sequence_rows(documents, step) for step in range(3)]
    key = Rows(*(torch.cat([getattr(p, f) for p in parts], 1) for f in vars(query)))
    mask = build_mask(query, key, training_time_test)
    assert mask.shape == (1, 6, 18)
    for i in range(6):
        for j in range(18):
            assert bool(mask[0, i, j]) == naive(query, key, (i, j)), (i, j)
    assert not torch.equal(mask, build_mask(query, key, causal))


def test_rows_count_their_position_from_the_start_of_the_sequence() -> None:
    rows = sequence_rows(torch.tensor([[0, 0, 1], [0, 1, 1]]), 4)
    wanted: list[tuple[Tensor, list]] = [
        (rows.position, [[0, 1, 2]] * 2),
        (rows.document, [[0, 0, 1], [0, 1, 1]]),
        (rows.step, [[4, 4, 4]] * 2),
    ]
    for found, values in wanted:
        assert found.tolist() == values
