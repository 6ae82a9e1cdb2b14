"""DFlash: what a pass computes, against a network written out by hand; the mask token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from drafters import TargetModel
from drafters.block import DFlashDrafter, choose_mask_token
from drafters.layers import rotate
from inference.proposers.context_cache import ContextCache
from tests.blocks import block_head
from tests.tiny import tiny_target, tiny_tokenizer

MASK = 5


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module")
def features() -> Tensor:
    return torch.randn(1, 7, 96, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def run(head: DFlashDrafter, features: Tensor, token: int, ids: Tensor | None = None) -> Tensor:
    """Rows (g, D) of the block behind some text."""
    length = features.shape[1]
    cache = ContextCache(head.windows)
    head.inject(head.context(features), torch.arange(length)[None], cache.append)
    ids = head.blocks(torch.tensor([token])) if ids is None else ids
    positions = length + torch.arange(ids.shape[1])[None]
    return head(ids, positions, cache.rows(0, head.causal))[0]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def by_hand(head: DFlashDrafter, features: Tensor, token: int) -> Tensor:
    """The same, one query and one head at a time, from the named weights."""
    w, config = dict(head.named_parameters()), head.config
    eps, d = config.rms_norm_eps, config.head_dim
    groups = config.num_attention_heads // config.num_key_value_heads
    context = rms(features[0] @ w["fc.weight"].T, w["hidden_norm.weight"], eps)  # (S, D)
    ids = torch.tensor([token] + [MASK] * (config.block_size - 1))
    hidden, length, size = head.target.embed(ids), len(context), config.block_size

    def heads(x: Tensor, name: str, positions: Tensor, norm: str | None) -> Tensor:
        split = (x @ w[name].T).unflatten(-1, (-1, d))  # (rows, heads, d)
        if norm is None:
            return split
        split = rms(split, w[norm], eps) if norm in w else split
        return rotate(split.transpose(0, 1)[None], positions[None], config.rope_theta)[0].transpose(
            0, 1
        )

    for i in range(config.num_layers):
        p = f"layers.{i}."
        a = p + "self_attn."
        x = rms(hidden, w[p + "input_layernorm.weight"], eps)
        both = torch.cat((context, x))  # the context has no input norm but its own
        place = torch.arange(length + size)
        q = heads(x, a + "q_proj.weight", place[length:], a + "q_norm.weight")
        k = heads(both, a + "k_proj.weight", place, a + "k_norm.weight")
        v = heads(both, a + "v_proj.weight", place, None)
        out = torch.zeros_like(q)
        for row in range(size):
            chosen = config.window_layers
            has_window = chosen is None or i in chosen
            window = (config.sliding_window if has_window else None) or 10**6
            causal = config.causal or i in (config.causal_layers or ())
            seen = [
                j
                for j in range(length + size)
                if length + row - j < window and (j <= length + row or not causal)
            ]
            for head_index in range(config.num_attention_heads):
                own = head_index // groups
                scores = (k[seen, own] @ q[row, head_index]) / d**0.5
                out[row, head_index] = scores.softmax(0) @ v[seen, own]
        hidden = hidden + out.flatten(1) @ w[a + "o_proj.weight"].T
        x = rms(hidden, w[p + "post_attention_layernorm.weight"], eps)
        gate = F.silu(x @ w[p + "mlp.gate_proj.weight"].T) * (x @ w[p + "mlp.up_proj.weight"].T)
        hidden = hidden + gate @ w[p + "mlp.down_proj.weight"].T
    return rms(hidden, w["norm.weight"], eps)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "qk_norm": False},
        {"causal": True, "num_layers": 2},
        {"sliding_window": 3},
        {"sliding_window": 3, "causal": True},
        {"num_layers": 3, "sliding_window": 3, "window_layers": [0, 2], "causal_layers": [0]},
    ],
    ids=str,
)
def test_a_pass_is_the_network_by_hand(
    target: TargetModel, features: Tensor, options: dict[str, Any]
) -> None:
    head = block_head(target, "dflash", block_size=4, mask_token_id=MASK, **options)
    found = run(head, features, 17)
    torch.testing.assert_close(found, by_hand(head, features, 17), atol=1e-10, rtol=0)


def test_tensors_have_the_names_that_engines_load(target: TargetModel) -> None:
    head = block_head(target, "dflash", num_layers=2)
    layer = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    layer |= {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    layer |= {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    layer |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    wanted = {f"layers.{i}.{name}" for i in range(2) for name in layer}
    assert set(head.state_dict()) == wanted | {"fc.weight", "hidden_norm.weight", "norm.weight"}


def test_a_block_is_its_root_and_masks(target: TargetModel) -> None:
    head = block_head(target, "dflash", block_size=4, mask_token_id=MASK)
    assert head.blocks(torch.tensor([[7, 8]])).tolist() == [
        [[7, MASK, MASK, MASK], [8, MASK, MASK, MASK]]
    ]
    assert head.num_drafts == 3
    rows = torch.arange(4)[None, :, None]
    assert head.drafting(rows).flatten().tolist() == [1, 2, 3]


def test_only_causal_blocks_ignore_the_slots_behind(target: TargetModel, features: Tensor) -> None:
    """With fewer slots a bidirectional block drafts something else, a causal one the same."""
    short = torch.tensor([[17, MASK]])
    shape = {"block_size": 4, "mask_token_id": MASK}
    both = block_head(target, "dflash", **shape)
    causal = block_head(target, "dflash", causal=True, **shape)
    whole = run(causal, features, 17)
    torch.testing.assert_close(run(causal, features, 17, short), whole[:2], atol=1e-12, rtol=0)
    difference = run(both, features, 17, short) - run(both, features, 17)[:2]
    assert difference.abs().max() > 1e-3


def test_logits_are_the_target_s_of_the_draft_vocabulary(target: TargetModel) -> None:
    rows = torch.randn(2, 3, 32, dtype=torch.float64)
    whole = block_head(target, "dflash").logits(rows)
    assert torch.equal(whole, target.project(rows))
    head = block_head(target, "dflash", draft_vocab_size=40)
    torch.testing.assert_close(head.logits(rows), whole[..., head.draft_vocab], atol=1e-12, rtol=0)
    assert head.output_modules() == []
    assert head.num_parameters_trained() == sum(p.numel() for p in head.parameters())


def test_it_starts_from_the_target(target: TargetModel) -> None:
    head = block_head(target, "dflash", noise=0.0, num_layers=2)
    theirs = [target.block(-2), target.block(-1)]
    for i, weights in enumerate(theirs):
        for name, weight in head.layers[i].named_parameters():
            if "q_norm" in name or "k_norm" in name:
                assert torch.equal(weight, torch.ones_like(weight)), "a Llama has no such norms"
            else:
                assert torch.equal(weight, weights[name]), name
    assert torch.allclose(head.norm.weight, 0.2 * theirs[1]["norm.weight"]), "nearly uniform"
    assert torch.equal(head.hidden_norm.weight, theirs[0]["input_layernorm.weight"])
    last = head.fc.weight[:, -32:] - torch.eye(32, dtype=torch.float64)
    assert 0 < last.std() < 0.3 * 96**-0.5


def test_layers_of_another_shape_start_at_random(target: TargetModel) -> None:
    head = block_head(target, "dflash", noise=0.0, intermediate_size=20)
    assert not torch.equal(
        head.layers[0].self_attn.q_proj.weight, target.block()["self_attn.q_proj.weight"]
    )
    assert torch.equal(head.norm.weight, torch.ones_like(head.norm.weight))


def test_saved_heads_come_back(target: TargetModel, features: Tensor, tmp_path: Path) -> None:
    head = block_head(target, "dflash", draft_vocab_size=40, causal=True, mask_token_id=MASK)
    head.save_pretrained(tmp_path)
    again = DFlashDrafter.load(tmp_path, target, dtype=torch.float64)
    assert torch.equal(run(head, features, 9), run(again, features, 9))
    assert again.config.mask_token_id == MASK


def test_a_head_needs_a_mask_token_of_the_vocabulary(target: TargetModel) -> None:
    for token in (96, -1):
        with pytest.raises(ValueError, match=r"mask_token_id must lie in 0\.\.95"):
            block_head(target, "dflash", mask_token_id=token)


# --- the mask token


def with_tokenizer(vocab: int, tokenizer: PreTrainedTokenizerFast) -> TargetModel:
    return TargetModel(tiny_target(vocab=vocab).model, tokenizer, name="tiny")


def test_a_reserved_row_behind_the_tokenizer_comes_first() -> None:
    assert choose_mask_token(with_tokenizer(100, tiny_tokenizer(96))) == 96


def test_the_tokenizer_s_own_mask_token_comes_before_that() -> None:
    tokenizer = tiny_tokenizer(96)
    tokenizer.mask_token = "<extra_90>"
    assert choose_mask_token(with_tokenizer(100, tokenizer)) == 90


def test_without_reserved_rows_it_is_an_unused_special_token() -> None:
    tokenizer = tiny_tokenizer(96)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra_80>", "<extra_85>"]})
    assert choose_mask_token(with_tokenizer(96, tokenizer)) == 85
    tokenizer.chat_template += "{{ '<extra_85>' }}"
    assert choose_mask_token(with_tokenizer(96, tokenizer)) == 80


def test_special_tokens_with_a_part_are_not_taken() -> None:
    """Those that end, pad or stand for the unknown; then what no text is encoded as."""
    tokenizer = tiny_tokenizer(96)
    tokenizer.pad_token = "<extra_95>"
    assert choose_mask_token(with_tokenizer(96, tokenizer)) == 94


def test_where_every_token_may_occur_it_must_be_named() -> None:
    model = BPE({"<unk>": 0, **{c: i for i, c in enumerate("abcdefg", 1)}}, [], unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="<unk>")
    with pytest.raises(ValueError, match=r"drafter\.mask_token_id: every token of target 'tiny'"):
        choose_mask_token(with_tokenizer(8, tokenizer))
