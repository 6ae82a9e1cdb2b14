"""Masks over the cache against drawn ones."""

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, LlamaConfig, MistralConfig, PreTrainedConfig

import inference.cache
from inference.attention import as_additive, mask_for, tree_masks
from inference.cache import TreeCache

CHAIN = torch.ones(2, 2).tril().bool()
FORK = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()


def tree_attention_mask(lengths: list[int], ancestors: list[Tensor], columns: int) -> Tensor:
    """Full attention with nothing pending, cell by cell: (B, 1, N, C)."""
    rows = columns - max(lengths)
    mask = torch.zeros(len(lengths), 1, rows, columns, dtype=torch.bool)
    for b, (length, seen) in enumerate(zip(lengths, ancestors, strict=True)):
        for row in range(rows):
            for column in range(columns):
                node = column - length
                if row < len(seen):  # a node: committed columns and its ancestors
                    sees = node < 0 or (node < len(seen) and bool(seen[row, node]))
                else:  # padding: itself
                    sees = node == row
                mask[b, 0, row, column] = sees
    return mask


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


# Windows and pending rows; tests/inference/test_targets.py has the models -------------------------

SLIDING, FULL = "sliding_attention", "full_attention"


def filled(config: PreTrainedConfig, lengths: list[int], pending: int = 0) -> TreeCache:
    """A cache with so many committed tokens and pending rows."""
    cache = TreeCache(config, len(lengths))
    count = max(lengths)
    for rows in filter(None, (count, pending)):
        states = torch.zeros(len(lengths), 1, rows, 1)
        for layer in range(len(cache.layers)):
            cache.update(states, states, layer)
        if rows is count and cache.lengths == [0] * len(lengths):
            cache.commit([range(length) for length in lengths])
    return cache


def sdpa(kind: type[PreTrainedConfig], **options: object) -> PreTrainedConfig:
    return kind(num_hidden_layers=2, attn_implementation="sdpa", **options)


def masks_of(cache: TreeCache, config: PreTrainedConfig, *matrices: Tensor) -> Tensor | dict:
    """Masks of trees with nothing pending."""
    depths = [matrix.sum(1) - 1 for matrix in matrices]
    return tree_masks(cache, matrices, depths, config, torch.float32)


def test_full_attention_gets_one_mask() -> None:
    config = sdpa(LlamaConfig)
    mask = masks_of(filled(config, [1, 3]), config, CHAIN, FORK)
    assert torch.equal(mask, tree_attention_mask([1, 3], [CHAIN, FORK], columns=6))


def test_a_window_reaches_back_along_the_path() -> None:
    """Window 3 over 3 tokens: siblings at one depth see equally far, a child one token less."""
    config = sdpa(MistralConfig, sliding_window=3)
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    mask = masks_of(filled(config, [3]), config, tree)
    assert mask[0, 0].tolist() == drawn(
        """
        . 1 1 1 . . .
        . . 1 1 1 . .
        . . 1 1 . 1 .
        . . . 1 . 1 1
        """
    )


def test_a_window_of_one_sees_itself_alone() -> None:
    config = sdpa(MistralConfig, sliding_window=1)
    mask = masks_of(filled(config, [2]), config, FORK)
    assert torch.equal(mask[0, 0], torch.eye(5).bool()[2:])


def test_a_window_in_a_ragged_batch_with_padding() -> None:
    config = sdpa(MistralConfig, sliding_window=2)
    mask = masks_of(filled(config, [1, 3]), config, CHAIN, FORK)
    assert mask[0, 0].tolist() == drawn(
        """
        1 1 . . . .
        . 1 1 . . .
        . . . 1 . .
        """
    )
    assert mask[1, 0].tolist() == drawn(
        """
        . . 1 1 . .
        . . . 1 1 .
        . . . 1 . 1
        """
    )


def test_columns_that_were_cut_off_have_no_place_in_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window keeps two tokens of five and of three; column 0 differs between sequences."""
    monkeypatch.setattr(inference.cache, "BLOCK", 1)
    config = sdpa(MistralConfig, sliding_window=3)
    cache = filled(config, [5, 3])
    assert cache.layers[0].offsets == [3, 1]
    mask = masks_of(cache, config, CHAIN, CHAIN)
    for row in range(2):
        assert mask[row, 0].tolist() == drawn(
            """
            1 1 1 .
            . 1 1 1
            """
        )


def test_mixed_layers_get_a_mask_each() -> None:
    config = sdpa(Gemma2Config, sliding_window=2, layer_types=[SLIDING, FULL])
    masks = masks_of(filled(config, [3]), config, FORK)
    assert isinstance(masks, dict) and set(masks) == {SLIDING, FULL}
    assert torch.equal(masks[FULL], tree_attention_mask([3], [FORK], columns=6))
    assert masks[SLIDING].sum() == 6 and masks[FULL].sum() == 9 + 5


def test_rows_behind_pending_ones() -> None:
    """The root and two children pend; a child of the second child joins, in a window of 3, and a
    second sequence adds nothing: its row is padding.
    """
    config = sdpa(Gemma2Config, sliding_window=3, layer_types=[SLIDING, FULL])
    cache = filled(config, [2, 1], pending=3)
    seen = [torch.tensor([[1, 0, 1, 1]]).bool(), torch.zeros(0, 3).bool()]
    depths = [torch.tensor([0, 1, 1, 2]), torch.tensor([0, 0, 0])]
    masks = tree_masks(cache, seen, depths, config, torch.float32)
    assert masks[FULL][0, 0].tolist() == drawn("1 1 1 . 1 1")
    assert masks[SLIDING][0, 0].tolist() == drawn(". . 1 . 1 1")
    for mask in masks.values():
        assert mask[1, 0].tolist() == drawn(". . . . 1 .")


def test_pending_rows_are_those_of_the_first_layer_that_runs() -> None:
    config = sdpa(LlamaConfig)
    cache = filled(config, [2], pending=3)
    cache.revert(first_layer=1)
    depths = [FORK.sum(1) - 1]
    mask = tree_masks(cache, [FORK], depths, config, torch.float32, first_layer=1)
    assert mask.shape[-1] == 5
    with pytest.raises(ValueError, match="3 pending ones need"):
        tree_masks(cache, [FORK], depths, config, torch.float32)


def test_masks_come_in_the_form_of_the_implementation() -> None:
    config = LlamaConfig(num_hidden_layers=2, attn_implementation="eager")
    cache = filled(config, [2])
    mask = tree_masks(cache, [FORK], [FORK.sum(1) - 1], config, torch.bfloat16)
    assert mask.dtype == torch.bfloat16
    assert torch.equal(mask == 0, tree_attention_mask([2], [FORK], columns=5))


def test_sequences_that_do_not_fit_are_refused() -> None:
    config = sdpa(LlamaConfig)
    with pytest.raises(ValueError, match="1 ancestor masks and 1 depths for 2 sequences"):
        masks_of(filled(config, [2, 2]), config, FORK)
