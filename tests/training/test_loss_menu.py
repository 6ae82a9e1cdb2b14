"""Every loss, weighting and schedule through a whole objective, against one written out draft by
draft; in chunks and at once. Heads are untrained, so "on policy" takes many best tokens here.

Legend: K depths, V / Vd target / draft vocabulary.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import TargetModel
from tests.tiny import tiny_target
from tests.training.test_unrolled import VOCAB, data_of, make_objective
from training import losses
from training.features import TargetBatch
from training.objectives import Objective, ObjectiveOptions

STEPS = 3


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@dataclass
class Draft:
    """One drafted token."""

    round: tuple[int, int]
    depth: int
    row: Tensor  # (D,)
    logits: Tensor  # (Vd,)
    teacher: Tensor  # (D,) the target's hidden state
    p: Tensor  # (Vd,) exact
    best_known: bool
    label: int | None  # draft id of the token

    @property
    def overlap(self) -> Tensor:
        return torch.minimum(self.logits.softmax(-1), self.p).sum()

    @property
    def own(self) -> float:
        return 0.0 if self.label is None else self.logits.softmax(-1)[self.label].item()


def all_drafts(objective: Objective, data: TargetBatch) -> list[Draft]:
    """Draft token j at depth i from row j-2-i, and read the target's law off row j-1."""
    batch, drafter, found = data.batch, objective.drafter, []
    vocab = torch.arange(VOCAB) if drafter.draft_vocab is None else drafter.draft_vocab
    for depth, rows in enumerate(objective.unroll(data)):
        for b, documents in enumerate(batch.document_ids.tolist()):
            for j in range(len(documents)):
                t = j - 2 - depth
                if t < 0 or documents[t] != documents[j] or documents[j] < 0:
                    continue
                if not batch.supervised[b, j]:
                    continue
                law = drafter.target.project(data.last_hidden[b, j - 1]).softmax(-1)
                place = (vocab == batch.input_ids[b, j]).nonzero().flatten().tolist()
                found.append(
                    Draft(
                        (b, t),
                        depth,
                        rows[b, t],
                        objective.logits(rows[b, t], depth),
                        data.last_hidden[b, j - 1],
                        law[vocab],
                        bool((vocab == law.argmax()).any()),
                        place[0] if place else None,
                    )
                )
    return found


def term(name: str, draft: Draft, top: int | None) -> Tensor | float:
    logits, p = draft.logits[None], draft.p[None]
    if name == "ce":
        return 0.0 if draft.label is None else -draft.logits.log_softmax(-1)[draft.label]
    if name == "smooth_l1":
        return torch.nn.functional.smooth_l1_loss(draft.row, draft.teacher)
    return losses.distillation(name, logits, p, top)[0] if draft.best_known else 0.0


def mixed(options: ObjectiveOptions, progress: float) -> dict[str, float]:
    if options.final is None:
        return options.terms
    start, end = options.ramp
    done = (
        min(1.0, max(0.0, (progress - start) / (end - start))) if end > start else progress >= end
    )
    names = {*options.terms, *options.final}
    return {
        name: (1 - done) * options.terms.get(name, 0) + done * options.final.get(name, 0)
        for name in names
    }


def reference(objective: Objective, data: TargetBatch) -> Tensor:
    """The loss, draft by draft."""
    options = objective.options
    mix = mixed(options, objective.progress)
    rounds: dict[tuple[int, int], dict[int, Draft]] = defaultdict(dict)
    for draft in all_drafts(objective, data):
        rounds[draft.round][draft.depth] = draft
    total: Tensor | float = 0.0
    scale = sum(options.decay**i for i in range(STEPS))
    for drafts in rounds.values():
        paced = pace(drafts) if options.weighting == "dpace" else dict.fromkeys(drafts, 1.0)
        alive = True
        for depth in range(STEPS):
            draft = drafts.get(depth)
            if draft is None:
                alive = False
                continue
            if alive or not options.on_policy:
                weight = options.decay**depth / scale * paced[depth]
                for name, share in mix.items():
                    if name != "expected_length":
                        total = total + weight * share * term(name, draft, options.top)
            best = draft.logits.topk(max(options.on_policy, 1)).indices.tolist()
            alive = alive and draft.label in best
        if mix.get("expected_length") and 0 in drafts:
            length: Tensor | float = 0.0
            product: Tensor | float = 1.0
            for depth in range(STEPS):
                if depth not in drafts:
                    break
                product = product * drafts[depth].overlap
                length = length + product
            total = total + mix["expected_length"] * (1 - length / STEPS)
    assert isinstance(total, Tensor)
    return total


