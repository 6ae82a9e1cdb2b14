"""MTP modules train on the right rows, decode as trained, and go on from a target's own."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import Drafter, build_drafter, load_drafter
from drafters.mtp_native import load_native_mtp
from recipes.parity import check_parity
from tests.native_mtp import KINDS, load_checkpoint, save_checkpoint
from tests.native_mtp import MODULES as NATIVE
from tests.tiny import tiny_target
from tests.training.toys import (
    SOLVED,
    STUCK,
    future_toy,
    pair_rows,
    prepared,
    surprise_toy,
    token_toy,
    toy_target,
    train,
)
from tests.zoo import float64_throughout
from training.data.batches import collate
from training.data.chat import TokenizedRow
from training.features import run_target
from training.objectives import Objective, ObjectiveOptions, build_objective

LENGTH = 30
IDS = torch.randint(3, 96, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
ROW = TokenizedRow(IDS, [False] * 3 + [True] * (LENGTH - 3))
MODULES = [1, 2]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("transformers.modeling_utils"), "disabled", True)


def steps(drafter: Drafter, count: int = 2) -> int | None:
    """Only a module applied to its own output has a number of steps to choose."""
    return None if drafter.num_drafts else count


def toy_objective(modules: int, **options: Any) -> Objective:
    torch.manual_seed(0)
    head = prepared(build_drafter("mtp", toy_target(), num_modules=modules, **options))
    return build_objective(head, ObjectiveOptions(steps=steps(head), decay=1.0, chunk=0))


# --- which row predicts which token


@pytest.mark.parametrize("modules", MODULES)
def test_every_step_learns_a_function_of_the_token_it_is_fed(modules: int) -> None:
    assert max(train(toy_objective(modules), lambda g: token_toy(4, 3, g), 250)) < SOLVED


@pytest.mark.parametrize("modules", MODULES)
def test_one_row_too_early_does_not_hold_the_token(
    monkeypatch: pytest.MonkeyPatch, modules: int
) -> None:
    pair_rows(monkeypatch, later=-1)
    assert min(train(toy_objective(modules), lambda g: token_toy(4, 3, g), 60)) > STUCK


@pytest.mark.parametrize("later", [0, 1])
@pytest.mark.parametrize("modules", MODULES)
def test_one_row_too_late_holds_the_label(
    monkeypatch: pytest.MonkeyPatch, modules: int, later: int
) -> None:
    """Negative control: a leak would show, where only the target knows the label."""
    pair_rows(monkeypatch, later)
    losses = train(toy_objective(modules), lambda g: surprise_toy(4, 3, g), 130 if later else 60)
    assert max(losses) < SOLVED if later else min(losses) > STUCK, losses


@pytest.mark.parametrize("modules", MODULES)
def test_the_hidden_state_of_the_row_comes_first_and_then_the_heads_own(modules: int) -> None:
    """At depth 1 the row holds the state of x_{j-3}, which here knows x_{j-1} but not x_j."""
    losses = train(toy_objective(modules), lambda g: future_toy(4, 3, g), 250)
    assert losses[0] < SOLVED
    assert losses[1] > STUCK


def test_what_only_the_first_module_saw_reaches_the_last() -> None:
    """The state that decides module 1's label went into module 0."""
    losses = train(toy_objective(2), lambda g: future_toy(4, 3, g, offset=3), 150)
    assert losses[1] < SOLVED, losses


# --- training pass and decoding

HEADS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "qk_norm": True, "norm_output": False},
    {"hidden_first": True, "draft_vocab_size": 50, "sliding_window": 6},
    {"num_modules": 3},
    {"num_modules": 4, "num_layers": 2, "sliding_window": 5, "norm_output": False},
]


@pytest.mark.parametrize("options", HEADS)
def test_training_and_decoding_agree(options: dict[str, Any]) -> None:
    target = tiny_target()
    drafter = build_drafter("mtp", target, **options).double()
    drafter.set_draft_vocab(torch.arange(96))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in drafter.parameters():
            p += 0.2 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    report = check_parity(
        target, build_objective(drafter, ObjectiveOptions(steps=steps(drafter, 4))), ROW
    )
    assert report.error < 1e-12
    assert report.positions > 20


@pytest.mark.parametrize(("kind", "modules"), NATIVE)
def test_native_modules_train_as_they_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, modules: int
) -> None:
    float64_throughout(monkeypatch)
    target = load_checkpoint(save_checkpoint(tmp_path, kind, modules))
    drafter = load_native_mtp(target, dtype=torch.float64)
    objective = build_objective(drafter, ObjectiveOptions(steps=steps(drafter, 4)))
    report = check_parity(target, objective, ROW)
    assert report.error < 1e-12
    assert report.positions > 20


# --- going on from a target's own modules


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("loss", ["kl", "lk_hybrid"])
def test_fine_tuning_for_recursion(tmp_path: Path, kind: str, loss: str) -> None:
    """A few steps on one document: each depth's loss falls; what is saved is what was trained."""
    target = load_checkpoint(save_checkpoint(tmp_path / "target", kind))
    drafter = load_native_mtp(target, dtype=torch.float64).train()
    options = ObjectiveOptions(steps=3, decay=0.6, terms={loss: 1.0})
    objective = build_objective(drafter, options)
    data = run_target(target, collate([[ROW]], LENGTH), ())
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    history = []
    for _ in range(25):
        total, metrics = objective(data)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        history.append([metrics[f"loss_{i}_sum"].item() for i in range(3)])
    assert all(last < 0.8 * first for first, last in zip(history[0], history[-1], strict=True))
    drafter.save_pretrained(tmp_path / "head")
    again = load_drafter(tmp_path / "head", target, dtype=torch.float64)
    with torch.no_grad():
        trained = build_objective(drafter.eval(), options).forced(data, torch.tensor([9]))
        loaded = build_objective(again, options).forced(data, torch.tensor([9]))
    assert all(torch.equal(a, b) for a, b in zip(trained, loaded, strict=True))


def test_every_weight_of_the_modules_is_trained(tmp_path: Path) -> None:
    target = load_checkpoint(save_checkpoint(tmp_path, "glm4_moe", modules=2))
    drafter = load_native_mtp(target, dtype=torch.float64).train()
    total, _ = build_objective(drafter, ObjectiveOptions())(
        run_target(target, collate([[ROW]], LENGTH), ())
    )
    total.backward()
    without = [n for n, p in drafter.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []
    assert all(p.grad is None for p in target.model.parameters())
