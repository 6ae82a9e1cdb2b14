"""DSpark: the Markov head's formulas, one draft after the other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import TargetModel
from drafters.dspark import DSparkDrafter
from drafters.families import DSparkConfig
from tests.blocks import block_head
from tests.tiny import tiny_target

D, R = 32, 8


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


def rows(count: int) -> Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def head_of(target: TargetModel, kind: str, **options) -> DSparkDrafter:
    return block_head(target, "dspark", markov_type=kind, markov_rank=R, **options)


def weights(head: DSparkDrafter) -> dict[str, Tensor]:
    return {name.rsplit(".", 2)[-2]: w for name, w in head.markov_head.named_parameters(prefix="x")}


def test_every_slot_drafts_the_token_behind_it(target: TargetModel) -> None:
    head = head_of(target, "vanilla", block_size=3, mask_token_id=5)
    assert head.num_drafts == 3
    assert head.blocks(torch.tensor([9])).tolist() == [[9, 5, 5]]
    assert head.drafting(torch.arange(3)[None, :, None]).flatten().tolist() == [0, 1, 2]


def test_vanilla_adds_a_bias_of_the_token_before(target: TargetModel) -> None:
    head = head_of(target, "vanilla")
    hidden, previous = rows(3), torch.tensor([4, 90, 4])
    out, state = head.advance(hidden, previous, head.begin_path(hidden))
    w = weights(head)
    assert out.shape == (3, head.output_size) == (3, D + R)
    assert state.shape == (3, 0)
    expected = target.project(hidden) + w["markov_w1"][previous] @ w["markov_w2"].T
    torch.testing.assert_close(head.logits(out), expected, atol=1e-12, rtol=0)


def test_gated_scales_the_embedding_by_row_and_token(target: TargetModel) -> None:
    head = head_of(target, "gated")
    hidden, previous = rows(2), torch.tensor([4, 90])
    out, _ = head.advance(hidden, previous, head.begin_path(hidden))
    w = weights(head)
    e = w["markov_w1"][previous]
    gate = torch.sigmoid(torch.cat((hidden, e), -1) @ w["gate_proj"].T)
    expected = target.project(hidden) + (gate * e) @ w["markov_w2"].T
    torch.testing.assert_close(head.logits(out), expected, atol=1e-12, rtol=0)
    assert [m for m in head.output_modules() if m is None] == []


def test_rnn_carries_a_state_from_draft_to_draft(target: TargetModel) -> None:
    head = head_of(target, "rnn")
    w, s = weights(head), torch.zeros(1, R, dtype=torch.float64)
    gate, candidate, output = w["joint_proj"].chunk(3)
    hidden = rows(3)
    state = head.begin_path(hidden[:1])
    for k, token in enumerate([4, 90, 31]):
        z = torch.cat((s, w["markov_w1"][[token]], hidden[k : k + 1]), -1)
        u = torch.sigmoid(z @ gate.T)
        bias = torch.tanh(z @ output.T) @ w["markov_w2"].T
        s = u * s + (1 - u) * torch.tanh(z @ candidate.T)
        out, state = head.advance(hidden[k : k + 1], torch.tensor([token]), state)
        expected = target.project(hidden[k : k + 1]) + bias
        torch.testing.assert_close(head.logits(out), expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(state, s, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_a_projection_may_have_a_bias(target: TargetModel, kind: str) -> None:
    """It is what a column of ones beside the projection's input would be."""
    head = head_of(target, kind, markov_bias=True)
    plain = head_of(target, kind)
    name = "gate_proj" if kind == "gated" else "joint_proj"
    own = getattr(head.markov_head, name)
    state = {k: v for k, v in head.state_dict().items() if not k.endswith(f"{name}.bias")}
    plain.load_state_dict(state)
    hidden, previous = rows(2), torch.tensor([4, 90])
    start = head.begin_path(hidden)
    shifted, _ = head.advance(hidden, previous, start)
    without, _ = plain.advance(hidden, previous, start)
    assert not torch.allclose(head.logits(shifted), plain.logits(without))
    size = own.in_features - (R if kind == "gated" else 2 * R)
    column = own.weight[:, :size] if kind == "gated" else own.weight[:, 2 * R :]
    solved = torch.linalg.lstsq(column, own.bias[:, None]).solution[:, 0]  # W x = bias
    assert torch.allclose(column @ solved, own.bias)
    moved, _ = plain.advance(hidden + solved, previous, start)
    bias = plain.markov_head.bias(moved)
    torch.testing.assert_close(head.markov_head.bias(shifted), bias, atol=1e-9, rtol=0)


