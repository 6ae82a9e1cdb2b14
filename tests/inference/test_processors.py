"""Scores equal `generate`'s, field by field; what needs other rows is refused."""

import math
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers import generation as hf
from transformers.generation import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    AlternatingCodebooksLogitsProcessor,
    BarkEosPrioritizerLogitsProcessor,
    DiaClassifierFreeGuidanceLogitsProcessor,
    DiaEOSChannelFilterLogitsProcessor,
    DiaEOSDelayPatternLogitsProcessor,
    TopHLogitsWarper,
    WhisperNoSpeechDetection,
)

from drafters import TargetModel
from inference.processors import (
    REFUSED,
    Sampler,
    check_processors,
)
from inference.sampling import SamplingParams, probabilities, sample
from tests.grammar import (
    EOS,
    MARKER,
    GrammarMatcher,
    GrammarProcessor,
    complete,
    token_of,
    valid_prefix,
)
from tests.tiny import tiny_target

VOCAB = 96
PROMPT = [5, 9, 7, 9, 20, 7, 9]
OFF = {"top_k": 0, "top_p": 1.0}
"""What switches the warpers of `generate` off that are on by default."""


def theirs(
    target: TargetModel,
    options: dict[str, Any],
    processors: list[Any] | None = None,
    steps: int = 12,
) -> tuple[list[int], Tensor, Tensor]:
    """New tokens, raw logits (n, V) and scores (n, V) of `generate`."""
    torch.manual_seed(0)
    config = GenerationConfig(
        max_new_tokens=steps,
        eos_token_id=list(target.eos_token_ids),
        pad_token_id=0,
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
        **{"do_sample": False, **options},
    )
    target.model.generation_config = GenerationConfig()
    prompt = torch.tensor([PROMPT])
    extra = LogitsProcessorList(processors or [])
    out: Any = target.model.generate(prompt, config, logits_processor=extra)
    new = out.sequences[0, len(PROMPT) :].tolist()
    return new, torch.cat(out.logits), torch.cat(out.scores)


def ours(params: SamplingParams, new: list[int], logits: Tensor) -> Tensor:
    """Scores (n, V) of our sampler on the same prefixes."""
    sampler = Sampler(params, len(PROMPT), [EOS], "cpu")
    rows = [sampler.scores(row, [*PROMPT, *new[:step]]) for step, row in enumerate(logits)]
    return torch.stack(rows)


BIAS = [(40, 1.5), (41, -2.25), (9, 0.7)]
WORDS = [[9], [7, 9], [20, 7, 30], [EOS]]

FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"repetition_penalty": 1.7}, {}),
    ({"repetition_penalty": 0.6}, {}),
    ({"no_repeat_ngram_size": 1}, {}),
    ({"no_repeat_ngram_size": 2}, {}),
    ({"bad_words_ids": WORDS}, {}),
    ({"logit_bias": BIAS}, {"sequence_bias": [[[token], bias] for token, bias in BIAS]}),
    ({"suppress_tokens": [3, 9, 50]}, {}),
    ({"begin_suppress_tokens": [3, 9, 50]}, {}),
    ({"min_new_tokens": 6}, {}),
    (
        {
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 2,
            "bad_words_ids": WORDS,
            "logit_bias": BIAS,
            "suppress_tokens": [3, 60],
            "begin_suppress_tokens": [4],
            "min_new_tokens": 5,
        },
        {"sequence_bias": [[[token], bias] for token, bias in BIAS]},
    ),
]
WARPERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.5, "min_p": 0.0},
    {"temperature": 1.0, "typical_p": 0.3},
    {"temperature": 1.2, "typical_p": 0.9},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.7},
]


