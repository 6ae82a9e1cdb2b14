"""Heads that start from other heads: what is copied, by which name, and what is left alone."""

from typing import Any

import pytest
import torch

from drafters import TargetModel, build_drafter, load_drafter
from drafters.mtp_native import load_native_mtp
from drafters.warm import warm_start
from tests.native_mtp import load_checkpoint, save_checkpoint
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


def head(target: TargetModel, family: str, seed: int, common: int = 0, **options: Any) -> Any:
    """A head with noise everywhere; ``common`` chooses which tokens are frequent."""
    found = build_drafter(family, target, seed=seed, **options).double()
    counts = (torch.arange(target.vocab_size) + common) % target.vocab_size
    found.set_draft_vocab(counts)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in found.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator).double()
    return found


def weights(drafter: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in drafter.named_parameters()}


SAME: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 2},
    "hydra": {"num_heads": 2, "num_layers": 1},
    "eagle1": {},
    "eagle3": {"fc_norm": True},
    "mtp": {},
    "peagle": {"norm_before_fc": True},
    "dflash": {},
    "dspark": {"markov_rank": 8, "markov_type": "gated"},
}


@pytest.mark.parametrize("family", SAME)
def test_a_head_of_the_same_shape_is_copied_whole(target: TargetModel, family: str) -> None:
    options = {**SAME[family], "draft_vocab_size": 48, "confidence_head": True}
    new, old = head(target, family, 1, **options), head(target, family, 2, **options)
    copied = warm_start(new, old)
    assert set(copied) == set(weights(new))
    for name, weight in weights(new).items():
        assert torch.equal(weight, weights(old)[name]), name


FEWER: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "medusa heads": ("medusa", {"num_heads": 2}, {"num_heads": 4}),
    "medusa blocks": ("medusa", {"num_heads": 2}, {"num_heads": 2, "num_layers": 2}),
    "hydra heads": ("hydra", {"num_heads": 2}, {"num_heads": 4, "num_layers": 1}),
    "eagle1 layers": ("eagle1", {}, {"num_layers": 2}),
    "eagle3 layers": ("eagle3", {}, {"num_layers": 3}),
    "mtp modules": ("mtp", {"num_modules": 2}, {"num_modules": 3}),
    "peagle drafts": ("peagle", {"num_drafts": 3}, {"num_drafts": 8}),
    "dflash block": (
        "dflash",
        {"block_size": 4, "num_layers": 1},
        {"block_size": 8, "num_layers": 2},
    ),
    "jetspec": ("dflash", {"causal": True}, {}),
    "dspark block": ("dspark", {"block_size": 3}, {"block_size": 7}),
}


@pytest.mark.parametrize("name", FEWER)
def test_a_smaller_head_is_filled_from_a_larger_one(target: TargetModel, name: str) -> None:
    family, small, large = FEWER[name]
    new, old = head(target, family, 1, **small), head(target, family, 2, **large)
    assert set(warm_start(new, old)) == set(weights(new))
    for key, weight in weights(new).items():
        assert torch.equal(weight, weights(old)[key]), key


@pytest.mark.parametrize("name", FEWER)
def test_a_larger_head_takes_what_a_smaller_one_has(target: TargetModel, name: str) -> None:
    family, small, large = FEWER[name]
    new, old = head(target, family, 1, **large), head(target, family, 2, **small)
    before = weights(new)
    copied = set(warm_start(new, old))
    assert copied == set(weights(old))
    for key, weight in weights(new).items():
        assert torch.equal(weight, weights(old)[key] if key in copied else before[key]), key


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("eagle3", "lm_head.weight"),
        ("peagle", "lm_head.weight"),
        ("medusa", "lm_heads.1.weight"),
        ("hydra", "lm_heads.1.weight"),
        ("dspark", "markov_head.markov_w2.weight"),
    ],
)
@pytest.mark.parametrize(("mine", "theirs"), [(40, 40), (60, 40), (96, 40), (40, 96)])
def test_output_rows_go_by_token(
    target: TargetModel, family: str, name: str, mine: int, theirs: int
) -> None:
    new = head(target, family, 1, common=20, draft_vocab_size=mine)
    old = head(target, family, 2, draft_vocab_size=theirs)
    before = weights(new)[name]
    assert name in warm_start(new, old)
    whole = list(range(target.vocab_size))
    mine_ids = whole if new.draft_vocab is None else new.draft_vocab.tolist()
    their_ids = whole if old.draft_vocab is None else old.draft_vocab.tolist()
    shared = set(mine_ids) & set(their_ids)
    assert shared and mine_ids != their_ids
    for row, token in enumerate(mine_ids):
        wanted = weights(old)[name][their_ids.index(token)] if token in shared else before[row]
        assert torch.equal(weights(new)[name][row], wanted), token


