"""The tree cache against a model without any cache, float64, to rounding."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen3NextConfig

from inference.attention import mask_for, tree_attention_mask
from inference.cache import BLOCK, TreeCache
from inference.tree import Proposal, TokenTree

VOCAB = 50
FORK = [-1, 0, 0, 1, 1, 2, 4, 4]  # 0 -> 1, 2; 1 -> 3, 4; 2 -> 5; 4 -> 6, 7
BUSH = [-1, 0, 0, 0, 2, 3]


@pytest.fixture(params=["eager", "sdpa"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LlamaForCausalLM:
    """A tiny random Llama, float64 all through: eager attention would round weights to float32."""
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype: x.softmax(dim))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        attn_implementation=request.param,
    )
    return LlamaForCausalLM(config).double().eval()


def random_tokens(count: int, seed: int) -> Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def random_tree(parents: list[int], seed: int) -> TokenTree:
    tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[: len(parents)]
    return TokenTree(tokens, torch.tensor(parents), Proposal.ONE_HOT)


@torch.no_grad()
def run_trees(model: LlamaForCausalLM, cache: TreeCache, trees: Sequence[TokenTree]) -> Tensor:
    """One verification forward: append each sequence's tree. Returns (B, N, V) logits."""
    num_rows = max(tree.num_nodes for tree in trees)
    tokens = torch.zeros(len(trees), num_rows, dtype=torch.long)
    positions = torch.zeros(len(trees), num_rows, dtype=torch.long)
    for row, tree in enumerate(trees):
        tokens[row, : tree.num_nodes] = tree.tokens
        positions[row, : tree.num_nodes] = cache.lengths[row] + tree.depths
    masks = [tree.ancestor_mask() for tree in trees]
    mask = tree_attention_mask(cache.lengths, masks, cache.columns(num_rows))
    mask = mask_for(model.config, mask, torch.float64)
    return model(tokens, attention_mask=mask, position_ids=positions, cache=cache).logits


def prefill(model: LlamaForCausalLM, cache: TreeCache, prompts: Sequence[Tensor]) -> Tensor:
    """Append the prompts as chains and commit them whole."""
    logits = run_trees(model, cache, [TokenTree.chain(prompt) for prompt in prompts])
    cache.commit([range(len(prompt)) for prompt in prompts])
    return logits


