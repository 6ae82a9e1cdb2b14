"""Separate MTP modules, decoded with a ring: equal to the training pass, and to recomputing all."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import TargetModel, build_drafter
from drafters.mtp import MtpDrafter
from drafters.mtp_native import load_native_mtp
from inference.cache import TreeCache
from inference.engine import EagerEngine
from inference.generate import plain_generate
from inference.proposers import RowState, Session, TreeOptions, build_proposer, mtp
from inference.proposers.mtp import MtpProposer
from inference.proposers.sequential import SequentialProposer, StepOutput
from inference.sampling import SamplingParams
from inference.timing import PhaseTimer
from recipes.parity import decode_rounds
from tests.inference.drafting import GREEDY, NO_END, PROMPTS, SAMPLED, Recording, decode, plain
from tests.native_mtp import MODULES as NATIVE
from tests.native_mtp import load_checkpoint, save_checkpoint
from tests.tiny import tiny_target
from tests.zoo import float64_throughout
from training.data.batches import collate
from training.data.chat import TokenizedRow
from training.features import run_target
from training.objectives import ObjectiveOptions, build_objective

VOCAB = 96
TEXT = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


def head(target: TargetModel, noise: float = 0.2, **options: Any) -> MtpDrafter:
    drafter = build_drafter("mtp", target, **{"num_modules": 3, **options}).double()
    drafter.set_draft_vocab(torch.arange(VOCAB))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += noise * torch.randn(
                parameter.shape, generator=generator, dtype=parameter.dtype
            )
    assert isinstance(drafter, MtpDrafter)
    return drafter.eval()


@torch.no_grad()
def training_pass(drafter: MtpDrafter, ids: list[int]) -> list[Tensor]:
    """Logits (T, V) of every depth, from scratch."""
    objective = build_objective(drafter, ObjectiveOptions())
    data = run_target(
        drafter.target, collate([[TokenizedRow(ids, [True] * len(ids))]], len(ids)), ()
    )
    return [drafter.logits(rows[0], d) for d, rows in enumerate(objective.unroll(data))]


def started(proposer: MtpProposer) -> MtpProposer:
    cache = TreeCache(proposer.drafter.target.model.config)
    proposer.start(
        Session(EagerEngine(proposer.drafter.target), cache, 1, PhaseTimer(), "match", [0])
    )
    return proposer


SHAPES = [
    {"num_modules": 2},
    {"num_modules": 3, "num_layers": 2, "norm_output": False},
    {"num_modules": 6, "hidden_first": True},
    {"num_modules": 4, "sliding_window": 5},
    {"num_modules": 3, "draft_vocab_size": 50},
]


@pytest.mark.parametrize("options", SHAPES)
def test_every_round_equals_the_training_pass(target: TargetModel, options: dict) -> None:
    """Rounds that commit one to three tokens each, with rejected drafts between them."""
    drafter = head(target, **options)
    proposer, modules = started(MtpProposer(drafter)), drafter.config.num_modules
    expected = training_pass(drafter, TEXT)
    compared = 0
    for state in decode_rounds(target, TEXT, ()):
        root = len(state.tokens) - 1
        found = proposer.forced(state, TEXT[root + 1 : root + modules])
        for depth, logits in enumerate(found[: len(TEXT) - root - 1]):
            assert (logits - expected[depth][root - 1]).abs().max() < 1e-9
            compared += 1
    assert compared > 8 * modules


@pytest.mark.parametrize("prompt", [2, 3, 4])
def test_prompts_shorter_than_the_chain_of_modules(target: TargetModel, prompt: int) -> None:
    """Modules whose row would lie before the text have none, in training either."""
    drafter = head(target, num_modules=5)
    proposer, expected = started(MtpProposer(drafter)), training_pass(drafter, TEXT)
    hidden = target.forward(torch.tensor([TEXT])).last_hidden[0]
    done = 0
    for length in range(prompt, 12):
        state = RowState(TEXT[:length], 1, None, hidden[done : length - 1], 9, GREEDY)
        found = proposer.forced(state, TEXT[length : length + 4])
        for depth, logits in enumerate(found):
            assert (logits - expected[depth][length - 2]).abs().max() < 1e-9
        done = length - 1


def test_branches_see_their_own_ancestors(target: TargetModel, monkeypatch: Any) -> None:
    """Every node's logits are the training pass on the text that its path spells."""
    drafter = head(target)
    proposer = started(MtpProposer(drafter, TreeOptions(20, 3, 3)))
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    step = MtpProposer.step

    def recording(self, row, feature, tokens, parents, depth):
        out = step(self, row, feature, tokens, parents, depth)
        seen.append((tokens, parents, out.logits))
        return out

    monkeypatch.setattr(MtpProposer, "step", recording)
    hidden = target.forward(torch.tensor([TEXT[:10]])).last_hidden[0]
    with torch.no_grad():
        proposer.grow(0, RowState(TEXT[:11], 1, None, hidden, 9, GREEDY))
    paths: list[list[int]] = []
    for depth, (tokens, parents, logits) in enumerate(seen, start=1):
        above = [paths[parent] if parent >= 0 else [] for parent in parents.tolist()]
        new = [[*path, token] for path, token in zip(above, tokens.tolist(), strict=True)]
        for path, row in zip(new, logits, strict=True):
            expected = training_pass(drafter, TEXT[:11] + path + [0])[depth][9]
            assert (row - expected).abs().max() < 1e-9
        paths += new
    assert len(seen) == 2
    assert len(paths) == 6


