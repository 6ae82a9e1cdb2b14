"""Noise and laws of a batch equal those of one sequence after the other, bit for bit.

Letters: B sequences, V vocabulary.
"""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inference import sampling
from inference.sampling import (
    SamplingParams,
    Stream,
    draw_top,
    lowest_argmax,
    probabilities,
    sample,
)
from inference.static.laws import Warpers, draw, first_argmax, keep_top_p, law, warp, warpers_of
from inference.static.noise import gumbel_at, race, seed_words, uniform_at
from tests.inference.static.batches import WITHOUT_VALUES, assert_static

WIDE = st.integers(-(2**70), 2**70)


@settings(deadline=None, max_examples=40)
@given(st.lists(WIDE, min_size=1, max_size=4), st.integers(0, 2**40), st.sampled_from(Stream))
def test_noise_has_the_same_bits(seeds: list[int], position: int, stream: Stream) -> None:
    positions = torch.arange(len(seeds)) * 7919 + position
    found = gumbel_at(seed_words(seeds)[:, None], positions[:, None], torch.arange(37), stream)
    coins = uniform_at(seed_words(seeds), stream, positions, torch.tensor(5))
    for row, seed in enumerate(seeds):
        expected = sampling.gumbel(seed, int(positions[row]), 37, stream=stream)
        assert torch.equal(found[row], expected)
        index = torch.tensor(5)
        assert torch.equal(
            coins[row], sampling.uniform_at(seed, stream, int(positions[row]), index)
        )


def test_a_race_is_a_draw_without_replacement() -> None:
    """The order of p / e is that of log p + g."""
    probs = some_logits(50, 40).softmax(-1)
    probs[:, ::7] = 0.0
    seeds, positions = list(range(50)), torch.arange(50) * 3
    order = race(probs, seed_words(seeds), positions).argsort(-1, descending=True)
    for row, seed in enumerate(seeds):
        expected = draw_top(probs[row], sampling.gumbel(seed, row * 3, 40), 40)
        assert torch.equal(order[row, : len(expected)], expected)


@pytest.mark.parametrize("size", [1, 6, 300, 320, 1024, 1000, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_first_of_the_largest(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    values = torch.randint(-3, 4, (2, 5, size), generator=generator).to(dtype)
    values[0, 0] = -torch.inf
    values[0, 0, -1] = -9.0
    largest, found = first_argmax(values)
    assert torch.equal(found, lowest_argmax(values)) and torch.equal(largest, values.amax(-1))
    values[1, 2, size // 2] = torch.nan
    values[1, 1] = -torch.inf
    largest = first_argmax(values)[0]
    assert largest[1, 2].isnan() and largest[1, 1] == -torch.inf


OPTIONS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.3, "top_k": 5},
    {"temperature": 1.7, "top_p": 0.6},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.4, "top_k": 99, "top_p": 1.0},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.95, "min_p": 0.03},
    {"temperature": 2.0, "top_p": 1e-9},
]


def some_logits(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 3).to(dtype)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_laws_are_the_same(options: dict[str, float], dtype: torch.dtype) -> None:
    """Ties in bfloat16 are many, those on the edge of a nucleus among them."""
    params = SamplingParams(**options)
    logits = some_logits(3, 4, 60, dtype=dtype)
    found = law(logits, warpers_of([params] * 3))
    expected = probabilities(logits, params)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("options", OPTIONS)
def test_laws_over_a_large_vocabulary(options: dict[str, float]) -> None:
    params = SamplingParams(**options)
    for scale in (0.2, 1.0):  # a nucleus of many tokens, and of few
        logits = some_logits(2, 50257) * scale
        found = law(logits, warpers_of([params] * 2))
        for row in range(2):
            assert torch.equal(found[row], probabilities(logits[row], params))


def test_sequences_may_differ() -> None:
    params = [SamplingParams(**options) for options in OPTIONS]
    logits = some_logits(len(params), 3, 40)
    warpers = warpers_of(params)
    assert isinstance(warpers.top_k, Tensor)
    found = law(logits, warpers)
    for row, one in enumerate(params):
        torch.testing.assert_close(found[row], probabilities(logits[row], one))


