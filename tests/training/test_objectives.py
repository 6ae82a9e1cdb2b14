"""The unrolled losses against slow, independent ways to compute them, float64."""

import math
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from drafters import Drafter, TargetModel, build_drafter
from tests.tiny import tiny_target
from training.data.batches import Batch, collate
from training.data.chat import TokenizedRow
from training.features import TargetBatch, run_target
from training.losses import TERMS
from training.masks import unrolled_mask
from training.objectives import (
    Objective,
    ObjectiveOptions,
    StepAttention,
    build_objective,
    sequential,
)

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
    attend = StepAttention(PACKED, [None])
    fast = torch.cat([attend(0, *part) for part in parts], dim=2)
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
    attend = StepAttention(PACKED, [None])
    fast = torch.cat([attend(0, *part) for part in parts], dim=2)
    causal = unrolled_mask(PACKED, 1).repeat(1, 3, 3)
    step = torch.arange(3).repeat_interleave(PACKED.shape[1])
    wrong = causal & (step[None, :] <= step[:, None])
    real = (PACKED >= 0).repeat(1, 3)[:, None, :, None]
    assert ((fast - dense_attention(parts, wrong)) * real).abs().max() > 1e-2


class DenseSteps:
    """Drop-in for StepAttention that runs every step through the (T·steps)² mask."""

    def __init__(self, document_ids: Tensor, windows: list[int | None]) -> None:
        assert windows == [None]
        self.documents = document_ids
        self.parts: list[list[Tensor]] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
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
    monkeypatch.setattr(sequential, "StepAttention", DenseSteps)
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

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
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
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"norm_output": True, "fc_norm": True},
        {"norm_before_residual": True, "norm_before_fc": True},
    ],
)
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
@pytest.mark.parametrize(
    "options",
    [
        *({"terms": {name: 1.0}} for name in sorted(TERMS - {"smooth_l1"})),
        {"terms": {"kl": 0.3, "ce": 0.5, "tv": 0.2}},
        {"on_policy": 3},
        {"weighting": "dpace"},
        {"terms": {"expected_length": 1.0, "kl": 0.1}, "weighting": "dpace", "on_policy": 5},
    ],
    ids=lambda options: "+".join([*options.get("terms", {}), *map(str, options.values())][:4]),
)
def test_chunks_do_not_matter(target: TargetModel, family: str, options: dict) -> None:
    drafter = head(target, family, confidence_head=True, draft_vocab_size=50)
    results = []
    for chunk in (0, 1, 4, 1000):
        objective = build_objective(drafter, ObjectiveOptions(**options, chunk=chunk))
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


class VocabularyTensors(TorchDispatchMode):
    """Counts the rows of vocabulary-sized storages that are alive together."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.alive, self.peak = columns, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else [found]:
            if isinstance(x, Tensor) and x.ndim == 2 and x.shape[1] == self.columns:
                storage = x.untyped_storage()
                if storage.data_ptr() not in self.alive:
                    self.alive[storage.data_ptr()] = len(x)
                    weakref.finalize(storage, self.alive.pop, storage.data_ptr(), None)
                    self.peak = max(self.peak, sum(self.alive.values()))
        return found


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_memory_does_not_grow_with_the_number_of_drafts(target: TargetModel, family: str) -> None:
    """At most one depth's logits are alive in a chunk; at once, all of them are."""
    peaks = {}
    for depths, chunk in ((1, 4), (5, 4), (1, 0), (5, 0)):
        given = {"num_heads": depths, "shared_lm_head": True} if family == "medusa" else {}
        drafter = head(target, family, **given)
        steps = None if family == "medusa" else depths
        objective = build_objective(drafter, ObjectiveOptions(chunk=chunk, steps=steps))
        data = teach(target, objective, batch_of([row(30, 2, 6)], length=30))
        with VocabularyTensors(VOCAB) as counted:
            objective(data)
        peaks[depths, chunk] = counted.peak
    assert 0 < peaks[5, 4] <= peaks[1, 4]
    assert peaks[5, 0] > 1.3 * peaks[1, 0], "negative control: depths share the laws, not more"


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


REGRESSION = {"terms": {"smooth_l1": 1.0}}


