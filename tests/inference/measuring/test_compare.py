"""What explains a difference between two texts: rounding, or a fault."""

import math
from typing import Any

import pytest
import torch

from drafters import TargetModel
from inference.measuring.compare import (
    clean_generation_config,
    explain_difference,
    reference_text,
)
from inference.measuring.doubt import NEAR_TIE
from inference.processors import Sampler
from inference.sampling import SamplingParams, gumbel, probabilities
from tests.grammar import (
    DIGITS,
    MARKER,
    GrammarMatcher,
    GrammarProcessor,
    complete,
    valid_prefix,
)
from tests.tiny import tiny_target

GREEDY = SamplingParams()
PROMPT = [5, 9, 7, 20]
EDGE = NEAR_TIE / 4
"""Log-probabilities wrong by NEAR_TIE / 2 move a mass m by at most m (1 - m) NEAR_TIE."""


def logits_after(target: TargetModel, ids: list[int]) -> torch.Tensor:
    return target.forward(torch.tensor([ids])).logits[0, -1]


def tied_target(gap: float) -> tuple[TargetModel, int, int]:
    """A target whose two best tokens after PROMPT are `gap` apart, and these tokens."""
    target = tiny_target()
    state = target.forward(torch.tensor([PROMPT])).last_hidden[0, -1]
    direction = state / state.norm() ** 2  # adds 1 to a logit after PROMPT
    top = float(logits_after(target, PROMPT).max()) + 1.0
    for token, logit in ((30, top), (31, top - gap)):
        target.lm_head.weight[token] = direction * logit
    return target, 30, 31


def test_equal_texts_have_no_difference() -> None:
    assert explain_difference(tiny_target(), PROMPT, [4, 5], [4, 5], GREEDY) is None


@pytest.mark.parametrize(("gap", "near"), [(NEAR_TIE / 10, True), (NEAR_TIE * 10, False)])
def test_a_near_tie_is_told_by_the_gap_of_the_best_two(gap: float, near: bool) -> None:
    target, best, second = tied_target(gap)
    found = explain_difference(target, PROMPT, [best, 1, 2], [second, 1, 2], GREEDY)
    assert found is not None and found.position == 0
    assert found.gap == pytest.approx(gap, rel=1e-6)
    assert found.near_tie is near


def test_a_third_token_is_no_near_tie_although_the_best_two_are_close() -> None:
    target, best, _ = tied_target(NEAR_TIE / 10)
    found = explain_difference(target, PROMPT, [best], [50], GREEDY)
    assert found is not None and found.gap is not None and found.gap > 0.1 and not found.near_tie


def test_the_common_prefix_is_taken_into_account() -> None:
    target = tiny_target()
    logits = logits_after(target, [*PROMPT, 11, 12])
    first, second = logits.topk(2).indices.tolist()
    found = explain_difference(target, PROMPT, [11, 12, first], [11, 12, second], GREEDY)
    assert found is not None and found.position == 2
    assert found.gap == pytest.approx(float(logits[first] - logits[second]), rel=1e-9)


def test_a_text_that_ends_early_is_a_failure() -> None:
    found = explain_difference(tiny_target(), PROMPT, [4, 5, 6], [4, 5], GREEDY)
    assert found is not None and (found.position, found.expected, found.found) == (2, 6, None)
    assert not found.near_tie


def test_sampled_texts_are_compared_by_the_perturbed_scores() -> None:
    target, sampling = tiny_target(), SamplingParams(temperature=0.7, top_k=20, seed=5)
    drawn = reference_text(target, PROMPT, 1, sampling).tokens[0]
    law = probabilities(logits_after(target, PROMPT), sampling)
    scores = law.log() + gumbel(5, len(PROMPT), 96)
    best, second = scores.topk(2).indices.tolist()
    assert drawn == best
    found = explain_difference(target, PROMPT, [best], [second], sampling)
    assert found is not None
    assert found.gap == pytest.approx(float(scores[best] - scores[second]), rel=1e-9)
    outside = int((law == 0).nonzero()[0])
    impossible = explain_difference(target, PROMPT, [best], [outside], sampling)
    assert impossible is not None and impossible.gap is None and not impossible.near_tie


