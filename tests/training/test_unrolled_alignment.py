"""Sequential heads on toy targets: each learns what its row holds, and nothing else."""

from typing import Any

import pytest
import torch

from drafters import build_drafter
from tests.training.toys import (
    SOLVED,
    STUCK,
    feature_toy,
    future_toy,
    pair_rows,
    prepared,
    surprise_toy,
    token_toy,
    toy_target,
    train,
)
from training.objectives import Objective, ObjectiveOptions, build_objective

KL = {"kl": 1.0}
HASS = {"smooth_l1": 1.0, "kl": 0.1, "top_k": 0.1}


def objective(family: str, drafter: dict[str, Any] | None = None, **loss: Any) -> Objective:
    torch.manual_seed(0)
    head = build_drafter(family, toy_target(layers=5), **(drafter or {}))
    if family != "hydra":
        loss = {"steps": 1, "noise": 0.0, **loss}
    options = ObjectiveOptions(chunk=0, **{"terms": KL, **loss})
    return build_objective(prepared(head), options)


def eagle1(steps: int, **loss: Any) -> Objective:
    return objective("eagle1", steps=steps, **loss)


def hydra(heads: int = 3, **drafter: Any) -> Objective:
    return objective("hydra", {"num_heads": heads, **drafter})


# --- Hydra


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_hydra_heads_read_as_far_back_as_their_own_drafts(lag: int) -> None:
    """Head i holds tokens x_{j-1} .. x_{j-1-i} before the label j, and no older ones."""
    losses = train(hydra(), lambda g: token_toy(8, 5, g, lag=lag), 100)
    assert [loss < SOLVED for loss in losses] == [i + 1 >= lag for i in range(3)], losses
    assert [loss > STUCK for loss in losses] == [i + 1 < lag for i in range(3)], losses


@pytest.mark.parametrize("prefix", [0, 1])
def test_only_the_prefix_layer_reads_hidden_states_of_earlier_rows(prefix: int) -> None:
    """Here the state that knows the label is that of the row before."""
    head = hydra(1, num_layers=prefix)
    loss = train(head, lambda g: future_toy(4, 3, g, offset=3), 150)[0]
    assert loss < SOLVED if prefix else loss > STUCK


@pytest.mark.parametrize("head", [0, 1, 2])
def test_hydra_head_learns_the_token_of_its_own_place(head: int) -> None:
    """A hidden state that knows x_{t+2+i} serves head i and no other."""
    losses = train(hydra(), lambda g: future_toy(8, 5, g, offset=2 + head), 100)
    assert [loss < SOLVED for loss in losses] == [i == head for i in range(3)], losses
    assert [loss > STUCK for loss in losses] == [i != head for i in range(3)], losses


def test_hydra_one_row_too_early_learns_the_label_of_another_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair_rows(monkeypatch, later=-1)
    losses = train(hydra(), lambda g: future_toy(8, 5, g, offset=3), 100)
    assert losses[0] < SOLVED
    assert min(losses[1:]) > STUCK, losses


@pytest.mark.parametrize("later", [0, 1])
def test_hydra_one_row_too_late_holds_the_label(
    monkeypatch: pytest.MonkeyPatch, later: int
) -> None:
    """Negative control: a leak would show, where only the target knows the label."""
    pair_rows(monkeypatch, later)
    losses = train(hydra(), lambda g: surprise_toy(8, 5, g), 60)
    assert max(losses) < SOLVED if later else min(losses) > STUCK, losses


def test_hydra_one_row_too_early_does_not_hold_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    pair_rows(monkeypatch, later=-1)
    losses = train(hydra(), lambda g: token_toy(8, 5, g), 60)
    assert min(losses) > STUCK, losses


# --- EAGLE-1 and HASS


def test_eagle1_learns_a_function_of_the_token_it_is_fed() -> None:
    assert max(train(eagle1(3), lambda g: token_toy(5, 4, g), 120)) < SOLVED


def test_eagle1_one_row_too_early_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    pair_rows(monkeypatch, later=-1)
    assert train(eagle1(1), lambda g: token_toy(4, 3, g), 100)[0] > STUCK


def test_eagle1_cannot_learn_what_only_the_target_knows() -> None:
    assert min(train(eagle1(2), lambda g: surprise_toy(5, 3, g), 100)) > STUCK


