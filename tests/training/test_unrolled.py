"""The unroll of sequential heads: attention against its definition, detached steps, input noise.

Legend: B batch, T sequence, K steps.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafters import Drafter, TargetModel, build_drafter
from drafters.base import SequentialDrafter
from tests.tiny import tiny_target
from training.data.batches import Batch
from training.features import TargetBatch, run_target
from training.masks import unrolled_mask
from training.objectives import Objective, ObjectiveOptions, build_objective, sequential
from training.objectives.sequential import StepAttention, document_lengths

VOCAB, LENGTH = 96, 14
DOCUMENTS = torch.tensor([[0] * 8 + [1] * 4 + [-1] * 2, [0] * 14])

HEADS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "eagle1": ("eagle1", {}, {"steps": 3}),
    "eagle1, bias, two layers": ("eagle1", {"fc_bias": True, "num_layers": 2}, {"steps": 3}),
    "hass": (
        "eagle1",
        {"draft_vocab_size": 50},
        {"steps": 3, "detach": True, "terms": {"smooth_l1": 1.0, "kl": 0.1, "top_k": 1.0}},
    ),
    "hydra": ("hydra", {"num_heads": 3, "mlp_layers": 2}, {}),
    "hydra++": ("hydra", {"num_heads": 3, "num_layers": 1, "sliding_window": 3}, {}),
    "eagle3, one fused": ("eagle3", {"feature_layers": [3]}, {"steps": 3}),
    "eagle3, four fused": ("eagle3", {"feature_layers": [0, 2, 3, 5]}, {"steps": 3}),
    "eagle3, two layers, norms": ("eagle3", {"num_layers": 2, "qk_norm": True}, {"steps": 4}),
    "eagle3, two layers, window": (
        "eagle3",
        {"num_layers": 2, "sliding_window": 4, "norm_output": True, "confidence_head": True},
        {"steps": 4},
    ),
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


def make_batch(draw: Sequence[int] = (0, 1)) -> Batch:
    """Two packed sequences: documents of 8 and 4 tokens with padding; one of 14."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=generator)
    positions = torch.tensor([[*range(8), *range(4), 0, 1], [*range(14)]])
    supervised = (DOCUMENTS >= 0) & (torch.rand(2, LENGTH, generator=generator) < 0.8)
    return Batch(ids, positions, DOCUMENTS, supervised, torch.tensor([-1, -1]), torch.tensor(draw))


def make_objective(
    target: TargetModel, family: str, options: dict[str, Any], loss: dict[str, Any]
) -> Objective:
    """Perturbed, because what starts at zero hides most mistakes; without noise."""
    drafter = build_drafter(family, target, **options).double()
    drafter.set_draft_vocab(torch.arange(VOCAB))
    perturb(drafter)
    quiet = {} if family == "hydra" else {"noise": 0.0}
    return build_objective(drafter, ObjectiveOptions(**{**quiet, **loss}))


def perturb(drafter: Drafter) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter += 0.2 * noise


def data_of(target: TargetModel, objective: Objective, batch: Batch | None = None) -> TargetBatch:
    return run_target(target, batch or make_batch(), objective.drafter.feature_layers)


# --- attention


class DenseAttention:
    """The definition: all steps' rows as one sequence under ``unrolled_mask``, windows by rotary
    positions, softmax written out.
    """

    def __init__(self, document_ids: Tensor, windows: Sequence[int | None]) -> None:
        self.documents, self.windows = document_ids, list(windows)
        self.past: dict[int, list[tuple[Tensor, Tensor]]] = {i: [] for i in range(len(windows))}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past, length = self.past[layer], q.shape[2]
        past.append((k, v))
        keys, values = (torch.cat(side, dim=2) for side in zip(*past, strict=True))
        groups = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
        mask = self.mask(len(past))[:, -length:]
        positions = torch.cat([torch.arange(length) + step for step in range(len(past))])
        if window := self.windows[layer]:
            mask = mask & (positions[-length:, None] - positions[None] < window)
        scores = q @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
        return scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1) @ values

    def mask(self, steps: int) -> Tensor:
        """(B, T·steps, T·steps)."""
        return unrolled_mask(self.documents, steps)


def loss_and_gradients(objective: Objective, data: TargetBatch) -> tuple[Tensor, list[Tensor]]:
    objective.zero_grad()
    loss, _ = objective(data)
    loss.backward()
    return loss.detach(), [p.grad for p in objective.parameters() if p.grad is not None]


@pytest.mark.parametrize(("family", "options", "loss"), HEADS.values(), ids=HEADS)
def test_fast_attention_is_the_dense_one(
    target: TargetModel,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    options: dict[str, Any],
    loss: dict[str, Any],
) -> None:
    """In rows, loss and every gradient, over whole unrolls."""
    objective = make_objective(target, family, options, loss)
    data = data_of(target, objective)
    real = DOCUMENTS >= 0
    fast, rows = loss_and_gradients(objective, data), objective.unroll(data)
    monkeypatch.setattr(sequential, "StepAttention", DenseAttention)
    slow, wanted = loss_and_gradients(objective, data), objective.unroll(data)
    for a, b in zip(rows, wanted, strict=True):
        assert (a[real] - b[real]).abs().max() < 1e-9
    assert abs(fast[0] - slow[0]) < 1e-9
    assert len(fast[1]) == len(slow[1]) > 0
    for a, b in zip(fast[1], slow[1], strict=True):
        assert (a - b).abs().max() < 1e-9