# The edge of top-k and top-p


def target_with_law(law: list[float]) -> TargetModel:
    """A target whose law after PROMPT is `law` for the first tokens, and 0 for the others."""
    target = tiny_target()
    state = target.forward(torch.tensor([PROMPT])).last_hidden[0, -1]
    direction = state / state.norm() ** 2
    logits = torch.tensor(law, dtype=torch.float64).log()
    weights = torch.cat([logits, torch.full((96 - len(law),), -200.0, dtype=torch.float64)])
    target.lm_head.weight.copy_(weights[:, None] * direction)
    return target


def seed_with(order: list[int], law: list[float]) -> int:
    """A seed whose noise after PROMPT ranks these tokens in this order, clearly."""
    log_law = torch.tensor(law, dtype=torch.float64).log()
    for seed in range(1000):
        scores = log_law + gumbel(seed, len(PROMPT), 96)[: len(law)]
        ranked = scores.argsort(descending=True).tolist()[: len(order)]
        if ranked == order and float(scores[order[0]] - scores[order[1]]) > 0.1:
            return seed
    raise AssertionError("no such seed")


@pytest.mark.parametrize(
    ("distance", "near"),
    [(EDGE / 10, True), (-EDGE / 10, True), (EDGE * 10, False), (-EDGE * 10, False)],
)
def test_a_token_at_the_edge_of_the_nucleus_is_a_near_tie(distance: float, near: bool) -> None:
    """Token 2 is kept by one run and dropped by the other, which then takes its next best.

    Kept or dropped by the comparison's own forward, the answer is the same.
    """
    law = [0.5, 0.3, 0.15, 0.05]
    sampling = SamplingParams(1.0, top_p=0.8 + distance, seed=seed_with([2, 0], law))
    target = target_with_law(law)
    kept = float(probabilities(logits_after(target, PROMPT), sampling)[2]) > 0
    assert kept is (distance > 0)
    for pair in ([2], [0]), ([0], [2]):
        found = explain_difference(target, PROMPT, *pair, sampling)
        assert found is not None and found.near_tie is near
        assert (found.gap is None) is (not near and not kept)


@pytest.mark.parametrize(("gap", "near"), [(NEAR_TIE / 10, True), (NEAR_TIE * 10, False)])
@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.7}])
def test_a_tie_at_the_cut_off_is_a_near_tie(
    options: dict[str, Any], gap: float, near: bool
) -> None:
    """Tokens 1 and 2 are as good as each other, and one of them is kept."""
    law = [0.5, 0.25, 0.25 * math.exp(-gap)]
    sampling = SamplingParams(1.0, **options, seed=seed_with([2, 1], law))
    target = target_with_law(law)
    support = probabilities(logits_after(target, PROMPT), sampling).nonzero().flatten()
    assert support.tolist() == [0, 1]
    found = explain_difference(target, PROMPT, [1], [2], sampling)
    assert found is not None and found.near_tie is near


def test_at_the_edge_the_better_token_must_still_win() -> None:
    """Token 2 may be kept, but nothing makes it win over 0."""
    law = [0.5, 0.3, 0.15, 0.05]
    sampling = SamplingParams(1.0, top_p=0.8 + EDGE / 10, seed=seed_with([0, 2], law))
    found = explain_difference(target_with_law(law), PROMPT, [0], [2], sampling)
    assert found is not None and found.gap is not None and found.gap > 0.1


def test_broken_logits_explain_nothing() -> None:
    target = tiny_target()
    with torch.no_grad():
        target.lm_head.weight.fill_(torch.nan)
    for sampling in (GREEDY, SamplingParams(1.0), SamplingParams(1.0, top_p=0.5)):
        found = explain_difference(target, PROMPT, [3], [4], sampling)
        assert found is not None and found.gap is None and not found.near_tie


# Processors and the other warpers