@pytest.mark.parametrize("warpers", WARPERS)
@pytest.mark.parametrize(("fields", "renamed"), FIELDS)
def test_scores_equal_those_of_generate(
    fields: dict[str, Any], renamed: dict[str, Any], warpers: dict[str, Any]
) -> None:
    target = tiny_target(torch.float32)
    options = {name: value for name, value in fields.items() if name != "logit_bias"} | renamed
    if warpers:
        options = {**options, "do_sample": True, **OFF, **warpers}
    new, logits, scores = theirs(target, options)
    found = ours(SamplingParams(**fields, **warpers), new, logits)
    assert torch.equal(found, scores)
    if fields or len(warpers) > 1:
        assert warpers.get("min_p") == 0.0 or not torch.equal(found, logits)


@pytest.mark.parametrize(("fields", "renamed"), FIELDS)
def test_the_whole_text_equals_that_of_generate(
    fields: dict[str, Any], renamed: dict[str, Any]
) -> None:
    """Each sampler decodes for itself; the options change the text."""
    target = tiny_target(torch.float32)
    options = {name: value for name, value in fields.items() if name != "logit_bias"} | renamed
    new, _, _ = theirs(target, options)
    assert decoded(target, SamplingParams(**fields), 12) == new


def decoded(target: TargetModel, params: SamplingParams, steps: int) -> list[int]:
    """Plain decoding as simple as it gets."""
    sampler = Sampler(params, len(PROMPT), [EOS], "cpu")
    text = list(PROMPT)
    while len(text) < len(PROMPT) + steps and text[-1] != EOS:
        logits = target.forward(torch.tensor([text]), logits_to_keep=1).logits[0, -1]
        text.append(sample(sampler.law(sampler.scores(logits, text)), params.seed, len(text)))
    return text[len(PROMPT) :]


# What transformers has no option for


def test_presence_and_frequency_count_new_tokens_only() -> None:
    """The formula of OpenAI's API and of vLLM, in plain numbers; 9 and 7 are in the prompt."""
    logits = torch.linspace(-1, 1, VOCAB, dtype=torch.float64)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    sampler = Sampler(params, len(PROMPT), [EOS], "cpu")
    assert torch.equal(sampler.scores(logits, PROMPT), logits)
    expected = logits.clone()
    expected[30] -= 0.5 + 2 * 0.25
    expected[9] -= 0.5 + 0.25
    found = sampler.scores(logits, [*PROMPT, 30, 9, 30])
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)


def test_penalties_change_greedy_texts() -> None:
    target = tiny_target(torch.float32)
    plain = decoded(target, SamplingParams(), 20)
    for params in (
        SamplingParams(presence_penalty=100.0),
        SamplingParams(frequency_penalty=100.0, seed=3),
    ):
        found = decoded(target, params, 20)
        assert found != plain and len(set(found)) == len(found)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_come_at_their_places(temperature: float) -> None:
    target = tiny_target(torch.float32)
    free = SamplingParams(temperature, seed=1)
    forced = SamplingParams(temperature, seed=1, forced_tokens=((0, 50), (3, 51), (5, EOS)))
    before, after = decoded(target, free, 8), decoded(target, forced, 8)
    assert (after[0], after[3], after[5], len(after)) == (50, 51, EOS, 6)
    assert before[:1] != after[:1]
    late = SamplingParams(temperature, seed=1, forced_tokens=((3, 51),))
    assert decoded(target, late, 8)[:3] == before[:3]


def test_forcing_beats_what_would_forbid() -> None:
    params = SamplingParams(
        forced_tokens=((1, EOS),), min_new_tokens=9, bad_words_ids=((EOS,), (4, EOS), (5,))
    )
    sampler = Sampler(params, len(PROMPT), [EOS], "cpu")
    scores = sampler.scores(torch.randn(VOCAB), [*PROMPT, 4])
    assert scores[EOS] == 0 and int((scores > -torch.inf).sum()) == 1


# Dtypes, copies, cost