def test_drafts_in_place_begin_behind_the_root(target: TargetModel) -> None:
    head = head_of(target, "vanilla", block_size=3, mask_token_id=5, sample_from_anchor=False)
    assert head.num_drafts == 2
    assert head.blocks(torch.tensor([9])).tolist() == [[9, 5, 5]]
    assert head.drafting(torch.arange(3)[None, :, None]).flatten().tolist() == [1, 2]


def test_confidence_may_read_the_row_alone(target: TargetModel) -> None:
    head = head_of(target, "rnn", confidence_head=True, confidence_with_markov=False)
    hidden, previous = rows(2), torch.tensor([4, 90])
    out, _ = head.advance(hidden, previous, head.begin_path(hidden))
    proj = head.confidence.proj
    assert proj.weight.shape == (1, D)
    expected = (hidden @ proj.weight.T + proj.bias).squeeze(-1).sigmoid()
    torch.testing.assert_close(head.acceptance(out, 0).double(), expected, atol=1e-6, rtol=0)


def test_without_a_markov_head_rows_are_the_pass_s(target: TargetModel) -> None:
    head = head_of(target, "none", confidence_head=True)
    hidden = rows(2)
    out, _ = head.advance(hidden, torch.tensor([1, 2]), head.begin_path(hidden))
    assert out is hidden
    assert head.output_size == D
    assert torch.equal(head.logits(out), target.project(hidden))
    assert head.acceptance(out, 0).shape == (2,)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_confidence_reads_the_row_and_the_token_s_embedding(target: TargetModel, kind: str) -> None:
    head = head_of(target, kind, confidence_head=True)
    hidden, previous = rows(2), torch.tensor([4, 90])
    out, _ = head.advance(hidden, previous, head.begin_path(hidden))
    proj = head.confidence.proj
    assert proj.weight.shape == (1, D + R)
    pair = torch.cat((hidden, weights(head)["markov_w1"][previous]), -1)
    expected = (pair @ proj.weight.T + proj.bias).squeeze(-1).sigmoid()
    torch.testing.assert_close(head.acceptance(out, 0).double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_an_untrained_head_is_a_shifted_dflash(target: TargetModel, kind: str) -> None:
    head = head_of(target, kind, noise=0.0)
    hidden = rows(2)
    out, _ = head.advance(hidden, torch.tensor([4, 90]), head.begin_path(hidden))
    assert torch.equal(head.logits(out), target.project(hidden))
    assert head.markov_head.markov_w1.weight.abs().max() > 0


def test_a_reduced_vocabulary_narrows_what_is_drafted_not_what_is_read(
    target: TargetModel,
) -> None:
    head = head_of(target, "vanilla", draft_vocab_size=40)
    w = weights(head)
    assert (len(w["markov_w1"]), len(w["markov_w2"])) == (96, 40)
    outside = next(i for i in range(96) if i not in head.draft_vocab.tolist())
    hidden = rows(1)
    out, _ = head.advance(hidden, torch.tensor([outside]), head.begin_path(hidden))
    expected = target.project(hidden)[:, head.draft_vocab]
    expected = expected + w["markov_w1"][[outside]] @ w["markov_w2"].T
    torch.testing.assert_close(head.logits(out), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "none"])
def test_saved_heads_come_back(target: TargetModel, kind: str, tmp_path: Path) -> None:
    head = head_of(target, kind, confidence_head=True, draft_vocab_size=40)
    head.save_pretrained(tmp_path)
    again = DSparkDrafter.load(tmp_path, target, dtype=torch.float64)
    found = again.state_dict()
    assert set(found) == set(head.state_dict())
    for name, tensor in head.state_dict().items():
        assert torch.equal(found[name], tensor), name
    assert again.config.markov_type == kind


def test_tensors_have_the_names_that_engines_load(target: TargetModel) -> None:
    names = set(head_of(target, "rnn").state_dict()) - set(
        block_head(target, "dflash").state_dict()
    )
    markov = {"markov_w1", "markov_w2", "joint_proj"}
    assert names == {f"markov_head.{name}.weight" for name in markov}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"markov_type": "lstm"}, "markov_type 'lstm' is unknown"),
        ({"markov_bias": True}, "markov_bias: a vanilla Markov head has no projection"),
        ({"markov_type": "rnn", "sample_from_anchor": False}, "starts at the root's row"),
        ({"block_size": 1, "sample_from_anchor": False}, "leaves no row that drafts"),
        ({"window_layers": [0]}, "window_layers has no effect without sliding_window"),
        ({"window_layers": [5], "sliding_window": 9}, "must be layers of the head, 0..4"),
        ({"causal_layers": [-1]}, "causal_layers must be layers of the head"),
        ({"causal_layers": [0], "causal": True}, "causal_layers has no effect"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DSparkConfig(**options)
