"""The audit passes what the target chose, in every dtype, and finds what it did not."""

import math
from typing import Any

import pytest
import torch

from drafters import TargetModel
from inference.generate import plain_generate
from inference.processors import fresh
from inference.proofs.audit import Audit, Miss, audit_text, ulp
from inference.sampling import SamplingParams, gumbel
from tests.grammar import MARKER, GrammarMatcher, complete
from tests.tiny import tiny_target

PROMPT = [5, 9, 7, 20]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, no_repeat_ngram_size=3),
    SamplingParams(1.0, seed=2),
    SamplingParams(0.7, 20, 0.95, seed=3),
    SamplingParams(1.1, seed=4, min_p=0.02, typical_p=0.95, frequency_penalty=0.3),
]


def decode(target: TargetModel, sampling: SamplingParams, steps: int = 40) -> list[int]:
    found = plain_generate(target, [PROMPT], max_new_tokens=steps, sampling=fresh(sampling))
    return found.sequences[0]


def scores_of(target: TargetModel, text: list[int]) -> torch.Tensor:
    """(V,) the target's logits after `text`."""
    return target.forward(torch.tensor([text])).logits[0, -1]


# Units in the last place


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [1.0, 1.5, 2.0, 3.99, 17.3, -17.3, 0.3, 1e-3])
def test_ulp_is_the_distance_to_the_next_number(value: float, dtype: torch.dtype) -> None:
    here = torch.tensor(abs(value), dtype=dtype)
    above = torch.nextafter(here.cpu(), torch.tensor(math.inf, dtype=dtype))
    assert ulp(float(here), dtype) == float(above.double() - here.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulp_of_zero_is_a_positive_number(dtype: torch.dtype) -> None:
    assert 0 < ulp(0.0, dtype) <= torch.finfo(dtype).smallest_normal


# Texts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_target_s_own_text_passes(sampling: SamplingParams, dtype: torch.dtype) -> None:
    """Decoded token by token, judged in one forward; nearly every token is the very choice.

    The layers of this model make of their own rounding a few units at the logits.
    """
    target = tiny_target(dtype)
    text = decode(target, sampling)
    audit = audit_text(target, PROMPT, text, sampling)
    assert (audit.tokens, audit.dtype) == (len(text), dtype)
    assert audit.passed(max_ulp=8.0)
    assert audit.exact >= 0.9 * len(text)
    if dtype in (torch.float32, torch.float64):
        assert audit.misses == ()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("place", [0, 7])
def test_a_planted_token_fails(sampling: SamplingParams, dtype: torch.dtype, place: int) -> None:
    target = tiny_target(dtype)
    text = decode(target, sampling)
    text[place] = 41 if text[place] != 41 else 42
    audit = audit_text(target, PROMPT, text, sampling, stop_after=place + 1)
    assert audit.tokens == place + 1
    assert not audit.passed(max_ulp=8.0) and audit.misses[-1].position == place
    assert audit.misses[-1].token == text[place]
    if place:  # what comes before it is judged as before
        assert audit_text(target, PROMPT, text, sampling, stop_after=place).passed(max_ulp=8.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_gaps_are_those_of_the_logits(dtype: torch.dtype) -> None:
    target = tiny_target(dtype)
    logits = scores_of(target, PROMPT)
    best, second = logits.double().topk(2).indices.tolist()
    gap = float(logits[best].double() - logits[second].double())
    assert gap > 0
    (miss,) = audit_text(target, PROMPT, [second], SamplingParams()).misses
    unit = ulp(max(abs(float(logits[best])), abs(float(logits[second]))), dtype)
    assert (miss.position, miss.token, miss.chosen) == (0, second, best)
    assert miss.gap == pytest.approx(gap, rel=1e-4)
    assert miss.ulp == pytest.approx(gap / unit, rel=1e-4)


def test_one_ulp_passes_and_more_does_not() -> None:
    """Logits of neighbouring numbers in bfloat16: 30 wins, 31 is one below and 32 three."""
    target = tiny_target(torch.bfloat16)
    state = target.forward(torch.tensor([PROMPT])).last_hidden[0, -1].double()
    target.lm_head.weight.zero_()
    unit = ulp(4.5, torch.bfloat16)
    axis = int(state.abs().argmax())
    for token, logit in ((30, 4.5), (31, 4.5 - unit), (32, 4.5 - 3 * unit)):
        target.lm_head.weight[token, axis] = logit / float(state[axis])
    values = scores_of(target, PROMPT)[[30, 31, 32]].double()
    steps = ((values[0] - values) / unit).tolist()
    assert steps[0] == 0 < steps[1] <= 2 < steps[2]
    for token, distance in zip((30, 31, 32), steps, strict=True):
        audit = audit_text(target, PROMPT, [token], SamplingParams())
        assert audit.worst_ulp == distance
        assert audit.passed() is (distance <= 2)
        assert audit.passed(distance) and (distance == 0 or not audit.passed(distance - 0.5))


def test_a_tie_that_another_run_broke_otherwise_has_gap_zero() -> None:
    target = tiny_target()
    target.lm_head.weight[31] = target.lm_head.weight[30]
    logits = scores_of(target, PROMPT)
    assert logits[30] == logits[31]
    bias = ((30, 50.0), (31, 50.0))
    assert audit_text(target, PROMPT, [30], SamplingParams(logit_bias=bias)).misses == ()
    (miss,) = audit_text(target, PROMPT, [31], SamplingParams(logit_bias=bias)).misses
    assert (miss.chosen, miss.gap, miss.ulp) == (30, 0.0, 0.0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_gaps_are_in_logits(temperature: float) -> None:
    """The noise is part of the score: the second best draw is as far off as its logit must rise."""
    target, sampling = tiny_target(), SamplingParams(temperature, seed=6)
    scores = (scores_of(target, PROMPT) / temperature) + gumbel(6, len(PROMPT), 96)
    best, second = scores.topk(2).indices.tolist()
    (miss,) = audit_text(target, PROMPT, [second], sampling).misses
    assert miss.chosen == best
    assert miss.gap == pytest.approx(temperature * float(scores[best] - scores[second]), rel=1e-4)


@pytest.mark.parametrize("options", [{"top_k": 2}, {"min_p": 0.9}, {"top_p": 0.01}])
def test_behind_the_edge_the_gap_is_how_far_the_edge_must_move(options: dict[str, Any]) -> None:
    """Large for a token far behind it, but finite: some rounding could let it in."""
    target = tiny_target()
    logits = scores_of(target, PROMPT)
    worst = int(logits.argmin())
    sampling = SamplingParams(1.0, **options)
    (miss,) = audit_text(target, PROMPT, [worst], sampling).misses
    assert 1.0 < miss.gap < math.inf


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_processor_rules_out_is_infinitely_far(temperature: float) -> None:
    sampling = SamplingParams(temperature, suppress_tokens=(8,))
    audit = audit_text(tiny_target(), PROMPT, [8], sampling)
    assert audit.worst_gap == audit.worst_ulp == math.inf and not audit.passed(1e9)


def test_the_wrong_seed_or_sampler_fails() -> None:
    target, sampling = tiny_target(), SamplingParams(1.0, seed=2)
    text = decode(target, sampling)
    assert audit_text(target, PROMPT, text, sampling).passed()
    for wrong in (SamplingParams(1.0, seed=3), SamplingParams(0.5, seed=2), SamplingParams()):
        assert not audit_text(target, PROMPT, text, wrong).passed()


def test_constrained_texts_are_audited_and_the_matcher_is_not_used_up() -> None:
    target, prompt = tiny_target(torch.bfloat16), [*PROMPT, MARKER]
    sampling = SamplingParams(1.0, seed=3, processors=(GrammarMatcher(),))
    text = plain_generate(target, [prompt], max_new_tokens=30, sampling=fresh(sampling)).sequences[
        0
    ]
    assert complete(text)
    assert audit_text(target, prompt, text, sampling).passed(max_ulp=8.0)
    assert not audit_text(target, prompt, text, SamplingParams(1.0, seed=3)).passed()


def test_the_counts_of_an_audit() -> None:
    misses = (Miss(2, 5, 6, 0.25, 1.0), Miss(4, 7, 8, 0.125, 3.0))
    audit = Audit(10, torch.bfloat16, misses)
    assert (audit.exact, audit.worst_gap, audit.worst_ulp) == (8, 0.25, 3.0)
    assert audit.passed(3.0) and not audit.passed()
    assert Audit(3, torch.float32, ()).worst_ulp == 0.0


def test_nothing_to_judge_is_an_error() -> None:
    for prompt, text in ([], [4]), (PROMPT, []):
        with pytest.raises(ValueError, match="at least one token"):
            audit_text(tiny_target(), prompt, text, SamplingParams())
