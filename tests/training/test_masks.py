"""Training masks against drawn ones: rows are queries, columns are keys."""

import pytest
import torch
from torch import Tensor

from training.masks import (
    Rows,
    block,
    block_rows,
    build_mask,
    causal,
    causal_block,
    causal_mask,
    join,
    parallel,
    rollout_rows,
    sequence_rows,
    training_time_test,
    unrolled_mask,
    windowed,
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
    key = join(*parts)
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


def whole_mask(documents: list[int], drafts: Rows, rule) -> list[list[bool]]:
    """Text rows first, then draft rows, of one sequence."""
    text = sequence_rows(torch.tensor([documents]))
    rows = join(text, drafts)
    mask = build_mask(rows, rows, rule)[0].tolist()
    return mask[len(documents) :]


def test_p_eagle_rollouts() -> None:
    """Rollouts from rows 1 and 2: both reach depth 1, only that from row 2 reaches depth 2."""
    documents = torch.tensor([[0, 0, 0, 0]])
    drafts = rollout_rows(documents, torch.tensor([[2, 1, 2]]), torch.tensor([1, 1, 2]))
    assert drafts.position.tolist() == [[3, 2, 4]]
    assert whole_mask([0, 0, 0, 0], drafts, parallel) == drawn(
        """
        1 1 1 .   1 . .
        1 1 . .   . 1 .
        1 1 1 .   1 . 1
        """
    )


def test_p_eagle_rollouts_stay_in_their_document() -> None:
    documents = torch.tensor([[0, 1, 1, -1]])
    drafts = rollout_rows(documents, torch.tensor([[0, 2, -1]]), torch.tensor([1, 1, 1]))
    assert whole_mask([0, 1, 1, -1], drafts, parallel) == drawn(
        """
        1 . . .   1 . .
        . 1 1 .   . 1 .
        . . . .   . . 1
        """
    )


def test_p_eagle_s_rule_is_the_training_time_test_from_every_row() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, -1]])
    parts = [sequence_rows(documents, step) for step in range(3)]
    rows = join(*parts)
    found = build_mask(rows, rows, parallel)
    assert torch.equal(found, build_mask(rows, rows, training_time_test))


def test_dflash_blocks() -> None:
    """Blocks of three from columns 1 and 3; text strictly before the root, all of the own block."""
    documents = torch.tensor([[0, 0, 0, 0, 0]])
    drafts = block_rows(documents, torch.tensor([[1, 3]]), 3)
    assert drafts.position.tolist() == [[1, 2, 3, 3, 4, 5]]
    assert whole_mask([0, 0, 0, 0, 0], drafts, block) == drawn(
        """
        1 . . . .   1 1 1 . . .
        1 . . . .   1 1 1 . . .
        1 . . . .   1 1 1 . . .
        1 1 1 . .   . . . 1 1 1
        1 1 1 . .   . . . 1 1 1
        1 1 1 . .   . . . 1 1 1
        """
    )


def test_jetspec_blocks_are_causal() -> None:
    documents = torch.tensor([[0, 0, 0, 0]])
    drafts = block_rows(documents, torch.tensor([[1, 2]]), 2)
    assert whole_mask([0, 0, 0, 0], drafts, causal_block) == drawn(
        """
        1 . . .   1 . . .
        1 . . .   1 1 . .
        1 1 . .   . . 1 .
        1 1 . .   . . 1 1
        """
    )


def test_sliding_blocks_lose_far_keys_row_by_row() -> None:
    """W = 3: from position p, keys p-2 and later; those ahead in the block stay."""
    documents = torch.tensor([[0, 0, 0, 0]])
    drafts = block_rows(documents, torch.tensor([[3]]), 4)
    assert whole_mask([0, 0, 0, 0], drafts, windowed(block, 3)) == drawn(
        """
        . 1 1 .   1 1 1 1
        . . 1 .   1 1 1 1
        . . . .   1 1 1 1
        . . . .   . 1 1 1
        """
    )
    assert windowed(block, None) is block


def test_sliding_rollouts() -> None:
    documents = torch.tensor([[0, 0, 0, 0]])
    drafts = rollout_rows(documents, torch.tensor([[3, 3, 3]]), torch.tensor([1, 2, 3]))
    assert whole_mask([0, 0, 0, 0], drafts, windowed(parallel, 3)) == drawn(
        """
        . . 1 1   1 . .
        . . . 1   1 1 .
        . . . .   1 1 1
        """
    )


def test_blocks_stay_in_their_document_and_padding_alone() -> None:
    """A block that reaches beyond its document still belongs to it; a padded one to none."""
    documents = torch.tensor([[0, 0, 1, 1]])
    drafts = block_rows(documents, torch.tensor([[1, 3, -1]]), 2)
    assert whole_mask([0, 0, 1, 1], drafts, block) == drawn(
        """
        1 . . .   1 1 . . . .
        1 . . .   1 1 . . . .
        . . 1 .   . . 1 1 . .
        . . 1 .   . . 1 1 . .
        . . . .   . . . . 1 .
        . . . .   . . . . . 1
        """
    )


def test_blocks_of_packed_sequences_are_their_own() -> None:
    documents = torch.tensor([[0, 0, 0], [0, 1, 1]])
    text, drafts = sequence_rows(documents), block_rows(documents, torch.tensor([[1], [2]]), 1)
    mask = build_mask(drafts, text, block)
    assert mask.tolist() == [[[True, False, False]], [[False, True, False]]]
