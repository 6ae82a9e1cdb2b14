"""P-EAGLE: EAGLE-3's network with mask rows behind the text."""

from pathlib import Path

import pytest
import torch

from drafters import Eagle3Drafter, TargetModel, build_drafter
from drafters.families import PEagleConfig
from drafters.peagle import PEagleDrafter
from inference.proposers.context_cache import ContextCache
from tests.blocks import block_head
from tests.tiny import tiny_target

IDS = [7, 9, 30, 12, 41, 18]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.mark.parametrize(
    "options", [{"num_layers": 1}, {"num_layers": 2, "fc_norm": True}], ids=str
)
def test_rows_of_the_text_are_eagle3_s_first_step(target: TargetModel, options: dict) -> None:
    """The same weights, the same pairing; the mask's two vectors are all that is new."""
    head = block_head(target, "peagle", **options)
    eagle = build_drafter("eagle3", target, **options).double()
    assert isinstance(eagle, Eagle3Drafter)
    missing, unexpected = eagle.load_state_dict(head.state_dict(), strict=False)
    assert (missing, sorted(unexpected)) == ([], ["mask_embedding", "mask_hidden"])
    features = torch.randn(1, len(IDS), 96, dtype=torch.float64)
    tokens, positions = torch.tensor([IDS]), torch.arange(len(IDS))[None]
    attend = ContextCache(head.windows).rows(6, [True] * len(head.windows))
    found = head.run(head.text_rows(features, tokens), positions, attend)
    attend = ContextCache(eagle.windows).rows(6, [True] * len(eagle.windows))
    feature = eagle.begin(features, features, positions, attend)
    expected, _ = eagle(feature, tokens, positions, attend)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_mask_rows_hold_the_learned_vectors(target: TargetModel) -> None:
    head = block_head(target, "peagle")
    embeds, feature = head.mask_rows(2, 3)
    assert embeds.shape == feature.shape == (2, 3, 32)
    assert torch.equal(embeds[1, 2], head.mask_embedding)
    torch.testing.assert_close(feature[1, 2], head.fc.weight @ head.mask_hidden[0, 0])
    (embeds.sum() + feature.sum()).backward()
    assert head.mask_embedding.grad is not None and head.mask_hidden.grad is not None


def test_names_and_shapes_are_those_of_engines(target: TargetModel) -> None:
    head = block_head(target, "peagle", num_layers=2, draft_vocab_size=40)
    shapes = {name: tuple(x.shape) for name, x in head.state_dict().items()}
    assert shapes["mask_hidden"] == (1, 1, 96)
    assert shapes["mask_embedding"] == (32,)
    assert shapes["lm_head.weight"] == (40, 32)
    assert {"midlayer.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.weight"} <= set(shapes)


def test_it_starts_as_eagle3_does_with_a_mask_of_the_embeddings_size(target: TargetModel) -> None:
    head = block_head(target, "peagle", noise=0.0)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight)
    assert torch.equal(head.norm.weight, target.block()["norm.weight"])
    size = target.embedding.weight.std()
    assert 0.9 * size < head.mask_embedding.std() < 1.1 * size


def test_saved_heads_come_back(target: TargetModel, tmp_path: Path) -> None:
    head = block_head(target, "peagle", num_layers=2, fc_norm=True, draft_vocab_size=40)
    head.save_pretrained(tmp_path)
    again = PEagleDrafter.load(tmp_path, target, dtype=torch.float64)
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_shape_and_depth(target: TargetModel) -> None:
    head = block_head(target, "peagle", num_drafts=3)
    assert (head.shape, head.num_drafts) == ("block", 3)
    with pytest.raises(ValueError, match=r"num_drafts must be at least 2 \(one .* EAGLE-3\)"):
        PEagleConfig(num_drafts=1)


def test_an_embedding_of_its_own_holds_the_mask_s_row(target: TargetModel) -> None:
    head = block_head(target, "peagle", noise=0.0, own_embedding=True, mask_token_id=90)
    assert "mask_embedding" not in head.state_dict()
    assert torch.equal(head.embed_tokens.weight, target.embedding.weight)  # its start
    features, tokens = torch.randn(1, 2, 96, dtype=torch.float64), torch.tensor([[7, 9]])
    with torch.no_grad():
        head.embed_tokens.weight[7] += 1
        head.embed_tokens.weight[90] = 2
    assert torch.equal(head.text_rows(features, tokens)[0], head.embed_tokens(tokens))
    assert torch.equal(head.mask_rows(1, 1)[0], torch.full((1, 1, 32), 2.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"own_embedding": True}, "own_embedding needs mask_token_id"),
        ({"mask_token_id": 96}, r"mask_token_id must lie in 0\.\.95"),
    ],
)
def test_places_for_the_mask_are_checked(target: TargetModel, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_drafter("peagle", target, **options)
