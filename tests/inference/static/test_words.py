"""Ancestor words equal the host's masks.

Letters: B sequences, N nodes.
"""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.static.words import (
    tree_words,
    word_count,
    words_mask,
)
from inference.tree import ancestor_mask
from tests.inference.static.batches import WITHOUT_VALUES, assert_static, random_parents, spread


def random_batch(seed: int, batch: int, width: int) -> torch.Tensor:
    rng = random.Random(seed)
    parents = torch.full((batch, width), -1)
    for row in range(batch):
        found = random_parents(rng, rng.randint(1, width), rng.randint(1, width), width)
        places, above = spread(rng, found, width)
        parents[row, places] = torch.tensor(above)
    return parents


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 128))
def test_words_and_depths_are_those_of_the_mask(seed: int, batch: int, width: int) -> None:
    parents = random_batch(seed, batch, width)
    words, depths = tree_words(parents)
    assert words.shape == (batch, width, word_count(width)) and words.dtype == torch.int64
    masks = torch.stack([ancestor_mask(row) for row in parents])
    assert torch.equal(words_mask(words, width), masks)
    assert torch.equal(depths, masks.sum(2) - 1)


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 63, 64, 65, 128])
def test_a_chain_is_followed_to_its_end(nodes: int) -> None:
    """The deepest tree of all; the 64th bit is the sign."""
    words, depths = tree_words(torch.arange(-1, nodes - 1)[None], depth=nodes - 1)
    assert torch.equal(words_mask(words, nodes)[0], torch.ones(nodes, nodes).tril().bool())
    assert depths.tolist() == [list(range(nodes))]
    if nodes >= 64:
        assert words[0, 63, 0] == -1


def test_fewer_passes_do_for_shallow_trees() -> None:
    parents = random_batch(3, 4, 40)
    words, depths = tree_words(parents)
    for depth in range(int(depths.max()), 40):
        assert torch.equal(tree_words(parents, depth)[0], words)
    assert not torch.equal(tree_words(parents, 1)[0], words)


def test_pending_rows_shift_the_bits() -> None:
    parents = random_batch(4, 3, 30)
    words, depths = tree_words(parents, num_pending=50)
    plain, same = tree_words(parents)
    mask = words_mask(words, 80)
    assert torch.equal(mask[..., 50:], words_mask(plain, 30)) and not mask[..., :50].any()
    assert torch.equal(depths, same)


def test_more_rows_than_two_words_tell_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="smaller tree"):
        tree_words(torch.full((1, 100), -1), num_pending=29)


@pytest.mark.parametrize("how", WITHOUT_VALUES)
def test_nothing_is_read_by_the_host(how: str) -> None:
    parents = random_batch(5, 2, 70)
    words = tree_words(parents)[0]
    assert_static(how, tree_words, parents)
    assert_static(how, lambda given: tree_words(given, 5, 20), parents)
    assert_static(how, lambda given: words_mask(given, 70), words)