def pace(drafts: dict[int, Draft]) -> dict[int, float]:
    """D-PACE's weights of one round, scaled to mean 1."""
    survival, running = {}, 1.0
    for depth in sorted(drafts):
        running *= 0.5 * drafts[depth].own + 0.5
        survival[depth] = running
    raw = {d: sum(v for e, v in survival.items() if e >= d) for d in survival}
    mean = sum(raw.values()) / len(raw)
    return {d: value / mean for d, value in raw.items()}


def with_gradients(objective: Objective, loss: Tensor) -> tuple[float, dict[str, Tensor]]:
    objective.zero_grad()
    loss.backward()
    return loss.item(), {
        n: p.grad for n, p in objective.drafter.named_parameters() if p.grad is not None
    }


def check(
    target: TargetModel,
    family: str,
    head: dict[str, Any],
    loss: dict[str, Any],
    progress: float = 0.0,
) -> None:
    """At once and in chunks of one and of seven rows, value and gradients."""
    wanted = None
    for chunk in (0, 1, 7):
        objective = make_objective(target, family, head, {"steps": STEPS, **loss, "chunk": chunk})
        objective.progress = progress
        data = data_of(target, objective)
        if wanted is None:
            wanted = with_gradients(objective, reference(objective, data))
            assert wanted[0] != 0
        value, gradients = with_gradients(objective, objective(data)[0])
        assert abs(value - wanted[0]) < 1e-9 * max(1, abs(wanted[0]))
        assert set(wanted[1]) <= set(gradients)
        for name, gradient in gradients.items():
            expected = wanted[1].get(name, torch.zeros_like(gradient))
            assert (gradient - expected).abs().max() < 1e-9, name


REDUCED = {"draft_vocab_size": 60}
SHARP = {"ramp": (0.5, 0.5)}


@pytest.mark.parametrize("name", sorted(losses.TERMS))
@pytest.mark.parametrize("head", [{}, REDUCED], ids=["whole", "reduced"])
def test_every_term(target: TargetModel, head: dict[str, Any], name: str) -> None:
    top = {"top": 4} if name == "top_k" else {}
    check(target, "eagle1", head, {"terms": {name: 0.7}, **top})


@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
@pytest.mark.parametrize(
    "loss",
    [
        {"on_policy": 1},
        {"on_policy": 30, "decay": 0.5},
        {"weighting": "dpace"},
        {"weighting": "dpace", "on_policy": 40, "terms": {"ce": 1.0}},
        {"terms": {"expected_length": 1.0, "kl": 0.1}, "on_policy": 50},
        {"terms": {"kl": 1.0, "ce": 0.5, "top_k": 0.2}, "decay": 0.9},
    ],
    ids=["on policy 1", "on policy 30", "dpace", "dpace on policy", "length", "three"],
)
def test_weights(target: TargetModel, family: str, loss: dict[str, Any]) -> None:
    check(target, family, REDUCED, {"terms": {"lk_hybrid": 1.0}, **loss})


@pytest.mark.parametrize("progress", [0.0, 0.5, 0.6, 0.65, 0.8, 1.0])
@pytest.mark.parametrize("ramp", [{}, SHARP], ids=["ramp", "sharp"])
def test_schedules(target: TargetModel, ramp: dict[str, Any], progress: float) -> None:
    loss = {"terms": {"kl": 1.0, "ce": 0.1}, "final": {"lk_hybrid": 1.0, "ce": 0.3}, **ramp}
    check(target, "eagle3", {}, loss, progress)


