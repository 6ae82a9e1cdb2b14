"""The tree cache against a model without any cache, float64, to rounding."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen3NextConfig

import inference.cache
from inference.attention import tree_masks
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
    depths = [tree.depths for tree in trees]
    mask = tree_masks(cache, masks, depths, model.config, torch.float64)
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


def test_several_appends_are_numbered_in_their_order() -> None:
    cache = filled_cache(3)
    more = torch.arange(3.0, 6.0).reshape(1, 1, -1, 1).repeat(2, 1, 1, 1)
    keys, values = cache.update(more, more + 100, 0)
    assert keys[0, 0, :, 0].tolist() == [-1, -1, 0, 1, 2, 3, 4, 5]
    assert values[1, 0, :7, 0].tolist() == [-1, 100, 101, 102, 103, 104, 105]
    assert cache.layers[0].pending == 6
    cache.commit([[0, 2, 3, 5], [1, 4]])
    layer = cache.layers[0]
    assert layer.keys is not None
    assert layer.keys[0, 0, : cache.lengths[0], 0].tolist() == [-1, -1, 0, 2, 3, 5]
    assert layer.keys[1, 0, : cache.lengths[1], 0].tolist() == [-1, 1, 4]
    assert layer.pending == 0


def test_revert_of_the_upper_layers_keeps_the_lower_ones() -> None:
    """As in layer skipping, where the lower layers have drafted and a whole forward failed."""
    cache = TreeCache(LlamaConfig(num_hidden_layers=3))
    rows = torch.ones(1, 1, 4, 1)
    for layer, count in [(0, 4), (1, 4), (2, 2)]:
        cache.update(rows[:, :, :count], rows[:, :, :count], layer)
    with pytest.raises(RuntimeError, match="same in every layer"):
        cache.commit([[0]])
    cache.revert(first_layer=2)
    assert [layer.pending for layer in cache.layers] == [4, 4, 0]
    cache.update(rows, rows, 2)
    cache.commit([[0, 3]])
    assert cache.lengths == [2]


# Sequences that leave -----------------------------------------------------------------------------


def test_select_keeps_sequences_and_their_pending_rows() -> None:
    cache = filled_cache(4)
    cache.select([1])
    assert cache.lengths == [1]
    assert cache.layers[0].batch_size == 1
    cache.commit([[1, 3]])
    layer = cache.layers[0]
    assert layer.keys is not None and len(layer.keys) == 1
    assert layer.keys[0, 0, :3, 0].tolist() == [-1, 1, 3]


def test_select_in_another_order(model: LlamaForCausalLM) -> None:
    cache = TreeCache(model.config, batch_size=3)
    texts = [random_tokens(count, seed=30 + count) for count in (4, 9, 2)]
    prefill(model, cache, texts)
    cache.select([2, 0])
    assert cache.lengths == [2, 4]
    trees = [random_tree(FORK, 33), random_tree(BUSH, 34)]
    logits = run_trees(model, cache, trees)
    for row, kept in enumerate([2, 0]):
        assert_tree_matches(model, texts[kept], trees[row], logits[row])


def test_select_of_everything_copies_nothing() -> None:
    cache = filled_cache(2)
    before = cache.layers[0].keys
    cache.select([0, 1])
    assert cache.layers[0].keys is before


@pytest.mark.parametrize("rows", [[], [2], [-1], [0, 5]])
def test_sequences_that_are_not_there_are_refused(rows: list[int]) -> None:
    cache = filled_cache(2)
    with pytest.raises(ValueError, match="of a batch of 2"):
        cache.select(rows)
    assert cache.lengths == [2, 1]


# Windows; tests/inference/test_targets.py has the models ------------------------------------------

WINDOW = 8


def windowed_cache(batch_size: int, capacity: int = 10_000) -> TreeCache:
    """A sliding and a full layer."""
    config = Gemma2Config(
        num_hidden_layers=2,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    )
    cache = TreeCache(config, batch_size, capacity)
    assert [layer.window for layer in cache.layers] == [WINDOW, None]
    return cache


def numbered(cache: TreeCache, count: int) -> Tensor:
    """Rows whose value is their position, as in a chain; (B, 1, N, 1)."""
    starts = torch.tensor(cache.lengths)[:, None]
    return (starts + torch.arange(count)).float()[:, None, :, None]


def decode_numbers(cache: TreeCache, rounds: int, accepted: Sequence[int]) -> set[int]:
    """Rounds in which sequence b accepts accepted[b] of 5 rows. Returns the capacities that the
    sliding layer had.
    """
    capacities = set()
    for _ in range(rounds):
        for layer in range(2):
            rows = numbered(cache, 5)
            cache.update(rows, -rows, layer)
        capacities.add(cache.layers[0].capacity)
        cache.commit([range(count) for count in accepted])
    return capacities


@pytest.mark.parametrize("block", [1, 4, BLOCK])
def test_a_window_keeps_what_it_can_still_see(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Whatever is cut off, the last window - 1 tokens are in their columns, at every length."""
    monkeypatch.setattr(inference.cache, "BLOCK", block)
    cache = windowed_cache(batch_size=2)
    for _ in range(2 * BLOCK):
        decode_numbers(cache, 1, accepted=[1, 3])
        for layer in cache.layers:
            assert layer.keys is not None and layer.values is not None
            for row, length in enumerate(cache.lengths):
                first = max(0, length - WINDOW + 1) if layer.window else 0
                kept = layer.keys[row, 0, first - layer.offsets[row] : layer.starts[row], 0]
                assert kept.tolist() == list(range(first, length))
                assert layer.values[row, 0, layer.starts[row] - 1, 0] == 1 - length
    dead = [
        n - WINDOW + 1 - offset
        for n, offset in zip(cache.lengths, cache.layers[0].offsets, strict=True)
    ]
    assert all(0 <= columns < block for columns in dead)
    assert cache.layers[1].offsets == [0, 0]


