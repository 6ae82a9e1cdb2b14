"""A head and a LoRA of its target trained together, float64: losses and gradients against slow
twins.
"""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafters import FAMILIES, TargetModel, build_drafter
from tests.tiny import tiny_target
from tests.zoo import float64_throughout
from training.adapter import TargetAdapter
from training.data.batches import Batch, collate
from training.data.chat import TokenizedRow
from training.features import TargetBatch, run_target
from training.joint import (
    JointObjective,
    UnreadBatches,
    adapter_groups,
    checkpointed,
    late_rate,
)
from training.objectives import Objective, ObjectiveOptions, build_objective
from training.options.data import LoraOptions

VOCAB, LENGTH = 96, 24
OPTIONS: dict[str, dict[str, Any]] = {"dspark": {"markov_rank": 8}}


def row(length: int, prompt: int, seed: int) -> TokenizedRow:
    ids = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return TokenizedRow(ids.tolist(), [i >= prompt for i in range(length)])


BATCH = collate([[row(9, 2, 0), row(12, 3, 1)], [row(20, 5, 2)]], LENGTH, draw=[7, 8])
EMPTY = collate([[replace(row(9, 2, 0), supervised=[False] * 9)]], LENGTH)


def single(number: int) -> Batch:
    return Batch(*(getattr(BATCH, f.name)[number : number + 1] for f in fields(BATCH)))


def frozen(family: str, target: TargetModel, **loss: Any) -> Objective:
    head = build_drafter(family, target, seed=1, **OPTIONS.get(family, {})).double()
    head.set_draft_vocab(torch.arange(VOCAB))
    return build_objective(head.train(), ObjectiveOptions(**loss))


def joint(
    family: str = "medusa",
    moved: float = 0.0,
    recompute: bool = False,
    dtype: torch.dtype = torch.float64,
    loss: dict[str, Any] | None = None,
    **lora: Any,
) -> JointObjective:
    """With B moved off 0 by so much."""
    target = tiny_target(dtype, layers=4)
    inner = frozen(family, target, **loss or {}).to(dtype)
    found = JointObjective(inner, target, LoraOptions(rank=2, **lora), recompute=recompute)
    move(found, moved)
    return found.train()


def move(objective: JointObjective, size: float, seed: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in objective.adapter.items():
            if "lora_B" in name:
                value += size * torch.randn(value.shape, generator=generator, dtype=value.dtype)


def run(objective: Objective, batch: Batch = BATCH) -> tuple[float, dict[str, Tensor], dict]:
    """Loss, gradients by parameter name, metrics."""
    objective.zero_grad()
    read = UnreadBatches().of(()) if isinstance(objective, JointObjective) else None
    target = objective.drafter.target
    data = read(batch) if read else run_target(target, batch, objective.drafter.feature_layers)
    loss, metrics = objective(data)
    loss.backward()
    named = objective.named_parameters()
    found = {name: p.grad.clone() for name, p in named if p.grad is not None}
    return loss.item(), found, metrics


def of_adapter(gradients: dict[str, Tensor], matrix: str = "lora_") -> dict[str, Tensor]:
    return {n: g for n, g in gradients.items() if n.startswith("adapter.") and matrix in n}


# --- the head's loss


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_first_step_is_that_of_the_frozen_target(family: str) -> None:
    """B is 0, so nothing has changed: loss and gradients of the head are equal bit for bit. But the
    LoRA is pulled already, in every layer that the head reads.
    """
    own = run(frozen(family, tiny_target(layers=4)))
    loss, gradients, metrics = run(joint(family))
    assert loss == own[0]
    for name, gradient in own[1].items():
        assert torch.equal(gradients[name.replace("inner.", "")], gradient), name
    assert metrics["target_loss_sum"] == 0
    pulled = of_adapter(gradients, "lora_B")
    first = [g for n, g in pulled.items() if "layers/0/" in n]
    assert first and all(gradient.abs().max() > 0 for gradient in first)
    assert all(gradient.abs().max() == 0 for gradient in of_adapter(gradients, "lora_A").values())


@pytest.mark.parametrize("family", ["medusa", "eagle3", "dspark"])
def test_gradients_go_through_what_the_head_reads_and_not_through_its_teacher(family: str) -> None:
    """Against the chain rule by hand: of the head's loss by the hidden states, and of those by the
    LoRA.
    """
    objective = joint(family, moved=0.1, target_weight=0.0)
    loss, gradients, _ = run(objective)
    target, layers = objective.drafter.target, objective.drafter.feature_layers
    known = run_target(target, BATCH, layers)
    leaves = [
        None if x is None else x.requires_grad_() for x in (known.features, known.last_hidden)
    ]
    again, _ = objective.inner(TargetBatch(BATCH, leaves[0], leaves[1]))
    assert again.item() == pytest.approx(loss, rel=1e-12)
    there = [leaf for leaf in leaves if leaf is not None]
    pulls = torch.autograd.grad(again, there, allow_unused=True)
    out = target.forward(
        BATCH.input_ids, position_ids=BATCH.position_ids, feature_layers=layers, gradients=True
    )
    states = [out.features, out.last_hidden]
    pairs = [
        (state, pull)
        for state, pull in zip([s for s in states if s is not None], pulls, strict=True)
        if pull is not None
    ]
    parameters = dict(objective.adapter.items())
    expected = torch.autograd.grad(
        [state for state, _ in pairs],
        list(parameters.values()),
        [pull for _, pull in pairs],
        allow_unused=True,
    )
    seen = 0
    for name, value in zip(parameters, expected, strict=True):
        found = gradients[f"adapter.{name}"]
        wanted = torch.zeros_like(found) if value is None else value
        assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12), name
        seen += bool(wanted.abs().max() > 1e-6)
    assert seen > len(parameters) // 3


