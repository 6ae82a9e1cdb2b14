"""Every architecture of the zoo, float64: trees in the cache against plain forwards of each path,
and against transformers' own cache; layer skipping; what cannot verify trees is refused.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, DynamicCache, Gemma3Config, Gemma3ForConditionalGeneration

import inference.cache
from drafters import TargetModel, TargetOutput
from inference.append import append_rows
from inference.cache import TreeCache
from inference.engine import EagerEngine
from inference.support import check_tree_support
from inference.tree import Proposal, TokenTree
from tests.zoo import (
    COMMON,
    LAYERS,
    WINDOW,
    ZOO,
    float64_throughout,
    zoo_target,
)

TOLERANCE = 1e-10
NODES = 7
CUT = 4
"""Nodes of a tree that are appended first, where it comes in two pieces."""


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 to the end, and windows cut every four tokens: short texts see many cuts."""
    float64_throughout(monkeypatch)
    monkeypatch.setattr(inference.cache, "BLOCK", 4)


def text(length: int, rng: torch.Generator) -> Tensor:
    return torch.randint(3, 96, (length,), generator=rng)


def random_tree(root: int, rng: torch.Generator) -> TokenTree:
    """`NODES` nodes that branch anywhere, deep ones more often."""
    parents = [-1]
    for node in range(1, NODES):
        reach = min(node, 3)
        parents.append(node - 1 - int(torch.randint(reach, (), generator=rng)))
    tokens = torch.randperm(93, generator=rng)[:NODES] + 3
    tokens[0] = root
    return TokenTree(tokens, torch.tensor(parents), Proposal.ONE_HOT)


def plain(target: TargetModel, tokens: Tensor) -> Tensor:
    """(T, V) logits of a text without cache, mask or tree."""
    return target.forward(tokens[None]).logits[0]


def append_chains(target: TargetModel, cache: TreeCache, tokens: Sequence[Tensor]) -> Tensor:
    """Append texts and commit them whole. Returns (B, T, V) logits."""
    seen = [torch.ones(len(row), len(row), dtype=torch.bool).tril() for row in tokens]
    out = append_rows(target, cache, tokens, [torch.arange(len(row)) for row in tokens], seen)
    cache.commit([range(len(row)) for row in tokens])
    return out.logits


def run_trees(
    target: TargetModel,
    cache: TreeCache,
    trees: Sequence[TokenTree],
    pieces: bool = False,
    **options: Any,
) -> list[TargetOutput]:
    """Append trees, whole or in two pieces, `CUT` nodes first."""
    tokens, depths = [tree.tokens for tree in trees], [tree.depths for tree in trees]
    masks = [tree.ancestor_mask() for tree in trees]
    if not pieces:
        return [append_rows(target, cache, tokens, depths, masks, **options)]
    first = (
        [some[:CUT] for some in tokens],
        [depth[:CUT] for depth in depths],
        [mask[:CUT, :CUT] for mask in masks],
    )
    others = [some[CUT:] for some in tokens], depths, [mask[CUT:] for mask in masks]
    return [append_rows(target, cache, *rows, **options) for rows in (first, others)]


def tree_error(target: TargetModel, committed: Tensor, tree: TokenTree, logits: Tensor) -> float:
    """Largest difference between the tree's rows and plain decoding along each path."""
    worst = 0.0
    leaves = [node for node in range(tree.num_nodes) if not tree.children(node)]
    for leaf in leaves:
        path = tree.path(leaf)
        expected = plain(target, torch.cat((committed, tree.tokens[path])))[-len(path) :]
        worst = max(worst, (logits[path] - expected).abs().max().item())
    return worst


