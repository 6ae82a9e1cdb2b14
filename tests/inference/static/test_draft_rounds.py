"""Batched drafts of fixed shape equal those of the host proposers, for every family."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from drafters import TargetModel
from drafters.mtp_native import load_native_mtp
from inference.proposers import TreeOptions
from inference.proposers.build import PROPOSERS
from inference.sampling import SamplingParams
from inference.shapes.static_tree import static_tree
from inference.static import draft_base, draft_cache
from inference.static.draft_base import Committed, StaticDrafter
from inference.static.draft_build import STATIC_DRAFTERS, build_static_drafter
from inference.static.draft_mtp import MtpDraft
from tests.blocks import VARIANTS, block_head
from tests.inference.static.draft_rounds import (
    Texts,
    check_rounds,
    static_drafter,
    static_paths,
)
from tests.native_mtp import load_checkpoint, save_checkpoint
from tests.tiny import tiny_target
from tests.zoo import float64_throughout

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle1": ("eagle1", {}),
    "eagle1 reduced": (
        "eagle1",
        {"num_layers": 2, "draft_vocab_size": 40, "attention_bias": True},
    ),
    "eagle3": ("eagle3", {"fc_norm": True, "norm_output": True}),
    "eagle3 sliding": ("eagle3", {"num_layers": 2, "sliding_window": 6, "draft_vocab_size": 40}),
    "eagle3 norms": (
        "eagle3",
        {"norm_before_residual": True, "norm_before_fc": True, "own_embedding": True},
    ),
    "hydra": ("hydra", {"mlp_layers": 2, "lm_head_bias": True}),
    "hydra++": (
        "hydra",
        {"num_layers": 1, "sliding_window": 5, "shared_lm_head": True, "prefix_norm": True},
    ),
    "mtp": ("mtp", {"draft_vocab_size": 50}),
    "mtp 2": ("mtp", {"num_modules": 2, "draft_vocab_size": 50}),
    "mtp 3": ("mtp", {"num_modules": 3, "num_layers": 2, "norm_output": False}),
    "mtp 4 sliding": ("mtp", {"num_modules": 4, "sliding_window": 3}),
    "mtp 6": ("mtp", {"num_modules": 6, "hidden_first": True}),
    "medusa": ("medusa", {"num_layers": 2}),
    "medusa reduced": ("medusa", {"draft_vocab_size": 40, "shared_lm_head": True}),
    **VARIANTS,
}
FEW = ["eagle3 sliding", "hydra++", "mtp 4 sliding", "medusa", "jetspec sliding", "dspark reduced"]
FEW += ["peagle sliding"]
TREE = TreeOptions(size=12, depth=4, top_k=3, grown=True)
CHAIN = TreeOptions(size=5, depth=4, top_k=1)
SHAPE = TreeOptions(shape=static_tree([(0,), (1,), (0, 0), (0, 2), (2,), (2, 0)]))
RAGGED = [2, 9, 17, 1]
"""Prompts of a batch; the short ones have fewer tokens than some heads have modules."""


@functools.cache
def target() -> TargetModel:
    return tiny_target()


@functools.cache
def head_of(name: str, dtype: torch.dtype = torch.float64) -> Any:
    family, options = HEADS[name]
    return block_head(target(), family, dtype=dtype, **options)


def test_every_family_has_one() -> None:
    assert set(STATIC_DRAFTERS) == set(PROPOSERS) == {family for family, _ in HEADS.values()}


# --- equality


@pytest.mark.parametrize("name", HEADS)
def test_grown_trees_equal_the_host_s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged batches, any number of accepted tokens per round, the same trees and logits."""
    with torch.no_grad():
        assert check_rounds(head_of(name), TREE, RAGGED, monkeypatch) > 100


