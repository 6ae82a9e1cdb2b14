"""Hydra's heads: what they read, what they are untrained, and that no two share anything."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from drafters import TargetModel, build_drafter, load_drafter
from drafters.hydra import HydraDrafter
from tests.tiny import tiny_target
from tests.zoo import zoo_target

LENGTH, HIDDEN, VOCAB = 9, 32, 96
IDS = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(LENGTH).expand(2, LENGTH)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


def untrained(target: TargetModel, **options: object) -> HydraDrafter:
    drafter = build_drafter("hydra", target, **options).double()
    drafter.set_draft_vocab(torch.arange(target.vocab_size).flip(0))
    return drafter


def perturbed(target: TargetModel, **options: object) -> HydraDrafter:
    drafter = untrained(target, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.3 * noise
    return drafter.requires_grad_(False)


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert layer == 0
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def run(drafter: HydraDrafter, hidden: Tensor, ids: Tensor = IDS) -> list[Tensor]:
    """Output rows of every head, each (B, T, D); those near the end hold wrapped-around tokens."""
    feature, rows = drafter.begin(None, hidden, POSITIONS, causal), []
    for depth in range(drafter.num_drafts):
        out, feature = drafter(feature, ids.roll(-1 - depth, 1), POSITIONS + depth, causal, depth)
        rows.append(out)
    return rows


OPTIONS: dict[str, dict] = {
    "default": {},
    "deep": {"num_heads": 2, "mlp_layers": 3},
    "shared": {"shared_lm_head": True},
    "plus": {"num_heads": 3, "mlp_layers": 2, "num_layers": 1},
    "plus with norms": {"num_heads": 2, "num_layers": 1, "qk_norm": True},
    "biased": {"num_heads": 2, "lm_head_bias": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_untrained_heads_repeat_the_target(target: TargetModel, options: dict) -> None:
    drafter = untrained(target, **options)
    out = target.forward(IDS)
    with torch.no_grad():
        for depth, rows in enumerate(run(drafter, out.last_hidden)):
            assert (drafter.logits(rows, depth) - out.logits).abs().max() < 1e-11


@pytest.mark.parametrize(
    "name", ["blocks.2.0.skip.weight", "blocks.2.0.linear.weight", "prefix.mlp.down_proj.weight"]
)
def test_a_touched_head_does_not(target: TargetModel, name: str) -> None:
    """Negative control."""
    drafter = untrained(target, num_layers=1)
    out = target.forward(IDS)
    with torch.no_grad():
        drafter.get_parameter(name).add_(0.1)
        logits = drafter.logits(run(drafter, out.last_hidden)[2], 2)
    assert (logits - out.logits).abs().max() > 1e-3


@pytest.mark.parametrize("architecture", ["granite", "gemma2", "cohere"])
@pytest.mark.parametrize("options", [{"shared_lm_head": True}, {"num_layers": 1}])
def test_other_targets_start_right_too(architecture: str, options: dict) -> None:
    """Scaled logits, soft capping (through the target's own matrix only) and layers of another
    layout than Llama's.
    """
    made = zoo_target(architecture)
    drafter, out = untrained(made, **options), made.forward(IDS)
    with torch.no_grad():
        logits = drafter.logits(run(drafter, out.last_hidden)[1], 1)
    if architecture == "gemma2" and "shared_lm_head" not in options:
        logits = 20.0 * (logits / 20.0).tanh()
    assert (logits - out.logits).abs().max() < 1e-6


@pytest.mark.parametrize("shared", [False, True])
def test_untrained_reduced_head_repeats_its_part_of_the_target(
    target: TargetModel, shared: bool
) -> None:
    drafter = untrained(target, draft_vocab_size=40, shared_lm_head=shared)
    out = target.forward(IDS)
    with torch.no_grad():
        logits = drafter.logits(run(drafter, out.last_hidden)[1], 1)
    assert logits.shape[-1] == 40
    assert (logits - out.logits[..., drafter.draft_vocab]).abs().max() < 1e-11


def test_heads_equal_their_formula(target: TargetModel) -> None:
    """Hidden state first, then the embeddings in order; skip and inner map read all of them."""
    drafter = perturbed(target, num_heads=3, mlp_layers=2)
    hidden = target.forward(IDS).last_hidden
    weights = dict(drafter.named_parameters())
    embedding = target.embedding.weight
    for depth, rows in enumerate(run(drafter, hidden)):
        inputs = [hidden] + [embedding[IDS.roll(-1 - i, 1)] for i in range(depth + 1)]
        x = 0
        inner = 0
        for part, values in enumerate(inputs):
            span = slice(part * HIDDEN, (part + 1) * HIDDEN)
            x = x + values @ weights[f"blocks.{depth}.0.skip.weight"][:, span].T
            inner = inner + values @ weights[f"blocks.{depth}.0.linear.weight"][:, span].T
        inner = inner + weights[f"blocks.{depth}.0.linear.bias"]
        x = x + weights[f"blocks.{depth}.0.skip.bias"] + inner / (1 + (-inner).exp())
        inner = x @ weights[f"blocks.{depth}.1.linear.weight"].T
        inner = inner + weights[f"blocks.{depth}.1.linear.bias"]
        x = x + inner / (1 + (-inner).exp())
        assert (rows - x).abs().max() < 1e-11
        logits = x @ weights[f"lm_heads.{depth}.weight"].T
        assert (drafter.logits(rows, depth) - logits).abs().max() < 1e-10


@pytest.mark.parametrize("head", [0, 1, 2])
def test_a_head_reads_the_tokens_of_its_path_and_no_others(target: TargetModel, head: int) -> None:
    """Row t of head i changes with tokens t+1 .. t+1+i, the hidden state held fixed."""
    drafter = perturbed(target, num_heads=3)
    hidden, row = target.forward(IDS).last_hidden, 2
    before = run(drafter, hidden)[head][0, row]
    moved = []
    for place in range(LENGTH):
        ids = IDS.clone()
        ids[0, place] = (ids[0, place] + 1) % VOCAB
        change = (run(drafter, hidden, ids)[head][0, row] - before).abs().max()
        if change > 0:
            moved.append(place)
    assert moved == list(range(row + 1, row + 2 + head))


def test_prefix_layer_is_a_llama_layer_on_the_last_hidden_states(target: TargetModel) -> None:
    """Against transformers' own layer with the same weights; its output replaces h."""
    drafter = perturbed(target, num_heads=2, num_layers=1)
    hidden = target.forward(IDS).last_hidden
    layer = tiny_target().model.model.layers[0]
    layer.load_state_dict(drafter.prefix.state_dict())
    model = target.model.model
    mask = torch.ones(LENGTH, LENGTH).tril().log().double()[None, None]
    with torch.no_grad():
        wanted = layer(
            hidden,
            attention_mask=mask,
            position_ids=POSITIONS,
            position_embeddings=model.rotary_emb(hidden, POSITIONS),
        )
    found = drafter.begin(None, hidden, POSITIONS, causal)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    assert (found - wanted).abs().max() < 1e-4  # their rotation is in float32
    assert (found - hidden).abs().max() > 0.1
    assert drafter.windows == [None]
    assert perturbed(target).windows == []


def test_a_prefix_norm_norms_what_the_prefix_layer_gives(target: TargetModel) -> None:
    plain = perturbed(target, num_heads=2, num_layers=1)
    normed = perturbed(target, num_heads=2, num_layers=1, prefix_norm=True)
    weight = normed.prefix_norm.weight
    normed.load_state_dict({**plain.state_dict(), "prefix_norm.weight": weight})
    hidden = target.forward(IDS).last_hidden
    wanted = F.rms_norm(plain.begin(None, hidden, POSITIONS, causal), (HIDDEN,), weight, 1e-6)
    assert (normed.begin(None, hidden, POSITIONS, causal) - wanted).abs().max() < 1e-5
    assert weight.std() > 0.1


def test_an_untrained_prefix_norm_nearly_repeats_the_target() -> None:
    """It starts with the size that the target's own final norm gives."""
    target = tiny_target()
    with torch.no_grad():
        target.model.model.norm.weight.fill_(1.7)
    drafter, out = (
        untrained(target, num_heads=1, num_layers=1, prefix_norm=True),
        target.forward(IDS),
    )
    with torch.no_grad():
        logits = drafter.logits(run(drafter, out.last_hidden)[0], 0)
    assert (logits - out.logits).abs().max() < 1e-4 * out.logits.abs().max()


def test_biases_of_output_matrices_are_added(target: TargetModel) -> None:
    drafter = perturbed(target, num_heads=2, lm_head_bias=True)
    rows = torch.randn(3, HIDDEN, dtype=torch.float64)
    linear = drafter.lm_heads[1]
    wanted = rows @ linear.weight.T + linear.bias
    assert (drafter.logits(rows, 1) - wanted).abs().max() < 1e-12
    assert linear.bias.abs().min() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_norm": True}, "prefix_norm belongs to the prefix layer"),
        ({"lm_head_bias": True, "shared_lm_head": True}, "lm_head_bias has no effect"),
    ],
)
def test_switches_without_effect_are_refused(
    target: TargetModel, options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_drafter("hydra", target, **options)


def test_blocks_are_distinct(target: TargetModel) -> None:
    """K·L modules of their own, none of them twice (the classic `[block] * n` mistake)."""
    drafter = build_drafter("hydra", target, num_heads=3, mlp_layers=3)
    linears = [m for m in drafter.blocks.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 3 * (2 + 2)
    assert len({m.weight.data_ptr() for m in linears}) == len(linears)
    widths = [block[0].linear.in_features for block in drafter.blocks]
    assert widths == [2 * HIDDEN, 3 * HIDDEN, 4 * HIDDEN]
    narrowing = sum(2 * (width * HIDDEN + HIDDEN) for width in widths)
    further = 3 * 2 * (HIDDEN * HIDDEN + HIDDEN)
    assert drafter.num_parameters_trained() == narrowing + further + 3 * VOCAB * HIDDEN


def test_output_matrices_are_copies_of_a_tied_embedding() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    made = TargetModel(LlamaForCausalLM(config).double())
    drafter = untrained(made, num_heads=2)
    before = made.embedding.weight.clone()
    pointers = {linear.weight.data_ptr() for linear in drafter.lm_heads}
    assert len(pointers | {made.embedding.weight.data_ptr()}) == 3
    optimizer = torch.optim.SGD(drafter.parameters(), lr=1.0)
    rows = run(drafter, made.forward(IDS).last_hidden)
    drafter.logits(rows[0], 0).square().sum().backward()
    optimizer.step()
    assert (drafter.lm_heads[0].weight - before).abs().max() > 1e-3
    assert torch.equal(drafter.lm_heads[1].weight, before)
    assert torch.equal(made.embedding.weight, before)


def test_shared_matrix_stays_frozen_but_passes_gradients_on(target: TargetModel) -> None:
    drafter = untrained(target, shared_lm_head=True)
    assert drafter.output_modules() == [None]
    drafter.logits(run(drafter, target.forward(IDS).last_hidden)[0], 0).square().sum().backward()
    assert target.lm_head.weight.grad is None
    assert target.embedding.weight.grad is None
    assert drafter.blocks[0][0].skip.weight.grad.abs().max() > 0
    assert all(name.startswith("blocks") for name, _ in drafter.named_parameters())


def test_every_trained_tensor_gets_a_gradient(target: TargetModel) -> None:
    """After one step away from the start, where zero outputs hide what is behind them."""
    drafter = perturbed(target, num_heads=3, mlp_layers=2, num_layers=1).requires_grad_(True)
    rows = run(drafter, target.forward(IDS).last_hidden)
    sum(drafter.logits(row, i).square().sum() for i, row in enumerate(rows)).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in drafter.parameters())


def test_save_and_load(target: TargetModel, tmp_path: Path) -> None:
    drafter = perturbed(target, num_heads=2, num_layers=1, draft_vocab_size=40)
    drafter.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, target, dtype=torch.float64)
    assert isinstance(loaded, HydraDrafter)
    hidden = target.forward(IDS).last_hidden
    for a, b in zip(run(drafter, hidden), run(loaded, hidden), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(loaded.draft_vocab, drafter.draft_vocab)


@pytest.mark.parametrize("field", ["num_heads", "mlp_layers"])
def test_counts_are_checked(target: TargetModel, field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least 1"):
        build_drafter("hydra", target, **{field: 0})


def test_at_most_one_prefix_layer(target: TargetModel) -> None:
    with pytest.raises(ValueError, match="num_layers"):
        build_drafter("hydra", target, num_layers=2)
