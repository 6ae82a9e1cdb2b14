"""Draft vocabularies: which tokens, and the maps there and back."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters import TargetModel, build_drafter, load_drafter
from drafters.vocab import (
    choose_draft_vocab,
    count_tokens,
    draft_index,
    from_offsets,
    scatter_to_target,
    size_for_coverage,
    to_offsets,
)
from tests.tiny import tiny_target


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


# --- a size by coverage


def covered(counts: torch.Tensor, size: int, always: tuple[int, ...]) -> int:
    return int(counts[choose_draft_vocab(counts, size, always)].sum())


@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=12).filter(any),
    st.integers(1, 100),
    st.sets(st.integers(0, 1)),
)
def test_the_smallest_size_that_covers(
    listed: list[int], hundredths: int, forced: set[int]
) -> None:
    counts, always = torch.tensor(listed), tuple(forced)
    least = next(
        size
        for size in range(max(1, len(forced)), len(listed) + 1)
        if 100 * covered(counts, size, always) >= hundredths * sum(listed)
    )
    assert size_for_coverage(counts, hundredths / 100, always) == least


def test_coverage_of_millions_of_tokens_is_exact() -> None:
    counts = torch.tensor([30_000_000_000, 2_999_999_999, 1, 0])
    assert size_for_coverage(counts, 1.0) == 3
    assert size_for_coverage(counts, 32_999_999_999 / 33_000_000_000) == 2


def test_forced_tokens_alone_may_cover() -> None:
    counts = torch.tensor([8, 1, 1])
    assert size_for_coverage(counts, 0.8, always=(0, 2)) == 2
    assert size_for_coverage(counts, 0.8, always=(1, 1)) == 2, "an id that comes twice is one"


@pytest.mark.parametrize("coverage", [0.0, -0.5, 1.5])
def test_coverage_out_of_range_is_refused(coverage: float) -> None:
    with pytest.raises(ValueError, match="draft_vocab_coverage"):
        size_for_coverage(torch.ones(3, dtype=torch.int64), coverage)


def test_coverage_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no answer token"):
        size_for_coverage(torch.zeros(3, dtype=torch.int64), 0.9)


# --- every family over a reduced vocabulary

REDUCED: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {"num_heads": 2}),
    "medusa shared": ("medusa", {"num_heads": 2, "shared_lm_head": True}),
    "hydra": ("hydra", {"num_heads": 2}),
    "hydra shared": ("hydra", {"num_heads": 2, "shared_lm_head": True}),
    "eagle1": ("eagle1", {}),
    "eagle3": ("eagle3", {}),
    "mtp": ("mtp", {}),
    "peagle": ("peagle", {}),
    "dflash": ("dflash", {}),
    "dspark": ("dspark", {"markov_rank": 8}),
}
SIZE = 40


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


def reduced(target: TargetModel, name: str) -> Any:
    family, options = REDUCED[name]
    head = build_drafter(family, target, draft_vocab_size=SIZE, **options).double()
    head.set_draft_vocab(torch.arange(target.vocab_size) % 7)
    return head


@pytest.mark.parametrize("name", REDUCED)
def test_untrained_logits_are_the_targets_own_of_those_tokens(
    target: TargetModel, name: str
) -> None:
    head = reduced(target, name)
    rows = torch.randn(3, head.output_size, generator=torch.Generator().manual_seed(0)).double()
    logits = head.logits(rows, 1)
    hidden = rows[:, : target.hidden_size]
    assert logits.shape == (3, SIZE)
    torch.testing.assert_close(logits, target.project(hidden)[:, head.draft_vocab])
    full = head.to_target_logits(logits)
    assert full.shape == (3, target.vocab_size)
    assert full.isfinite().sum() == 3 * SIZE


@pytest.mark.parametrize("name", REDUCED)
def test_ids_are_absolute_and_survive_saving(
    target: TargetModel, name: str, tmp_path: Path
) -> None:
    head = reduced(target, name)
    counts = torch.arange(target.vocab_size) % 7
    wanted = choose_draft_vocab(counts, SIZE, target.eos_token_ids)
    assert head.draft_vocab.tolist() == wanted.tolist()
    assert wanted.tolist() != list(range(SIZE))
    assert set(target.eos_token_ids) <= set(wanted.tolist())
    head.save_pretrained(tmp_path)
    again = load_drafter(tmp_path, target, dtype=torch.float64)
    assert again.draft_vocab.tolist() == wanted.tolist()
    assert again.draft_vocab.dtype == torch.int64
    assert again.to_target_ids(torch.tensor([0, 39])).tolist() == [wanted[0], wanted[39]]
    rows = torch.ones(2, head.output_size, dtype=torch.float64)
    assert torch.equal(again.logits(rows, 0), head.logits(rows, 0))
