"""Random packed documents: no family's training pass lets one see another, or the padding.

The loss of one document is taken (nothing else is supervised), then the tokens, features and hidden
states of all other documents, of the padding and of the other sequence are replaced. The loss and
every gradient must stay, and must move when the document itself changes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import TargetModel, build_drafter
from tests.tiny import tiny_target
from training.data.batches import collate
from training.data.chat import TokenizedRow
from training.features import TargetBatch
from training.masks import (
    Rows,
    block,
    block_rows,
    build_mask,
    causal,
    causal_block,
    join,
    parallel,
    rollout_rows,
    sequence_rows,
    training_time_test,
    windowed,
)
from training.objectives import Objective, ObjectiveOptions, build_objective

VOCAB, HIDDEN = 96, 32
HASS = {"terms": {"smooth_l1": 1.0, "kl": 0.1, "top_k": 1.0}, "top": 4, "steps": 3, "detach": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "medusa": ("medusa", {"num_heads": 3}, {}),
    "hydra": ("hydra", {"num_heads": 3}, {}),
    "hydra++": ("hydra", {"num_heads": 3, "num_layers": 1}, {}),
    "eagle1": ("eagle1", {}, {}),
    "hass": ("eagle1", {"num_layers": 2}, HASS),
    "eagle3": ("eagle3", {}, {"steps": 3}),
    "eagle3, window": ("eagle3", {"sliding_window": 3}, {"steps": 3}),
    "mtp": ("mtp", {}, {"steps": 3}),
    "mtp, window": ("mtp", {"sliding_window": 3}, {"steps": 3}),
    "mtp, modules": ("mtp", {"num_modules": 3}, {}),
    "peagle": ("peagle", {"num_drafts": 4}, {}),
    "peagle, window": ("peagle", {"num_drafts": 4, "sliding_window": 3}, {}),
    "dflash": ("dflash", {"block_size": 4}, {"anchors": 3}),
    "dflash, window": ("dflash", {"block_size": 4, "sliding_window": 3}, {"anchors": 99}),
    "jetspec": ("dflash", {"block_size": 4, "causal": True}, {"anchors": 3}),
    "dspark": ("dspark", {"block_size": 3}, {"anchors": 3}),
    "dspark, rnn": ("dspark", {"block_size": 3, "markov_type": "rnn"}, {"anchors": 3}),
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module", params=CASES)
def objective(request: pytest.FixtureRequest, target: TargetModel) -> Objective:
    """Off its initial values, so that nothing is zero by chance."""
    family, fields, options = CASES[request.param]
    drafter = build_drafter(family, target, **fields).double().train()
    drafter.set_draft_vocab(torch.arange(VOCAB))
    seeded = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=seeded, dtype=torch.float64)
    return build_objective(drafter, ObjectiveOptions(**options)).train()


@st.composite
def documents(draw: st.DrawFn) -> tuple[list[list[int]], int, int]:
    """Two sequences' document lengths, the padding behind, and the document that is looked at."""
    first = draw(st.lists(st.integers(3, 9), min_size=2, max_size=4))
    chosen = draw(st.integers(0, len(first) - 1))
    first[chosen] += 3  # long enough for every depth
    second = draw(st.lists(st.integers(3, 9), min_size=1, max_size=3))
    return [first, second], draw(st.integers(0, 4)), chosen


def packed_batch(sizes: list[list[int]], padding: int, chosen: int, target: TargetModel):
    """A batch with random tokens, features and hidden states, of which one document is
    supervised; and where that document is.
    """
    seeded = torch.Generator().manual_seed(sum(map(sum, sizes)) + chosen)

    def row(size: int, supervised: bool) -> TokenizedRow:
        ids = torch.randint(3, VOCAB, (size,), generator=seeded).tolist()
        return TokenizedRow(ids, [supervised and place >= 2 for place in range(size)])

    groups = [
        [row(size, (number, place) == (0, chosen)) for place, size in enumerate(group)]
        for number, group in enumerate(sizes)
    ]
    length = max(map(sum, sizes)) + padding
    batch = collate(groups, length, index=[0, 1], draw=[11, 12])
    own = batch.document_ids == chosen
    own[1] = False
    return batch, own


def filled(objective: Objective, batch, seed: int) -> TargetBatch:
    """Features and hidden states drawn anew."""
    seeded = torch.Generator().manual_seed(seed)
    shape = batch.input_ids.shape

    def draw(width: int) -> torch.Tensor:
        return torch.randn(*shape, width, generator=seeded, dtype=torch.float64)

    layers = len(objective.drafter.feature_layers)
    return TargetBatch(batch, draw(layers * HIDDEN) if layers else None, draw(HIDDEN))