def test_biases_of_output_rows_go_by_token(target: TargetModel) -> None:
    new = head(target, "hydra", 1, common=20, draft_vocab_size=40, lm_head_bias=True)
    old = head(target, "hydra", 2, draft_vocab_size=40, lm_head_bias=True)
    assert new.draft_vocab.tolist() != old.draft_vocab.tolist()
    assert "lm_heads.0.bias" in warm_start(new, old)
    mine, theirs = weights(new)["lm_heads.0.bias"], weights(old)["lm_heads.0.bias"]
    shared = set(new.draft_vocab.tolist()) & set(old.draft_vocab.tolist())
    for token in shared:
        row, other = new.draft_vocab.tolist().index(token), old.draft_vocab.tolist().index(token)
        assert mine[row] == theirs[other]


def test_rows_that_stand_for_target_tokens_stay_where_they_are(target: TargetModel) -> None:
    """DSpark's W1 has a row for every token, whatever the draft vocabularies are."""
    new = head(target, "dspark", 1)
    old = head(target, "dspark", 2, draft_vocab_size=40)
    warm_start(new, old)
    assert torch.equal(new.markov_head.markov_w1.weight, old.markov_head.markov_w1.weight)


@pytest.mark.parametrize("family", ["eagle1", "mtp", "dflash"])
def test_heads_without_an_output_matrix_need_no_rows(target: TargetModel, family: str) -> None:
    """32 is also the width of the layers, whose rows are not tokens."""
    new = head(target, family, 1, common=20, draft_vocab_size=32)
    old = head(target, family, 2, draft_vocab_size=40)
    vocabulary = new.draft_vocab.tolist()
    assert set(warm_start(new, old)) == set(weights(new))
    assert all(torch.equal(weight, weights(old)[name]) for name, weight in weights(new).items())
    assert new.draft_vocab.tolist() == vocabulary


@pytest.mark.parametrize("family", ["eagle3", "peagle", "dflash"])
def test_the_fusion_goes_by_captured_layer(target: TargetModel, family: str) -> None:
    new = head(target, family, 1, feature_layers=[1, 3])
    old = head(target, family, 2, feature_layers=[0, 1, 5])
    assert "fc.weight" in warm_start(new, old)
    size = target.hidden_size
    assert torch.equal(new.fc.weight[:, :size], old.fc.weight[:, size : 2 * size])
    assert not new.fc.weight[:, size:].any()


@pytest.mark.parametrize("theirs", [[0, 1], [0, 1, 5]])
def test_what_mask_rows_have_in_place_of_features_goes_by_captured_layer(
    target: TargetModel, theirs: list[int]
) -> None:
    """As the fusion's columns do, also where equally many layers make equal shapes; what the other
    head has no features of keeps its start, which the fusion ignores.
    """
    new = head(target, "peagle", 1, feature_layers=[1, 3])
    old = head(target, "peagle", 2, feature_layers=theirs)
    size, before = target.hidden_size, new.mask_hidden.clone()
    assert "mask_hidden" in warm_start(new, old)
    assert torch.equal(new.mask_hidden[..., :size], old.mask_hidden[..., size : 2 * size])
    assert torch.equal(new.mask_hidden[..., size:], before[..., size:])
    seen = old.mask_hidden.clone()
    seen[..., :size] = 0
    seen[..., 2 * size :] = 0
    torch.testing.assert_close(new.fuse(new.mask_hidden), old.fuse(seen), atol=1e-12, rtol=0)