def decode(target: TargetModel, rounds: int, lengths: Sequence[int], seed: int) -> dict[str, float]:
    """Rounds of random trees in a ragged batch, random branches committed, one sequence leaving
    the batch half way. Returns the largest differences from plain and from cached decoding.
    """
    rng = torch.Generator().manual_seed(seed)
    cache = TreeCache(target.model.config, batch_size=len(lengths))
    texts = [text(length, rng) for length in lengths]
    prefill = append_chains(target, cache, texts)
    worst = max(
        (prefill[row, : len(tokens)] - plain(target, tokens)).abs().max().item()
        for row, tokens in enumerate(texts)
    )
    seen = [prefill[row, : len(tokens)] for row, tokens in enumerate(texts)]
    for index in range(rounds):
        if index == rounds // 2:
            kept = list(range(1, len(texts)))
            cache.select(kept)
            texts, seen = [texts[row] for row in kept], [seen[row] for row in kept]
        trees = [random_tree(int(torch.randint(3, 96, (), generator=rng)), rng) for _ in texts]
        outputs = run_trees(target, cache, trees, pieces=index % 2 == 1)
        logits = torch.cat([out.logits for out in outputs], dim=1)
        paths = []
        for row, tree in enumerate(trees):
            worst = max(worst, tree_error(target, texts[row], tree, logits[row]))
            path = tree.path(int(torch.randint(NODES // 2, NODES, (), generator=rng)))
            texts[row] = torch.cat((texts[row], tree.tokens[path]))
            seen[row] = torch.cat((seen[row], logits[row, path]))
            paths.append(path)
        cache.commit(paths)
        assert cache.lengths == list(map(len, texts))
    return {
        "plain": worst,
        "cached": (seen[0] - token_by_token(target, texts[0])).abs().max().item(),
        "length": min(map(len, texts)),
    }


def token_by_token(target: TargetModel, tokens: Tensor) -> Tensor:
    """(T, V) logits of transformers' own cached decoding, one token a forward."""
    cache = DynamicCache(config=target.model.config)
    rows = []
    for place in range(len(tokens)):
        position = torch.tensor([[place]])
        out = target.forward(tokens[None, place : place + 1], position_ids=position, cache=cache)
        rows.append(out.logits[0])
    return torch.cat(rows)


# --- trees


@pytest.mark.parametrize("name", ZOO)
def test_trees_equal_plain_decoding(name: str) -> None:
    """Prompts shorter and longer than the window, texts that grow well past it."""
    found = decode(zoo_target(name), rounds=8, lengths=[5, 2, 2 * WINDOW + 1], seed=1)
    assert found["length"] > 2 * WINDOW
    assert found["plain"] < TOLERANCE
    assert found["cached"] < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "cohere2"])
def test_eager_attention_gets_the_mask_it_takes(name: str) -> None:
    """The others run with what transformers chooses: eager for Gemma 2 and gpt-oss, else sdpa."""
    target = zoo_target(name, attn="eager")
    assert decode(target, rounds=4, lengths=[3, 12], seed=2)["plain"] < TOLERANCE


def test_what_transformers_chooses() -> None:
    chosen = {name: zoo_target(name).config._attn_implementation for name in ZOO}
    assert {name for name, kind in chosen.items() if kind == "eager"} == {"gemma2", "gpt_oss"}
    assert set(chosen.values()) == {"eager", "sdpa"}


@pytest.mark.parametrize(
    "name", [name for name, options in ZOO.items() if options.get("sliding_window")]
)
def test_control_the_windows_matter(name: str) -> None:
    """A window that is never left gives other logits, so the comparison above sees windows."""
    rng = torch.Generator().manual_seed(3)
    tokens = text(3 * WINDOW, rng)
    short, long = zoo_target(name), zoo_target(name, sliding_window=100)
    difference = (plain(short, tokens) - plain(long, tokens)).abs().amax(dim=-1)
    assert difference[:WINDOW].max() < TOLERANCE
    assert difference[-1] > 1e-2


def test_the_text_part_of_a_multimodal_model() -> None:
    """Gemma 3 comes as one beyond its smallest size."""
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    words = {**COMMON, **ZOO["gemma3_text"], "final_logit_softcapping": None}
    config = Gemma3Config(text_config=words, vision_config=vision)
    torch.manual_seed(0)
    target = TargetModel(Gemma3ForConditionalGeneration(config).double(), name="gemma3")
    check_tree_support(EagerEngine(target))
    assert decode(target, rounds=4, lengths=[3, 12], seed=3)["plain"] < TOLERANCE


def test_no_text_may_cross_a_switch_of_frequencies() -> None:
    """ "longrope": exact on either side of its original length, refused across (`length_limit`)."""
    rope = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
    rope |= {"rope_type": "longrope", "original_max_position_embeddings": 40}
    options = {"original_max_position_embeddings": 40, "rope_parameters": rope}
    target = zoo_target("phi3", **options)
    assert [target.length_limit(n) for n in (1, 40, 41)] == [40, 40, target.max_length]
    for lengths in ([2, 12], [41, 44]):
        assert decode(target, rounds=4, lengths=lengths, seed=4)["plain"] < TOLERANCE
    assert decode(target, rounds=4, lengths=[36, 38], seed=4)["plain"] > 1e-2
    assert zoo_target("llama").length_limit(1) == zoo_target("llama").max_length == 512


# --- some of the layers


@pytest.mark.parametrize("name", ZOO)
def test_two_halves_are_the_whole(name: str) -> None:
    """Layers 0..E-1, then E.. from where they left: bit for bit, with and without a cache."""
    target = zoo_target(name)
    rng = torch.Generator().manual_seed(4)
    tokens = text(2 * WINDOW, rng)[None]
    features = (0, 1, 2, LAYERS - 1)
    whole = target.forward(tokens, feature_layers=features)
    for exit_layer in (1, 2, LAYERS - 1):
        first = target.forward(tokens, run_layers=range(exit_layer), feature_layers=(exit_layer,))
        second = target.forward(
            tokens,
            run_layers=range(exit_layer, LAYERS),
            entering=first.features,
            feature_layers=features,
        )
        assert torch.equal(second.logits, whole.logits)
        assert torch.equal(second.last_hidden, whole.last_hidden)
        width = target.hidden_size
        for place, layer in enumerate(features):
            if layer >= exit_layer:
                block = slice(place * width, (place + 1) * width)
                assert torch.equal(second.features[..., block], whole.features[..., block])
        assert not torch.equal(first.logits, whole.logits)
    assert torch.equal(target.forward(tokens).logits, whole.logits), "nothing is left replaced"


@pytest.mark.parametrize("name", ZOO)
def test_two_halves_of_a_tree_are_the_whole(name: str) -> None:
    """Level by level through the lower layers, as layer-skip drafting does, then all nodes at once
    through the upper ones: their keys and values end where one forward puts them."""
    target, exit_layer = zoo_target(name), 2
    rng = torch.Generator().manual_seed(5)
    prompts = [text(2 * WINDOW, rng), text(3, rng)]
    trees = [random_tree(3, rng), random_tree(4, rng)]
    caches = [TreeCache(target.model.config, batch_size=2) for _ in range(2)]
    for cache in caches:
        append_chains(target, cache, prompts)
    (whole,) = run_trees(target, caches[0], trees)

    low = {"run_layers": range(exit_layer), "feature_layers": (exit_layer,)}
    pieces = run_trees(target, caches[1], trees, pieces=True, **low)
    assert [layer.pending for layer in caches[1].layers] == [NODES, NODES, 0, 0]
    entering = torch.cat([piece.features for piece in pieces], dim=1)
    high = {"run_layers": range(exit_layer, LAYERS), "entering": entering}
    (out,) = run_trees(target, caches[1], trees, **high)
    assert (out.logits - whole.logits).abs().max() < TOLERANCE
    more = [text(2, rng), text(1, rng)]
    following = []
    for cache in caches:
        cache.commit([tree.path(NODES - 1) for tree in trees])
        following.append(append_chains(target, cache, more))
    assert (following[0] - following[1]).abs().max() < TOLERANCE


def test_one_piece_resumed_is_bit_for_bit() -> None:
    target = zoo_target("gemma2")
    rng = torch.Generator().manual_seed(7)
    prompt, tree = text(2 * WINDOW, rng), random_tree(3, rng)
    logits = []
    for halves in (False, True):
        cache = TreeCache(target.model.config)
        append_chains(target, cache, [prompt])
        options: dict[str, Any] = {}
        if halves:
            low = {"run_layers": range(2), "feature_layers": (2,)}
            (first,) = run_trees(target, cache, [tree], **low)
            options = {"run_layers": range(2, LAYERS), "entering": first.features}
        logits.append(run_trees(target, cache, [tree], **options)[0].logits)
    assert torch.equal(*logits)


def test_layers_may_be_left_out_anywhere() -> None:
    """A subset with a gap is the model whose other layers add nothing."""
    target, tokens = zoo_target("llama"), text(9, torch.Generator().manual_seed(8))[None]
    skipped = target.forward(tokens, run_layers=[0, 3]).logits
    layers = target.model.model.layers
    with torch.no_grad():
        for index in (1, 2):
            layers[index].self_attn.o_proj.weight.zero_()
            layers[index].mlp.down_proj.weight.zero_()
    assert (target.forward(tokens).logits - skipped).abs().max() < TOLERANCE


def test_layers_are_put_back_after_an_error() -> None:
    target, tokens = zoo_target("llama"), text(9, torch.Generator().manual_seed(9))[None]
    whole = target.forward(tokens).logits
    with pytest.raises(RuntimeError):
        target.forward(tokens, run_layers=[1], entering=torch.zeros(1, 9, 5).double())
    assert torch.equal(target.forward(tokens).logits, whole)
    assert not any("forward" in layer.__dict__ for layer in target.model.model.layers)


@pytest.mark.parametrize("run", [[], [-1], [LAYERS]])
def test_layers_that_are_not_there_are_refused(run: list[int]) -> None:
    with pytest.raises(ValueError, match="run_layers"):
        zoo_target("llama").forward(torch.tensor([[1]]), run_layers=run)


# --- what cannot verify trees

MAMBA: dict[str, Any] = {"state_size": 8}
NEXT: dict[str, Any] = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
JAMBA: dict[str, Any] = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
LFM2: dict[str, Any] = {"layer_types": ["full_attention", "conv"] * 2}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mamba", MAMBA, "layer 0 of 'mamba' is 'linear_attention'"),
        ("qwen3_next", NEXT, "layer 0 of 'qwen3_next' is 'linear_attention'"),
        ("jamba", JAMBA, "layer 0 of 'jamba' is 'linear_attention'"),
        ("lfm2", LFM2, "layer 1 of 'lfm2' is 'conv'"),
        ("recurrent_gemma", {"head_dim": 8, "lru_width": 32}, "layer 0 of 'recurrent_gemma'"),
        ("llama4_text", {"head_dim": 8}, "layer 0 of 'llama4_text' is 'chunked_attention'"),
    ],
)
def test_layers_that_cannot_be_rolled_back_are_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    target = zoo_target(name, torch.float32, **options)
    with pytest.raises(ValueError, match=message):
        TreeCache(target.model.config)
    with pytest.raises(ValueError, match=message):
        check_tree_support(EagerEngine(target))


