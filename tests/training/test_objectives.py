"""The unrolled losses against slow, independent ways to compute them, float64."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafters import Drafter, TargetModel, build_drafter
from tests.tiny import tiny_target
from training import objectives
from training.chat import TokenizedRow
from training.data import Batch, collate
from training.features import TargetBatch, run_target
from training.masks import unrolled_mask
from training.objectives import Objective, ObjectiveOptions, StepAttention, build_objective

VOCAB = 96
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
PACKED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0, 1, 1]])


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


def row(length: int, prompt: int, seed: int) -> TokenizedRow:
    ids = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return TokenizedRow(ids.tolist(), [i >= prompt for i in range(length)])


def head(target: TargetModel, family: str, **options: object) -> Drafter:
    """An attached float64 head, moved off its initial values so that nothing is zero by chance."""
    drafter = build_drafter(family, target, **options).double()
    drafter.set_draft_vocab(torch.arange(VOCAB).flip(0))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn(
                parameter.shape, generator=generator, dtype=parameter.dtype
            )
    return drafter


def batch_of(*groups: Sequence[TokenizedRow], length: int) -> Batch:
    return collate(groups, length)


def teach(target: TargetModel, objective: Objective, batch: Batch) -> TargetBatch:
    return run_target(target, batch, objective.drafter.feature_layers)


def gradients(objective: Objective, loss: Tensor) -> dict[str, Tensor]:
    objective.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in objective.named_parameters() if p.grad is not None}


# --- attention of the training-time test


def random_steps(steps: int, documents: Tensor, seed: int) -> list[list[Tensor]]:
    """(q, k, v) of every step."""
    generator = torch.Generator().manual_seed(seed)
    batch, length = documents.shape

    def draw(heads: int) -> Tensor:
        shape = (batch, heads, length, HEAD_DIM)
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    return [[draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)] for _ in range(steps)]


def dense_attention(parts: list[list[Tensor]], mask: Tensor) -> Tensor:
    """All steps at once through one (T·steps)² mask: (B, H, T·steps, d)."""
    q, k, v = (torch.cat([part[i] for part in parts], dim=2) for i in range(3))
    k, v = (x[:, torch.arange(HEADS) // (HEADS // KV_HEADS)] for x in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(HEAD_DIM)
    weights = scores.masked_fill(~mask[:, None], -math.inf).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_step_attention_is_the_dense_mask(steps: int) -> None:
    """In value and in gradient of every query, key and value; padding only has to be finite."""
    parts = random_steps(steps, PACKED, seed=steps)
    attend = StepAttention(PACKED)
    fast = torch.cat([attend(*part) for part in parts], dim=2)
    assert fast.isfinite().all()
    dense = dense_attention(parts, unrolled_mask(PACKED, steps))
    real = (PACKED >= 0).repeat(1, steps)[:, None, :, None]
    assert ((fast - dense) * real).abs().max() < 1e-12
    weights = torch.randn(fast.shape, generator=torch.Generator().manual_seed(9)).double() * real
    sources = [x for part in parts for x in part]
    fast_grads = torch.autograd.grad((fast * weights).sum(), sources)
    dense_grads = torch.autograd.grad((dense * weights).sum(), sources)
    for one, other in zip(fast_grads, dense_grads, strict=True):
        assert (one - other).abs().max() < 1e-12
    assert all(gradient[:, :, :7].abs().max() > 1e-3 for gradient in fast_grads[2::3])


def test_dense_run_tells_masks_apart() -> None:
    """Negative control: later steps that also see the later-step keys of earlier rows."""
    parts = random_steps(3, PACKED, seed=3)
    attend = StepAttention(PACKED)
    fast = torch.cat([attend(*part) for part in parts], dim=2)
    causal = unrolled_mask(PACKED, 1).repeat(1, 3, 3)
    step = torch.arange(3).repeat_interleave(PACKED.shape[1])
    wrong = causal & (step[None, :] <= step[:, None])
    real = (PACKED >= 0).repeat(1, 3)[:, None, :, None]
    assert ((fast - dense_attention(parts, wrong)) * real).abs().max() > 1e-2


class DenseSteps:
    """Drop-in for StepAttention that runs every step through the (T·steps)² mask."""

    def __init__(self, document_ids: Tensor) -> None:
        self.documents = document_ids
        self.parts: list[list[Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.parts.append([q, k, v])
        steps, rows = len(self.parts), q.shape[2]
        out = dense_attention(self.parts, unrolled_mask(self.documents, steps))
        return out[:, :, -rows:]


def test_eagle3_loss_and_gradients_equal_the_dense_run(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = build_objective(
        head(target, "eagle3", confidence_head=True), ObjectiveOptions(steps=3)
    )
    batch = batch_of([row(9, 3, 0), row(6, 2, 1)], [row(14, 5, 2)], length=16)
    data = teach(target, objective, batch)
    loss, metrics = objective(data)
    fast = gradients(objective, loss)
    monkeypatch.setattr(objectives, "StepAttention", DenseSteps)
    slow_loss, slow_metrics = objective(data)
    slow = gradients(objective, slow_loss)
    assert abs(loss - slow_loss) < 1e-10 * abs(loss)
    assert fast.keys() == slow.keys()
    for name, gradient in fast.items():
        assert (gradient - slow[name]).abs().max() < 1e-10 * (1 + gradient.abs().max()), name
    for name, value in metrics.items():
        assert abs(float(value) - float(slow_metrics[name])) < 1e-9, name


# --- the whole loss, from scratch


def chain_logits(drafter: Drafter, data: TargetBatch, label: int, depth: int) -> Tensor:
    """Draft logits of one label of a single document, computed one row at a time.

    Committed rows 0..r come first, then one row per further step with its own feature.
    """
    ids = data.batch.input_ids[0]
    last = label - 2 - depth  # the row that drafts the label
    memory: list[tuple[Tensor, Tensor]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        memory.append((k, v))
        keys, values = (
            torch.cat([pair[i] for pair in memory], dim=2).repeat_interleave(2, dim=1)
            for i in (0, 1)
        )
        return F.scaled_dot_product_attention(q, keys, values)  # one row sees all before it

    features = drafter.fuse(data.features)
    for position in range(last + 1):
        hidden, feature = drafter(
            features[:, position : position + 1],
            ids[None, position + 1 : position + 2],
            torch.tensor([[position]]),
            attend,
        )
    for step in range(1, depth + 1):
        token = ids[None, last + 1 + step : last + 2 + step]
        hidden, feature = drafter(feature, token, torch.tensor([[last + step]]), attend)
    return drafter.logits(hidden)[0, 0]


def expected_metrics(
    drafter: Drafter, data: TargetBatch, depths: int, all_logits
) -> dict[str, float]:
    """Sums over the labels of one document, written out label by label."""
    batch, found = (
        data.batch,
        dict.fromkeys(
            [
                f"{n}_{d}_{kind}"
                for n in ("loss", "overlap", "accuracy")
                for d in range(depths)
                for kind in ("sum", "count")
            ],
            0.0,
        ),
    )
    teacher = drafter.target.project(data.last_hidden)[0]
    vocab = range(VOCAB) if drafter.draft_vocab is None else drafter.draft_vocab.tolist()
    for label in range(1, batch.input_ids.shape[1]):
        if not batch.supervised[0, label]:
            continue
        p = teacher[label - 1].softmax(-1)
        best = int(p.argmax())
        for depth in range(depths):
            if label - 2 - depth < 0:
                continue
            q = all_logits(label, depth).softmax(-1)
            loss = 0.0
            if best in vocab:
                inside = torch.stack([p[token] for token in vocab])
                inside = inside / inside.sum()
                loss = (inside * (inside.log() - q.log())).sum().item()
            overlap = sum(min(p[token].item(), q[i].item()) for i, token in enumerate(vocab))
            agree = list(vocab)[int(q.argmax())] == best
            for name, value in (("loss", loss), ("overlap", overlap), ("accuracy", float(agree))):
                found[f"{name}_{depth}_sum"] += value
                found[f"{name}_{depth}_count"] += 1
    return found


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
@pytest.mark.parametrize("variant", [{}, {"norm_output": True, "fc_norm": True}])
def test_eagle3_objective_written_out(
    target: TargetModel, draft_vocab_size: int | None, variant: dict
) -> None:
    """Loss and metrics equal those of every label drafted alone, step by step."""
    drafter = head(target, "eagle3", draft_vocab_size=draft_vocab_size, **variant)
    objective = build_objective(drafter, ObjectiveOptions(steps=3, decay=0.5, chunk=4))
    data = teach(target, objective, batch_of([row(10, 2, 3)], length=10))
    with torch.no_grad():
        loss, metrics = objective(data)
        wanted = expected_metrics(
            drafter, data, 3, lambda label, depth: chain_logits(drafter, data, label, depth)
        )
    for name, value in wanted.items():
        assert abs(float(metrics[name]) - value) < 1e-9, name
    weights = [1 / 1.75, 0.5 / 1.75, 0.25 / 1.75]
    total = sum(w * wanted[f"loss_{d}_sum"] for d, w in enumerate(weights))
    assert abs(loss.item() - total) < 1e-9


@pytest.mark.parametrize("shared", [False, True])
def test_medusa_objective_written_out(target: TargetModel, shared: bool) -> None:
    drafter = head(target, "medusa", num_heads=3, num_layers=2, shared_lm_head=shared)
    objective = build_objective(drafter, ObjectiveOptions(decay=1.0))
    data = teach(target, objective, batch_of([row(9, 4, 4)], length=9))
    with torch.no_grad():
        loss, metrics = objective(data)
        wanted = expected_metrics(
            drafter,
            data,
            3,
            lambda label, i: drafter.logits(
                drafter.blocks[i](data.last_hidden[0, label - 2 - i]), i
            ),
        )
    for name, value in wanted.items():
        assert abs(float(metrics[name]) - value) < 1e-9, name
    assert abs(loss.item() - sum(wanted[f"loss_{d}_sum"] for d in range(3)) / 3) < 1e-9


# --- metrics


def test_tokens_outside_the_draft_vocabulary_are_misses(target: TargetModel) -> None:
    """They are masked out of the loss but counted, and what p holds outside is missed overlap."""
    drafter = head(target, "eagle3", draft_vocab_size=40)
    objective = build_objective(drafter, ObjectiveOptions(steps=2))
    data = teach(target, objective, batch_of([row(30, 2, 6)], length=30))
    with torch.no_grad():
        _, metrics = objective(data)
    p = drafter.target.project(data.last_hidden)[0].softmax(-1)[1:-1]
    inside = torch.isin(p.argmax(-1), drafter.draft_vocab)
    assert 0 < inside.sum() < len(inside)
    assert metrics["accuracy_0_count"] == len(inside) == 28
    assert metrics["accuracy_0_sum"] <= inside.sum()
    assert metrics["overlap_0_sum"] <= p[:, drafter.draft_vocab].sum()


def test_confidence_is_trained_on_the_overlap(target: TargetModel) -> None:
    """Label 1 - ½‖p-q‖₁; only the confidence head gets a gradient from it."""
    drafter = head(target, "medusa", num_heads=2, confidence_head=True)
    data = teach(
        target, build_objective(drafter, ObjectiveOptions()), batch_of([row(8, 2, 7)], length=8)
    )
    losses, grads = [], []
    for weight in (0.0, 0.7):
        objective = build_objective(drafter, ObjectiveOptions(confidence_weight=weight, decay=1.0))
        loss, metrics = objective(data)
        grads.append(gradients(objective, loss))
        losses.append(loss.item())
    wanted = 0.0
    for head_index in range(2):
        for label in range(2 + head_index, 8):
            hidden = drafter.blocks[head_index](data.last_hidden[0, label - 2 - head_index])
            q = drafter.logits(hidden, head_index).softmax(-1)
            p = target.project(data.last_hidden)[0, label - 1].softmax(-1)
            overlap = 1 - 0.5 * (p - q).abs().sum()
            c = drafter.confidence(hidden).sigmoid()
            wanted += -(overlap * c.log() + (1 - overlap) * (1 - c).log()).item()
    found = sum(float(metrics[f"confidence_{d}_sum"]) for d in range(2))
    assert abs(found - wanted) < 1e-9
    assert abs(losses[1] - losses[0] - 0.7 * wanted / 2) < 1e-9
    for name, gradient in grads[0].items():
        if "confidence" in name:
            assert gradient.abs().max() == 0
            assert grads[1][name].abs().max() > 1e-3
        else:
            assert (gradient - grads[1][name]).abs().max() < 1e-12, name


def test_metrics_are_sums_with_their_counts(target: TargetModel) -> None:
    drafter = head(target, "eagle3", confidence_head=True)
    objective = build_objective(drafter, ObjectiveOptions(steps=2))
    _, metrics = objective(teach(target, objective, batch_of([row(9, 3, 8)], length=9)))
    stems = {name.rsplit("_", 1)[0] for name in metrics}
    assert {f"{stem}_{kind}" for stem in stems for kind in ("sum", "count")} == set(metrics)
    assert stems == {
        f"{n}_{d}" for n in ("loss", "accuracy", "overlap", "confidence") for d in range(2)
    }
    assert not any(value.requires_grad for value in metrics.values())


# --- what the batch looks like must not matter


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
@pytest.mark.parametrize("chunk", [0, 3])
def test_packed_documents_give_the_loss_of_single_ones(
    target: TargetModel, family: str, chunk: int
) -> None:
    drafter = head(target, family, confidence_head=True)
    objective = build_objective(drafter, ObjectiveOptions(chunk=chunk))
    rows = [row(9, 3, 10), row(5, 1, 11), row(12, 6, 12)]
    packed, packed_metrics = objective(
        teach(target, objective, batch_of([rows[0], rows[1]], [rows[2]], length=16))
    )
    packed_grads = gradients(objective, packed)
    single = 0
    sums: dict[str, float] = {}
    for one in rows:
        loss, metrics = objective(teach(target, objective, batch_of([one], length=len(one.ids))))
        single = single + loss
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    single_grads = gradients(objective, single)
    assert abs(packed - single) < 1e-10 * abs(packed)
    for name, value in packed_metrics.items():
        assert abs(float(value) - sums[name]) < 1e-9, name
    for name, gradient in packed_grads.items():
        assert (gradient - single_grads[name]).abs().max() < 1e-9, name


def test_loss_of_a_document_sees_its_neighbour_if_they_are_not_told_apart(
    target: TargetModel,
) -> None:
    """Negative control of the test above: one long document is not two packed ones."""
    objective = build_objective(head(target, "eagle3"), ObjectiveOptions())
    first, second = row(9, 3, 10), row(7, 3, 11)
    packed, _ = objective(teach(target, objective, batch_of([first, second], length=16)))
    joined = TokenizedRow(first.ids + second.ids, first.supervised + second.supervised)
    one, _ = objective(teach(target, objective, batch_of([joined], length=16)))
    assert abs(packed - one) > 1e-2


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
@pytest.mark.parametrize("loss_name", ["kl", "soft_cross_entropy", "tv", "lk_hybrid"])
def test_chunks_do_not_matter(target: TargetModel, family: str, loss_name: str) -> None:
    drafter = head(target, family, confidence_head=True, draft_vocab_size=50)
    results = []
    for chunk in (0, 1, 4, 1000):
        objective = build_objective(drafter, ObjectiveOptions(loss=loss_name, chunk=chunk))
        batch = batch_of([row(9, 3, 13)], [row(7, 2, 14)], length=10)
        loss, metrics = objective(teach(target, objective, batch))
        results.append((loss.item(), metrics, gradients(objective, loss)))
    value, metrics, grads = results[0]
    for other_value, other_metrics, other_grads in results[1:]:
        assert abs(value - other_value) < 1e-10 * abs(value)
        assert metrics.keys() == other_metrics.keys()
        assert grads.keys() == other_grads.keys()
        for name, gradient in grads.items():
            assert (gradient - other_grads[name]).abs().max() < 1e-10, name


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_every_trainable_parameter_gets_a_gradient(target: TargetModel, family: str) -> None:
    """Also from a batch without a label, which data-parallel wrappers insist on."""
    drafter = head(target, family, confidence_head=True)
    objective = build_objective(drafter, ObjectiveOptions())
    names = {name for name, p in objective.named_parameters() if p.requires_grad}
    loss, _ = objective(teach(target, objective, batch_of([row(9, 3, 15)], length=12)))
    assert set(gradients(objective, loss)) == names
    empty = TokenizedRow([5, 6, 7, 8], [False] * 4)
    loss, metrics = objective(teach(target, objective, batch_of([empty], length=4)))
    found = gradients(objective, loss)
    assert loss == 0 and metrics == {}
    assert set(found) == names
    assert all(gradient.abs().max() == 0 for gradient in found.values())


def test_the_target_gets_no_gradient(target: TargetModel) -> None:
    drafter = head(target, "medusa", shared_lm_head=True)
    objective = build_objective(drafter, ObjectiveOptions())
    loss, _ = objective(teach(target, objective, batch_of([row(9, 3, 15)], length=9)))
    loss.backward()
    assert all(p.grad is None for p in target.model.parameters())
    assert not any("embed" in name for name, _ in objective.named_parameters())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss": "hinge"}, "hinge"),
        ({"steps": 0}, "steps >= 1"),
        ({"decay": 0.0}, "decay"),
        ({"decay": 1.5}, "decay"),
        ({"chunk": -1}, "chunk >= 0"),
        ({"confidence_weight": -0.1}, "confidence_weight >= 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ObjectiveOptions(**options)
