"""Which row predicts which token: the table, and toy targets that only the right pairing can learn.

The toys are real objectives trained for a moment on fresh random batches, so that nothing can be
memorised: a head reaches zero loss exactly where its row holds what decides the label, and stays at
log V where it does not.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafters import Drafter, TargetModel, build_drafter
from training.alignment import Labels, draft_rows, shifted_tokens, supervised_labels
from training.data.batches import Batch
from training.features import TargetBatch
from training.objectives import Objective, ObjectiveOptions, base, build_objective

# --- the table


@pytest.fixture
def table() -> tuple[Tensor, Tensor, Tensor]:
    """Two packed sequences: documents of 4 and 2 tokens with a padding; one of 7."""
    ids = torch.arange(100, 114).reshape(2, 7)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, -1], [0, 0, 0, 0, 0, 0, 0]])
    return ids, documents, torch.ones(2, 7, dtype=torch.bool)


def test_labels_have_a_predecessor_in_their_document(table: tuple[Tensor, Tensor, Tensor]) -> None:
    ids, documents, supervised = table
    labels = supervised_labels(ids, documents, supervised)
    assert labels.positions.tolist() == [1, 2, 3, 5, 8, 9, 10, 11, 12, 13]
    assert labels.ids.tolist() == [101, 102, 103, 105, 108, 109, 110, 111, 112, 113]
    assert labels.column.tolist() == [1, 2, 3, 5, 1, 2, 3, 4, 5, 6]
    assert labels.teacher_rows.tolist() == [0, 1, 2, 4, 7, 8, 9, 10, 11, 12]


def test_the_mask_belongs_to_the_predicted_token(table: tuple[Tensor, Tensor, Tensor]) -> None:
    """Not to the row that predicts it: supervising token 3 alone gives one label, 3."""
    ids, documents, _ = table
    supervised = torch.zeros(2, 7, dtype=torch.bool)
    supervised[0, 3] = True
    labels = supervised_labels(ids, documents, supervised)
    assert (labels.positions.tolist(), labels.ids.tolist()) == ([3], [103])
    assert draft_rows(labels, documents, 0)[0].tolist() == [1]


def test_padding_is_never_a_label() -> None:
    documents = torch.tensor([[0, 0, -1, -1, -1]])
    labels = supervised_labels(torch.zeros(1, 5).long(), documents, torch.ones(1, 5).bool())
    assert labels.positions.tolist() == [1]


@pytest.mark.parametrize(
    ("depth", "pairs"),
    [
        # (label position, draft row), flat over two sequences of 7
        (0, [(2, 0), (3, 1), (9, 7), (10, 8), (11, 9), (12, 10), (13, 11)]),
        (1, [(3, 0), (10, 7), (11, 8), (12, 9), (13, 10)]),
        (2, [(11, 7), (12, 8), (13, 9)]),
        (4, [(13, 7)]),
        (5, []),
    ],
)
def test_draft_rows(
    table: tuple[Tensor, Tensor, Tensor], depth: int, pairs: list[tuple[int, int]]
) -> None:
    """Depth i drafts label j from row j-2-i of the same document."""
    labels = supervised_labels(*table)
    rows, valid = draft_rows(labels, table[1], depth)
    assert list(zip(labels.positions[valid].tolist(), rows[valid].tolist(), strict=True)) == pairs
    assert (rows[~valid] == 0).all()


def test_a_row_before_the_first_sequence_is_not_the_last_of_another() -> None:
    """Flat indices must not run over from one sequence of the batch into the one before it."""
    documents = torch.zeros(2, 3, dtype=torch.long)
    labels = supervised_labels(torch.zeros(2, 3).long(), documents, torch.ones(2, 3).bool())
    rows, valid = draft_rows(labels, documents, 0)
    assert labels.positions[valid].tolist() == [2, 5]
    assert rows[valid].tolist() == [0, 3]


def test_shifted_tokens() -> None:
    ids = torch.tensor([[1, 2, 3, 4]])
    assert shifted_tokens(ids, 1).tolist() == [[2, 3, 4, 4]]
    assert shifted_tokens(ids, 3).tolist() == [[4, 4, 4, 4]]
    assert shifted_tokens(ids, 6).tolist() == [[4, 4, 4, 4]]


def test_every_draft_row_holds_its_token(table: tuple[Tensor, Tensor, Tensor]) -> None:
    """The token fed at depth i to the row that drafts x_j is x_{j-1}: teacher forcing."""
    ids, documents, supervised = table
    labels = supervised_labels(ids, documents, supervised)
    for depth in range(4):
        rows, valid = draft_rows(labels, documents, depth)
        fed = shifted_tokens(ids, 1 + depth).flatten()[rows]
        assert torch.equal(fed[valid], labels.ids[valid] - 1)
        assert valid.any()


# --- toy targets

V = 8  # vocabulary
BLOCKS = 3  # a hidden state has room for the codes of so many tokens
SOLVED, STUCK = 0.1, 0.8 * math.log(V)
FOLLOWER = torch.tensor([3, 6, 0, 7, 5, 1, 4, 2])  # no fixed point, no short cycle


def toy_target() -> TargetModel:
    """Its output matrix reads the first V places of a hidden state, with certainty."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=BLOCKS * V,
        intermediate_size=2 * V,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.zero_()[:, :V] = 20 * torch.eye(V)
        model.model.embed_tokens.weight.normal_(generator=torch.Generator().manual_seed(1))
    return TargetModel(model)


