"""Laws equal those of `generate`; noise is keyed, uniform and independent; draws have their law."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import TopPLogitsWarper

from inference import sampling
from inference.sampling import (
    SamplingParams,
    Stream,
    draw,
    draw_top,
    gumbel,
    gumbel_at,
    keep_top_p,
    lowest_argmax,
    probabilities,
    sample,
    uniform_at,
    warp,
)

LAW = torch.tensor([0.1, 0.0, 0.4, 0.2, 0.3])


def uniform(seed: int, stream: int, position: int, size: int) -> Tensor:
    return uniform_at(seed, stream, position, torch.arange(size))


def chi_square(counts: Tensor, law: Tensor) -> float:
    """Pearson's statistic over the cells of positive probability; the others must be empty."""
    assert counts[law == 0].sum() == 0
    expected = counts.sum() * law[law > 0]
    return float(((counts[law > 0] - expected) ** 2 / expected).sum())


# Laws -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.7, "top_p": 0.6},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.4, "top_k": 99, "top_p": 1.0},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.8, "min_p": 0.0, "typical_p": 1.0},
        {"temperature": 1.0, "typical_p": 0.4},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.95, "min_p": 0.03, "typical_p": 0.8},
    ],
)
def test_laws_equal_those_of_generate(options: dict[str, float]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=1.0,
    )
    model = LlamaForCausalLM(config).eval()
    out = model.generate(
        torch.tensor([[1, 2, 3]]),
        max_new_tokens=4,
        do_sample=True,
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **{"top_k": 0, "top_p": 1.0, **options},
    )
    raw, warped = torch.stack(out.logits), torch.stack(out.scores)
    law = probabilities(raw, SamplingParams(**options))  # (4, 1, V)
    assert law.shape == raw.shape
    assert torch.equal(law, warped.softmax(-1))
    assert torch.equal(warp(raw, SamplingParams(**options)), warped)


@pytest.mark.parametrize("guess", [1, 8, 1000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_nucleus_is_that_of_transformers(
    top_p: float, guess: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is found: among the best few, or only among all."""
    monkeypatch.setattr(sampling, "NUCLEUS_GUESS", guess)
    logits = torch.randn(20, 300, dtype=torch.float64) * torch.linspace(0.1, 8, 20)[:, None]
    expected = TopPLogitsWarper(top_p)(torch.empty(20, 0, dtype=torch.long), logits)
    assert torch.equal(keep_top_p(logits, top_p), expected)


@pytest.mark.parametrize("guess", [1, 3, 40, 1000])
def test_of_equal_tokens_on_the_edge_of_a_nucleus_the_lowest_ids_stay(
    guess: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a stable sort, wherever the guess cuts among them; so many as transformers keeps."""
    monkeypatch.setattr(sampling, "NUCLEUS_GUESS", guess)
    logits = torch.randint(0, 5, (40, 200)).double() * 1.5
    for top_p in (0.1, 0.5, 0.8, 0.97):
        kept = keep_top_p(logits, top_p) > -torch.inf
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        probs = logits.softmax(-1).gather(-1, order)
        expected = probs.cumsum(-1) - probs < top_p
        assert torch.equal(kept, torch.zeros_like(kept).scatter(-1, order, expected))
        theirs = TopPLogitsWarper(top_p)(torch.empty(40, 0, dtype=torch.long), logits)
        assert torch.equal(kept.sum(-1), (theirs > -torch.inf).sum(-1))


def test_temperature_comes_before_top_p() -> None:
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    law = probabilities(logits, SamplingParams(temperature=0.25, top_p=0.9))
    assert law.tolist() == [1.0, 0.0, 0.0]  # 0.6 alone has over 0.9 once sharpened


def test_temperature_zero_is_the_lowest_argmax() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, -1.0, 3.0]])
    law = probabilities(logits, SamplingParams())
    assert law.tolist() == [[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_laws_are_float32_or_float64(temperature: float) -> None:
    params = SamplingParams(temperature)
    for given, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        assert probabilities(torch.zeros(3, 4, dtype=given), params).dtype == expected


def test_logits_are_not_changed() -> None:
    logits = torch.randn(5)
    before = logits.clone()
    probabilities(logits, SamplingParams(0.5, top_k=2, top_p=0.5, min_p=0.1, typical_p=0.5))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("options", [{"min_p": 0.1}, {"typical_p": 0.6}, {"top_k": 5}])
def test_each_law_of_many_is_that_of_one(options: dict[str, float]) -> None:
    logits = 2 * torch.randn(2, 3, 40, dtype=torch.float64)
    params = SamplingParams(0.9, **options)
    scores = warp(logits, params)
    assert scores.dtype == torch.float64
    for row in range(2):
        for column in range(3):
            assert torch.equal(scores[row, column], warp(logits[row, column], params))


def test_at_temperature_zero_scores_are_the_logits() -> None:
    logits = torch.randn(5, dtype=torch.bfloat16)
    params = SamplingParams(0.0, top_k=2, top_p=0.5, min_p=0.5, typical_p=0.5)
    scores = warp(logits, params)
    assert scores.dtype == torch.float32 and torch.equal(scores, logits.float())


# Parameters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"typical_p": 0.0}, "typical_p"),
        ({"typical_p": math.nan}, "typical_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"no_repeat_ngram_size": 0}, "no_repeat_ngram_size"),
        ({"min_new_tokens": 0}, "min_new_tokens"),
        ({"bad_words_ids": ((),)}, "bad_words_ids"),
        ({"bad_words_ids": ((3, -1),)}, "bad_words_ids"),
        ({"logit_bias": ((3, math.inf),)}, "logit_bias.*suppress_tokens"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "logit_bias holds two pairs"),
        ({"logit_bias": ((3,),)}, "logit_bias must hold pairs"),
        ({"logit_bias": ((-3, 1.0),)}, "logit_bias"),
        ({"suppress_tokens": (-1,)}, "suppress_tokens"),
        ({"suppress_tokens": (1.5,)}, "suppress_tokens"),
        ({"suppress_tokens": (True,)}, "suppress_tokens"),
        ({"forced_tokens": ((0.5, 4),)}, "forced_tokens: places"),
        ({"begin_suppress_tokens": (-1,)}, "begin_suppress_tokens"),
        ({"forced_tokens": ((-1, 4),)}, "forced_tokens: places"),
        ({"forced_tokens": ((0, -4),)}, "forced_tokens"),
        ({"forced_tokens": ((2, 4), (2, 5))}, "forced_tokens holds two pairs"),
        ({"forced_tokens": ((2, 4),), "suppress_tokens": (4,)}, "forced_tokens: token 4"),
        ({"forced_tokens": ((0, 4),), "begin_suppress_tokens": (4,)}, "forced_tokens: token 4"),
        ({"processors": (3,)}, "processors must hold callables"),
        ({"processors": (max, max)}, "processors holds the same object twice"),
    ],
)
def test_params_outside_their_range_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**options)