@pytest.mark.parametrize("name", ["gpt_neo", "doge"])
def test_models_with_windows_of_their_own_are_refused(name: str) -> None:
    """They go by columns of the cache once a text is long, which a short probe does not see."""
    with pytest.raises(ValueError, match=f"'{name}' cannot verify trees"):
        TreeCache(CONFIG_MAPPING[name]())


ALIBI: dict[str, Any] = {"alibi": True, "new_decoder_architecture": False}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bloom", {"n_layer": 4, "n_head": 4}),
        ("mpt", {"d_model": 32, "n_layers": 4, "n_heads": 4}),
        ("falcon", ALIBI),
        ("rwkv", {"attention_hidden_size": 32}),
    ],
)
def test_models_that_do_not_do_what_the_mask_says_are_refused(
    name: str, options: dict[str, Any]
) -> None:
    target = zoo_target(name, torch.float32, **options)
    with pytest.raises(ValueError, match=rf"'{name}'\) cannot verify trees"):
        check_tree_support(EagerEngine(target))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "gpt_oss", "gpt2"])
def test_others_pass_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    check_tree_support(EagerEngine(zoo_target(name, dtype)))


def test_a_model_that_ignores_the_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = zoo_target("llama", torch.bfloat16)
    forward = target.model.forward

    def without_mask(**kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        if mask is not None:
            kwargs["attention_mask"] = torch.ones_like(mask).tril(mask.shape[-1] - mask.shape[-2])
        return forward(**kwargs)

    monkeypatch.setattr(target.model, "forward", without_mask)
    with pytest.raises(ValueError, match="sibling"):
        check_tree_support(EagerEngine(target))


def test_a_model_that_counts_positions_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = zoo_target("llama", torch.bfloat16)
    forward = target.model.forward

    def counting(**kwargs: Any) -> Any:
        if kwargs["position_ids"] is not None:
            start = kwargs["cache"].get_seq_length()
            rows = kwargs["input_ids"].shape[1]
            kwargs["position_ids"] = torch.arange(start, start + rows)[None]
        return forward(**kwargs)

    monkeypatch.setattr(target.model, "forward", counting)
    with pytest.raises(ValueError, match=r"differ by .* from plain decoding"):
        check_tree_support(EagerEngine(target))


def test_a_target_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = zoo_target("llama")
    check_tree_support(EagerEngine(target))
    monkeypatch.setattr(target, "forward", lambda *_, **__: pytest.fail("checked again"))
    check_tree_support(EagerEngine(target))


def test_common_options_are_those_of_the_tokenizer() -> None:
    for name in ZOO:
        target = zoo_target(name)
        assert target.vocab_size == len(target.tokenizer) == COMMON["vocab_size"]
        assert target.eos_token_ids == (target.tokenizer.eos_token_id,)
        assert target.num_layers == LAYERS