def test_a_greedy_sequence_among_others_takes_the_first_of_the_largest() -> None:
    """Warpers must not drop it for another one of the same size."""
    logits = torch.zeros(2, 9)
    params = [SamplingParams(0.0, 2, 0.3, min_p=0.9), SamplingParams(1.0, 3, 0.5)]
    assert law(logits, warpers_of(params))[0].tolist() == [1.0] + [0.0] * 8


def test_of_equal_tokens_at_the_edge_of_the_nucleus_the_first_stay() -> None:
    scores = torch.tensor([[0.5, 0.1, 0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.5, 0.1, 0.1, 0.1]]).log()
    kept = keep_top_p(scores, 0.65) > -torch.inf
    assert kept.tolist() == [[True] * 3 + [False] * 3] * 2


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_as_the_host_keeps_them(top_p: float) -> None:
    scores = some_logits(6, 50257, dtype=torch.bfloat16).float() * 0.3
    assert torch.equal(keep_top_p(scores, top_p), sampling.keep_top_p(scores, top_p))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_order_of_adding_up_moves_no_nucleus(dtype: torch.dtype) -> None:
    """Laws of equal tokens, whose sums come out at top_p itself."""
    draw = random.Random(2)
    for _ in range(200):
        count, top_p = draw.choice([4, 5, 8, 10, 16, 20]), draw.choice(range(1, 20)) / 20
        scores = torch.tensor([[draw.randrange(2) for _ in range(count)]], dtype=dtype)
        kept = keep_top_p(scores, top_p)
        assert torch.equal(kept, sampling.keep_top_p(scores, top_p)), (scores, top_p)


def test_what_all_sequences_share_stays_a_number() -> None:
    params = [SamplingParams(0.7, 20, 0.9, seed) for seed in range(3)]
    assert warpers_of(params) == Warpers(0.7, 20, 0.9, None, 20)
    assert warpers_of([SamplingParams()]).greedy
    assert warpers_of(params).tempered(0.5).temperature == 0.35


@pytest.mark.parametrize("options", [{"typical_p": 0.5}, {"suppress_tokens": (3,)}])
def test_what_has_no_static_form_is_refused(options: dict[str, object]) -> None:
    params = replace(SamplingParams(1.0), **options)
    with pytest.raises(ValueError, match=next(iter(options))):
        warpers_of([SamplingParams(1.0), params])


@pytest.mark.parametrize("options", OPTIONS[1:])
def test_draws_are_the_same(options: dict[str, float]) -> None:
    params = SamplingParams(**options)
    seeds, logits = list(range(40)), some_logits(40, 33)
    probs, positions = law(logits, warpers_of([params] * 40)), torch.arange(40) + 5
    tokens, lawful = draw(probs, seed_words(seeds), positions, Stream.RESIDUAL)
    assert lawful.all()
    for row, seed in enumerate(seeds):
        expected = sample(probabilities(logits[row], params), seed, row + 5, Stream.RESIDUAL)
        assert tokens[row] == expected


def test_no_law_is_noticed() -> None:
    probs = torch.tensor([[0.0, 0.0], [0.5, torch.nan], [0.0, 1.0]])
    assert draw(probs, seed_words([1, 2, 3]), torch.arange(3))[1].tolist() == [False, False, True]


@pytest.mark.parametrize("how", WITHOUT_VALUES)
def test_nothing_is_read_by_the_host(how: str) -> None:
    logits, seeds, positions = some_logits(9, 2, 40), seed_words(range(9)), torch.arange(9)
    shared = warpers_of([SamplingParams(**OPTIONS[-2])])
    mixed = warpers_of([SamplingParams(**options) for options in OPTIONS])
    assert_static(how, lambda given: warp(given, shared), logits)
    own = (mixed.temperature, mixed.top_k, mixed.top_p, mixed.min_p)
    assert_static(how, lambda given, *of_each: warp(given, Warpers(*of_each, 99)), logits, *own)
    assert_static(
        how,
        lambda given, seed, place: draw(law(given, shared)[:, 0], seed, place),
        logits,
        seeds,
        positions,
    )