def test_norms_of_captured_layers_go_by_layer(target: TargetModel) -> None:
    new = head(target, "eagle3", 1, feature_layers=[1, 3], fc_norm=True)
    old = head(target, "eagle3", 2, feature_layers=[0, 1], fc_norm=True)
    before = new.fc_norm[1].weight.clone()
    warm_start(new, old)
    assert torch.equal(new.fc_norm[0].weight, old.fc_norm[1].weight)
    assert torch.equal(new.fc_norm[1].weight, before)


def test_the_norm_over_captured_layers_goes_by_layer(target: TargetModel) -> None:
    new = head(target, "eagle3", 1, feature_layers=[1, 3], norm_before_fc=True)
    old = head(target, "eagle3", 2, feature_layers=[0, 1], norm_before_fc=True)
    size, before = target.hidden_size, new.input_norm.weight.clone()
    assert "input_norm.weight" in warm_start(new, old)
    assert torch.equal(new.input_norm.weight[:size], old.input_norm.weight[size:])
    assert torch.equal(new.input_norm.weight[size:], before[size:])


def test_more_captured_layers_change_nothing_at_the_start(target: TargetModel) -> None:
    new = head(target, "eagle3", 1, feature_layers=[0, 2, 4])
    old = head(target, "eagle3", 2, feature_layers=[2])
    warm_start(new, old)
    features = torch.randn(1, 5, 3, target.hidden_size).double()
    torch.testing.assert_close(
        new.fuse(features.flatten(2)), old.fuse(features[:, :, 1]), atol=1e-12, rtol=0
    )


def test_narrower_layers_are_left_alone(target: TargetModel) -> None:
    new = head(target, "eagle3", 1, intermediate_size=24)
    before = weights(new)
    copied = warm_start(new, head(target, "eagle3", 2))
    left = set(before) - set(copied)
    assert left == {f"midlayer.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert all(torch.equal(weights(new)[name], before[name]) for name in left)


def test_the_source_is_not_shared(target: TargetModel) -> None:
    new, old = head(target, "medusa", 1), head(target, "medusa", 2)
    warm_start(new, old)
    mine = {weight.data_ptr() for weight in new.parameters()}
    assert not mine & {weight.data_ptr() for weight in old.parameters()}
    assert all(weight.requires_grad for weight in new.parameters())


def test_another_family_is_refused(target: TargetModel) -> None:
    with pytest.raises(ValueError, match=r"warm_from is a medusa head but drafter.type is eagle3"):
        warm_start(head(target, "eagle3", 1), head(target, "medusa", 2))


def test_native_layers_start_from_a_saved_head_of_theirs(tmp_path: Any) -> None:
    target = load_checkpoint(save_checkpoint(tmp_path / "target", "qwen3_5_text"))
    trained = load_native_mtp(target)
    with torch.no_grad():
        for weight in trained.parameters():
            weight += 0.1
    trained.save_pretrained(tmp_path / "head")
    new = load_native_mtp(target)
    copied = warm_start(new, load_drafter(tmp_path / "head", target))
    assert set(copied) == set(weights(new))
    assert all(torch.equal(weight, weights(trained)[name]) for name, weight in weights(new).items())


def test_native_layers_and_new_ones_do_not_mix(tmp_path: Any) -> None:
    """Qwen's norms store one less than they apply: equal names and shapes mean other things."""
    target = load_checkpoint(save_checkpoint(tmp_path, "qwen3_5_text"))
    native = load_native_mtp(target, dtype=torch.float64)
    with pytest.raises(ValueError, match="init_from"):
        warm_start(head(target, "mtp", 1), native)
