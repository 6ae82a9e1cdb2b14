"""MTP modules: what a row holds, separate and shared modules, the start from the target."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from drafters import TargetModel, build_drafter, load_drafter
from drafters.mtp import MtpDrafter
from tests.tiny import tiny_target

B, T, D, V = 2, 5, 32, 96
POSITIONS = torch.arange(T).expand(B, T)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


def head(target: TargetModel, **options: object) -> MtpDrafter:
    drafter = build_drafter("mtp", target, **options).double()
    assert isinstance(drafter, MtpDrafter)
    return drafter.eval()


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    feature = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    return feature, torch.randint(V, (B, T), generator=generator)


def test_a_step_is_the_formula_of_the_released_weights(target: TargetModel) -> None:
    """Embedding first into the projection; one layer; the norm; the target's output matrix."""
    drafter = head(target)
    feature, tokens = rows()
    module = drafter.mtp[0]
    pair = (module.enorm(target.embed(tokens)), module.hnorm(feature))
    stream = module.layers[0](module.eh_proj(torch.cat(pair, -1)), POSITIONS, causal)
    hidden, following = drafter(feature, tokens, POSITIONS, causal)
    assert (hidden - module.norm(stream)).abs().max() < 1e-12
    assert following is hidden
    assert torch.equal(drafter.logits(hidden), target.lm_head(hidden))


def test_hidden_first_swaps_the_projections_halves(target: TargetModel) -> None:
    plain, swapped = head(target), head(target, hidden_first=True)
    swapped.load_state_dict(plain.state_dict())
    weight = plain.mtp[0].eh_proj.weight.data
    swapped.mtp[0].eh_proj.weight.data = torch.cat((weight[:, D:], weight[:, :D]), dim=1)
    feature, tokens = rows()
    there, here = (d(feature, tokens, POSITIONS, causal)[0] for d in (plain, swapped))
    assert (there - here).abs().max() < 1e-12


def test_without_norm_output_the_stream_is_handed_on(target: TargetModel) -> None:
    drafter = head(target, norm_output=False)
    hidden, following = drafter(*rows(), POSITIONS, causal)
    assert (drafter.mtp[0].norm(following) - hidden).abs().max() < 1e-12
    assert (following - hidden).abs().max() > 0.1


def test_the_first_feature_is_the_targets_last_hidden_state(target: TargetModel) -> None:
    drafter = head(target)
    hidden = target.forward(torch.arange(T)[None]).last_hidden
    assert torch.equal(drafter.begin(None, hidden, POSITIONS[:1], causal), hidden)
    assert drafter.feature_layers == ()


def test_separate_modules_have_weights_and_keys_of_their_own(target: TargetModel) -> None:
    drafter = head(target, num_modules=3, num_layers=2, sliding_window=7)
    assert (drafter.num_layers, drafter.num_drafts) == (6, 3)
    assert drafter.windows == [7] * 6
    feature, tokens = rows()
    called: list[int] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        called.append(layer)
        return causal(layer, q, k, v)

    outputs = [drafter(feature, tokens, POSITIONS, attend, depth)[0] for depth in range(3)]
    assert called == list(range(6))
    assert min((outputs[i] - outputs[i - 1]).abs().max() for i in range(3)) > 0.1


def test_one_module_serves_every_depth(target: TargetModel) -> None:
    drafter = head(target)
    assert (drafter.num_layers, drafter.num_drafts) == (1, None)
    first, later = (drafter(*rows(), POSITIONS, causal, depth)[0] for depth in (0, 4))
    assert torch.equal(first, later)


def test_a_reduced_draft_vocabulary_takes_the_targets_rows(target: TargetModel) -> None:
    drafter = head(target, draft_vocab_size=10)
    drafter.set_draft_vocab(torch.arange(V))
    hidden = drafter(*rows(), POSITIONS, causal)[0]
    expected = target.lm_head(hidden)[..., drafter.draft_vocab]
    assert (drafter.logits(hidden) - expected).abs().max() < 1e-12
    assert "lm_head" not in "".join(drafter.state_dict())


@pytest.mark.parametrize("hidden_first", [False, True])
def test_an_untrained_module_repeats_the_hidden_state(
    target: TargetModel, hidden_first: bool
) -> None:
    """Without the embedding's part, what it says is what the target says about the token before."""
    drafter = head(target, num_modules=2, num_layers=2, hidden_first=hidden_first)
    drafter.set_draft_vocab(torch.arange(V))
    ids = torch.arange(4, 10)[None]
    hidden = target.forward(ids).last_hidden
    for depth, module in enumerate(drafter.mtp):
        weight = module.eh_proj.weight
        embedding = weight[:, D:] if hidden_first else weight[:, :D]
        assert 0.3 * D**-0.5 < embedding.std() < D**-0.5, "the token stirs it"
        with torch.no_grad():
            embedding.zero_()
        found = drafter.logits(drafter(hidden, ids, torch.arange(6)[None], causal, depth)[0])
        expected = target.project(hidden)
        cosine = torch.nn.functional.cosine_similarity(found, expected, dim=-1)
        assert cosine.min() > 1 - 1e-6
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_start_random_leaves_the_modules_alone(target: TargetModel) -> None:
    drafter = head(target)
    before = drafter.mtp[0].eh_proj.weight.clone()
    drafter.set_draft_vocab(torch.arange(V), start="random")
    assert torch.equal(drafter.mtp[0].eh_proj.weight, before)


def test_saves_and_loads(target: TargetModel, tmp_path: Path) -> None:
    drafter = head(target, num_modules=2, draft_vocab_size=20, confidence_head=True)
    drafter.set_draft_vocab(torch.arange(V))
    drafter.save_pretrained(tmp_path)
    again = load_drafter(tmp_path, target, dtype=torch.float64)
    assert isinstance(again, MtpDrafter)
    for depth in range(2):
        there, here = (d(*rows(), POSITIONS, causal, depth)[0] for d in (drafter, again))
        assert torch.equal(there, here)
    assert torch.equal(again.draft_vocab, drafter.draft_vocab)
    assert {name.split(".")[2] for name in again.state_dict() if name.startswith("mtp.")} == {
        "enorm",
        "hnorm",
        "eh_proj",
        "layers",
        "norm",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_modules": 0}, "num_modules must be at least 1"),
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"num_modules": 2, "tree": [[0], [0, 0], [0, 0, 0]]}, "num_modules=2"),
        ({"native_config": {}, "num_layers": 2}, "num_layers and qk_norm have no effect"),
    ],
)
def test_configs_are_checked(target: TargetModel, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head(target, **options)