class FromScratch(MtpProposer):
    """Keeps the hidden states of the whole text and computes every row again in every round."""

    def reset(self, batch_size: int) -> None:
        super().reset(batch_size)
        self._hidden: dict[int, list[Tensor]] = {row: [] for row in range(batch_size)}

    def absorb(self, row: int, state: RowState) -> StepOutput:
        self._hidden[row].append(state.hidden)
        self._forget(row)
        return super().absorb(row, replace(state, hidden=torch.cat(self._hidden[row])))

    def _forget(self, row: int) -> None:
        kept, hidden = self._rings, self._hidden
        self.reset(1)
        self._rings, self._hidden = {**kept, row: self._rings[0]}, hidden


@pytest.mark.parametrize(("rule", "sampling"), [("match", GREEDY), ("rejection", SAMPLED)])
def test_acceptance_is_that_of_full_recomputation(
    target: TargetModel, rule: str, sampling: SamplingParams
) -> None:
    drafter = head(target, noise=0.02)
    options = TreeOptions(12, 3, 3)
    results = []
    for proposer in (MtpProposer(drafter, options), FromScratch(drafter, options)):
        recording = Recording(proposer)
        found = decode(target, recording, rule=rule, sampling=sampling)
        results.append(
            (found.stats, found.sequences, [d.tree.tokens.tolist() for d in recording.drafted])
        )
    assert results[0] == results[1]
    assert results[0][0].num_accepted_tokens > 0


class Stale(MtpProposer):
    """The later modules' rows of the ring lag one round behind."""

    def absorb(self, row: int, state: RowState) -> StepOutput:
        ring = self._rings[row]
        before = ring.outputs.clone()
        out = super().absorb(row, state)
        ring.outputs[1:] = before[1:]
        return out


def test_a_ring_that_is_not_kept_up_is_seen(target: TargetModel) -> None:
    drafter = head(target)
    proposer, expected = started(Stale(drafter)), training_pass(drafter, TEXT)
    worst = 0.0
    for state in decode_rounds(target, TEXT, ()):
        root = len(state.tokens) - 1
        found = proposer.forced(state, TEXT[root + 1 : root + 3])
        for depth, logits in enumerate(found[: len(TEXT) - root - 1]):
            worst = max(worst, float((logits - expected[depth][root - 1]).abs().max()))
    assert worst > 1e-3


@pytest.mark.parametrize("modules", [1, 3])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_output_is_plain_decodings_own(
    target: TargetModel, modules: int, sampling: SamplingParams
) -> None:
    drafter = head(target, noise=0.02, num_modules=modules)
    proposer = build_proposer(drafter, TreeOptions(12, 4, 3))
    assert type(proposer) is (MtpProposer if modules > 1 else SequentialProposer)
    assert decode(target, proposer, sampling=sampling).sequences == plain(target, sampling)


def test_trees_are_no_deeper_than_there_are_modules(target: TargetModel) -> None:
    proposer = Recording(MtpProposer(head(target), TreeOptions(30, 9, 3)))
    decode(target, proposer)
    assert max(int(drafted.tree.depths.max()) for drafted in proposer.drafted) == 3


def test_long_prompts_are_absorbed_in_stretches(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = head(target, num_modules=4)
    hidden = target.forward(torch.tensor([TEXT])).last_hidden[0]
    state = RowState(TEXT, 1, None, hidden[:-1], 9, GREEDY)
    whole = started(MtpProposer(drafter)).forced(state, [5, 6, 7])
    for rows in (1, 2, 7):
        monkeypatch.setattr(mtp, "PREFILL_ROWS", rows)
        parts = started(MtpProposer(drafter)).forced(state, [5, 6, 7])
        assert max(float((a - b).abs().max()) for a, b in zip(whole, parts, strict=True)) < 1e-9


@pytest.mark.parametrize(("kind", "modules"), NATIVE)
def test_native_modules_decode_losslessly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, modules: int
) -> None:
    float64_throughout(monkeypatch)
    target = load_checkpoint(save_checkpoint(tmp_path, kind, modules))
    proposer = build_proposer(load_native_mtp(target, dtype=torch.float64), TreeOptions(10, 3, 3))
    expected = plain_generate(target, PROMPTS, max_new_tokens=12, stop=NO_END).sequences
    assert decode(target, proposer, max_new_tokens=12).sequences == expected
