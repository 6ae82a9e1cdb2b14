"""The parity check agrees for right heads, and catches the classical ways to decode wrongly."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafters import Drafter, TargetModel, build_drafter
from inference.cache import TreeCache
from inference.proposers import MedusaProposer, RowState, SequentialProposer
from inference.proposers.draft_cache import DraftCache
from inference.proposers.sequential import StepOutput
from recipes import parity
from recipes.parity import ParityError, check_parity, decode_rounds
from tests.tiny import tiny_target
from training.alignment import shifted_tokens
from training.data.chat import TokenizedRow
from training.features import run_target
from training.objectives import Objective, ObjectiveOptions, build_objective, sequential

VOCAB, LENGTH = 96, 40
DOCUMENT = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
ROW = TokenizedRow(DOCUMENT, [False] * 5 + [True] * (LENGTH - 5))


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


def objective(target: TargetModel, family: str, **options: object) -> Objective:
    drafter = build_drafter(family, target, **options).double()
    drafter.set_draft_vocab(torch.arange(VOCAB))
    perturb(drafter)
    options = ObjectiveOptions(steps=4 if family == "eagle3" else None)
    return build_objective(drafter, options).train()


def perturb(drafter: Drafter) -> None:
    """Away from zero blocks and norms of one, where many mistakes would not show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter += 0.2 * noise


HEADS = [
    ("eagle3", {}),
    ("eagle3", {"norm_output": True, "fc_norm": True, "draft_vocab_size": 50}),
    ("medusa", {"num_heads": 4, "num_layers": 2}),
    ("medusa", {"num_heads": 2, "shared_lm_head": True}),
]


