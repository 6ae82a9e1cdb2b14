"""Medusa's heads: what they are untrained, and that no two of them share anything."""

import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from drafters import MedusaDrafter, TargetModel, build_drafter
from tests.tiny import tiny_target

HIDDEN, VOCAB = 32, 96
IDS = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


def tied_target() -> TargetModel:
    torch.manual_seed(0)
    return TargetModel(LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).double())


def granite_target() -> TargetModel:
    torch.manual_seed(0)
    return TargetModel(GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=8.0)).double())


def gemma2_target() -> TargetModel:
    torch.manual_seed(0)
    config = Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=3.0)
    return TargetModel(Gemma2ForCausalLM(config).double())


def untrained(target: TargetModel, **options: object) -> MedusaDrafter:
    drafter = build_drafter("medusa", target, **options).double()
    drafter.set_draft_vocab(torch.arange(VOCAB).flip(0))
    return drafter


@torch.no_grad()
def largest_difference(target: TargetModel, drafter: MedusaDrafter) -> float:
    """Between the law of any head and the target's law on the same row."""
    out = target.forward(IDS)
    law = out.logits.softmax(-1)
    rows = drafter(out.last_hidden)
    return max(
        (drafter.logits(row, head).softmax(-1) - law).abs().max().item()
        for head, row in enumerate(rows)
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"num_heads": 2, "num_layers": 3}, {"shared_lm_head": True}],
    ids=["default", "three layers", "shared"],
)
def test_untrained_heads_repeat_the_target(target: TargetModel, options: dict) -> None:
    assert largest_difference(target, untrained(target, **options)) < 1e-12


@pytest.mark.parametrize("shared", [False, True])
def test_a_touched_head_does_not(target: TargetModel, shared: bool) -> None:
    """Negative control."""
    drafter = untrained(target, shared_lm_head=shared)
    with torch.no_grad():
        drafter.blocks[2][0].linear.weight += 0.1
    assert largest_difference(target, drafter) > 1e-3


@pytest.mark.parametrize("make", [tied_target, granite_target])
@pytest.mark.parametrize("shared", [False, True])
def test_untrained_heads_repeat_targets_that_tie_or_scale(make, shared: bool) -> None:
    """Granite divides its logits: a bare copy of its matrix would be far too sure of itself."""
    made = make()
    assert largest_difference(made, untrained(made, shared_lm_head=shared)) < 1e-12


def test_shared_matrix_includes_soft_capping() -> None:
    made = gemma2_target()
    assert largest_difference(made, untrained(made, shared_lm_head=True)) < 1e-12


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("make", [tiny_target, granite_target, gemma2_target])
def test_untrained_reduced_head_repeats_its_part_of_the_target(make, shared: bool) -> None:
    """Gemma 2's soft capping is only in the target's own way from rows to logits."""
    made = make()
    if made.config.model_type == "gemma2" and not shared:
        return
    drafter = untrained(made, draft_vocab_size=40, shared_lm_head=shared)
    out = made.forward(IDS)
    with torch.no_grad():
        logits = drafter.logits(drafter(out.last_hidden)[1], 1)
    assert (logits - out.logits[..., drafter.draft_vocab]).abs().max() < 1e-11
    assert logits.shape[-1] == 40


def test_blocks_are_distinct(target: TargetModel) -> None:
    """K·L modules with K·L matrices, none of them twice (the classic `[block] * n` mistake)."""
    drafter = build_drafter("medusa", target, num_heads=3, num_layers=4)
    linears = [m for m in drafter.blocks.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 12
    assert len({id(m) for m in linears}) == 12
    assert len({m.weight.data_ptr() for m in linears}) == 12
    with torch.no_grad():
        for value, linear in enumerate(linears):
            linear.bias.fill_(float(value))
    assert [m.bias[0].item() for m in linears] == list(range(12))
    expected = 12 * (HIDDEN * HIDDEN + HIDDEN) + 3 * VOCAB * HIDDEN
    assert drafter.num_parameters_trained() == expected


def test_every_block_starts_at_zero(target: TargetModel) -> None:
    drafter = build_drafter("medusa", target, num_heads=3, num_layers=2)
    assert all((p == 0).all() for p in drafter.blocks.parameters())
    assert not any((p == 0).all() for p in drafter.lm_heads.parameters())


def test_block_is_the_residual_one(target: TargetModel) -> None:
    drafter = build_drafter("medusa", target, num_heads=2, num_layers=2).double()
    torch.manual_seed(3)
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        for parameter in drafter.blocks.parameters():
            parameter.normal_()
        wanted = x
        for block in drafter.blocks[1]:
            inner = wanted @ block.linear.weight.T + block.linear.bias
            wanted = wanted + inner / (1 + (-inner).exp())
        found = drafter(x)
    assert found.shape == (2, 5, HIDDEN)
    assert (found[1] - wanted).abs().max() < 1e-12
    assert (found[0] - found[1]).abs().max() > 0.1


def test_output_matrices_are_copies_of_a_tied_embedding() -> None:
    """An alias would let training the head edit the target's embedding."""
    made = tied_target()
    assert made.lm_head.weight is made.embedding.weight
    drafter = untrained(made, num_heads=2)
    before, logits = made.embedding.weight.clone(), made.forward(IDS).logits
    pointers = {linear.weight.data_ptr() for linear in drafter.lm_heads}
    assert len(pointers | {made.embedding.weight.data_ptr()}) == 3
    optimizer = torch.optim.SGD(drafter.parameters(), lr=1.0)
    drafter.logits(drafter(torch.randn(4, HIDDEN).double())[0], 0).square().sum().backward()
    optimizer.step()
    assert (drafter.lm_heads[0].weight - before).abs().max() > 1e-3
    assert torch.equal(drafter.lm_heads[1].weight, before)
    assert torch.equal(made.embedding.weight, before)
    assert torch.equal(made.forward(IDS).logits, logits)


def test_shared_matrix_stays_frozen(target: TargetModel) -> None:
    drafter = untrained(target, shared_lm_head=True)
    assert drafter.lm_heads is None
    drafter.logits(drafter(torch.randn(4, HIDDEN).double())[0], 0).sum().backward()
    assert target.lm_head.weight.grad is None
    assert drafter.blocks[0][0].linear.weight.grad.abs().max() > 0
    names = [name for name, _ in drafter.named_parameters()]
    assert all(name.startswith("blocks") for name in names)