def test_the_parameters_are_named_as_in_a_frozen_run() -> None:
    plain = {name for name, _ in frozen("eagle3", tiny_target(layers=4)).named_parameters()}
    names = {name for name, p in joint("eagle3").named_parameters() if p.requires_grad}
    assert {name for name in names if not name.startswith("adapter.")} == plain
    assert len(names - plain) == 2 * 7 * 4  # A and B of the linear layers of four layers


# --- the target's own loss


def own_loss(objective: JointObjective, batch: Batch, kind: str) -> Tensor:
    """Slowly: sequence by sequence, from all logits."""
    target, total = objective.drafter.target, torch.zeros((), dtype=torch.float64)
    for number in range(len(batch.input_ids)):
        one = Batch(*(getattr(batch, f.name)[number : number + 1] for f in fields(batch)))
        with objective.lora_adapter.disabled():
            before = target.forward(one.input_ids, position_ids=one.position_ids).logits[0]
        out = target.forward(one.input_ids, position_ids=one.position_ids, gradients=True)
        values = []
        for label in one.supervised[0].nonzero().squeeze(-1).tolist():
            if one.document_ids[0, label] != one.document_ids[0, label - 1] or not label:
                continue
            q, p = out.logits[0, label - 1].log_softmax(-1), before[label - 1].log_softmax(-1)
            ce = F.nll_loss(q[None], one.input_ids[0, label][None])
            values.append(F.kl_div(q, p, log_target=True, reduction="sum") if kind == "kl" else ce)
        total = total + objective.count(one) * torch.stack(values).mean()
    return total


@pytest.mark.parametrize("family", ["medusa", "dflash"])
@pytest.mark.parametrize("kind", ["kl", "ce"])
@pytest.mark.parametrize("chunk", [0, 3])
def test_the_targets_own_loss(
    monkeypatch: pytest.MonkeyPatch, family: str, kind: str, chunk: int
) -> None:
    """What is added to the head's loss, in value and gradient."""
    float64_throughout(monkeypatch)
    common: dict[str, Any] = {"moved": 0.1, "loss": {"chunk": chunk, "anchors": None}}
    with_own = joint(family, **common, target_weight=0.7, target_loss=kind)
    without = joint(family, **common, target_weight=0.0)
    loss, gradients, metrics = run(with_own)
    plain, plain_gradients, sums = run(without)
    expected = own_loss(with_own, BATCH, kind)
    assert expected.item() > 0.01
    assert loss - plain == pytest.approx(0.7 * expected.item(), rel=1e-9)
    names = list(of_adapter(gradients))
    parameters = [with_own.get_parameter(name) for name in names]
    wanted = torch.autograd.grad(0.7 * expected, parameters)
    for name, value in zip(names, wanted, strict=True):
        assert torch.allclose(gradients[name] - plain_gradients[name], value, atol=1e-9), name
    assert "target_loss_sum" not in sums
    assert metrics["target_loss_count"] == BATCH.supervised.sum()