PROCESSORS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.6},
    {"presence_penalty": 2.5, "frequency_penalty": 1.25},
    {"no_repeat_ngram_size": 1},
    {"bad_words_ids": ((30,), (11, 31))},
    {"logit_bias": ((31, 3.5), (30, -1.0))},
    {"suppress_tokens": (30, 40)},
    {"forced_tokens": ((1, 31),)},
    {"begin_suppress_tokens": (5,), "min_new_tokens": 9},
]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("fields", PROCESSORS)
def test_differences_are_judged_behind_the_processors(
    fields: dict[str, Any], temperature: float
) -> None:
    """The best token there has gap 0 and the second that of the perturbed, processed scores."""
    target, params = tiny_target(), SamplingParams(temperature, seed=3, **fields)
    common = [11, 12]
    text = [*PROMPT, *common]
    sampler = Sampler(params, len(PROMPT), target.eos_token_ids, "cpu")
    scores = sampler.scores(logits_after(target, text), text)
    if temperature:
        scores = scores.log_softmax(-1) + gumbel(3, len(text), 96)
    best, second = scores.topk(2).indices.tolist()
    found = explain_difference(target, PROMPT, [*common, best], [*common, second], params)
    assert found is not None and found.position == 2
    assert found.gap == pytest.approx(float(scores[best] - scores[second]), rel=1e-9)
    if bool((banned := scores == -torch.inf).any()):
        wrong = int(banned.nonzero()[0])
        found = explain_difference(target, PROMPT, [*common, best], [*common, wrong], params)
        assert found is not None and found.gap is None and not found.near_tie


def test_a_near_tie_of_the_logits_is_none_behind_a_bias() -> None:
    target, best, second = tied_target(NEAR_TIE / 10)
    for bias, near in ((0.0, True), (1.0, False)):
        params = SamplingParams(logit_bias=((best, bias),))
        found = explain_difference(target, PROMPT, [best], [second], params)
        assert found is not None and found.near_tie is near
    level = SamplingParams(logit_bias=((50, 0.0), (second, -NEAR_TIE / 20)))
    found = explain_difference(target, PROMPT, [best], [second], level)
    assert found is not None and found.gap == pytest.approx(1.5 * NEAR_TIE / 10, rel=1e-3)


@pytest.mark.parametrize(
    ("distance", "near"),
    [(EDGE / 10, True), (-EDGE / 10, True), (EDGE * 10, False), (-EDGE * 10, False)],
)
@pytest.mark.parametrize("kind", ["min_p", "typical_p"])
def test_a_token_at_the_edge_of_min_p_or_typical_p_is_a_near_tie(
    kind: str, distance: float, near: bool
) -> None:
    """Token 2 is kept by one run and dropped by the other, as at the edge of the nucleus."""
    law = [0.5, 0.3, 0.15, 0.05]
    # Surprises 0.69 1.20 1.90 3.00, entropy 1.14: from the most typical on, tokens 1, 0, 2, 3.
    option = {"min_p": 0.3 - distance, "typical_p": 0.8 + distance}[kind]
    sampling = SamplingParams(1.0, **{kind: option}, seed=seed_with([2, 0], law))
    target = target_with_law(law)
    kept = float(probabilities(logits_after(target, PROMPT), sampling)[2]) > 0
    assert kept is (distance > 0)
    for pair in ([2], [0]), ([0], [2]):
        found = explain_difference(target, PROMPT, *pair, sampling)
        assert found is not None and found.near_tie is near
        assert (found.gap is None) is (not near and not kept)


def test_eos_that_is_not_due_yet_explains_nothing() -> None:
    target = tiny_target()
    params = SamplingParams(min_new_tokens=2)
    (eos,) = target.eos_token_ids
    found = explain_difference(target, PROMPT, [4], [eos], params)
    assert found is not None and found.gap is None
    found = explain_difference(target, PROMPT, [4], [eos], params, eos_token_ids=[9])
    assert found is not None and found.gap is not None


@pytest.mark.parametrize("build", [GrammarMatcher, GrammarProcessor])
def test_constrained_texts_are_compared_along_the_grammar(build: Any) -> None:
    """The matcher is called from the prompt on, and the given one stays unused."""
    target, prompt = tiny_target(), [*PROMPT, MARKER]
    params = SamplingParams(processors=(build(),))
    text = reference_text(target, prompt, 30, params).tokens
    assert complete(text)
    for place, token in enumerate(text):
        (other, *_) = [one for one in DIGITS if one != token]
        found = explain_difference(target, prompt, text, [*text[:place], other], params)
        assert found is not None and found.position == place and not found.near_tie
        assert (found.gap is None) is (not valid_prefix([*text[:place], other]))


