"""Masks over the cache against drawn ones."""

import pytest
import torch
from transformers import LlamaConfig

from inference.attention import as_additive, mask_for, tree_attention_mask

CHAIN = torch.ones(2, 2).tril().bool()
FORK = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()


def drawn(text: str) -> list[list[bool]]:
    return [[cell == "1" for cell in line.split()] for line in text.split("\n") if line.strip()]


def test_rows_of_unequal_length_and_size() -> None:
    """Lengths 1 and 3, a chain of 2 and a fork of 3: N = 3, columns = 3 + 3."""
    mask = tree_attention_mask([1, 3], [CHAIN, FORK], columns=6)
    assert mask.shape == (2, 1, 3, 6)
    # sequence 0: its token, the chain behind it, a padding row that sees itself, stale columns
    assert mask[0, 0].tolist() == drawn(
        """
        1 1 . . . .
        1 1 1 . . .
        . . . 1 . .
        """
    )
    assert mask[1, 0].tolist() == drawn(
        """
        1 1 1 1 . .
        1 1 1 1 1 .
        1 1 1 1 . 1
        """
    )


def test_columns_may_hold_more_rows_than_any_tree() -> None:
    mask = tree_attention_mask([2], [CHAIN], columns=6)
    assert mask[0, 0].tolist() == drawn(
        """
        1 1 1 . . .
        1 1 1 1 . .
        . . . . 1 .
        . . . . . 1
        """
    )


def test_every_row_sees_something() -> None:
    assert tree_attention_mask([0, 5, 2], [CHAIN, FORK, CHAIN], columns=9).any(-1).all()


def test_additive_mask_holds_the_same() -> None:
    mask = tree_attention_mask([1], [FORK], columns=4)
    for dtype in (torch.float32, torch.bfloat16):
        additive = as_additive(mask, dtype)
        assert additive.dtype == dtype
        assert torch.equal(additive == 0, mask)
        assert (additive[~mask] == torch.finfo(dtype).min).all()


def test_each_implementation_gets_the_mask_it_takes() -> None:
    """A bool mask would be added by "eager" as 0 and 1; test_cache shows the outputs equal."""
    mask = tree_attention_mask([1], [FORK], columns=4)
    eager, sdpa, flash = (
        LlamaConfig(attn_implementation=name) for name in ("eager", "sdpa", "flash_attention_2")
    )
    assert mask_for(sdpa, mask, torch.float32) is mask
    additive = mask_for(eager, mask, torch.bfloat16)
    assert torch.equal(additive, as_additive(mask, torch.bfloat16))
    with pytest.raises(ValueError, match="'flash_attention_2' cannot take"):
        mask_for(flash, mask, torch.float32)


def test_masks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit 1 sequences with 2 rows"):
        tree_attention_mask([1], [FORK], columns=3)
    with pytest.raises(ValueError, match="2 masks"):
        tree_attention_mask([1], [FORK, FORK], columns=4)