def changed(data: TargetBatch, other: TargetBatch, where: torch.Tensor) -> TargetBatch:
    """``data``, with the tokens, features and hidden states of ``other`` in some places."""
    ids = torch.where(where, other.batch.input_ids, data.batch.input_ids)
    features = None
    if data.features is not None and other.features is not None:
        features = torch.where(where[..., None], other.features, data.features)
    hidden = torch.where(where[..., None], other.last_hidden, data.last_hidden)
    return TargetBatch(replace(data.batch, input_ids=ids), features, hidden)


def loss_and_gradients(objective: Objective, data: TargetBatch) -> tuple[float, torch.Tensor]:
    objective.zero_grad()
    loss, _ = objective(data)
    loss.backward()
    found = [p.grad.flatten() for p in objective.parameters() if p.grad is not None]
    return float(loss.detach()), torch.cat(found)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(drawn=documents())
def test_no_document_sees_another(objective: Objective, target: TargetModel, drawn) -> None:
    sizes, padding, chosen = drawn
    batch, own = packed_batch(sizes, padding, chosen, target)
    shuffled = replace(batch, input_ids=(batch.input_ids + 7) % (VOCAB - 3) + 3)
    data, other = filled(objective, batch, 1), filled(objective, shuffled, 2)
    loss, gradients = loss_and_gradients(objective, data)
    assert loss > 0
    same, same_gradients = loss_and_gradients(objective, changed(data, other, ~own))
    assert abs(same - loss) < 1e-11 * loss
    assert (same_gradients - gradients).abs().max() < 1e-11 * gradients.abs().max()
    moved, _ = loss_and_gradients(objective, changed(data, other, own))
    assert abs(moved - loss) > 1e-6 * loss


@pytest.mark.parametrize("objective", ["eagle3", "dflash", "peagle"], indirect=True)
def test_a_leak_would_show(objective: Objective, target: TargetModel) -> None:
    """Negative control: documents that are not told apart."""
    batch, own = packed_batch([[6, 9], [7]], 2, 1, target)
    joined = replace(batch, document_ids=batch.document_ids.clamp(0, 0))
    data, other = filled(objective, joined, 1), filled(objective, joined, 2)
    loss, _ = loss_and_gradients(objective, data)
    before = torch.zeros_like(own)
    before[0, :6] = True
    leaked, _ = loss_and_gradients(objective, changed(data, other, before))
    assert abs(leaked - loss) > 1e-6 * loss


# --- the definitions that fast paths are tested against


def unrolled_rows(documents: torch.Tensor) -> Rows:
    return join(*(sequence_rows(documents, step) for step in range(3)))


def rollouts(documents: torch.Tensor) -> Rows:
    anchors = torch.arange(documents.shape[1]).repeat(2).expand(len(documents), -1)
    steps = torch.tensor([1, 2]).repeat_interleave(documents.shape[1])
    return join(sequence_rows(documents), rollout_rows(documents, anchors, steps))


def blocks(documents: torch.Tensor) -> Rows:
    roots = torch.arange(documents.shape[1]).expand(len(documents), -1)
    return join(sequence_rows(documents), block_rows(documents, roots, 3))


RULES: dict[str, tuple[Callable[[torch.Tensor], Rows], Any]] = {
    "causal": (sequence_rows, causal),
    "training_time_test": (unrolled_rows, training_time_test),
    "parallel": (rollouts, parallel),
    "block": (blocks, block),
    "causal_block": (blocks, causal_block),
}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", RULES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(drawn=documents())
def test_masks_stay_in_their_document(name: str, window: int | None, drawn) -> None:
    """Whatever the rule: only rows of the own document, never padding, and never nothing."""
    sizes, padding, _ = drawn
    length = max(map(sum, sizes)) + padding
    ids = torch.full((2, length), -1)
    for number, group in enumerate(sizes):
        marks = torch.arange(len(group)).repeat_interleave(torch.tensor(group))
        ids[number, : len(marks)] = marks
    make, rule = RULES[name]
    rows = make(ids)
    mask = build_mask(rows, rows, windowed(rule, window))
    document = rows.document
    alike = document[:, :, None] == document[:, None, :]
    assert not (mask & ~alike).any()
    real = document >= 0
    assert not (mask & real[:, :, None] & ~real[:, None, :]).any()
    assert mask.any(-1).all()
    assert (mask & alike & real[:, :, None]).sum() > real.sum()