@pytest.mark.parametrize(("fields", "_"), FIELDS)
def test_float64_stays_and_everything_else_becomes_float32(fields: dict[str, Any], _: Any) -> None:
    logits = torch.randn(VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(SamplingParams(0.7, **fields), len(PROMPT), [EOS], "cpu")
    text = [*PROMPT, 20, 7]
    exact = sampler.scores(logits, text)
    assert exact.dtype == torch.float64
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert sampler.scores(logits.to(dtype), text).dtype == torch.float32
    single = sampler.scores(logits.float(), text).double()
    torch.testing.assert_close(single, exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(single == -torch.inf, exact == -torch.inf)


def test_nothing_is_computed_in_float32_in_between() -> None:
    """Two logits that float32 cannot tell apart stay apart through every processor."""
    logits = torch.zeros(VOCAB, dtype=torch.float64)
    logits[60], logits[61] = 1.0, 1.0 + 1e-12
    for fields, _ in FIELDS:
        sampler = Sampler(SamplingParams(0.5, **fields), len(PROMPT), [EOS], "cpu")
        scores = sampler.scores(logits, [*PROMPT, 60, 61])
        if scores[61] > -torch.inf and scores[60] > -torch.inf:
            assert scores[61] > scores[60], fields


def test_the_given_logits_are_not_changed() -> None:
    def careless(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 4] = -torch.inf
        return scores

    logits = torch.randn(VOCAB)
    before = logits.clone()
    params = SamplingParams(0.5, top_k=4, processors=(careless,))
    found = Sampler(params, len(PROMPT), [EOS], "cpu").scores(logits, PROMPT)
    assert torch.equal(logits, before) and found[4] == -torch.inf


class Unread(list[int]):
    """A text that must not be looked at."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("the text was read")

    def __getitem__(self, where: object) -> NoReturn:
        raise AssertionError("the text was read")


@pytest.mark.parametrize("warpers", WARPERS)
def test_without_processors_a_sampler_is_probabilities(warpers: dict[str, Any]) -> None:
    logits = torch.randn(VOCAB)
    params = SamplingParams(**warpers)
    sampler = Sampler(params, len(PROMPT), [EOS], "cpu")
    law = sampler.law(sampler.scores(logits, Unread(PROMPT)))
    assert torch.equal(law, probabilities(logits, params))


def test_a_processor_reads_the_text() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), len(PROMPT), [EOS], "cpu")
    with pytest.raises(AssertionError, match="was read"):
        sampler.scores(torch.randn(VOCAB), Unread(PROMPT))


def test_the_law_is_one_hot_at_the_lowest_index_or_a_softmax() -> None:
    scores = torch.tensor([1.0, 3.0, 3.0, -torch.inf])
    greedy = Sampler(SamplingParams(), 1, [], "cpu")
    assert greedy.law(scores).tolist() == [0, 1, 0, 0]
    sampled = Sampler(SamplingParams(0.3), 1, [], "cpu")
    assert torch.equal(sampled.law(scores), scores.softmax(-1))


def test_processors_that_leave_nothing_are_named_as_a_cause() -> None:
    params = SamplingParams(suppress_tokens=tuple(range(VOCAB)))
    sampler = Sampler(params, len(PROMPT), [EOS], "cpu")
    with pytest.raises(ValueError, match="processors leave any token"):
        sampler.law(sampler.scores(torch.randn(VOCAB), PROMPT))


# transformers' own processors, given by the user


def encoder_ids() -> Tensor:
    return torch.tensor([PROMPT])


def avoid_nine(row: int, text: Tensor) -> list[int]:
    return [token for token in range(VOCAB) if token != 9 and token != int(text[-1])]


STATELESS: dict[str, Callable[[], LogitsProcessor]] = {
    "min length": lambda: hf.MinLengthLogitsProcessor(12, EOS),
    "repetition": lambda: hf.RepetitionPenaltyLogitsProcessor(1.4, prompt_ignore_length=3),
    "encoder repetition": lambda: hf.EncoderRepetitionPenaltyLogitsProcessor(1.4, encoder_ids()),
    "encoder n-gram": lambda: hf.EncoderNoRepeatNGramLogitsProcessor(1, encoder_ids()),
    "n-gram": lambda: hf.NoRepeatNGramLogitsProcessor(1),
    "bias": lambda: hf.SequenceBiasLogitsProcessor([[[7, 9], 2.5], [[30], -1.0]]),
    "bad words": lambda: hf.NoBadWordsLogitsProcessor([[7, 9], [30]]),
    "prefix": lambda: hf.PrefixConstrainedLogitsProcessor(avoid_nine, 1),
    "first": lambda: hf.ForcedBOSTokenLogitsProcessor(4),
    "last": lambda: hf.ForcedEOSTokenLogitsProcessor(len(PROMPT) + 6, EOS),
    "finite": lambda: hf.InfNanRemoveLogitsProcessor(),
    "decay": lambda: hf.ExponentialDecayLengthPenalty((2, 1.5), EOS, len(PROMPT)),
    "normalise": lambda: hf.LogitNormalization(),
    "suppress": lambda: hf.SuppressTokensLogitsProcessor([3, 9]),
    "suppress first": lambda: hf.SuppressTokensAtBeginLogitsProcessor([3, 9], len(PROMPT)),
    "temperature": lambda: hf.TemperatureLogitsWarper(0.5),
    "top-k": lambda: hf.TopKLogitsWarper(5),
    "top-p": lambda: hf.TopPLogitsWarper(0.6),
    "top-h": lambda: TopHLogitsWarper(0.5),
    "min-p": lambda: hf.MinPLogitsWarper(0.1),
    "typical": lambda: hf.TypicalLogitsWarper(0.5),
    "epsilon": lambda: hf.EpsilonLogitsWarper(0.02),
    "eta": lambda: hf.EtaLogitsWarper(0.02),
    "codebooks": lambda: AlternatingCodebooksLogitsProcessor(len(PROMPT), 30, 30),
    "Bark": lambda: BarkEosPrioritizerLogitsProcessor(EOS, 0.5),
}
"""Functions of text and scores."""

KEY_ARGUMENTS = {"ngram_len": 3, "keys": [654, 400, 836, 123], "device": torch.device("cpu")}
STATEFUL: dict[str, Callable[[TargetModel], LogitsProcessor]] = {
    "synth id": lambda _: hf.SynthIDTextWatermarkLogitsProcessor(
        sampling_table_size=2**16, sampling_table_seed=0, context_history_size=64, **KEY_ARGUMENTS
    ),
    "guidance": lambda target: hf.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, target.model),
    "guidance without cache": lambda target: hf.UnbatchedClassifierFreeGuidanceLogitsProcessor(
        1.5, target.model, torch.tensor([[4, 5]]), use_cache=False
    ),
}
"""They keep state, and are reproduced by calls in order."""

WATERMARKS: dict[str, Callable[[], LogitsProcessor]] = {
    "lefthash": lambda: hf.WatermarkLogitsProcessor(VOCAB, "cpu"),
    "selfhash": lambda: hf.WatermarkLogitsProcessor(
        VOCAB, "cpu", seeding_scheme="selfhash", context_width=2
    ),
}
"""Functions of text and scores with a generator inside."""


@pytest.mark.parametrize("temperature", [None, 0.8])
@pytest.mark.parametrize("name", [*STATELESS, *STATEFUL, *WATERMARKS])
def test_processors_of_transformers_score_as_in_generate(
    name: str, temperature: float | None
) -> None:
    """Called in order, once per token, on one sequence."""
    target = tiny_target(torch.float32)

    def build() -> LogitsProcessor:
        if name in STATEFUL:
            return STATEFUL[name](target)
        return (STATELESS | WATERMARKS)[name]()

    options = {} if temperature is None else {"do_sample": True, "temperature": temperature, **OFF}
    new, logits, scores = theirs(target, options, [build()])
    assert not torch.equal(scores, logits) or name in ("first", "finite", "Bark")
    params = SamplingParams(temperature or 0.0, processors=(build(),))
    assert torch.equal(ours(params, new, logits), scores)


@pytest.mark.parametrize("name", [*STATELESS, *WATERMARKS])
def test_processors_of_transformers_keep_float64(name: str) -> None:
    logits = torch.randn(VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(processors=((STATELESS | WATERMARKS)[name](),))
    exact = Sampler(params, len(PROMPT), [EOS], "cpu").scores(logits, PROMPT)
    single = Sampler(params, len(PROMPT), [EOS], "cpu").scores(logits.float(), PROMPT)
    assert exact.dtype == torch.float64
    finite = exact > torch.finfo(torch.float32).min
    torch.testing.assert_close(single.double()[finite], exact[finite], rtol=1e-5, atol=1e-6)


def test_user_processors_come_behind_the_fields_and_before_the_warpers() -> None:
    target = tiny_target(torch.float32)
    options = {"do_sample": True, **OFF, "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.5}
    extra = hf.SequenceBiasLogitsProcessor([[[9], 3.0]])
    new, logits, scores = theirs(target, options, [extra])
    params = SamplingParams(0.7, 5, repetition_penalty=1.5, processors=(extra,))
    assert torch.equal(ours(params, new, logits), scores)


def test_a_field_and_a_processor_for_the_same_are_refused() -> None:
    params = SamplingParams(
        repetition_penalty=1.5, processors=(hf.RepetitionPenaltyLogitsProcessor(1.2),)
    )
    with pytest.raises(ValueError, match="RepetitionPenaltyLogitsProcessor is also what a field"):
        Sampler(params, 3, [EOS], "cpu")


def test_bad_words_that_are_all_let_through_are_refused() -> None:
    with pytest.raises(ValueError, match="bad_words_ids holds end-of-sequence tokens only"):
        Sampler(SamplingParams(bad_words_ids=((EOS,),)), 3, [EOS], "cpu")


def test_without_an_end_nothing_waits_for_it() -> None:
    logits = torch.randn(VOCAB)
    sampler = Sampler(SamplingParams(min_new_tokens=4), len(PROMPT), [], "cpu")
    assert torch.equal(sampler.scores(logits, PROMPT), logits)


# Copies


@pytest.mark.parametrize("name", [*STATELESS, *WATERMARKS, "synth id"])
def test_copies_of_processors_of_transformers_answer_alike(name: str) -> None:
    """Used or not; so they serve several rows, and may be asked ahead."""
    build = (STATELESS | WATERMARKS).get(name) or (lambda: STATEFUL[name](tiny_target()))
    params = SamplingParams(processors=(build(),))
    sampler = Sampler(params, len(PROMPT), [EOS], "cpu")
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    texts = [PROMPT, [*PROMPT, 30], [*PROMPT, 30, 9]]
    for row, text in zip(logits, texts, strict=True):
        ahead = sampler.ahead()
        expected = ahead.scores(row, text)
        assert torch.equal(sampler.scores(row, text), expected)
    for rule in ("match", "coupled", "rejection", "block", "lossy_typical"):
        check_processors([params, params], rule, VOCAB)


def test_what_looks_ahead_leaves_the_sampler_as_it_is() -> None:
    matcher = GrammarMatcher()
    params = SamplingParams(processors=(matcher,), repetition_penalty=1.2)
    sampler = Sampler(params, 1, [EOS], "cpu")
    assert sampler.may_keep_state and not Sampler(SamplingParams(), 1, [], "cpu").may_keep_state
    sampler.scores(torch.zeros(VOCAB), [MARKER])
    ahead = sampler.ahead()
    token = int(ahead.scores(torch.zeros(VOCAB), [MARKER, token_of("a")]).argmax())
    assert token == token_of("=") and matcher.calls == 1
    assert ahead.params is params and ahead._own == sampler._own


# Refusals


@pytest.mark.parametrize(
    "processor",
    [
        hf.ClassifierFreeGuidanceLogitsProcessor(1.5),
        DiaClassifierFreeGuidanceLogitsProcessor(1.5),
        DiaEOSChannelFilterLogitsProcessor(2, 4),
        DiaEOSDelayPatternLogitsProcessor([0, 1], 4, 50),
        WhisperNoSpeechDetection(4, 5),
        type("HammingDiversityLogitsProcessor", (LogitsProcessor,), {})(),
    ],
)
def test_processors_that_need_other_rows_are_refused_by_name(processor: Any) -> None:
    name = type(processor).__name__
    assert name in REFUSED
    inherited = type("Mine", (type(processor),), {})
    derived = object.__new__(inherited)
    for given, called in ((processor, name), (derived, "Mine")):
        params = SamplingParams(processors=(given,))
        for attempt in (
            lambda params=params: Sampler(params, 3, [EOS], "cpu"),
            lambda params=params: check_processors([params], "match", VOCAB),
        ):
            with pytest.raises(ValueError, match=f"processors: {called} cannot be used"):
                attempt()


def test_every_processor_of_transformers_has_a_verdict() -> None:
    """A new one in a later release shows up here."""
    built = [build() for build in (STATELESS | WATERMARKS).values()]
    target = tiny_target(torch.float32)
    built += [build(target) for build in STATEFUL.values()]
    judged = {type(processor).__name__ for processor in built} | set(REFUSED)
    judged |= {"LogitsProcessor", "MinNewTokensLengthLogitsProcessor"}  # the base, and a field
    judged |= {"WhisperTimeStampLogitsProcessor"}  # a function of text and scores, for Whisper
    known = {
        name
        for name, kind in vars(hf.logits_process).items()
        if isinstance(kind, type) and issubclass(kind, LogitsProcessor)
    }
    assert known <= judged


def test_processors_that_want_more_arguments_are_refused() -> None:
    def groups(input_ids: Tensor, scores: Tensor, beam: int) -> Tensor:
        return scores

    with pytest.raises(ValueError, match=r"groups must be callable with \(input_ids, scores\)"):
        Sampler(SamplingParams(processors=(groups,)), 3, [EOS], "cpu")


@pytest.mark.parametrize("result", [None, torch.zeros(VOCAB), torch.zeros(1, 3)])
def test_processors_that_return_something_else_are_named(result: Any) -> None:
    def wrong(input_ids: Tensor, scores: Tensor) -> Any:
        return result

    sampler = Sampler(SamplingParams(processors=(wrong,)), 3, [EOS], "cpu")
    with pytest.raises(ValueError, match=r"wrong must return scores of shape \(1, 96\)"):
        sampler.scores(torch.randn(VOCAB), PROMPT)


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words_ids": ((3, VOCAB),)},
        {"logit_bias": ((VOCAB, 1.0),)},
        {"suppress_tokens": (VOCAB,)},
        {"begin_suppress_tokens": (VOCAB,)},
        {"forced_tokens": ((0, VOCAB),)},
    ],
)
def test_tokens_that_the_target_lacks_are_refused(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(ValueError, match=f"{name}: the target has 96 tokens, but not 96"):
        check_processors([SamplingParams(**fields)], "match", VOCAB)


# Constrained decoding


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_holds_with_and_without_state(temperature: float) -> None:
    target = tiny_target(torch.float32)
    texts = []
    for processor in (GrammarProcessor(), GrammarMatcher()):
        params = SamplingParams(temperature, seed=4, processors=(processor,))
        sampler = Sampler(params, len(PROMPT) + 1, [EOS], "cpu")
        text = [*PROMPT, MARKER]
        while text[-1] != EOS:
            logits = target.forward(torch.tensor([text]), logits_to_keep=1).logits[0, -1]
            text.append(sample(sampler.law(sampler.scores(logits, text)), 4, len(text)))
        texts.append(text[len(PROMPT) + 1 :])
    assert texts[0] == texts[1] and complete(texts[0]) and len(texts[0]) >= 13
    assert not valid_prefix(decoded(target, SamplingParams(temperature), 1))


def test_the_matcher_notices_calls_out_of_order() -> None:
    matcher, scores = GrammarMatcher(), torch.zeros(1, VOCAB)
    matcher(torch.tensor([[5, 6]]), scores)
    for wrong in ([[5, 6]], [[5, 6, 4]], [[5, 6, 4, 4]]):
        with pytest.raises(ValueError, match=r"called at length|not allowed"):
            matcher(torch.tensor(wrong), scores)
    assert math.isinf(float(matcher.__class__()(torch.tensor([[1]]), scores).min()))
