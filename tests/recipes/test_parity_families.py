"""The training pass and step-by-step decoding agree for every sequential head and option, and the
check catches the off-by-ones of each.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import Drafter, TargetModel, build_drafter
from inference.proposers import RowState
from inference.proposers.draft_cache import DraftCache
from inference.proposers.sequential import SequentialProposer, StepOutput
from recipes.parity import ParityError, ParityReport, check_parity
from tests.tiny import tiny_target
from training.data.chat import TokenizedRow
from training.objectives import Objective, ObjectiveOptions, build_objective, sequential

VOCAB, LENGTH = 96, 40
DOCUMENT = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
ROW = TokenizedRow(DOCUMENT, [False] * 5 + [True] * (LENGTH - 5))

HEADS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "eagle1": ("eagle1", {}, {"steps": 4}),
    "eagle1, bias, reduced": ("eagle1", {"fc_bias": True, "draft_vocab_size": 50}, {"steps": 4}),
    "eagle1, two layers, norms": (
        "eagle1",
        {"num_layers": 2, "qk_norm": True, "attention_bias": True},
        {"steps": 4},
    ),
    "eagle1, window": ("eagle1", {"sliding_window": 4}, {"steps": 4}),
    "hass": ("eagle1", {}, {"steps": 4, "detach": True, "terms": {"kl": 0.1, "top_k": 1.0}}),
    "hydra": ("hydra", {"num_heads": 4, "mlp_layers": 2}, {}),
    "hydra, shared, reduced": ("hydra", {"shared_lm_head": True, "draft_vocab_size": 50}, {}),
    "hydra++": ("hydra", {"num_heads": 3, "num_layers": 1}, {}),
    "hydra++, window, norms": (
        "hydra",
        {
            "num_heads": 3,
            "num_layers": 1,
            "sliding_window": 4,
            "qk_norm": True,
            "prefix_norm": True,
            "lm_head_bias": True,
        },
        {},
    ),
    "eagle3, one fused": ("eagle3", {"feature_layers": [4]}, {"steps": 4}),
    "eagle3, four fused, normed": (
        "eagle3",
        {"feature_layers": [0, 2, 3, 5], "fc_norm": True, "norm_output": True},
        {"steps": 4},
    ),
    "eagle3, normed residual and fusion": (
        "eagle3",
        {"norm_before_residual": True, "norm_before_fc": True},
        {"steps": 4},
    ),
    "eagle3, own embedding": ("eagle3", {"own_embedding": True}, {"steps": 4}),
    "eagle3, two layers, norms": ("eagle3", {"num_layers": 2, "qk_norm": True}, {"steps": 4}),
    "eagle3, two layers, window": ("eagle3", {"num_layers": 2, "sliding_window": 4}, {"steps": 4}),
    "eagle3, narrow window": ("eagle3", {"sliding_window": 2}, {"steps": 2}),
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


def make_objective(
    target: TargetModel, family: str, options: dict[str, Any], loss: dict[str, Any]
) -> Objective:
    drafter = build_drafter(family, target, **options).double()
    drafter.set_draft_vocab(torch.arange(VOCAB))
    perturb(drafter)
    return build_objective(drafter, ObjectiveOptions(**loss)).train()


def perturb(drafter: Drafter) -> None:
    """Away from zero blocks and norms of one, where many mistakes would not show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter += 0.2 * noise


def checked(
    target: TargetModel, name: str, proposer: type[SequentialProposer] = SequentialProposer
) -> ParityReport:
    objective = make_objective(target, *HEADS[name])
    return check_parity(target, objective, ROW, proposer=proposer(objective.drafter))


@pytest.mark.parametrize("name", HEADS)
def test_training_and_decoding_agree(target: TargetModel, name: str) -> None:
    objective = make_objective(target, *HEADS[name])
    report = check_parity(target, objective, ROW)
    assert report.error < 1e-9
    assert report.positions > 8 * objective.depths
    assert objective.training, "the check must leave the head ready to train"


# --- what must be caught


class SameToken(SequentialProposer):
    """Pairs the feature of t with the embedding of t itself."""

    def absorb(self, row: int, state: RowState) -> StepOutput:
        tokens = [state.tokens[0], *state.tokens[:-1]]
        return super().absorb(row, replace(state, tokens=tokens))


class LateHidden(SequentialProposer):
    """Pairs the embedding of t+1 with the hidden states and features of t-1."""

    def absorb(self, row: int, state: RowState) -> StepOutput:
        features = None if state.features is None else state.features.roll(1, 0)
        late = replace(state, hidden=state.hidden.roll(1, 0), features=features)
        return super().absorb(row, late)


class ShiftedRotary(SequentialProposer):
    """Draft steps stand where the last committed row does."""

    def step(
        self, row: int, feature: Tensor, tokens: Tensor, parents: Tensor, depth: int
    ) -> StepOutput:
        self._sequences[row].committed -= 1
        found = super().step(row, feature, tokens, parents, depth)
        self._sequences[row].committed += 1
        return found


class RepeatedToken(SequentialProposer):
    """Draft steps are fed the token of the level before."""

    def forced(self, state: RowState, tokens: list[int]) -> list[Tensor]:
        return super().forced(state, [state.tokens[-1], *tokens[:-1]])


class BlindCache(DraftCache):
    """Tree rows do not see their ancestors."""

    def tree_step(self, parents: Tensor, position: int):
        return super().tree_step(torch.full_like(parents, -1), position)


RECURSIVE = ["eagle1", "eagle1, two layers, norms", "hass", "eagle3, two layers, window"]
SOME = [*RECURSIVE, "hydra", "hydra++", "eagle3, one fused"]


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("proposer", [SameToken, LateHidden, RepeatedToken])
def test_a_wrong_pairing_is_caught(
    target: TargetModel, name: str, proposer: type[SequentialProposer]
) -> None:
    with pytest.raises(ParityError, match="disagree"):
        checked(target, name, proposer)


@pytest.mark.parametrize("name", RECURSIVE)
def test_wrong_rotary_positions_are_caught(target: TargetModel, name: str) -> None:
    with pytest.raises(ParityError, match="disagree"):
        checked(target, name, ShiftedRotary)


@pytest.mark.parametrize("name", RECURSIVE)
def test_a_draft_cache_without_ancestors_is_caught(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("inference.proposers.sequential.DraftCache", BlindCache)
    with pytest.raises(ParityError, match="disagree"):
        checked(target, name)


@pytest.mark.parametrize("name", ["eagle1, window", "hydra++, window, norms"])
@pytest.mark.parametrize("change", [-1, 1])
def test_another_window_in_decoding_is_caught(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch, name: str, change: int
) -> None:
    monkeypatch.setattr(
        "inference.proposers.sequential.DraftCache",
        lambda windows: DraftCache([window + change for window in windows]),
    )
    with pytest.raises(ParityError, match="disagree"):
        checked(target, name)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("shift", [-1, 1])
def test_training_on_tokens_one_place_off_is_caught(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch, name: str, shift: int
) -> None:
    right = sequential.shifted_tokens
    monkeypatch.setattr(sequential, "shifted_tokens", lambda ids, by: right(ids, by + shift))
    with pytest.raises(ParityError, match="disagree"):
        checked(target, name)


def test_noise_does_not_disturb_the_check(target: TargetModel) -> None:
    """It is for training alone; EAGLE-1 trains with it by default."""
    objective = make_objective(target, "eagle1", {}, {"steps": 2})
    assert objective.options.noise
    assert check_parity(target, objective, ROW).error < 1e-9
