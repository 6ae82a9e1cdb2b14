"""Verification on the device emits what the host emits, token for token.

Letters: B sequences, D depth, V vocabulary.
"""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.sampling import SamplingParams
from inference.static.accept import (
    BROKEN,
    LENGTH,
    Acceptance,
    accept,
    check_ended,
)
from inference.static.laws import Warpers, warpers_of
from inference.tree import Proposal
from tests.inference.static.batches import WITHOUT_VALUES, Batch, assert_static

DRAWN = (Proposal.DENSE, Proposal.MIXED)
WARPED = SamplingParams(0.8, 5, 0.95, min_p=0.01)


def run(batch: Batch, rule: str, eos: list[int], remaining: list[int]) -> Acceptance:
    return accept(
        batch.tree,
        batch.logits,
        warpers_of([batch.sampling]),
        batch.noise,
        batch.ends(eos, remaining),
        rule=rule,
        depth=batch.depth,
        children=batch.children,
    )


def check(batch: Batch, rule: str) -> int:
    """One round; how many drafts were accepted."""
    rng = random.Random(batch.positions[0])
    eos = rng.sample(range(batch.vocab), rng.choice([0, 0, 1, 2]))
    remaining = [rng.choice([1, 2, 3, 9]) for _ in batch.seeds]
    verdicts = batch.check(run(batch, rule, eos, remaining), rule, eos, remaining)
    return sum(len(verdict.path) for verdict in verdicts)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 6), st.booleans())
def test_greedy(seed: int, width: int, depth: int, ties: bool) -> None:
    batch = Batch(seed, width=width, depth=depth, ties=ties)
    for rule in ("match", "rejection"):
        check(batch, rule)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 5), st.booleans())
def test_following_the_targets_draws(seed: int, width: int, depth: int, warped: bool) -> None:
    sampling = WARPED if warped else SamplingParams(1.0)
    kind = random.Random(seed).choice([Proposal.ONE_HOT, Proposal.COUPLED])
    check(Batch(seed, width=width, depth=depth, kind=kind, sampling=sampling), "coupled")


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 4), st.integers(1, 4))
def test_accepting_or_rejecting(seed: int, width: int, depth: int, children: int) -> None:
    rng = random.Random(seed)
    batch = Batch(
        seed,
        width=width,
        depth=depth,
        children=children,
        kind=rng.choice([*DRAWN, Proposal.ONE_HOT]),
        sampling=rng.choice([WARPED, SamplingParams(1.0), SamplingParams(0.5)]),
        dtype=rng.choice([torch.float32, torch.float64]),
    )
    check(batch, "rejection")


@pytest.mark.parametrize(
    ("rule", "kind", "temperature"),
    [
        ("match", Proposal.ONE_HOT, 0.0),
        ("match", Proposal.ONE_HOT, 0.7),
        ("rejection", Proposal.DENSE, 0.7),
        ("rejection", Proposal.MIXED, 0.7),
    ],
)
def test_many_rounds(rule: str, kind: Proposal, temperature: float) -> None:
    """Enough of them that every branch is taken; something is accepted, and not everything."""
    accepted = drafted = 0
    for seed in range(15):
        batch = Batch(seed, batch=8, kind=kind, sampling=SamplingParams(temperature))
        accepted += check(batch, rule)
        drafted += int(batch.valid.sum()) - 8
    assert 0.05 * drafted < accepted < 0.6 * drafted


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_large_vocabulary(rule: str, temperature: float) -> None:
    kind = Proposal.DENSE if rule == "rejection" and temperature else Proposal.ONE_HOT
    sampling = SamplingParams(temperature, 50, 0.9) if temperature else SamplingParams()
    for dtype in (torch.float32, torch.bfloat16):
        if kind is Proposal.DENSE and dtype is torch.bfloat16:
            continue  # laws are recorded in the dtype of the target's
        batch = Batch(7, batch=2, vocab=50_257, kind=kind, sampling=sampling, dtype=dtype)
        check(batch, rule)


def test_sequences_of_different_sampling() -> None:
    """A greedy one beside others, under every rule."""
    params = [SamplingParams(0.0), SamplingParams(1.0), SamplingParams(0.6, 3), SamplingParams(0.0)]
    for seed in range(8):
        batch = Batch(seed, sampling=SamplingParams(1.0))
        found = accept(
            batch.tree,
            batch.logits,
            warpers_of(params),
            batch.noise,
            batch.ends([], [9] * 4),
            rule="match",
            depth=batch.depth,
            children=batch.children,
        )
        for row, sampling in enumerate(params):
            alone = Batch(seed, sampling=sampling)
            expected = run(alone, "match", [], [9] * 4)
            assert all(
                torch.equal(one[row], other[row])
                for one, other in zip(found, expected, strict=True)
            )


