"""The shared layers against transformers' own, to rounding."""

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from drafters.config import DecoderConfig
from drafters.layers import (
    Attention,
    DecoderLayer,
    GatedMLP,
    RMSNorm,
    copy_layer,
    repeat_heads,
    rotate,
)

POSITIONS = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 0, 1, 500]])


def llama_config(theta: float = 10000.0) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        attn_implementation="sdpa",
    )


HEAD = DecoderConfig(
    hidden_size=32,
    vocab_size=96,
    target_num_layers=6,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rotation_is_llama_s(theta: float) -> None:
    """Same layout, same angles, at positions that restart and jump."""
    x = randn(2, 4, 5, 8)
    cos, sin = LlamaRotaryEmbedding(llama_config(theta))(x, POSITIONS)
    wanted, _ = apply_rotary_pos_emb(x, x, cos, sin)
    found = rotate(x, POSITIONS, theta)
    assert found.dtype == x.dtype
    assert (found - wanted).abs().max() < 1e-4
    assert (rotate(x, POSITIONS + 1, theta) - wanted).abs().max() > 0.1
    interleaved = x.unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2)
    assert (rotate(interleaved, POSITIONS, theta) - wanted).abs().max() > 0.1


def test_rotation_in_float64_is_exact() -> None:
    """Complex multiplication of the pairs (i, i + d/2)."""
    x = randn(1, 1, 4, 6, dtype=torch.float64)
    positions = torch.tensor([[0, 3, 100, 2000]])
    frequency = torch.tensor([10000 ** (-2 * i / 6) for i in range(3)], dtype=torch.float64)
    angle = positions[0, :, None] * frequency
    pairs = torch.complex(x[0, 0, :, :3], x[0, 0, :, 3:])
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    wanted = torch.cat((pairs.real, pairs.imag), dim=-1)
    assert (rotate(x, positions, 10000.0)[0, 0] - wanted).abs().max() < 1e-12


def test_rotation_depends_on_distance_alone() -> None:
    q, k = randn(1, 1, 1, 8, dtype=torch.float64), randn(1, 1, 1, 8, seed=1, dtype=torch.float64)

    def score(a: int, b: int) -> float:
        one = rotate(q, torch.tensor([[a]]), 10000.0)
        other = rotate(k, torch.tensor([[b]]), 10000.0)
        return (one * other).sum().item()

    assert abs(score(5, 3) - score(105, 103)) < 1e-12
    assert abs(score(5, 3) - score(5, 2)) > 1e-3


def test_rotation_in_bfloat16_takes_its_angles_from_float32() -> None:
    """bfloat16 positions would be wrong from 257 on."""
    x = randn(1, 1, 1, 8)
    positions = torch.tensor([[401]])
    exact = rotate(x, positions, 10000.0)
    rounded = rotate(x.bfloat16(), positions, 10000.0)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).abs().max() < 0.05
    assert (rotate(x, positions - 1, 10000.0) - exact).abs().max() > 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_llama_s(dtype: torch.dtype) -> None:
    ours, theirs = RMSNorm(16, 1e-5), LlamaRMSNorm(16, 1e-5)
    with torch.no_grad():
        for norm in (ours, theirs):
            norm.weight.copy_(randn(16, seed=3))
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    x = 100 * randn(3, 16).to(dtype)
    assert torch.equal(ours(x), theirs(x))


def test_rms_norm_keeps_float64() -> None:
    norm = RMSNorm(16, 1e-5).double()
    x = randn(3, 16, dtype=torch.float64)
    wanted = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    assert (norm(x) - wanted).abs().max() < 1e-14


def test_mlp_is_llama_s() -> None:
    ours, theirs = GatedMLP(32, 48), LlamaMLP(llama_config())
    ours.load_state_dict(theirs.state_dict())
    x = randn(3, 32)
    assert (ours(x) - theirs(x)).abs().max() < 1e-6