class ForgetfulAttention(DenseAttention):
    """Rows of later steps see the first step's keys only."""

    def mask(self, steps: int) -> Tensor:
        allowed = super().mask(steps)
        allowed[..., LENGTH:] &= (self.documents < 0).repeat(1, steps)[..., None]
        return allowed


class LateAttention(DenseAttention):
    """Rows see the later steps' keys of the row before theirs."""

    def mask(self, steps: int) -> Tensor:
        allowed = super().mask(steps)
        later = allowed[..., LENGTH:]
        return torch.cat((allowed[..., :LENGTH], later.roll(-1, -1)), dim=-1)


class LeakingAttention(DenseAttention):
    """Documents see each other."""

    def mask(self, steps: int) -> Tensor:
        return unrolled_mask(torch.zeros_like(self.documents), steps)


@pytest.mark.parametrize("broken", [ForgetfulAttention, LateAttention, LeakingAttention])
def test_the_comparison_sees_wrong_masks(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch, broken: type[DenseAttention]
) -> None:
    """Negative control."""
    objective = make_objective(target, *HEADS["eagle3, two layers, norms"])
    data = data_of(target, objective)
    rows = objective.unroll(data)
    monkeypatch.setattr(sequential, "StepAttention", broken)
    wrong = objective.unroll(data)
    assert (rows[2] - wrong[2])[DOCUMENTS >= 0].abs().max() > 1e-3


def test_layers_keep_their_own_keys() -> None:
    """Two layers called in turn, against two attentions with a layer each."""
    torch.manual_seed(0)
    calls = [
        (layer, [torch.randn(2, heads, LENGTH, 4).double() for heads in (4, 2, 2)])
        for _ in range(3)
        for layer in (0, 1)
    ]
    together = StepAttention(DOCUMENTS, [None, 3])
    alone = {0: StepAttention(DOCUMENTS, [None]), 1: StepAttention(DOCUMENTS, [3])}
    for layer, qkv in calls:
        assert torch.equal(together(layer, *qkv), alone[layer](0, *qkv))


@pytest.mark.parametrize("window", [2, 5])
def test_a_window_is_counted_in_positions(window: int) -> None:
    """At step i the row stands i places further on, so it sees i fewer of the first keys."""
    attend = StepAttention(torch.zeros(1, LENGTH, dtype=torch.long), [window])
    q, row = torch.zeros(1, 1, LENGTH, 2).double(), 9
    places = torch.eye(LENGTH).double()[None, None]
    for step in range(window):
        own = places if not step else torch.zeros_like(places)
        out = attend(0, q, torch.zeros_like(q), own)[0, 0, row]
        seen = [row - back for back in range(window - step)]
        assert out.nonzero().flatten().tolist() == sorted(seen)
        assert torch.allclose(out[seen], torch.tensor(1 / window).double())


def test_unrolling_beyond_the_window_is_refused(target: TargetModel) -> None:
    with pytest.raises(ValueError, match="sliding_window=3"):
        make_objective(target, "eagle3", {"sliding_window": 3}, {"steps": 4})


def test_heads_with_steps_of_their_own_refuse_others(target: TargetModel) -> None:
    with pytest.raises(ValueError, match=r"loss\.steps"):
        make_objective(target, "hydra", {}, {"steps": 3})


# --- detached steps


class TwoHeads(SequentialDrafter):
    """The first step by one head and the others by a copy of it, to tell their gradients apart."""

    family = "eagle1"

    def __init__(self, first: SequentialDrafter, later: SequentialDrafter) -> None:
        super().__init__(first.config)
        self.first, self.later = first, later

    def begin(self, *args: Any) -> Tensor:
        return self.first.begin(*args)

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        return (self.later if args[-1] else self.first)(*args)

    def logits(self, hidden: Tensor, depth: int = 0) -> Tensor:
        return self.first.logits(hidden, depth)