@pytest.mark.parametrize("family", ["medusa", "dflash"])
def test_the_loss_adds_up_however_sequences_are_dealt(family: str) -> None:
    """Over micro-batches and processes: of a batch it is the sum of those of its sequences."""
    objective = joint(family, moved=0.1, loss={"anchors": 4} if family == "dflash" else {})
    both, together, _ = run(objective)
    parts = [run(objective, single(number)) for number in range(2)]
    assert both == pytest.approx(sum(loss for loss, _, _ in parts), rel=1e-12)
    for name, gradient in together.items():
        summed = sum(found[name] for _, found, _ in parts)
        assert torch.allclose(gradient, summed, rtol=1e-9, atol=1e-12), name


def test_nothing_supervised_is_worth_nothing_and_pulls_nothing() -> None:
    objective = joint(moved=0.1)
    for data in (UnreadBatches().of(())(EMPTY), None):
        objective.zero_grad()
        loss, metrics = objective(data)
        loss.backward()
        assert loss.item() == 0 and not metrics
        trained = [p for p in objective.parameters() if p.requires_grad]
        assert all(p.grad is not None and p.grad.abs().max() == 0 for p in trained)


def test_the_original_target_is_there_without_the_adapter() -> None:
    objective = joint(moved=0.3)
    target = objective.drafter.target
    expected = run_target(tiny_target(layers=4), BATCH, ()).last_hidden
    with objective.lora_adapter.disabled():
        assert torch.equal(run_target(target, BATCH, ()).last_hidden, expected)
    assert (run_target(target, BATCH, ()).last_hidden - expected).abs().max() > 0.1
    assert not any(module.training for module in target.model.modules())


# --- how it is trained


def test_before_its_start_the_adapter_rests() -> None:
    objective = joint(start=0.5)
    objective.progress = 0.49
    loss, gradients, metrics = run(objective)
    own = run(frozen("medusa", tiny_target(layers=4)))
    assert loss == own[0] and "target_loss_sum" not in metrics
    pulls = of_adapter(gradients)
    assert pulls and all(gradient.abs().max() == 0 for gradient in pulls.values())
    objective.progress = 0.5
    assert any(g.abs().max() > 0 for g in of_adapter(run(objective)[1]).values())


def test_the_adapters_learning_rate() -> None:
    assert late_rate(float, 0.0, 3, 10) is float
    rate = late_rate(lambda step: 10.0 - step, 0.4, 3, 10)
    assert [rate(step) for step in range(11)] == [0, 0, 0, 0, 1.5, 2.5, 3, 3, 2, 1, 0]
    late = late_rate(lambda step: 1.0, 0.25, 0, 10)  # between two steps
    assert [late(step) for step in range(5)] == [0, 0, 0, 1, 1]


def test_the_adapter_is_a_parameter_group_of_its_own() -> None:
    objective = joint(lr=3e-4, start=0.2)
    (group,) = adapter_groups(objective)
    assert (group["lr"], group["weight_decay"], group["start"]) == (3e-4, 0.0, 0.2)
    assert {id(p) for p in group["params"]} == {
        id(p) for name, p in objective.named_parameters() if name.startswith("adapter.")
    }
    assert adapter_groups(objective.inner) == []