def test_memory_of_a_window_does_not_grow_with_the_text() -> None:
    cache = windowed_cache(batch_size=2)
    capacities = decode_numbers(cache, rounds=1000, accepted=[5, 1])
    assert cache.lengths == [5000, 1000]
    sliding, full = cache.layers
    assert max(capacities) == WINDOW + 2 * BLOCK, "one sequence runs away, the buffer does not"
    assert sliding.keys is not None and sliding.keys.shape[2] == WINDOW + 2 * BLOCK
    assert full.keys is not None and full.keys.shape[2] == 10_000


def test_memory_of_a_long_prompt_is_given_back() -> None:
    cache = windowed_cache(batch_size=1)
    for layer in range(2):
        cache.update(numbered(cache, 3000), numbered(cache, 3000), layer)
    assert cache.layers[0].capacity >= 3000
    cache.commit([range(3000)])
    sliding = cache.layers[0]
    assert sliding.keys is not None and sliding.keys.shape[2] == WINDOW + 2 * BLOCK
    assert sliding.keys.untyped_storage().nbytes() == 4 * sliding.keys.numel()
    assert sliding.offsets == [3000 - WINDOW + 1]


def test_unequal_lengths_need_a_mask() -> None:
    cache = filled_cache(2)
    cache.revert()
    with pytest.raises(RuntimeError, match="tree_masks"):
        cache.get_mask_sizes(1, 0)


# What is refused ----------------------------------------------------------------------------------


def test_commit_without_an_append_is_an_error() -> None:
    cache = filled_cache(4)
    cache.commit([[0], [0]])
    with pytest.raises(RuntimeError, match="pending append, the same in every layer"):
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
    """More architectures in tests/inference/test_targets.py."""
    with pytest.raises(ValueError, match=r"layer 0 of 'qwen3_next' is 'linear_attention'.*state"):
        TreeCache(Qwen3NextConfig(num_hidden_layers=4))
    later = LlamaConfig(num_hidden_layers=2, layer_types=["full_attention", "conv"])
    with pytest.raises(ValueError, match="layer 1 of 'llama' is 'conv'"):
        TreeCache(later)
    with pytest.raises(ValueError, match="batch_size"):
        TreeCache(LlamaConfig(), batch_size=0)


def test_windows_of_several_sizes_are_refused() -> None:
    layers = {1: {"sliding_window": 4}}
    config = MistralConfig(num_hidden_layers=2, sliding_window=8, per_layer_config=layers)
    with pytest.raises(
        ValueError, match=r"'mistral' has sliding windows of several sizes \[4, 8\]"
    ):
        TreeCache(config)


def test_layers_by_kind() -> None:
    assert set(TreeCache(MistralConfig(sliding_window=8)).layer_types) == {"sliding_attention"}
    assert set(TreeCache(MistralConfig(sliding_window=None)).layer_types) == {"full_attention"}