@pytest.mark.parametrize("options", [CHAIN, SHAPE], ids=["chain", "shape"])
@pytest.mark.parametrize("name", FEW)
def test_chains_and_shapes_too(
    name: str, options: TreeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        assert check_rounds(head_of(name), options, [5, 2], monkeypatch) >= 50


@pytest.mark.parametrize("name", FEW)
def test_in_float32_to_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = head_of(name, torch.float32)
    with torch.no_grad():
        check_rounds(head, CHAIN, [7], monkeypatch, atol=2e-5)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("name", ["eagle1 reduced", "mtp 3", "dflash", "dspark rnn"])
def test_with_noise_too(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, sampling = TreeOptions(size=9, depth=3, top_k=2), SamplingParams(0.8, seed=5)
    with torch.no_grad():
        check_rounds(head_of(name), options, [6, 3], monkeypatch, rule=rule, sampling=sampling)


def test_trees_of_more_than_64_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two words tell them apart."""
    options = TreeOptions(size=60, depth=6, top_k=16)
    with torch.no_grad():
        check_rounds(head_of("eagle3"), options, [3, 8], monkeypatch, rounds=3)


@pytest.mark.parametrize(
    ("kind", "modules"), [("deepseek_v3", 1), ("deepseek_v3", 2), ("mellum", 1)]
)
def test_modules_that_came_with_a_target(
    kind: str, modules: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent attention has keys and values of different sizes; Mellum's module has a window."""
    float64_throughout(monkeypatch)
    own = load_checkpoint(save_checkpoint(tmp_path, kind, modules))
    head = load_native_mtp(own, dtype=torch.float64)
    with torch.no_grad():
        check_rounds(head, CHAIN, [6, 2], monkeypatch, rounds=3)


@pytest.mark.parametrize("name", ["eagle3 sliding", "mtp 3", "dflash", "peagle"])
def test_a_long_prompt_in_stretches_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_base, "PREFILL_ROWS", 5)
    with torch.no_grad():
        check_rounds(head_of(name), CHAIN, [17, 3, 11], monkeypatch, rounds=2)


# --- captured


def prefilled(name: str, batch: int = 2) -> tuple[StaticDrafter, Committed, Texts]:
    head = head_of(name)
    static, texts = static_drafter(head, TREE, batch), Texts.random(head, batch)
    return static, texts.prefilled(static, [9, 4, 6][:batch]), texts


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_a_round_reads_nothing_on_the_host(name: str) -> None:
    """On tensors without values, whatever asks for one, or for a shape made of one, fails."""
    static, new, _ = prefilled(name)
    expected = static.draft(new)  # a first time, for what is gathered once
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = Committed(*(None if x is None else mode.from_tensor(x) for x in new))
        found = static.draft(fake)
        with pytest.raises(RuntimeError):
            int(found.tokens.sum())
    assert found.tokens.shape == expected.tokens.shape


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_a_round_is_one_graph(name: str) -> None:
    static, new, texts = prefilled(name)
    expected = static.draft(new)
    static.reset()
    texts.prefilled(static, [9, 4])
    torch._dynamo.reset()
    found = torch.compile(static.draft, fullgraph=True, backend="eager")(new)
    assert all(map(torch.equal, found[:3], expected[:3]))


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_buffers_stay_where_they_are(name: str) -> None:
    """Or a captured graph would write into memory that is not used any more."""
    static, new, texts = prefilled(name)
    places = [buffer.data_ptr() for buffer in buffers(static)]
    first = static.draft(new)
    static.reset()
    assert not any(bool(cache.lengths.any()) for cache in static.caches)
    again = static.draft(texts.prefilled(static, [9, 4]))
    assert [buffer.data_ptr() for buffer in buffers(static)] == places
    assert static_paths(first) == static_paths(again)


def test_attention_is_laid_out_as_the_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's is a view of another layout."""
    view = torch.rand(2, 3, 4, 8).transpose(1, 2)
    monkeypatch.setattr(draft_cache, "tree_attention", lambda *args, **options: view)
    keys, new, lengths = torch.zeros(2, 2, 9, 8), torch.rand(2, 2, 3, 8), torch.tensor([1, 5])
    rows = torch.rand(2, 4, 3, 8), new, new
    words = draft_cache.chain_words(3, lengths.device)
    args = (keys, keys.clone(), *rows, lengths, words, None, None, 0)
    found = draft_cache.draft_attention(*args)
    assert found.is_contiguous() and torch.equal(found, view)
    assert draft_cache._shape_only(*args).stride() == found.stride()


def kept_state(static: StaticDrafter) -> list[Tensor]:
    """What rounds leave behind, beside keys and values."""
    kept = [cache.lengths for cache in static.caches]
    return [*kept, static._ring, static._committed] if isinstance(static, MtpDraft) else kept


def buffers(static: StaticDrafter) -> list[Tensor]:
    """All that is kept between rounds."""
    kept = kept_state(static)
    for cache in static.caches:
        kept += [buffer for buffer in (*cache._keys, *cache._values) if buffer is not None]
    return kept


# --- batches


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_a_sequence_that_has_ended_changes_nothing(name: str) -> None:
    """Neither what is kept for it nor what the others draft."""
    static, new, _ = prefilled(name)
    both = static_paths(static.draft(new))
    before = [state.clone() for state in kept_state(static)]
    static.draft(new._replace(counts=torch.zeros_like(new.counts)))
    assert all(map(torch.equal, before, kept_state(static)))
    alone, first, _ = prefilled(name)
    assert static_paths(alone.draft(first._replace(counts=torch.tensor([1, 0]))))[0] == both[0]


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_sequences_may_leave_the_batch(name: str) -> None:
    """And the others go on as if they were alone."""
    static, new, texts = prefilled(name, 3)
    static.draft(new)
    starts, ends = [9, 4, 6], [11, 5, 9]
    whole = static_paths(static.draft(texts.committed(starts, ends, static.new_rows)))
    static, new, texts = prefilled(name, 3)
    static.draft(new)
    rows = torch.tensor([2, 0])
    static.select(rows)
    static.growth.law.positions.resize_(2)
    later = texts.committed(starts, ends, static.new_rows)
    some = Committed(*(None if x is None else x[rows] for x in later))
    assert static_paths(static.draft(some)) == [whole[2], whole[0]]
    assert static.batch == 2


# --- refusals


def test_more_than_there_is_room_for_is_refused() -> None:
    head = head_of("eagle3")
    static, texts = static_drafter(head, CHAIN, 1), Texts.random(head, 1)
    static.capacity = 10
    with pytest.raises(ValueError, match="capacity is 10 tokens but a prompt has 11"):
        texts.prefilled(static, [11])


@pytest.mark.parametrize("rows", [4, 129])
def test_as_many_rows_as_a_round_may_commit(rows: int) -> None:
    with pytest.raises(ValueError, match=r"new_rows must lie in 5\.\.128"):
        static_drafter(head_of("eagle3"), CHAIN, 1, new_rows=rows)
    assert static_drafter(head_of("eagle3"), CHAIN, 1, new_rows=9).new_rows == 9


def test_mask_rows_count_too() -> None:
    with pytest.raises(ValueError, match="new_rows: a pass of P-EAGLE has new_rows \\+ 3 mask"):
        static_drafter(head_of("peagle"), CHAIN, 1, new_rows=126)


def test_a_batch_and_a_length_are_needed() -> None:
    law = static_drafter(head_of("eagle3"), CHAIN, 1).growth.law
    with pytest.raises(ValueError, match="batch and capacity must be at least 1, got 1 and 0"):
        build_static_drafter(head_of("eagle3"), CHAIN, law, 0)


# --- words and rows


def test_first_bits() -> None:
    words = draft_cache.first_bits(torch.tensor([0, 1, 3, 63, 64, 65, 128]), 2)
    as_bits = [[word % 2**64 for word in row] for row in words.tolist()]
    assert [low | high << 64 for low, high in as_bits] == [
        2**count - 1 for count in (0, 1, 3, 63, 64, 65, 128)
    ]


def test_chain_words_see_what_is_before() -> None:
    [rows] = draft_cache.chain_words(66, torch.device("cpu")).tolist()
    seen = [sum((word % 2**64) << 64 * place for place, word in enumerate(row)) for row in rows]
    assert seen == [2 ** (row + 1) - 1 for row in range(66)]