def codes(*tokens: Tensor) -> Tensor:
    """(B, T) token ids per block -> (B, T, BLOCKS·V) one-hot blocks; missing blocks are empty."""
    blocks = [torch.nn.functional.one_hot(t, V).float() for t in tokens]
    blocks += [torch.zeros_like(blocks[0])] * (BLOCKS - len(blocks))
    return torch.cat(blocks, dim=-1)


def stream(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """(B, length + 8) unpredictable tokens, so that every row has a future."""
    return torch.randint(V, (batch, length + 8), generator=generator)


def toy_batch(ids: Tensor, hidden: Tensor, features: Tensor, first_label: int) -> TargetBatch:
    length = hidden.shape[1]
    supervised = torch.zeros(len(ids), length, dtype=torch.bool)
    supervised[:, first_label:] = True
    positions = torch.arange(length).expand(len(ids), length)
    unknown = torch.full((len(ids),), -1)
    documents, draws = torch.zeros_like(positions), torch.arange(len(ids))
    batch = Batch(ids[:, :length], positions, documents, supervised, unknown, draws)
    return TargetBatch(batch, features, hidden)


def noise_features(batch: int, length: int, generator: torch.Generator) -> Tensor:
    return 0.3 * torch.randn(batch, length, 3 * BLOCKS * V, generator=generator)


def token_toy(length: int, first_label: int, generator: torch.Generator) -> TargetBatch:
    """The next token is a function of the present one; text and features are noise."""
    ids = stream(32, length, generator)
    hidden = codes(FOLLOWER[ids[:, :length]])
    return toy_batch(ids, hidden, noise_features(32, length, generator), first_label)


def feature_toy(length: int, first_label: int, generator: torch.Generator) -> TargetBatch:
    """The hidden state at t knows x_{t+1}; the features at t know x_{t+2}; text is noise."""
    ids = stream(32, length, generator)
    features = torch.cat([codes(ids[:, 2 : length + 2])] * 3, dim=-1)
    return toy_batch(ids, codes(ids[:, 1 : length + 1]), features, first_label)


def late_feature_toy(length: int, first_label: int, generator: torch.Generator) -> TargetBatch:
    """As :func:`feature_toy`, but row t is handed the features of row t+1."""
    ids = stream(32, length, generator)
    features = torch.cat([codes(ids[:, 3 : length + 3])] * 3, dim=-1)
    return toy_batch(ids, codes(ids[:, 1 : length + 1]), features, first_label)


def surprise_toy(length: int, first_label: int, generator: torch.Generator) -> TargetBatch:
    """The next token is known to the target's hidden state alone: nobody can draft it."""
    ids = stream(32, length, generator)
    features = noise_features(32, length, generator)
    return toy_batch(ids, codes(ids[:, 1 : length + 1]), features, first_label)


def future_toy(length: int, offset: int, generator: torch.Generator) -> TargetBatch:
    """For Medusa: the hidden state at t knows x_{t+1} and, of what follows, only x_{t+offset}."""
    ids = stream(32, length, generator)
    hidden = codes(ids[:, 1 : length + 1], ids[:, offset : length + offset])
    return toy_batch(ids, hidden, hidden, 1)


def train(objective: Objective, make_batch, steps: int) -> list[float]:
    """Loss of each depth, averaged over the last steps; every batch is fresh."""
    generator = torch.Generator().manual_seed(2)
    trained = [p for p in objective.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    tail = []
    for step in range(steps):
        loss, metrics = objective(make_batch(generator))
        (loss / metrics["loss_0_count"]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step >= steps - 10:
            sums = [metrics[f"loss_{i}_sum"] for i in range(objective.depths)]
            counts = [metrics[f"loss_{i}_count"] for i in range(objective.depths)]
            tail.append([(s / c).item() for s, c in zip(sums, counts, strict=True)])
    return torch.tensor(tail).mean(0).tolist()


def eagle_objective(steps: int) -> Objective:
    drafter = build_drafter("eagle3", toy_target(), feature_layers=[0, 1, 2])
    return build_objective(prepared(drafter), even(steps, steps=steps))


def medusa_objective(heads: int) -> Objective:
    drafter = build_drafter("medusa", toy_target(), num_heads=heads)
    return build_objective(prepared(drafter), even(heads))


def even(depths: int, **options: Any) -> ObjectiveOptions:
    """All depths count the same."""
    return ObjectiveOptions(decay=1.0 if depths > 1 else None, chunk=0, **options)


def prepared(drafter: Drafter) -> Drafter:
    drafter.set_draft_vocab(torch.ones(V, dtype=torch.int64))
    return drafter.train()


def pair_rows(monkeypatch: pytest.MonkeyPatch, later: int) -> None:
    """Draft each label from a row that much later than the right one."""

    def shifted(labels: Labels, document_ids: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        return draft_rows(labels, document_ids, depth - later)

    monkeypatch.setattr(base, "draft_rows", shifted)


@pytest.mark.parametrize("steps", [1, 3])
def test_eagle3_learns_a_function_of_the_token_it_is_fed(steps: int) -> None:
    losses = train(
        eagle_objective(steps),
        lambda g: token_toy(steps + 2, steps + 1, g),
        150 + 50 * steps,
    )
    assert max(losses) < SOLVED, losses


def test_eagle3_one_row_too_early_cannot_learn_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pair_rows(monkeypatch, later=-1)
    losses = train(eagle_objective(1), lambda g: token_toy(4, 3, g), 200)
    assert losses[0] > STUCK


def test_eagle3_cannot_learn_what_only_the_target_knows() -> None:
    losses = train(eagle_objective(2), lambda g: surprise_toy(5, 3, g), 200)
    assert min(losses) > STUCK, losses


def test_eagle3_one_row_too_late_sees_the_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above: a leak of the label would show as zero loss."""
    pair_rows(monkeypatch, later=1)
    losses = train(eagle_objective(1), lambda g: surprise_toy(5, 3, g), 200)
    assert losses[0] < SOLVED


def test_eagle3_learns_from_the_feature_of_its_row() -> None:
    losses = train(eagle_objective(1), lambda g: feature_toy(3, 2, g), 200)
    assert losses[0] < SOLVED


def test_eagle3_with_features_one_row_late_cannot() -> None:
    losses = train(eagle_objective(1), lambda g: late_feature_toy(3, 2, g), 200)
    assert losses[0] > STUCK


def test_eagle3_second_step_gets_the_row_s_own_past_not_a_new_feature() -> None:
    """At depth 1 the row holds the feature of x_{j-3}, which here knows x_{j-1} but not x_j."""
    losses = train(eagle_objective(2), lambda g: feature_toy(4, 3, g), 350)
    assert losses[0] < SOLVED
    assert losses[1] > STUCK


@pytest.mark.parametrize("head", [0, 1, 2])
def test_medusa_head_learns_the_token_of_its_own_place(head: int) -> None:
    """A hidden state that knows x_{t+2+i} serves head i and no other."""
    losses = train(medusa_objective(3), lambda g: future_toy(8, 2 + head, g), 120)
    solved = [loss < SOLVED for loss in losses]
    stuck = [loss > STUCK for loss in losses]
    assert solved == [i == head for i in range(3)], losses
    assert stuck == [i != head for i in range(3)], losses


@pytest.mark.parametrize("later", [-1, 1])
def test_medusa_with_shifted_labels_cannot(monkeypatch: pytest.MonkeyPatch, later: int) -> None:
    pair_rows(monkeypatch, later)
    losses = train(medusa_objective(3), lambda g: future_toy(8, 3, g), 120)
    assert losses[1] > STUCK
    assert losses[1 + later] < SOLVED  # another head got the label it was to learn
