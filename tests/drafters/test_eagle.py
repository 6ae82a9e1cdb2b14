"""EAGLE-3's layer against a dense re-implementation with plain matrix products, float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafters import Eagle3Drafter, TargetModel, build_drafter
from drafters.config import default_feature_layers
from tests.tiny import tiny_target

LENGTH, HIDDEN, VOCAB = 7, 32, 96
IDS = torch.randint(VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


def make_head(target: TargetModel, **options: object) -> Eagle3Drafter:
    """With every weight and norm moved off its initial value."""
    drafter = build_drafter("eagle3", target, **options).double()
    drafter.set_draft_vocab(torch.arange(VOCAB))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.3 * noise
    return drafter.requires_grad_(False)


def features(target: TargetModel, drafter: Eagle3Drafter) -> Tensor:
    return target.forward(IDS, feature_layers=drafter.feature_layers).features


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def turn(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """(T, d) vectors, pair (i, i + d/2) turned as a complex number."""
    half = x.shape[-1] // 2
    frequency = theta ** (-2 * torch.arange(half, dtype=torch.float64) / x.shape[-1])
    angle = positions[:, None] * frequency
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


def dense_step(
    drafter: Eagle3Drafter, embeds: Tensor, feature: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """One causal step over (T, D) rows, written out head by head: (normed, un-normed) output."""
    config, weights = drafter.config, dict(drafter.named_parameters())
    eps = config.rms_norm_eps

    def w(name: str) -> Tensor:
        return weights[f"midlayer.{name}.weight"]

    pair = torch.cat(
        (
            norm(embeds, w("input_layernorm"), eps),
            norm(feature, w("hidden_norm"), eps),
        ),
        dim=-1,
    )
    q, k, v = (pair @ w(f"self_attn.{name}_proj").T for name in "qkv")
    size, heads = config.head_dim, []
    for head in range(config.num_attention_heads):
        group = head // (config.num_attention_heads // config.num_key_value_heads)
        one = turn(q[:, head * size : (head + 1) * size], positions, config.rope_theta)
        key = turn(k[:, group * size : (group + 1) * size], positions, config.rope_theta)
        scores = one @ key.T / math.sqrt(size)
        causal = torch.ones_like(scores).tril().bool()
        weight = scores.masked_fill(~causal, -math.inf).softmax(-1)
        heads.append(weight @ v[:, group * size : (group + 1) * size])
    residual = pair[:, HIDDEN:] if config.norm_before_residual else feature
    hidden = residual + torch.cat(heads, dim=-1) @ w("self_attn.o_proj").T
    inner = norm(hidden, w("post_attention_layernorm"), eps)
    gate = inner @ w("mlp.gate_proj").T
    inner = gate * gate.sigmoid() * (inner @ w("mlp.up_proj").T)
    output = hidden + inner @ w("mlp.down_proj").T
    return norm(output, weights["norm.weight"], eps), output


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("start", [0, 13])
@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
def test_step_equals_the_dense_layer(
    target: TargetModel, norm_output: bool, norm_before_residual: bool, start: int
) -> None:
    drafter = make_head(target, norm_output=norm_output, norm_before_residual=norm_before_residual)
    feature = drafter.fuse(features(target, drafter))
    positions = torch.arange(start, start + LENGTH)
    hidden, following = drafter(feature, IDS, positions[None], causal)
    embeds = target.model.model.embed_tokens.weight[IDS[0]]
    normed, output = dense_step(drafter, embeds, feature[0], positions)
    assert (hidden[0] - normed).abs().max() < 1e-12
    assert (following[0] - (normed if norm_output else output)).abs().max() < 1e-12
    assert (normed - output).abs().max() > 0.1, "the two feedback variants differ"
    logits = drafter.logits(hidden)
    assert (logits[0] - normed @ drafter.lm_head.weight.T).abs().max() < 1e-11


def test_dense_layer_tells_the_halves_apart(target: TargetModel) -> None:
    """Negative control: embedding first, feature second; the residual is the feature."""
    drafter = make_head(target)
    feature = drafter.fuse(features(target, drafter))
    positions = torch.arange(LENGTH)
    hidden, _ = drafter(feature, IDS, positions[None], causal)
    embeds = target.model.model.embed_tokens.weight[IDS[0]]
    swapped, _ = dense_step(drafter, feature[0], embeds, positions)
    late, _ = dense_step(drafter, embeds, feature[0], positions * 2)
    for wrong in (swapped, late):
        assert (hidden[0] - wrong).abs().max() > 0.1


def test_residual_stream_is_the_feature_not_its_norm(target: TargetModel) -> None:
    """With attention and MLP switched off, the feature comes out as it went in."""
    drafter = make_head(target)
    drafter.midlayer.self_attn.o_proj.weight.zero_()
    drafter.midlayer.mlp.down_proj.weight.zero_()
    feature = drafter.fuse(features(target, drafter))
    hidden, following = drafter(feature, IDS, torch.arange(LENGTH)[None], causal)
    assert torch.equal(following, feature)
    assert (hidden - drafter.norm(feature)).abs().max() < 1e-12


def test_residual_stream_can_be_the_normed_feature(target: TargetModel) -> None:
    drafter = make_head(target, norm_before_residual=True)
    drafter.midlayer.self_attn.o_proj.weight.zero_()
    drafter.midlayer.mlp.down_proj.weight.zero_()
    feature = drafter.fuse(features(target, drafter))
    _, following = drafter(feature, IDS, torch.arange(LENGTH)[None], causal)
    eps, weight = drafter.config.rms_norm_eps, drafter.midlayer.hidden_norm.weight
    assert (following - norm(feature, weight, eps)).abs().max() < 1e-12


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_gradients_equal_those_of_the_dense_layer(
    target: TargetModel, norm_before_residual: bool, recompute: bool
) -> None:
    """Of every weight of the layer and of the feature, recomputed or kept."""
    drafter = make_head(target, norm_before_residual=norm_before_residual).requires_grad_()
    drafter.midlayer.recompute = recompute
    feature = drafter.fuse(features(target, drafter)).detach().requires_grad_()
    positions = torch.arange(LENGTH)
    embeds = target.model.model.embed_tokens.weight[IDS[0]]
    direction = torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(2)).double()
    inputs = {**dict(drafter.midlayer.named_parameters()), "feature": feature}

    hidden, _ = drafter(feature, IDS, positions[None], causal)
    found = torch.autograd.grad((hidden[0] * direction).sum(), list(inputs.values()))
    normed, _ = dense_step(drafter, embeds, feature[0], positions)
    wanted = torch.autograd.grad((normed * direction).sum(), list(inputs.values()))
    for name, one, other in zip(inputs, found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10, msg=name)


@pytest.mark.parametrize("option", [None, "fc_norm", "norm_before_fc"])
def test_fusion(target: TargetModel, option: str | None) -> None:
    """One matrix over the captured layers in order, each normed on its own in 3.1, or all as one
    vector.
    """
    options = {} if option is None else {option: True}
    drafter = make_head(target, feature_layers=[0, 3, 5], **options)
    assert drafter.feature_layers == (0, 3, 5)
    captured, eps = features(target, drafter), drafter.config.rms_norm_eps
    fused = captured[0]
    if drafter.input_norm is not None:
        fused = norm(fused, drafter.input_norm.weight, eps)
    parts = [fused[:, i * HIDDEN : (i + 1) * HIDDEN] for i in range(3)]
    if drafter.fc_norm is not None:
        parts = [norm(p, n.weight, eps) for p, n in zip(parts, drafter.fc_norm, strict=True)]
    wanted = sum(
        part @ drafter.fc.weight[:, i * HIDDEN : (i + 1) * HIDDEN].T for i, part in enumerate(parts)
    )
    assert (drafter.fuse(captured)[0] - wanted).abs().max() < 1e-11


def test_only_one_norm_before_the_fusion(target: TargetModel) -> None:
    with pytest.raises(ValueError, match=r"fc_norm and norm_before_fc .* choose one"):
        build_drafter("eagle3", target, fc_norm=True, norm_before_fc=True)


def test_two_steps_feed_back_as_configured(target: TargetModel) -> None:
    """The second step of EAGLE-3 starts from the un-normed output, that of 3.1 from the normed."""
    for norm_output in (False, True):
        drafter = make_head(target, norm_output=norm_output)
        feature = drafter.fuse(features(target, drafter))
        positions = torch.arange(LENGTH)
        _, following = drafter(feature, IDS, positions[None], causal)
        second, _ = drafter(following, IDS.roll(-1, 1), positions[None] + 1, causal)
        embeds = [target.model.model.embed_tokens.weight[i[0]] for i in (IDS, IDS.roll(-1, 1))]
        results = dense_step(drafter, embeds[0], feature[0], positions)
        right, wrong = results if norm_output else results[::-1]
        assert (
            second[0] - dense_step(drafter, embeds[1], right, positions + 1)[0]
        ).abs().max() < 1e-11
        assert (
            second[0] - dense_step(drafter, embeds[1], wrong, positions + 1)[0]
        ).abs().max() > 0.1


def test_shape_is_taken_from_the_target(target: TargetModel) -> None:
    config = build_drafter("eagle3", target).config
    theirs = target.config
    assert config.head_dim == theirs.head_dim == 8
    for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"):
        assert getattr(config, name) == getattr(theirs, name)
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.feature_layers == default_feature_layers(6)


def test_initial_values_come_from_the_target(target: TargetModel) -> None:
    """Output matrix, final norm and last layer are copies, and training them leaves it alone."""
    drafter = build_drafter("eagle3", target, feature_layers=[0, 3, 5]).double()
    drafter.set_draft_vocab(torch.arange(VOCAB))
    last, model = drafter.midlayer, target.model.model
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight)
    assert torch.equal(last.mlp.up_proj.weight, model.layers[-1].mlp.up_proj.weight)
    feature_half = last.self_attn.k_proj.weight[:, HIDDEN:]
    assert torch.equal(feature_half, model.layers[-1].self_attn.k_proj.weight)
    before = [p.clone() for p in target.model.parameters()]
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, target.model.parameters(), strict=True))


def test_untrained_head_repeats_the_last_layer(target: TargetModel) -> None:
    """With the embedding half switched off and the fusion the identity, it is the target's end."""
    drafter = build_drafter("eagle3", target, feature_layers=[0, 3, 5]).double()
    drafter.set_draft_vocab(torch.arange(VOCAB))
    with torch.no_grad():
        for name in "qkv":
            getattr(drafter.midlayer.self_attn, f"{name}_proj").weight[:, :HIDDEN] = 0
        captured = features(target, drafter)
        hidden, _ = drafter(captured[..., -HIDDEN:], IDS, torch.arange(LENGTH)[None], causal)
        logits = drafter.logits(hidden)
    assert (logits - target.forward(IDS).logits).abs().max() < 1e-5