# References


def test_both_references_decode_the_same_text_and_time_it() -> None:
    target = tiny_target()
    plain, theirs = (
        reference_text(target, PROMPT, 12, GREEDY, kind) for kind in ("plain", "generate")
    )
    assert plain.tokens == theirs.tokens and len(plain.tokens) == 12
    assert min(plain.prefill, plain.decoding, theirs.prefill, theirs.decoding) > 0


@pytest.mark.parametrize("fields", PROCESSORS)
def test_generate_is_asked_for_the_same_processors(fields: dict[str, Any]) -> None:
    target = tiny_target(torch.float32)
    free = reference_text(target, PROMPT, 12, GREEDY).tokens
    forbid = SamplingParams(**{**fields, "begin_suppress_tokens": (free[0],)})
    plain, theirs = (
        reference_text(target, PROMPT, 12, forbid, kind).tokens for kind in ("plain", "generate")
    )
    assert plain == theirs != free


@pytest.mark.parametrize("build", [GrammarMatcher, GrammarProcessor])
def test_both_references_obey_a_grammar_and_do_not_use_it_up(build: Any) -> None:
    target, prompt = tiny_target(torch.float32), [*PROMPT, MARKER]
    params = SamplingParams(processors=(build(),), frequency_penalty=0.5)
    texts = [
        reference_text(target, prompt, 30, params, kind).tokens
        for kind in ("plain", "generate", "plain")
    ]
    assert texts[0] == texts[1] == texts[2] and complete(texts[0])


def test_generate_is_asked_for_plain_greedy_decoding() -> None:
    """Whatever the model's generation config would have it do, which stays as it is."""
    target = tiny_target()
    plain = reference_text(target, PROMPT, 12, GREEDY).tokens
    wishes: dict[str, Any] = {
        "do_sample": True,
        "temperature": 2.0,
        "top_k": 3,
        "num_beams": 2,
        "repetition_penalty": 5.0,
        "no_repeat_ngram_size": 1,
        "suppress_tokens": [plain[2]],
        "begin_suppress_tokens": [plain[0]],
        "bad_words_ids": [[plain[1]]],
        "min_new_tokens": 30,
        "max_length": 5,
        "forced_eos_token_id": 7,
        "sequence_bias": [[[plain[3]], -50.0]],
    }
    config = target.model.generation_config
    for name, value in wishes.items():
        setattr(config, name, value)
    theirs = reference_text(target, PROMPT, 12, GREEDY, "generate")
    assert theirs.tokens == plain
    assert target.model.generation_config is config
    assert {name: getattr(config, name) for name in wishes} == wishes


@pytest.mark.parametrize("ends", [3, [50, 3], None])
def test_the_clean_config_ends_texts_where_the_target_does(ends: int | list[int] | None) -> None:
    target = tiny_target()
    plain = reference_text(target, PROMPT, 12, GREEDY).tokens
    stop = [plain[4], 95] if isinstance(ends, list) else plain[4] if ends else None
    target.model.generation_config.eos_token_id = stop
    target.config.eos_token_id = None
    expected = plain[: plain.index(plain[4]) + 1] if ends else plain
    for kind in ("plain", "generate"):
        assert reference_text(target, PROMPT, 12, GREEDY, kind).tokens == expected
    config = clean_generation_config(target, 9, do_sample=True, temperature=0.5)
    assert (config.max_new_tokens, config.do_sample, config.temperature) == (9, True, 0.5)
    assert config.repetition_penalty is None and config.suppress_tokens is None


def test_references_that_cannot_work_are_refused() -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match="plain, generate"):
        reference_text(target, PROMPT, 4, GREEDY, "beam")
    with pytest.raises(ValueError, match="temperature 0"):
        reference_text(target, PROMPT, 4, SamplingParams(temperature=1.0), "generate")