@pytest.mark.parametrize("name", ["seed", "top_k", "no_repeat_ngram_size", "min_new_tokens"])
@pytest.mark.parametrize("value", [True, 5.0, 0.5, "5", torch.tensor(5)])
def test_only_integers_count(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be an integer"):
        SamplingParams(**{name: value})
    assert getattr(SamplingParams(**{name: 5}), name) == 5


def test_a_token_suppressed_at_the_beginning_may_be_forced_later() -> None:
    SamplingParams(forced_tokens=((1, 4),), begin_suppress_tokens=(4,))


def test_params_can_be_hashed_and_compared_whatever_they_were_given() -> None:
    lists = SamplingParams(
        1.0,
        bad_words_ids=[[3, 4], [5]],  # type: ignore[arg-type]
        logit_bias=[[3, 1.0]],  # type: ignore[arg-type]
        suppress_tokens=[7],  # type: ignore[arg-type]
        processors=[max],  # type: ignore[arg-type]
    )
    tuples = SamplingParams(
        1.0,
        bad_words_ids=((3, 4), (5,)),
        logit_bias=((3, 1.0),),
        suppress_tokens=(7,),
        processors=(max,),
    )
    assert lists == tuples and hash(lists) == hash(tuples)
    assert tuples != SamplingParams(1.0, suppress_tokens=(7,))
    assert SamplingParams(bad_words_ids=None) == SamplingParams()  # type: ignore[arg-type]


def test_what_follows_the_seed_is_given_by_name() -> None:
    with pytest.raises(TypeError):
        SamplingParams(1.0, 5, 0.9, 3, 0.1)  # type: ignore[misc]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_an_error_not_a_token(temperature: float) -> None:
    logits = torch.tensor([0.0, math.nan, 1.0])
    with pytest.raises(ValueError, match="NaN"):
        sample(probabilities(logits, SamplingParams(temperature)), seed=0, position=0)


# Noise ------------------------------------------------------------------------------------------


def splitmix64(state: int) -> int:
    """The published finaliser, in plain integers."""
    mask = (1 << 64) - 1
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


@pytest.mark.parametrize(
    ("seed", "stream", "position"), [(0, 0, 0), (-3, 2, 17), (2**70 + 1, 3, 5)]
)
def test_uniform_equals_plain_integer_arithmetic(seed: int, stream: int, position: int) -> None:
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15
    key = 0
    for word in (seed, stream, position):
        key = splitmix64(((key ^ (word & mask)) + golden) & mask)
    expected = [
        ((splitmix64((key + (index + 1) * golden) & mask) >> 12) + 0.5) / 2**52
        for index in range(50)
    ]
    assert uniform(seed, stream, position, 50).tolist() == expected


def test_splitmix64_is_the_published_one() -> None:
    """First outputs of the reference generator from state 1234567."""
    golden = 0x9E3779B97F4A7C15
    outputs = [splitmix64((1234567 + (i + 1) * golden) % 2**64) for i in range(2)]
    assert outputs == [6457827717110365317, 3203168211198807973]


@pytest.mark.parametrize("bits", [0, -1])
def test_uniform_never_touches_its_ends(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coin that rounds up to 1.0 accepts nothing; one of 0.0 has infinite Gumbel noise."""
    monkeypatch.setattr(sampling, "_hash", lambda *_: torch.tensor([bits]))
    value = uniform_at(0, 0, 0, torch.tensor([0]))
    assert 0.0 < value.item() < 1.0
    assert torch.isfinite(value.log().neg().log())


def test_noise_at_an_index_does_not_depend_on_what_else_is_asked() -> None:
    whole = gumbel(3, 11, 1000)
    index = torch.tensor([999, 4, 4, 500])
    assert torch.equal(gumbel_at(3, 11, index), whole[index])
    assert torch.equal(gumbel(3, 11, 10), whole[:10])


def test_noise_differs_by_seed_stream_and_position() -> None:
    rows = [
        uniform(seed, stream, position, 2000)
        for seed in (0, 1)
        for stream in Stream
        for position in (0, 1)
    ]
    correlation = torch.corrcoef(torch.stack(rows))
    assert (correlation - torch.eye(len(rows))).abs().max() < 0.1  # 4.5 standard deviations


def test_uniform_is_uniform() -> None:
    counts = torch.histc(uniform(5, Stream.ACCEPT, 8, 50_000), 50, 0.0, 1.0)
    assert chi_square(counts, torch.full((50,), 0.02)) < 85.4  # 49 degrees, 0.1 %


def test_gumbel_has_the_moments_of_a_gumbel() -> None:
    noise = gumbel(0, 0, 200_000)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.012)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.05)
    assert not torch.equal(noise[:9], gumbel(0, 0, 9, stream=Stream.DRAFT))


# Draws ------------------------------------------------------------------------------------------


def test_draw_has_the_law_over_seeds_and_over_positions() -> None:
    for tokens in (
        [sample(LAW, seed, position=3) for seed in range(2000)],
        [sample(LAW, 7, position) for position in range(2000)],
    ):
        counts = torch.bincount(torch.tensor(tokens), minlength=5)
        assert chi_square(counts, LAW) < 16.3  # 3 degrees of freedom, 0.1 %


def test_chi_square_tells_a_wrong_law() -> None:
    tokens = [sample(LAW, seed, position=3) for seed in range(2000)]
    counts = torch.bincount(torch.tensor(tokens), minlength=5)
    assert chi_square(counts, torch.tensor([0.15, 0.0, 0.35, 0.2, 0.3])) > 16.3


def test_sample_is_draw_with_the_noise_of_its_position() -> None:
    law = probabilities(torch.randn(500), SamplingParams(1.0, top_p=0.8))
    for position in range(30):
        assert sample(law, 1, position) == draw(law, gumbel(1, position, 500))


def test_draw_takes_the_lowest_index_on_ties() -> None:
    assert draw(torch.tensor([0.2, 0.4, 0.4]), torch.zeros(3)) == 1
    assert lowest_argmax(torch.tensor([[1, 5, 5], [5, 5, 1]])).tolist() == [1, 0]


def test_a_law_without_mass_is_refused() -> None:
    with pytest.raises(ValueError, match="no mass"):
        sample(torch.zeros(4), 0, 0)
    with pytest.raises(ValueError, match="-inf"):
        draw(torch.zeros(4), torch.zeros(4))


def test_draw_top_draws_without_replacement() -> None:
    law = torch.tensor([0.5, 0.3, 0.2])
    counts = torch.zeros(3, 3)
    for seed in range(3000):
        noise = gumbel(seed, 0, 3, stream=Stream.DRAFT)
        first, second = draw_top(law, noise, 2).tolist()
        assert first == draw(law, noise)
        counts[first, second] += 1
    expected = law[:, None] * law[None, :] / (1 - law[:, None])
    expected.fill_diagonal_(0.0)
    assert chi_square(counts.reshape(-1), expected.reshape(-1)) < 20.6  # 5 degrees, 0.1 %


def test_draw_top_leaves_out_what_cannot_be() -> None:
    assert sorted(draw_top(LAW, gumbel(0, 0, 5), 9).tolist()) == [0, 2, 3, 4]


def test_single_rows_have_the_same_lowest_argmax() -> None:
    rows = torch.tensor([[1.0, 5.0, 5.0], [5.0, 1.0, 5.0], [0.0, 0.0, 7.0]])
    assert [int(lowest_argmax(row)) for row in rows] == lowest_argmax(rows).tolist() == [1, 0, 2]


def test_a_law_of_one_token_needs_no_noise() -> None:
    law = torch.zeros(9)
    law[4] = 1.0
    assert sample(law, 3, 7) == draw(law, gumbel(3, 7, 9)) == 4