def test_eagle1_one_row_too_late_sees_the_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above: a leak of the label would show as zero loss."""
    pair_rows(monkeypatch, later=1)
    assert train(eagle1(1), lambda g: surprise_toy(5, 3, g), 120)[0] < SOLVED


def test_eagle1_reads_the_hidden_state_of_its_row_and_then_its_own() -> None:
    """At depth 1 the row holds the state of x_{j-3}, which here knows x_{j-1} but not x_j."""
    losses = train(eagle1(2), lambda g: future_toy(4, 3, g), 250)
    assert losses[0] < SOLVED
    assert losses[1] > STUCK


def test_eagle1_with_hidden_states_one_row_late_cannot() -> None:
    assert train(eagle1(1), lambda g: future_toy(3, 2, g, offset=3), 120)[0] > STUCK


@pytest.mark.parametrize("later", [-1, 0, 1])
def test_features_are_regressed_onto_those_of_the_next_position(
    monkeypatch: pytest.MonkeyPatch, later: int
) -> None:
    """Smooth L1 alone teaches the label, if the estimate of row t meets the state of t+1."""
    pair_rows(monkeypatch, later)
    toy = surprise_toy if later == 1 else token_toy  # a row that meets its own state copies it
    head = eagle1(1, terms={"smooth_l1": 1.0})
    accuracy = train(head, lambda g: toy(5, 4, g), 120, metric="accuracy")[0]
    assert accuracy > 0.95 if later in (0, 1) else accuracy < 0.5


@pytest.mark.parametrize("detach", [False, True])
def test_hass_learns_all_its_steps(detach: bool) -> None:
    head = eagle1(3, detach=detach, terms=HASS)
    accuracies = train(head, lambda g: token_toy(5, 4, g), 150, metric="accuracy")
    assert min(accuracies) > 0.95, accuracies


def test_hass_one_row_too_early_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    pair_rows(monkeypatch, later=-1)
    head = eagle1(2, detach=True, terms=HASS)
    assert max(train(head, lambda g: token_toy(4, 3, g), 100, metric="accuracy")) < 0.5


# --- EAGLE-3 in all shapes

SHAPES: dict[str, dict[str, Any]] = {
    "one fused layer": {"feature_layers": [2]},
    "four fused layers, normed": {"feature_layers": [0, 1, 2, 4], "fc_norm": True},
    "two layers": {"num_layers": 2},
    "two layers, norms, window": {"num_layers": 2, "qk_norm": True, "sliding_window": 2},
    "normed output, window": {"norm_output": True, "sliding_window": 3},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_eagle3_of_any_shape_learns_from_token_and_feature(shape: dict[str, Any]) -> None:
    count = len(shape.get("feature_layers", [0, 2, 4]))
    head = objective("eagle3", shape, steps=2)
    losses = train(head, lambda g: token_toy(5, 4, g, count=count), 120)
    assert max(losses) < 2 * SOLVED, losses
    head = objective("eagle3", shape)
    losses = train(head, lambda g: feature_toy(3, 2, g, count=count), 100)
    assert losses[0] < SOLVED, losses


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("wrong", ["row", "feature"])
def test_eagle3_of_any_shape_one_place_off_cannot(
    monkeypatch: pytest.MonkeyPatch, wrong: str, shape: dict[str, Any]
) -> None:
    count = len(shape.get("feature_layers", [0, 2, 4]))
    head = objective("eagle3", shape)
    if wrong == "row":
        pair_rows(monkeypatch, later=-1)
        losses = train(head, lambda g: token_toy(4, 3, g, count=count), 60)
    else:
        losses = train(head, lambda g: feature_toy(3, 2, g, offset=3, count=count), 60)
    assert losses[0] > STUCK


@pytest.mark.parametrize(("window", "lag"), [(2, 2), (2, 3), (3, 3)])
@pytest.mark.parametrize("family", ["eagle1", "eagle3"])
def test_a_window_hides_tokens_further_back(family: str, window: int, lag: int) -> None:
    """A row and W-1 before it hold the tokens x_{j-1} .. x_{j-W}."""
    head = objective(family, {"sliding_window": window})
    loss = train(head, lambda g: token_toy(6, 5, g, lag=lag), 150)[0]
    assert loss < STUCK - 0.3 if lag <= window else loss > STUCK
