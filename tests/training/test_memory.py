"""Memory of a training step: linear in the length, one chunk of the vocabulary, and less where the
insides of layers are computed again.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import TargetModel, build_drafter
from scripts.training_cost import LiveBytes
from tests.tiny import tiny_target
from training.data.batches import Batch
from training.features import TargetBatch
from training.masks import unrolled_mask
from training.objectives import Objective, ObjectiveOptions, build_objective, sequential, spans

VOCAB = 96
HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "medusa": ({"num_heads": 3}, {}),
    "hydra": ({"num_heads": 3, "num_layers": 1}, {}),
    "eagle1": ({}, {"noise": 0.0, "steps": 3}),
    "eagle3": ({"num_layers": 2}, {}),
    "mtp": ({}, {}),
    "peagle": ({"num_drafts": 3}, {}),
    "dflash": ({"block_size": 4}, {"anchors": 100_000}),
    "dspark": ({"block_size": 4, "markov_rank": 8}, {"anchors": 100_000}),
}
"""Head and loss of each family; all rounds of a block family are drafted."""
BLOCK = ("peagle", "dflash", "dspark")
"""Families whose depths have laws of their own."""


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(torch.float32, vocab=VOCAB)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "ROWS", 16)


def make_objective(target: TargetModel, family: str, dtype=torch.float32, **loss: Any) -> Objective:
    head, options = HEADS[family]
    drafter = build_drafter(family, target, **head).to(dtype)
    drafter.set_draft_vocab(torch.arange(target.vocab_size))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return build_objective(drafter, ObjectiveOptions(**{"chunk": 16, **options, **loss})).train()


def data_of(objective: Objective, length: int, dtype: torch.dtype = torch.float32) -> TargetBatch:
    """One document of noise: nothing of the target is run."""
    ids = torch.randint(3, VOCAB, (1, length))
    positions = torch.arange(length)[None]
    batch = Batch(
        ids,
        positions,
        torch.zeros_like(ids),
        torch.ones_like(ids, dtype=torch.bool),
        torch.tensor([0]),
        torch.tensor([0]),
    )
    size, count = objective.drafter.target.hidden_size, len(objective.drafter.feature_layers)
    features = torch.randn(1, length, count * size, dtype=dtype) if count else None
    return TargetBatch(batch, features, torch.randn(1, length, size, dtype=dtype))


def live(objective: Objective, length: int, widths: tuple[int, ...] = ()) -> LiveBytes:
    data = data_of(objective, length)
    objective.zero_grad()
    with LiveBytes(widths) as counted:
        objective(data)[0].backward()
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("family", HEADS)
def test_memory_grows_linearly_with_the_length(target: TargetModel, family: str) -> None:
    objective = make_objective(target, family)
    short, long = (live(objective, length).peak for length in (128, 256))
    assert long <= 2.1 * short


class Dense:
    """The slow twin of the unroll's attention, all steps' rows at once."""

    def __init__(self, document_ids: Tensor, windows: list) -> None:
        self.documents, self.past = document_ids, {layer: [] for layer in range(len(windows))}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.past[layer].append((k, v))
        keys, values = (
            torch.cat(side, dim=2).repeat_interleave(q.shape[1] // k.shape[1], 1)
            for side in zip(*self.past[layer], strict=True)
        )
        mask = unrolled_mask(self.documents, len(self.past[layer]))[:, None, -q.shape[2] :]
        scores = (q @ keys.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ values


@pytest.mark.slow
def test_dense_attention_would_show(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: pairs of rows grow with the square."""
    monkeypatch.setattr(sequential, "StepAttention", Dense)
    objective = make_objective(target, "eagle3")
    short, long = (live(objective, length).peak for length in (256, 512))
    assert long > 3 * short


@pytest.mark.slow
@pytest.mark.parametrize("family", HEADS)
def test_only_a_chunk_of_the_vocabulary_is_alive(family: str) -> None:
    """Whatever the length: the logits and laws of a chunk of rows, in a few copies."""
    vocab, chunk = 2000, 16
    target = tiny_target(torch.float32, vocab=vocab)
    objective = make_objective(target, family)
    peaks = [live(objective, length, (vocab,)).wide_peak for length in (48, 96)]
    logits = chunk * vocab * 4
    assert (
        logits < peaks[0] <= peaks[1] < 12 * logits * (objective.depths if family in BLOCK else 1)
    )
    assert peaks[1] < 1.1 * peaks[0]
    whole = make_objective(target, family, chunk=0)
    at_once = [live(whole, length, (vocab,)).wide_peak for length in (48, 96)]
    assert at_once[1] > 1.8 * at_once[0], "negative control"


@pytest.mark.parametrize("family", HEADS)
def test_computing_layers_again_changes_nothing_but_memory(
    target: TargetModel, family: str
) -> None:
    wide = tiny_target(torch.float64, vocab=VOCAB)
    objective = make_objective(wide, family, torch.float64)
    data = data_of(objective, 40, torch.float64)
    results = []
    for again in (False, True):
        objective.activation_checkpointing = again
        assert objective.activation_checkpointing is again
        objective.zero_grad()
        loss, metrics = objective(data)
        loss.backward()
        grads = {name: p.grad.clone() for name, p in objective.named_parameters()}
        results.append((loss.detach(), metrics, grads))
    (loss, metrics, grads), (other_loss, other_metrics, other_grads) = results
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(metrics[name], other_metrics[name]) for name in metrics)
    for name, gradient in grads.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, other_grads[name], atol=1e-12, rtol=1e-12)

    objective = make_objective(target, family)
    kept = live(objective, 128).peak
    objective.activation_checkpointing = True
    assert live(objective, 128).peak < 0.97 * kept


def test_checkpointing_without_effect_is_refused(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = make_objective(target, "medusa")
    monkeypatch.setattr(type(objective), "_layers", lambda self: [])
    with pytest.raises(ValueError, match=r"run\.activation_checkpointing has no effect"):
        objective.activation_checkpointing = True
    objective.activation_checkpointing = False
