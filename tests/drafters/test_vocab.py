"""Draft vocabularies: which tokens, and the maps there and back."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.vocab import (
    choose_draft_vocab,
    count_tokens,
    draft_index,
    from_offsets,
    scatter_to_target,
    to_offsets,
)


def test_count_tokens() -> None:
    ids = torch.tensor([[1, 1, 3], [5, 1, 3]])
    assert count_tokens(ids, 7).tolist() == [0, 3, 0, 2, 0, 1, 0]


def test_most_frequent_tokens_are_chosen_and_sorted() -> None:
    counts = torch.tensor([0, 9, 1, 5, 7])
    assert choose_draft_vocab(counts, 3).tolist() == [1, 3, 4]


def test_ties_and_unseen_tokens_are_taken_in_id_order() -> None:
    counts = torch.tensor([0, 2, 0, 2, 2, 0])
    assert choose_draft_vocab(counts, 2).tolist() == [1, 3]
    assert choose_draft_vocab(counts, 5).tolist() == [0, 1, 2, 3, 4]


def test_forced_tokens_are_in_without_touching_the_counts() -> None:
    counts = torch.tensor([0, 9, 1, 5, 7])
    assert choose_draft_vocab(counts, 2, always=(0,)).tolist() == [0, 1]
    assert counts.tolist() == [0, 9, 1, 5, 7]


@pytest.mark.parametrize(("size", "always"), [(6, ()), (1, (0, 2)), (-1, ())])
def test_sizes_that_do_not_fit_are_refused(size: int, always: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"draft_vocab_size must lie in .*got {size}"):
        choose_draft_vocab(torch.ones(5, dtype=torch.int64), size, always)


def test_draft_index_inverts_the_vocabulary() -> None:
    vocab = torch.tensor([2, 3, 7])
    assert draft_index(vocab, 9).tolist() == [-1, -1, 0, 1, -1, -1, -1, 2, -1]


def test_offsets_are_target_minus_draft_id() -> None:
    """d2t of EAGLE-3's files is an offset, not an id."""
    assert to_offsets(torch.tensor([2, 3, 7])).tolist() == [2, 2, 5]
    assert from_offsets(torch.tensor([2, 2, 5])).tolist() == [2, 3, 7]


@given(st.sets(st.integers(0, 199), min_size=1))
def test_maps_there_and_back(ids: set[int]) -> None:
    vocab = torch.tensor(sorted(ids))
    assert torch.equal(from_offsets(to_offsets(vocab)), vocab)
    index = draft_index(vocab, 200)
    assert torch.equal(index[vocab], torch.arange(len(ids)))
    assert (index < 0).sum() == 200 - len(ids)
    assert (to_offsets(vocab).diff() >= 0).all()


def test_scatter_to_target() -> None:
    vocab = torch.tensor([1, 4])
    values = torch.tensor([[0.25, 0.75], [1.0, 0.0]], dtype=torch.float64)
    full = scatter_to_target(values, vocab, 6, 0.0)
    assert full.tolist() == [[0, 0.25, 0, 0, 0.75, 0], [0, 1, 0, 0, 0, 0]]
    assert full.dtype == torch.float64
    assert scatter_to_target(values, vocab, 6, -math.inf)[0, 0] == -math.inf