@pytest.mark.parametrize(
    ("family", "given", "options", "named"),
    [
        ("eagle3", {}, {"top": 5}, r"loss\.top has no effect without a top_k term"),
        ("eagle3", {}, {"ramp": (0.1, 0.2)}, r"loss\.ramp has no effect without loss\.final"),
        ("eagle3", {}, {"steps": 1, "decay": 0.5}, r"loss\.decay=0.5 .* single draft"),
        ("eagle3", {}, {"steps": 1, "on_policy": 1}, r"loss\.on_policy=1 .* single draft"),
        ("eagle1", {}, {"weighting": "dpace"}, r"loss\.weighting=dpace .* single draft"),
        ("medusa", {"num_heads": 1}, {"decay": 0.5}, r"loss\.decay=0.5 .* single draft"),
        ("medusa", {"num_heads": 1}, {"on_policy": 2}, r"loss\.on_policy=2 .* single draft"),
        ("dflash", {"block_size": 2}, {"decay": 0.5}, r"loss\.decay=0.5 .* single draft"),
        ("eagle3", {}, {"confidence_weight": 0.5}, r"loss\.confidence_weight has no effect"),
        ("eagle3", {}, REGRESSION, r"smooth_l1 .* eagle3 has no features"),
        ("medusa", {}, REGRESSION, r"smooth_l1 .* medusa has no features"),
        ("hydra", {}, REGRESSION, r"only with drafter\.shared_lm_head=true"),
        ("mtp", {"norm_output": False}, REGRESSION, r"only with drafter\.norm_output=true"),
    ],
)
def test_options_without_effect_on_a_head_are_refused(
    target: TargetModel, family: str, given: dict, options: dict, named: str
) -> None:
    drafter = head(target, family, **given)
    with pytest.raises(ValueError, match=named):
        build_objective(drafter, ObjectiveOptions(**options))


def test_defaults_that_depend_on_other_options() -> None:
    plain = ObjectiveOptions().resolved("eagle3")
    assert (plain.top, plain.ramp) == (None, None)
    mixed = ObjectiveOptions(terms={"kl": 1.0}, final={"top_k": 1.0}).resolved("eagle3")
    assert (mixed.top, mixed.ramp) == (10, (0.6, 0.8))
    given = ObjectiveOptions(terms={"top_k": 1.0}, final={"kl": 1.0}, top=3, ramp=(0.1, 0.2))
    assert (given.resolved("eagle1").top, given.resolved("eagle1").ramp) == (3, (0.1, 0.2))


@pytest.mark.parametrize(
    ("family", "given", "options"),
    [("mtp", {}, {"steps": 2}), ("hydra", {"num_heads": 2, "shared_lm_head": True}, {})],
)
def test_rows_are_regressed_on_what_the_output_matrix_reads(
    target: TargetModel, family: str, given: dict, options: dict
) -> None:
    """Row t of depth i against the target's last hidden state at t+1+i, whose logits predict the
    drafted token.
    """
    objective = build_objective(
        head(target, family, **given), ObjectiveOptions(**REGRESSION, decay=1.0, **options)
    )
    data = teach(target, objective, batch_of([row(9, 4, 4)], length=9))
    with torch.no_grad():
        loss, _ = objective(data)
        rows = objective.unroll(data)
    wanted = 0.0
    for depth in range(2):
        for token in range(max(4, 2 + depth), 9):
            read = rows[depth][0, token - 2 - depth]
            wanted += F.smooth_l1_loss(read, data.last_hidden[0, token - 1]).item() / 2
    assert wanted > 0.1
    assert abs(loss.item() - wanted) < 1e-9


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"terms": {"hinge": 1.0}}, r"loss\.terms: 'hinge'"),
        ({"terms": {}}, r"loss\.terms needs"),
        ({"terms": {"kl": 0.0}}, r"loss\.terms needs"),
        ({"terms": {"kl": -1.0}}, r"loss\.terms\.kl"),
        ({"final": {"kl": 1.0, "hinge": 1.0}}, r"loss\.final: 'hinge'"),
        ({"ramp": (0.8, 0.6)}, r"loss\.ramp"),
        ({"ramp": (0.5, 1.1)}, r"loss\.ramp"),
        ({"weighting": "dice"}, r"loss\.weighting 'dice'"),
        ({"steps": 0}, r"loss\.steps must be at least 1"),
        ({"decay": 0.0}, r"loss\.decay"),
        ({"decay": 1.5}, r"loss\.decay"),
        ({"cod_rate": 0.0}, r"loss\.cod_rate"),
        ({"cod_floor": 1.5}, r"loss\.cod_floor"),
        ({"anchors": 0}, r"loss\.anchors"),
        ({"noise": -0.1}, r"loss\.noise"),
        ({"on_policy": -1}, r"loss\.on_policy"),
        ({"top": 0}, r"loss\.top"),
        ({"chunk": -1}, r"loss\.chunk must be at least 0"),
        ({"confidence_weight": -0.1}, r"loss\.confidence_weight must be at least 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ObjectiveOptions(**options)