@pytest.mark.parametrize(("family", "options"), HEADS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_training_and_decoding_agree(
    monkeypatch: pytest.MonkeyPatch, attention: str, family: str, options: dict
) -> None:
    """To rounding; eager attention would round its weights to float32, which is undone here."""
    monkeypatch.setattr(F, "softmax", lambda x, dim, dtype: x.softmax(dim))
    target = tiny_target(attn=attention)
    checked = objective(target, family, **options)
    report = check_parity(target, checked, ROW)
    assert report.error < 1e-12
    assert report.positions > 8 * checked.depths
    assert checked.training, "the check must leave the head ready to train"


@pytest.mark.parametrize(("family", "options"), HEADS)
def test_eager_attention_as_it_is(
    monkeypatch: pytest.MonkeyPatch, family: str, options: dict
) -> None:
    """What transformers rounds to float32 costs no more than that; the head has no part in it."""
    monkeypatch.setitem(parity.FEATURE_TOLERANCE, torch.float64, 1e-5)
    target = tiny_target(attn="eager", layers=3)
    checked = objective(target, family, **options)
    report = check_parity(target, checked, ROW)
    assert report.error < 1e-12 < report.feature_error < 1e-5


def test_rounds_really_append_and_revert(target: TargetModel) -> None:
    """The decode behind the check commits paths that skip a rejected row, and reaches the end."""
    states = list(decode_rounds(target, DOCUMENT, (2, 3)))
    assert states[0].tokens == DOCUMENT[: LENGTH // 3 + 1]
    assert len(states) > 8
    assert {len(state.hidden) for state in states[1:]} == {1, 2}
    absorbed = sum(len(state.hidden) for state in states)
    assert states[-1].tokens == DOCUMENT[: absorbed + 1]
    assert absorbed >= LENGTH - 4
    alone = target.forward(torch.tensor([DOCUMENT[:absorbed]]), feature_layers=(2, 3))
    hidden = torch.cat([state.hidden for state in states])
    features = torch.cat([state.features for state in states])
    assert (hidden - alone.last_hidden[0]).abs().max() < 1e-11
    assert (features - alone.features[0]).abs().max() < 1e-11


# --- what must be caught


class WrongPairing(SequentialProposer):
    """Pairs the feature of t with the embedding of t itself."""

    def absorb(self, row: int, state: RowState) -> StepOutput:
        tokens = [state.tokens[0], *state.tokens[:-1]]
        return super().absorb(row, replace(state, tokens=tokens))


class ShiftedRotary(SequentialProposer):
    """Draft steps one position too far on."""

    def step(self, row, feature, tokens, parents, depth):
        return super().step(row, feature, tokens, parents, depth + 1)


class StandingRotary(SequentialProposer):
    """Draft steps that stay at the position of the last committed row."""

    def step(self, row, feature, tokens, parents, depth):
        return super().step(row, feature, tokens, parents, 0)


class NormedFeedback(SequentialProposer):
    """Feeds the post-norm output back where the head was trained on the un-normed one."""

    def absorb(self, row, state):
        found = super().absorb(row, state)
        return replace(found, feature=self.drafter.norm(found.feature))

    def step(self, row, feature, tokens, parents, depth):
        found = super().step(row, feature, tokens, parents, depth)
        return replace(found, feature=self.drafter.norm(found.feature))


class TargetFeedback(SequentialProposer):
    """Starts every draft step from the fused target feature again, as if it were known."""

    def absorb(self, row, state):
        found = super().absorb(row, state)
        return replace(found, feature=self.drafter.fuse(state.features[-1:]))


@pytest.mark.parametrize(
    "proposer", [WrongPairing, ShiftedRotary, StandingRotary, NormedFeedback, TargetFeedback]
)
def test_a_proposer_that_decodes_wrongly_is_caught(
    target: TargetModel, proposer: type[SequentialProposer]
) -> None:
    checked = objective(target, "eagle3")
    with pytest.raises(ParityError, match="disagree"):
        check_parity(target, checked, ROW, proposer=proposer(checked.drafter))
    right = SequentialProposer(checked.drafter)
    assert check_parity(target, checked, ROW, proposer=right).error < 1e-12


class StaleCache(DraftCache):
    """Committed rows still see the tree rows of the round before."""

    def begin_round(self) -> None:
        self._stale = [
            [x[:, :, own.length : own.length + own.tail].clone() for x in (own._keys, own._values)]
            if own.tail
            else None
            for own in self._layers
        ]
        super().begin_round()

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own, old = self._layers[layer], self._stale[layer]
        before = own.length
        found = super().extend(layer, q, k, v)
        if old is None:
            return found
        now = [x[:, :, : own.length] for x in (own._keys, own._values)]
        rows = q.shape[2]
        mask = torch.ones(rows, own.length, dtype=torch.bool).tril(before)
        mask = torch.cat((mask, torch.ones(rows, old[0].shape[2], dtype=torch.bool)), dim=1)
        keys, values = (
            torch.cat(pair, dim=2).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            for pair in zip(now, old, strict=True)
        )
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


class BlindCache(DraftCache):
    """Tree rows do not see their ancestors."""

    def tree_step(self, parents: Tensor, position: int):
        return super().tree_step(torch.full_like(parents, -1), position)


@pytest.mark.parametrize("cache", [StaleCache, BlindCache])
def test_a_wrong_draft_cache_is_caught(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch, cache: type[DraftCache]
) -> None:
    checked = objective(target, "eagle3")
    monkeypatch.setattr("inference.proposers.sequential.DraftCache", cache)
    with pytest.raises(ParityError, match="disagree"):
        check_parity(target, checked, ROW)


class FirstRowsCache(TreeCache):
    """Commits the first rows of the append instead of the accepted path."""

    def commit(self, paths):
        super().commit([list(range(len(path))) for path in paths])


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_a_target_cache_that_keeps_rejected_rows_is_caught(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    checked = objective(target, family)
    monkeypatch.setattr(parity, "TreeCache", FirstRowsCache)
    with pytest.raises(ParityError, match="disagree"):
        check_parity(target, checked, ROW)


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_bool_mask_under_eager_attention_is_caught(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    eager = tiny_target(attn="eager")
    checked = objective(eager, family)
    monkeypatch.setattr("inference.attention.mask_for", lambda config, mask, dtype: mask)
    with pytest.raises(ParityError, match="disagree"):
        check_parity(eager, checked, ROW)


@pytest.mark.parametrize("shift", [-1, 1])
def test_training_on_tokens_one_place_off_is_caught(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    checked = objective(target, "eagle3")
    monkeypatch.setattr(
        sequential, "shifted_tokens", lambda ids, by: shifted_tokens(ids, by + shift)
    )
    with pytest.raises(ParityError, match="disagree"):
        check_parity(target, checked, ROW)


def test_features_of_other_layers_are_caught(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training captured outputs of layers k where decoding captures inputs."""
    checked = objective(target, "eagle3")
    monkeypatch.setattr(
        parity, "run_target", lambda t, batch, layers: run_target(t, batch, [k + 1 for k in layers])
    )
    with pytest.raises(ParityError, match="disagree"):
        check_parity(target, checked, ROW)


def test_hidden_states_of_other_rows_are_caught(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's own pass with a cache hands over every hidden state one row late."""
    checked = objective(target, "medusa")

    def late(*args: object) -> Iterator[RowState]:
        last = None
        for state in decode_rounds(*args):
            before = state.hidden[:1] if last is None else last
            last = state.hidden[-1:]
            yield replace(state, hidden=torch.cat((before, state.hidden[:-1])))

    monkeypatch.setattr(parity, "decode_rounds", late)
    with pytest.raises(ParityError, match="hidden states differ"):
        check_parity(target, checked, ROW)


def test_medusa_on_the_hidden_state_of_another_row_is_caught(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = objective(target, "medusa")
    grown = MedusaProposer._rows

    def first(self: MedusaProposer, state: RowState) -> tuple:
        return grown(self, replace(state, hidden=state.hidden[:1]))

    monkeypatch.setattr(MedusaProposer, "_rows", first)
    with pytest.raises(ParityError, match="draft logits differ"):
        check_parity(target, checked, ROW)


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_a_broken_head_is_not_passed(target: TargetModel, family: str) -> None:
    """NaN logits compare as different."""
    checked = objective(target, family)
    with torch.no_grad():
        next(checked.parameters()).fill_(torch.nan)
    with pytest.raises(ParityError, match="disagree"):
        check_parity(target, checked, ROW)


@pytest.mark.parametrize("length", [1, 9])
def test_short_documents_are_refused(target: TargetModel, length: int) -> None:
    checked = objective(target, "eagle3")
    with pytest.raises(ValueError, match=f"only {length} tokens"):
        check_parity(target, checked, TokenizedRow(DOCUMENT[:length], [True] * length))


def test_the_shortest_document_still_compares(target: TargetModel) -> None:
    checked = objective(target, "eagle3")
    short = TokenizedRow(DOCUMENT[:10], [True] * 10)
    assert check_parity(target, checked, short).positions >= 4