def test_attention_is_llama_s_where_the_input_is_as_wide() -> None:
    config = llama_config()
    ours = Attention(HEAD, layer=0).double()
    theirs = LlamaAttention(config, layer_idx=0).double().eval()
    ours.load_state_dict(theirs.state_dict())
    x, positions = randn(2, 6, 32, dtype=torch.float64), torch.arange(6).expand(2, 6)

    def causal(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = repeat_heads(k, 2), repeat_heads(v, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    found = ours(x, positions, causal)
    embedding = LlamaRotaryEmbedding(config)(x, positions)
    wanted, _ = theirs(x, position_embeddings=embedding, attention_mask=None)
    assert (found - wanted).abs().max() < 1e-5


def shape(qk_norm: bool) -> dict[str, object]:
    return {**{name: getattr(HEAD, name) for name in HEAD.own_fields()}, "qk_norm": qk_norm}


@pytest.mark.parametrize("qk_norm", [False, True])
def test_decoder_layer_is_that_of_llama_or_qwen3(qk_norm: bool) -> None:
    """Filled by `copy_layer`, with the order of norm and rotation in Qwen3's."""
    ours = DecoderLayer(DecoderConfig(**shape(qk_norm)), layer=2).double()
    config = llama_config()
    if qk_norm:
        config = Qwen3Config(
            **{key: getattr(config, key) for key in ("hidden_size", "intermediate_size")},
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rms_norm_eps=1e-5,
            rope_parameters=config.rope_parameters,
            attn_implementation="sdpa",
        )
    config.rms_norm_eps = 1e-5
    layer = Qwen3DecoderLayer if qk_norm else LlamaDecoderLayer
    theirs = layer(config, layer_idx=0).double().eval()
    with torch.no_grad():
        for number, parameter in enumerate(theirs.parameters()):
            parameter.copy_(0.5 * randn(*parameter.shape, seed=number, dtype=torch.float64))
    assert copy_layer(ours, dict(theirs.named_parameters()))
    x, positions = randn(2, 6, 32, dtype=torch.float64), torch.arange(3, 9).expand(2, 6)
    seen = []

    def causal(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append(layer)
        k, v = repeat_heads(k, 2), repeat_heads(v, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    found = ours(x, positions, causal)
    embedding = LlamaRotaryEmbedding(config)(x, positions)
    wanted = theirs(x, position_embeddings=embedding, attention_mask=None)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    assert seen == [2]
    assert (found - wanted).abs().max() < 1e-4 < wanted.abs().max()
    k, v = ours.self_attn.keys_values(x, positions)
    assert k.shape == v.shape == (2, 2, 6, 8)


def test_layers_are_copied_whole_or_not_at_all() -> None:
    ours, wide = DecoderLayer(HEAD, 0), DecoderLayer(HEAD, 0)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    weights = {name: value + 1 for name, value in wide.named_parameters()}
    weights["mlp.up_proj.weight"] = torch.zeros(49, 32)
    assert not copy_layer(ours, weights)
    assert not copy_layer(ours, {})
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    del weights["mlp.up_proj.weight"]
    assert copy_layer(ours, weights | {"norm.weight": torch.zeros(32)})
    for name, value in ours.state_dict().items():
        wanted = before[name] if name == "mlp.up_proj.weight" else weights[name]
        assert torch.equal(value, wanted), name


def test_wide_input_gives_narrow_output() -> None:
    attention = Attention(HEAD, layer=3, input_size=64)
    shapes = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        shapes.extend([layer, q.shape, k.shape, v.shape])
        return q

    assert attention(randn(2, 5, 64), POSITIONS, attend).shape == (2, 5, 32)
    assert shapes == [3, (2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)]


def test_heads_of_a_group_stand_together() -> None:
    """Query heads 0, 1 use key head 0, as in Llama, not 0, 2."""
    x = torch.arange(2).view(1, 2, 1, 1)
    assert repeat_heads(x, 3).flatten().tolist() == [0, 0, 0, 1, 1, 1]