def test_laws_over_a_draft_vocabulary() -> None:
    """Columns of the recorded laws are the head's; absolute ids are elsewhere."""
    ids = torch.tensor([5, 2, 0, 4, 1, 3])
    for seed in range(10):
        batch = Batch(seed, kind=Proposal.DENSE, sampling=SamplingParams(1.0))
        expected = run(batch, "rejection", [], [9] * 4)
        narrow = batch.tree._replace(draft_probs=batch.laws[..., ids])
        found = accept(
            narrow,
            batch.logits,
            Warpers(1.0),
            batch.noise,
            batch.ends([], [9] * 4),
            rule="rejection",
            depth=batch.depth,
            children=batch.children,
            draft_vocab=ids,
        )
        assert torch.equal(found.packed, expected.packed)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sequence_without_room_emits_nothing(temperature: float) -> None:
    batch = Batch(1, sampling=SamplingParams(temperature))
    found = run(batch, "match", [], [0, 9, 0, 9])
    assert found.emitted[[0, 2]].tolist() == [0, 0] and found.accepted[[0, 2]].tolist() == [0, 0]
    assert (found.packed[[0, 2], 2:] == -1).all() and (found.ended[[0, 2]] == LENGTH).all()
    assert (found.path[[0, 2]] == 0).all() and (found.emitted[[1, 3]] > 0).all()


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_logits_without_a_law_are_reported(rule: str, temperature: float, value: float) -> None:
    """Where the host would have raised, and only there."""
    kind = Proposal.DENSE if rule == "rejection" and temperature else Proposal.ONE_HOT
    broken = 0
    for seed in range(12):
        batch = Batch(seed, kind=kind, sampling=SamplingParams(temperature))
        batch.logits[:, 1:][batch.valid[:, 1:]] = value
        found = run(batch, rule, [], [9] * 4)
        for row in range(4):
            failed = fails(batch.host_round, row, batch.host(row)[0], rule, [], 9)
            assert (found.ended[row] == BROKEN) == failed
            broken += failed
    assert 2 < broken < 46
    with pytest.raises(ValueError, match="no next token"):
        check_ended(BROKEN)
    check_ended(LENGTH)


def fails(function: Callable[..., object], *args: object) -> bool:
    try:
        function(*args)
    except ValueError:
        return True
    return False


def test_drafts_that_were_not_drawn_are_reported() -> None:
    batch = Batch(2, kind=Proposal.DENSE, sampling=SamplingParams(1.0))
    found = run(batch, "rejection", [], [9] * 4)
    assert (found.ended != BROKEN).all()
    batch.laws[:, 0] = 0.0
    batch.laws[:, 0, batch.vocab - 1] = 1.0
    wrong = (batch.parents == 0) & (batch.tokens != batch.vocab - 1)
    found = run(batch, "rejection", [], [9] * 4)
    first = wrong & (wrong.cumsum(1) == 1) & ((batch.parents == 0).cumsum(1) == 1)
    assert (found.ended[first.any(1)] == BROKEN).all() and first.any()


def test_rules_that_are_not_offered_are_refused() -> None:
    with pytest.raises(ValueError, match="'block'"):
        run(Batch(1), "block", [], [9] * 4)
    with pytest.raises(ValueError, match="drawn drafts"):
        run(Batch(1, kind=Proposal.DENSE, sampling=SamplingParams(1.0)), "match", [], [9] * 4)


@pytest.mark.parametrize("how", WITHOUT_VALUES)
@pytest.mark.parametrize(
    ("rule", "kind", "temperature"),
    [
        ("match", Proposal.ONE_HOT, 0.0),
        ("coupled", Proposal.COUPLED, 0.7),
        ("rejection", Proposal.DENSE, 0.7),
        ("rejection", Proposal.MIXED, 0.7),
    ],
)
def test_nothing_is_read_by_the_host(
    how: str, rule: str, kind: Proposal, temperature: float
) -> None:
    batch = Batch(5, kind=kind, sampling=SamplingParams(temperature))
    warpers = Warpers(temperature, 5, 0.9)

    def round_(tree, logits, noise, ends):  # type: ignore[no-untyped-def]
        return accept(tree, logits, warpers, noise, ends, rule=rule, depth=batch.depth, children=3)

    assert_static(how, round_, batch.tree, batch.logits, batch.noise, batch.ends([1], [3] * 4))