@torch.no_grad()
def plain(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """(T, V) logits of a sequence without cache and without tree."""
    return model(tokens[None], use_cache=False).logits[0]


def assert_tree_matches(
    model: LlamaForCausalLM, committed: Tensor, tree: TokenTree, logits: Tensor
) -> None:
    """Each row of the tree equals the end of plain decoding along its path."""
    for node in range(tree.num_nodes):
        expected = plain(model, torch.cat([committed, tree.tokens[tree.path(node)]]))[-1]
        assert (logits[node] - expected).abs().max() < 1e-12


def test_two_rounds_equal_plain_decoding(model: LlamaForCausalLM) -> None:
    cache = TreeCache(model.config)
    committed = random_tokens(5, seed=1)
    logits = prefill(model, cache, [committed])
    assert (logits[0] - plain(model, committed)).abs().max() < 1e-12
    for seed, (parents, path) in enumerate([(FORK, [0, 1, 4, 7]), (BUSH, [0, 3, 5]), (FORK, [0])]):
        tree = random_tree(parents, seed)
        logits = run_trees(model, cache, [tree])
        assert_tree_matches(model, committed, tree, logits[0])
        cache.commit([path])
        committed = torch.cat([committed, tree.tokens[path]])
        assert cache.lengths == [len(committed)]


def test_ragged_batch_equals_plain_decoding(model: LlamaForCausalLM) -> None:
    """Prompts, trees and accepted paths all differ in length between the two sequences."""
    cache = TreeCache(model.config, batch_size=2)
    committed = [random_tokens(7, seed=2), random_tokens(3, seed=3)]
    logits = prefill(model, cache, committed)
    for row, tokens in enumerate(committed):
        assert (logits[row, : len(tokens)] - plain(model, tokens)).abs().max() < 1e-12
    assert cache.lengths == [7, 3]
    rounds = [
        ([FORK, BUSH], [[0, 2, 5], [0]]),
        ([BUSH, FORK], [[0], [0, 1, 4, 6]]),
        ([[-1], FORK], [[0], [0, 2]]),  # a one-node tree beside a large one
        ([BUSH, BUSH], [[0, 2, 4], [0, 3, 5]]),
    ]
    for seed, (shapes, paths) in enumerate(rounds):
        trees = [random_tree(shape, 10 * seed + row) for row, shape in enumerate(shapes)]
        logits = run_trees(model, cache, trees)
        for row, tree in enumerate(trees):
            assert_tree_matches(model, committed[row], tree, logits[row])
        cache.commit(paths)
        committed = [
            torch.cat([tokens, tree.tokens[path]])
            for tokens, tree, path in zip(committed, trees, paths, strict=True)
        ]
    assert cache.lengths == [len(tokens) for tokens in committed] == [15, 13]


def test_an_ended_sequence_commits_nothing(model: LlamaForCausalLM) -> None:
    cache = TreeCache(model.config, batch_size=2)
    committed = [random_tokens(4, seed=4), random_tokens(4, seed=5)]
    prefill(model, cache, committed)
    tree = random_tree(FORK, 6)
    run_trees(model, cache, [tree, tree])
    cache.commit([[0, 1, 3], []])
    assert cache.lengths == [7, 4]
    committed[0] = torch.cat([committed[0], tree.tokens[[0, 1, 3]]])
    tree = random_tree(BUSH, 7)
    logits = run_trees(model, cache, [tree, tree])
    for row in range(2):
        assert_tree_matches(model, committed[row], tree, logits[row])


def test_growth_keeps_what_is_there(model: LlamaForCausalLM) -> None:
    cache = TreeCache(model.config, batch_size=2, capacity=6)
    committed = [random_tokens(5, seed=8), random_tokens(2, seed=9)]
    prefill(model, cache, committed)
    assert {layer.capacity for layer in cache.layers} == {6}
    trees = [random_tree(FORK, 10), random_tree(FORK, 11)]
    logits = run_trees(model, cache, trees)
    assert {layer.capacity for layer in cache.layers} == {6 + BLOCK}
    for row, tree in enumerate(trees):
        assert_tree_matches(model, committed[row], tree, logits[row])


def test_revert_leaves_no_trace(model: LlamaForCausalLM) -> None:
    cache = TreeCache(model.config)
    committed = random_tokens(5, seed=12)
    prefill(model, cache, [committed])
    tree = random_tree(BUSH, 13)
    expected = run_trees(model, cache, [tree])
    cache.revert()
    run_trees(model, cache, [random_tree(FORK, 14)])
    cache.revert()
    assert cache.lengths == [5]
    assert torch.equal(run_trees(model, cache, [tree]), expected)


def test_equal_lengths_need_no_mask(model: LlamaForCausalLM) -> None:
    """A chain, even in pieces, may leave the mask to the model: sizes and offsets are right."""
    cache = TreeCache(model.config)
    tokens = random_tokens(9, seed=15)
    expected = plain(model, tokens)
    for start, end in [(0, 4), (4, 8), (8, 9)]:
        with torch.no_grad():
            logits = model(tokens[None, start:end], cache=cache).logits[0]
        assert (logits - expected[start:end]).abs().max() < 1e-12
        cache.commit([range(end - start)])


def test_control_a_wrong_path_is_seen(model: LlamaForCausalLM) -> None:
    """The comparison can fail: keep a sibling's row and the next round differs."""
    cache = TreeCache(model.config)
    committed = random_tokens(5, seed=19)
    prefill(model, cache, [committed])
    tree = random_tree(FORK, 20)
    run_trees(model, cache, [tree])
    cache.commit([[0, 1, 3]])
    following = random_tree([-1], 21)
    logits = run_trees(model, cache, [following])
    accepted = torch.cat([committed, tree.tokens[[0, 1, 4]]])
    expected = plain(model, torch.cat([accepted, following.tokens]))[-1]
    assert (logits[0, 0] - expected).abs().max() > 1e-3


# Commit itself ----------------------------------------------------------------------------------


def filled_cache(num_rows: int) -> TreeCache:
    """One layer, one head, d = 1; two sequences of 2 and 1 tokens, then rows 0 .. N-1 appended."""
    config = LlamaConfig(num_hidden_layers=1)
    cache = TreeCache(config, batch_size=2, capacity=16)
    start = torch.full((2, 1, 2, 1), -1.0)
    cache.update(start, start, 0)
    cache.commit([[0, 1], [0]])
    rows = torch.arange(float(num_rows)).reshape(1, 1, -1, 1).repeat(2, 1, 1, 1)
    cache.update(rows, rows + 100, 0)
    return cache


@pytest.mark.parametrize("path", [[0, 2, 3], [0, 1, 2], [3, 2, 1, 0], [5], [0, 5, 1, 4]])
def test_commit_moves_rows_even_where_they_overlap(path: list[int]) -> None:
    cache = filled_cache(6)
    cache.commit([path, path[:2]])
    assert cache.lengths == [2 + len(path), 1 + len(path[:2])]
    layer = cache.layers[0]
    assert layer.keys is not None and layer.values is not None
    assert layer.keys[0, 0, : cache.lengths[0], 0].tolist() == [-1, -1, *path]
    assert layer.values[0, 0, 2 : cache.lengths[0], 0].tolist() == [100 + node for node in path]
    assert layer.keys[1, 0, : cache.lengths[1], 0].tolist() == [-1, *path[:2]]


def test_a_chain_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled_cache(4)
    monkeypatch.setattr(cache.layers[0], "move", lambda *_: pytest.fail("moved"))
    cache.commit([range(4), range(2)])
    assert cache.lengths == [6, 3]


def test_append_over_a_pending_one_is_an_error() -> None:
    cache = filled_cache(4)
    more = torch.zeros(2, 1, 3, 1)
    with pytest.raises(RuntimeError, match="4 rows are still pending"):
        cache.update(more, more, 0)
    cache.revert()
    cache.update(more, more, 0)


def test_commit_without_an_append_is_an_error() -> None:
    cache = filled_cache(4)
    cache.commit([[0], [0]])
    with pytest.raises(RuntimeError, match="pending append in every layer"):
        cache.commit([[0], [0]])


def test_commit_after_a_partial_forward_is_an_error() -> None:
    cache = TreeCache(LlamaConfig(num_hidden_layers=2))
    rows = torch.zeros(1, 1, 3, 1)
    cache.update(rows, rows, 0)
    with pytest.raises(RuntimeError, match="every layer"):
        cache.commit([[0]])


@pytest.mark.parametrize(
    ("paths", "message"),
    [([[0]], "1 paths for 2"), ([[0], [4]], "leaves the 4"), ([[-1], [0]], "leaves the 4")],
)
def test_paths_that_do_not_fit_are_refused(paths: list[list[int]], message: str) -> None:
    cache = filled_cache(4)
    with pytest.raises(ValueError, match=message):
        cache.commit(paths)
    assert cache.lengths == [2, 1]


def test_another_batch_size_is_refused() -> None:
    cache = TreeCache(LlamaConfig(num_hidden_layers=1), batch_size=2)
    rows = torch.zeros(3, 1, 3, 1)
    with pytest.raises(ValueError, match="batch_size=2"):
        cache.update(rows, rows, 0)


def test_layers_that_cannot_be_rolled_back_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="layer 0 of 'mistral' is 'sliding_attention'"):
        TreeCache(MistralConfig(sliding_window=8))
    with pytest.raises(ValueError, match="layer 0 of 'qwen3_next' is 'linear_attention'"):
        TreeCache(Qwen3NextConfig(num_hidden_layers=4))
    with pytest.raises(ValueError, match="batch_size"):
        TreeCache(LlamaConfig(), batch_size=0)