@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("detach", [False, True])
def test_detached_steps_teach_only_themselves(
    target: TargetModel, detach: bool, attends: bool
) -> None:
    """The second step's loss reaches the first step's weights through the feature handed on, which
    ``detach`` cuts, and through the keys of true features, which both steps read.
    """
    heads = []
    for _ in range(2):
        head = build_drafter("eagle1", target).double()
        perturb(head)
        if not attends:
            head.layers[0].self_attn.o_proj.weight.data.zero_()
        heads.append(head)
    both = TwoHeads(*heads)
    options = ObjectiveOptions(steps=2, detach=detach, noise=0.0)
    objective = build_objective(both, options)
    rows = objective.unroll(data_of(target, objective))
    rows[1].square().sum().backward()

    def reached(head: SequentialDrafter) -> set[str]:
        found = ((n, p.grad) for n, p in head.named_parameters())
        return {n for n, grad in found if grad is not None and grad.abs().max() > 0}

    every = {name for name, _ in heads[0].named_parameters()}
    silent = {f"layers.0.self_attn.{name}_proj.weight" for name in "qkv"}
    assert reached(heads[1]) == (every if attends else every - silent)
    keys = {"fc.weight", *(f"layers.0.self_attn.{name}_proj.weight" for name in "kv")}
    through_keys = keys if attends else set()
    through_feature = set() if detach else (every if attends else every - silent)
    assert reached(heads[0]) == through_keys | through_feature


def test_detaching_leaves_the_loss_as_it_is(target: TargetModel) -> None:
    """Only gradients differ."""
    family, options, loss = HEADS["hass"]
    found = []
    for detach in (False, True):
        objective = make_objective(target, family, options, {**loss, "detach": detach})
        found.append(loss_and_gradients(objective, data_of(target, objective)))
    assert found[0][0] == found[1][0]
    assert (found[0][1][0] - found[1][1][0]).abs().max() > 1e-6


# --- noise


def inputs(objective: Objective, data: TargetBatch) -> tuple[Tensor, Tensor]:
    """What noise was added to: (features or hidden states, the other of the two)."""
    features, hidden = objective._noised(data)
    return (hidden, hidden) if features is None else (features, hidden)


@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
def test_noise_is_inversely_proportional_to_the_document(target: TargetModel, family: str) -> None:
    """Uniform of width 0.2 · 512 / length, for each packed document its own."""
    objective = make_objective(target, family, {}, {"noise": 0.2}).train()
    data = data_of(target, objective)
    clean = data.last_hidden if data.features is None else data.features
    noise = inputs(objective, data)[0] - clean
    for row, document, length in ((0, 0, 8), (0, 1, 4), (1, 0, 14)):
        width = 0.2 * 512 / length
        here = noise[row, DOCUMENTS[row] == document]
        assert 0.45 * width < here.abs().max() <= 0.5 * width
        assert abs(here.mean()) < 0.05 * width
        assert abs(here.std() - width / 12**0.5) < 0.03 * width
    assert document_lengths(data.batch)[0].tolist()[:12] == [8] * 8 + [4] * 4


def test_only_the_input_is_noised(target: TargetModel) -> None:
    """EAGLE-3's captured layers and not its teacher, whose laws stay exact."""
    objective = make_objective(target, "eagle3", {}, {"noise": 0.2}).train()
    data = data_of(target, objective)
    before = data.last_hidden.clone()
    noised, hidden = objective._noised(data)
    assert torch.equal(hidden, before)
    assert (noised - data.features).abs().max() > 1
    objective(data)
    assert torch.equal(data.last_hidden, before)


def test_noise_only_in_training(target: TargetModel) -> None:
    objective = make_objective(target, "eagle1", {}, {"noise": 0.2})
    data = data_of(target, objective)
    assert torch.equal(objective.eval()._noised(data)[1], data.last_hidden)
    assert not torch.equal(objective.train()._noised(data)[1], data.last_hidden)


def test_noise_belongs_to_the_use_of_a_sequence_not_to_its_batch(target: TargetModel) -> None:
    """The same on any number of processes and after a restart; afresh at the next use."""
    objective = make_objective(target, "eagle1", {}, {"noise": 0.2}).train()
    whole = objective.unroll(data_of(target, objective, make_batch((7, 8))))
    again = objective.unroll(data_of(target, objective, make_batch((7, 8))))
    fresh = objective.unroll(data_of(target, objective, make_batch((7, 9))))
    for row in range(2):
        batch = make_batch((7, 8))
        part = Batch(*(getattr(batch, name)[row : row + 1] for name in batch.__annotations__))
        alone = objective.unroll(data_of(target, objective, part))
        assert (alone[0][0] - whole[0][row])[DOCUMENTS[row] >= 0].abs().max() < 1e-9
    assert torch.equal(whole[0], again[0])
    assert torch.equal(whole[0][0], fresh[0][0])
    assert (whole[0][1] - fresh[0][1]).abs().max() > 1e-2


@pytest.mark.parametrize("option", ["noise", "detach", "steps"])
def test_options_without_effect_on_hydra_are_refused(target: TargetModel, option: str) -> None:
    with pytest.raises(ValueError, match=f"loss.{option}"):
        make_objective(target, "hydra", {}, {option: 1})


def test_dense_twin_is_itself_causal() -> None:
    """With one step and one document it is the attention of torch."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, LENGTH, 4).double() for _ in range(3))
    dense = DenseAttention(torch.zeros(1, LENGTH, dtype=torch.long), [None])
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (dense(0, q, k, v) - plain).abs().max() < 1e-12
