"""Rows of the host as tensors of one width."""

import pytest
import torch

from inference.static.inputs import row_depths, row_inputs, row_words
from inference.static.words import tree_words, words_mask


@pytest.mark.parametrize("pending", [0, 3, 60, 64])
def test_words_say_what_the_masks_say(pending: int) -> None:
    generator = torch.Generator().manual_seed(pending)
    sizes, width = [5, 64, 1], 64
    seen = [torch.rand(n, pending + n, generator=generator) < 0.5 for n in sizes]
    found = words_mask(row_words(seen, width, pending), pending + width)
    assert found.shape == (3, width, pending + width)
    for row, (matrix, size) in enumerate(zip(seen, sizes, strict=True)):
        assert torch.equal(found[row, :size, : pending + size], matrix)
        assert not found[row, :size, pending + size :].any()
        itself = torch.eye(width, dtype=torch.bool)[size:]
        assert torch.equal(found[row, size:, pending:], itself)  # padding
        assert not found[row, size:, :pending].any()


def test_words_are_those_of_the_parents() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 3, 3, 2]])
    mask = torch.eye(7, dtype=torch.bool)
    for node, parent in enumerate(parents[0].tolist()):
        mask[node] |= mask[parent] if parent >= 0 else False
    assert torch.equal(row_words([mask], 7, 0), tree_words(parents)[0])


def test_more_rows_than_words_have_bits() -> None:
    with pytest.raises(ValueError, match="128 rows"):
        row_words([torch.ones(1, 121, dtype=torch.bool)], 9, 120)


def test_ids_positions_and_depths() -> None:
    tokens, depths = [torch.tensor([7, 8]), torch.tensor([9])], [[0, 1, 1, 2], [0, 1, 2]]
    depths = [torch.tensor(depth) for depth in depths]  # two rows pending
    ids, positions = row_inputs([10, 20], tokens, depths, 3)
    assert ids.tolist() == [[7, 8, 0], [9, 0, 0]]
    assert positions.tolist() == [[11, 12, 0], [22, 0, 0]]
    assert row_depths(depths, 5).tolist() == [[0, 1, 1, 2, 0], [0, 1, 2, 0, 0]]