def test_a_schedule_may_end_in_the_expected_length(target: TargetModel) -> None:
    loss = {"terms": {"kl": 1.0}, "final": {"expected_length": 2.0}}
    for progress in (0.0, 0.7, 1.0):
        check(target, "eagle1", {}, loss, progress)


def test_mix_of_a_ramp(target: TargetModel) -> None:
    loss = {"terms": {"kl": 1.0}, "final": {"tv": 2.0}, "ramp": (0.2, 0.6)}
    objective = make_objective(target, "eagle1", {}, loss)
    found = []
    for objective.progress in (0.0, 0.2, 0.3, 0.6, 1.0):
        found.append({k: round(v, 9) for k, v in objective.mix().items()})
    assert found == [{"kl": 1.0}, {"kl": 1.0}, {"kl": 0.75, "tv": 0.5}, {"tv": 2.0}, {"tv": 2.0}]


@pytest.mark.parametrize("progress", [0.0, 0.49, 0.5])
def test_a_sharp_ramp_switches(target: TargetModel, progress: float) -> None:
    loss = {"terms": {"kl": 1.0}, "final": {"tv": 1.0}, "ramp": (0.5, 0.5)}
    objective = make_objective(target, "eagle1", {}, loss)
    objective.progress = progress
    assert list(objective.mix()) == (["tv"] if progress >= 0.5 else ["kl"])


def test_options_matter(target: TargetModel) -> None:
    """Negative control: no two of these are the same loss."""
    found = []
    for loss in (
        {},
        {"on_policy": 1},
        {"on_policy": 40},
        {"weighting": "dpace"},
        {"decay": 0.5},
        {"terms": {"ce": 1.0}},
        {"terms": {"expected_length": 1.0}},
    ):
        loss = {"terms": {"kl": 1.0}, "steps": STEPS, **loss}
        objective = make_objective(target, "eagle1", {}, loss)
        found.append(objective(data_of(target, objective))[0].item())
    assert all(abs(a - b) > 1e-3 for i, a in enumerate(found) for b in found[:i]), found


def test_expected_length_is_reported_per_round(target: TargetModel) -> None:
    objective = make_objective(
        target, "eagle1", {}, {"terms": {"expected_length": 1.0}, "steps": STEPS, "chunk": 5}
    )
    data = data_of(target, objective)
    loss, metrics = objective(data)
    count = metrics["expected_length_count"].item()
    length = metrics["expected_length_sum"].item() / count
    assert 0 < length < STEPS
    assert math.isclose(loss.item(), count * (1 - length / STEPS), rel_tol=1e-9)
    assert count == metrics["accuracy_0_count"].item()


@pytest.mark.parametrize("chunk", [0, 3])
def test_confidence_goes_along_with_every_weighting(target: TargetModel, chunk: int) -> None:
    """Its loss is added, undisturbed by how drafts are weighed, and teaches only itself."""
    found = []
    for weight in (0.0, 2.0):
        loss = {"steps": STEPS, "on_policy": 40, "weighting": "dpace", "chunk": chunk}
        loss["confidence_weight"] = weight
        objective = make_objective(target, "eagle3", {"confidence_head": True}, loss)
        value, metrics = objective(data_of(target, objective))
        found.append(with_gradients(objective, value))
    shares = [
        weight * metrics[f"confidence_{depth}_sum"].item()
        for depth, weight in enumerate(objective.depth_weights)
    ]
    assert math.isclose(found[1][0] - found[0][0], 2 * sum(shares), rel_tol=1e-9)
    moved = {n for n, gradient in found[0][1].items() if not torch.equal(gradient, found[1][1][n])}
    assert moved == {"confidence.proj.weight", "confidence.proj.bias"}