@pytest.mark.parametrize("family", ["medusa", "eagle3"])
def test_recomputing_changes_nothing_but_what_is_kept(family: str) -> None:
    def kept(objective: JointObjective) -> tuple[int, tuple]:
        sizes: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            sizes[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            objective._run(BATCH, objective.drafter.feature_layers)
        return sum(sizes.values()), run(objective)

    (much, expected), (little, found) = (
        kept(joint(family, moved=0.1, recompute=recompute)) for recompute in (False, True)
    )
    assert little < much / 3
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


def test_recomputed_layers_get_their_forward_back() -> None:
    layers = tiny_target(layers=4).decoder_layers()
    with pytest.raises(RuntimeError), checkpointed(layers):
        assert all("forward" in layer.__dict__ for layer in layers)
        raise RuntimeError
    assert not any("forward" in layer.__dict__ for layer in layers)


def test_the_target_keeps_its_own_precision_under_autocast() -> None:
    """As it does in a run with a frozen target, where it is outside of it."""
    objective = joint(dtype=torch.float32, moved=0.1)
    expected = objective._run(BATCH, ()).last_hidden
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = objective._run(BATCH, ()).last_hidden
        assert torch.equal(found, expected)
    objective.arithmetic = torch.bfloat16
    loss, gradients, _ = run(objective)
    objective.arithmetic = None
    exact, _, _ = run(objective)
    assert loss != exact and loss == pytest.approx(exact, rel=0.05)
    assert all(g.dtype == torch.float32 for g in of_adapter(gradients).values())


def test_a_16_bit_target_has_a_32_bit_adapter() -> None:
    target = tiny_target(torch.bfloat16, layers=4)
    adapter = TargetAdapter(target, LoraOptions(rank=2))
    assert {p.dtype for p in adapter.parameters().values()} == {torch.float32}
    assert target.dtype == torch.bfloat16


def test_the_seed_is_the_adapters_alone() -> None:
    state = torch.get_rng_state()
    digests = [
        TargetAdapter(tiny_target(layers=4), LoraOptions(rank=2, alpha=alpha), seed).digest()
        for seed, alpha in ((0, 16), (0, 16), (1, 16), (0, 8))
    ]
    assert digests[0] == digests[1] and len(set(digests)) == 3
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["lm_head"], "the head borrows"),
        (["q_proj", "embed_tokens"], "'embed_tokens' is a matrix that the head borrows"),
        (["q_prog"], "no layer 'q_prog'; its linear ones are .*'q_proj'"),
        (["all-linear", "q_proj"], "not named together"),
    ],
)
def test_layers_that_cannot_have_one(modules: list[str], message: str) -> None:
    target = tiny_target(layers=4)
    with pytest.raises(ValueError, match=message):
        TargetAdapter(target, LoraOptions(rank=2, modules=modules))
    assert not [name for name, _ in target.model.named_parameters() if "lora" in name]


def test_only_the_named_layers_have_one() -> None:
    adapter = TargetAdapter(
        tiny_target(layers=4), LoraOptions(rank=2, modules=["q_proj", "up_proj"])
    )
    names = adapter.parameters()
    assert len(names) == 2 * 2 * 4
    assert all("q_proj" in name or "up_proj" in name for name in names)


def test_a_float16_target_is_refused() -> None:
    with pytest.raises(ValueError, match="float16 does not go"):
        TargetAdapter(tiny_target(torch.float16, layers=4), LoraOptions(rank=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": -1}, "lora.rank"),
        ({"rank": 2, "alpha": 0}, "lora.alpha"),
        ({"rank": 2, "start": 1.0}, "lora.start"),
        ({"rank": 2, "target_weight": -1}, "lora.target_weight"),
        ({"rank": 2, "target_loss": "mse"}, "lora.target_loss"),
        ({"rank": 2, "modules": []}, "lora.modules"),
        ({"rank": 2, "target_weight": 0, "target_loss": "ce"}, "lora.target_loss has no effect"),
        ({"alpha": 8}, "lora.alpha has no effect without lora.rank"),
        ({"modules": ["q_proj"]}, "lora.modules has no effect without lora.rank"),
    ],
)
def test_options_out_of_range_or_without_effect(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraOptions(**options)
