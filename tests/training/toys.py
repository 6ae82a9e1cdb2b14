"""Toy targets whose next token only the right pairing of rows and labels can foretell.

Nothing is run: a toy writes down the hidden states and features that a target with that property
would have had. A head trained on fresh batches reaches zero loss exactly where its row holds what
decides the label, and stays at log V where it does not.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafters import Drafter, TargetModel
from training.alignment import Labels, draft_rows
from training.data.batches import Batch
from training.features import TargetBatch
from training.objectives import Objective
from training.objectives import base as objective_base

V = 8  # vocabulary
BLOCKS = 3  # a hidden state has room for the codes of so many tokens
BATCH = 32
SOLVED, STUCK = 0.1, 0.8 * math.log(V)
FOLLOWER = torch.tensor([3, 6, 0, 7, 5, 1, 4, 2])  # no fixed point, no short cycle


def toy_target(layers: int = 3) -> TargetModel:
    """Its output matrix reads the first V places of a hidden state, with certainty."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=BLOCKS * V,
        intermediate_size=2 * V,
        num_hidden_layers=layers,
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


def stream(length: int, generator: torch.Generator) -> Tensor:
    """(B, length + 8) unpredictable tokens, so that every row has a future."""
    return torch.randint(V, (BATCH, length + 8), generator=generator)


def toy_batch(ids: Tensor, hidden: Tensor, features: Tensor, first_label: int) -> TargetBatch:
    """Supervised from column ``first_label`` on."""
    length = hidden.shape[1]
    supervised = torch.zeros(len(ids), length, dtype=torch.bool)
    supervised[:, first_label:] = True
    positions = torch.arange(length).expand(len(ids), length)
    number = torch.arange(len(ids))
    batch = Batch(
        ids[:, :length], positions, torch.zeros_like(positions), supervised, -1 - number, number
    )
    return TargetBatch(batch, features, hidden)


def noise_features(length: int, generator: torch.Generator, count: int = 3) -> Tensor:
    """(B, T, count·D) that say nothing."""
    return 0.3 * torch.randn(BATCH, length, count * BLOCKS * V, generator=generator)


def token_toy(
    length: int, first_label: int, generator: torch.Generator, lag: int = 1, count: int = 3
) -> TargetBatch:
    """The next token is a function of the one ``lag`` places before it; text and features are
    noise.
    """
    ids = stream(length + lag, generator)
    hidden = codes(FOLLOWER[ids[:, : length + lag].roll(lag - 1, 1)])[:, lag:]
    return toy_batch(
        ids[:, lag:], hidden[:, :length], noise_features(length, generator, count), first_label
    )


def feature_toy(
    length: int, first_label: int, generator: torch.Generator, offset: int = 2, count: int = 3
) -> TargetBatch:
    """The hidden state at t knows x_{t+1}; the features at t know x_{t+offset}; text is noise."""
    ids = stream(length, generator)
    features = torch.cat([codes(ids[:, offset : length + offset])] * count, dim=-1)
    return toy_batch(ids, codes(ids[:, 1 : length + 1]), features, first_label)


def surprise_toy(length: int, first_label: int, generator: torch.Generator) -> TargetBatch:
    """The next token is known to the target's hidden state alone: nobody can draft it."""
    ids = stream(length, generator)
    return toy_batch(
        ids, codes(ids[:, 1 : length + 1]), noise_features(length, generator), first_label
    )


def future_toy(
    length: int, first_label: int, generator: torch.Generator, offset: int = 2
) -> TargetBatch:
    """The hidden state at t knows x_{t+1} and, of what follows, only x_{t+offset}."""
    ids = stream(length, generator)
    hidden = codes(ids[:, 1 : length + 1], ids[:, offset : length + offset])
    return toy_batch(ids, hidden, hidden, first_label)


def train(
    objective: Objective,
    make_batch: Callable[[torch.Generator], TargetBatch],
    steps: int,
    metric: str = "loss",
) -> list[float]:
    """A metric of each depth, averaged over the last steps; every batch is fresh."""
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
            sums = [metrics[f"{metric}_{i}_sum"] for i in range(objective.depths)]
            counts = [metrics[f"{metric}_{i}_count"] for i in range(objective.depths)]
            tail.append([(s / c).item() for s, c in zip(sums, counts, strict=True)])
    return torch.tensor(tail).mean(0).tolist()


def prepared(drafter: Drafter) -> Drafter:
    """With its output matrices started from the target's."""
    drafter.set_draft_vocab(torch.ones(V, dtype=torch.int64))
    return drafter.train()


def pair_rows(monkeypatch: pytest.MonkeyPatch, later: int) -> None:
    """Draft each label from a row that much later than the right one."""

    def shifted(labels: Labels, document_ids: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        return draft_rows(labels, document_ids, depth - later)

    monkeypatch.setattr(objective_base, "draft_rows", shifted)
