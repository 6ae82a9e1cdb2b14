"""EAGLE-1's step against a dense re-implementation with plain matrix products, float64."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafters import TargetModel, build_drafter, load_drafter
from drafters.eagle1 import Eagle1Drafter
from tests.drafters.test_eagle import norm, turn
from tests.tiny import tiny_target
from tests.zoo import zoo_target

LENGTH, HIDDEN, VOCAB = 7, 32, 96
IDS = torch.randint(VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


def untrained(target: TargetModel, **options: object) -> Eagle1Drafter:
    drafter = build_drafter("eagle1", target, **options).double()
    drafter.set_draft_vocab(torch.arange(target.vocab_size))
    return drafter


def perturbed(target: TargetModel, **options: object) -> Eagle1Drafter:
    """With every weight and norm moved off its initial value."""
    drafter = untrained(target, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.3 * noise
    return drafter.requires_grad_(False)


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def run(drafter: Eagle1Drafter, hidden: Tensor, start: int = 0) -> Tensor:
    """(1, T, D) estimates of one causal step over IDS."""
    positions = torch.arange(start, start + LENGTH)[None]
    feature = drafter.begin(None, hidden, positions, causal)
    return drafter(feature, IDS, positions, causal)[0]


def dense_step(
    drafter: Eagle1Drafter, pair: Tensor, positions: Tensor, normed: bool = False
) -> Tensor:
    """(T, 2D) pairs -> (T, D), written out head by head."""
    config, weights = drafter.config, dict(drafter.named_parameters())
    eps, hidden = config.rms_norm_eps, pair @ weights["fc.weight"].T
    if config.fc_bias:
        hidden = hidden + weights["fc.bias"]
    for layer in range(config.num_layers):

        def w(name: str, layer: int = layer) -> Tensor:
            return weights[f"layers.{layer}.{name}.weight"]

        inner = norm(hidden, w("input_layernorm"), eps) if layer else hidden
        inner = norm(inner, torch.ones(HIDDEN).double(), eps) if normed else inner
        q, k, v = (inner @ w(f"self_attn.{name}_proj").T for name in "qkv")
        size, heads = config.head_dim, []
        for head in range(config.num_attention_heads):
            group = head // (config.num_attention_heads // config.num_key_value_heads)
            one = q[:, head * size : (head + 1) * size]
            key = k[:, group * size : (group + 1) * size]
            if config.qk_norm:
                one, key = (
                    norm(one, w("self_attn.q_norm"), eps),
                    norm(key, w("self_attn.k_norm"), eps),
                )
            one, key = (turn(x, positions, config.rope_theta) for x in (one, key))
            scores = one @ key.T / math.sqrt(size)
            unseen = ~torch.ones_like(scores).tril().bool()
            weight = scores.masked_fill(unseen, -math.inf).softmax(-1)
            heads.append(weight @ v[:, group * size : (group + 1) * size])
        hidden = hidden + torch.cat(heads, dim=-1) @ w("self_attn.o_proj").T
        inner = norm(hidden, w("post_attention_layernorm"), eps)
        gate = inner @ w("mlp.gate_proj").T
        inner = gate * gate.sigmoid() * (inner @ w("mlp.up_proj").T)
        hidden = hidden + inner @ w("mlp.down_proj").T
    return hidden


OPTIONS: dict[str, dict] = {
    "default": {},
    "bias": {"fc_bias": True},
    "two layers": {"num_layers": 2},
    "norms of queries and keys": {"num_layers": 2, "qk_norm": True},
}


@pytest.mark.parametrize("start", [0, 13])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_step_equals_the_dense_layers(target: TargetModel, options: dict, start: int) -> None:
    drafter, hidden = perturbed(target, **options), target.forward(IDS).last_hidden
    positions = torch.arange(start, start + LENGTH)
    embeds = target.embedding.weight[IDS[0]]
    wanted = dense_step(drafter, torch.cat((embeds, hidden[0]), dim=-1), positions)
    found = run(drafter, hidden, start)
    assert (found[0] - wanted).abs().max() < 1e-10
    logits = drafter.logits(found)
    assert (logits[0] - wanted @ target.lm_head.weight.T).abs().max() < 1e-10


def test_dense_layers_tell_variants_apart(target: TargetModel) -> None:
    """Negative control: the embedding is first, positions turn, the first layer has no norm."""
    drafter, hidden = perturbed(target), target.forward(IDS).last_hidden
    positions, embeds = torch.arange(LENGTH), target.embedding.weight[IDS[0]]
    found = run(drafter, hidden)[0]
    right = torch.cat((embeds, hidden[0]), dim=-1)
    for wrong in (
        dense_step(drafter, torch.cat((hidden[0], embeds), dim=-1), positions),
        dense_step(drafter, right, positions * 2),
        dense_step(drafter, right, positions, normed=True),
    ):
        assert (found - wrong).abs().max() > 0.1


def test_second_step_feeds_the_estimate_back(target: TargetModel) -> None:
    drafter, hidden = perturbed(target), target.forward(IDS).last_hidden
    positions = torch.arange(LENGTH)
    first, following = drafter(hidden, IDS, positions[None], causal)
    assert torch.equal(first, following)
    later = IDS.roll(-1, 1)
    second, _ = drafter(following, later, positions[None] + 1, causal, 1)
    pair = torch.cat((target.embedding.weight[later[0]], first[0]), dim=-1)
    assert (second[0] - dense_step(drafter, pair, positions + 1)).abs().max() < 1e-10


def test_tensors_are_those_the_engines_load(target: TargetModel) -> None:
    layer = {f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"}
    layer |= {f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    layer |= {"layers.0.post_attention_layernorm.weight"}
    assert set(untrained(target).state_dict()) == {"fc.weight", *layer}
    more = {name.replace("layers.0", "layers.1") for name in layer}
    more |= {"layers.1.input_layernorm.weight", "fc.weight", "fc.bias", *layer}
    assert set(untrained(target, num_layers=2, fc_bias=True).state_dict()) == more


def test_the_feature_is_what_the_output_matrix_reads(target: TargetModel) -> None:
    """After the final norm: through the head's logits it is the target's own law."""
    drafter, out = untrained(target), target.forward(IDS)
    positions = torch.arange(LENGTH)[None]
    feature = drafter.begin(None, out.last_hidden, positions, causal)
    assert (drafter.logits(feature) - out.logits).abs().max() < 1e-12
    assert drafter.feature_layers == ()


@pytest.mark.parametrize("architecture", ["gemma2", "granite", "cohere", "phi"])
def test_logits_are_borrowed_with_scale_cap_and_bias(architecture: str) -> None:
    made = zoo_target(architecture)
    whole, part = untrained(made), untrained(made, draft_vocab_size=40)
    out = made.forward(IDS)
    assert (whole.logits(out.last_hidden) - out.logits).abs().max() < 1e-5
    reduced = part.logits(out.last_hidden)
    assert reduced.shape[-1] == 40
    assert (reduced - out.logits[..., part.draft_vocab]).abs().max() < 1e-5


def test_the_borrowed_matrix_stays_frozen_but_passes_gradients_on(target: TargetModel) -> None:
    for options in ({}, {"draft_vocab_size": 40}):
        drafter = perturbed(target, **options).requires_grad_(True)
        drafter.logits(run(drafter, target.forward(IDS).last_hidden)).square().sum().backward()
        assert target.lm_head.weight.grad is None
        assert target.embedding.weight.grad is None
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in drafter.parameters())
        assert drafter.output_modules() == []


# --- the start


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_untrained_head_repeats_the_target_stirred_by_the_token(
    target: TargetModel, options: dict
) -> None:
    """Without the embedding it says what the target said; the embedding adds half as much."""
    drafter, out = untrained(target, **options), target.forward(IDS)
    with torch.no_grad():
        estimate = run(drafter, out.last_hidden)
        added = estimate - out.last_hidden
        size = added.square().mean().sqrt() / out.last_hidden.square().mean().sqrt()
        assert 0.3 < size < 0.8
        drafter.fc.weight[:, :HIDDEN] = 0
        assert (drafter.logits(run(drafter, out.last_hidden)) - out.logits).abs().max() < 1e-11


@pytest.mark.parametrize("architecture", ["gemma3_text", "granite", "gpt2", "olmo2"])
def test_other_targets_start_sensibly(architecture: str) -> None:
    """Scaled embeddings and layers of another layout: finite, and no surer than the target."""
    made = zoo_target(architecture)
    drafter, out = untrained(made), made.forward(IDS)
    with torch.no_grad():
        estimate = run(drafter, out.last_hidden)
    assert estimate.isfinite().all()
    added, whole = (x.square().mean().sqrt() for x in (estimate - out.last_hidden, out.last_hidden))
    assert 0.1 < added / whole < 1.0
    assert drafter.logits(estimate).std() < 2 * out.logits.std()


def test_the_start_leaves_the_target_alone(target: TargetModel) -> None:
    before = [p.clone() for p in target.model.parameters()]
    drafter = untrained(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, target.model.parameters(), strict=True))


def test_save_and_load(target: TargetModel, tmp_path: Path) -> None:
    drafter = perturbed(target, num_layers=2, fc_bias=True, draft_vocab_size=40)
    drafter.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, target, dtype=torch.float64)
    assert isinstance(loaded, Eagle1Drafter)
    hidden = target.forward(IDS).last_hidden
    found, wanted = run(loaded, hidden), run(drafter, hidden)
    assert torch.equal(found, wanted)
    assert torch.equal(loaded.logits(found), drafter.logits(wanted))
