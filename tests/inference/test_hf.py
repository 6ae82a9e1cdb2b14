"""`model.generate` with and without the two arguments gives the same tokens."""

import copy
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
)
from transformers.generation import (
    BaseStreamer,
    EosTokenCriteria,
    LogitNormalization,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import inference.hf.rows
import inference.hf.setup
import inference.texts
from drafters import Drafter, TargetModel, build_drafter
from inference.generate import plain_generate
from inference.hf import SpeculativeOutput, speculative
from inference.hf.rows import of_row, split_rows, split_warpers
from inference.proposers import TreeOptions, build_proposer
from inference.sampling import SamplingParams
from inference.stopping import Stop
from tests.oracle import NoisyOracle
from tests.tiny import tiny_target, tiny_tokenizer

NEW = 24
PAD = 1
PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [20] * 8]
WIDTH = max(map(len, PROMPTS))
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="module")
def head(target: TargetModel) -> Drafter:
    head = build_drafter("eagle3", target, seed=1).double()
    head.set_draft_vocab(torch.arange(target.vocab_size))
    return head.eval()


def padded(prompts: list[list[int]], pad: int = PAD) -> dict[str, Tensor]:
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
    }


BATCHES = {
    "one": {"input_ids": torch.tensor(PROMPTS[:1])},
    "even": {"input_ids": torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])},
    "padded": padded(PROMPTS),
    "padded one": padded([[0] * WIDTH, PROMPTS[1]]),
    "mask inferred": {"input_ids": padded(PROMPTS)["input_ids"], "pad_token_id": PAD},
}
BATCHES["padded one"] = {name: rows[1:] for name, rows in BATCHES["padded one"].items()}


class Recorder(BaseStreamer):
    """Everything a streamer is given."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.pieces.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def oracle(batch: dict[str, Any], plain: Tensor) -> NoisyOracle:
    """Drafts from what `generate` gave; behind the end come tokens that must not be emitted."""
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", ids != PAD)
    texts = [
        [*row[real.bool()].tolist(), *out[len(row) :].tolist(), *range(8)]
        for row, real, out in zip(ids, mask, plain, strict=True)
    ]
    return NoisyOracle(texts)


def live_steps(plain: Tensor, width: int, options: dict[str, Any]) -> list[int]:
    """New tokens of each row up to its end."""
    eos = options.get("eos_token_id", 2)
    stops = StoppingCriteriaList(options.get("stopping_criteria", ()))
    stops.append(EosTokenCriteria(eos))
    if strings := options.get("stop_strings"):
        stops.append(StopStringCriteria(TOKENIZER, strings))
    places = range(width + 1, plain.shape[1] + 1)
    return [
        next((place - width for place in places if stops(row[None, :place], None)), len(places))
        for row in plain
    ]


def assert_same(
    model: PreTrainedModel, batch: dict[str, Any], drafter: Any, make: Callable[[], dict[str, Any]]
) -> SpeculativeOutput:
    """Tokens, shape, scores and streamed pieces equal those of plain `generate`.

    Args:
        make: gives the options, with objects of their own, as some keep state.
    """
    outputs = dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), True)
    common = {**outputs, **batch}
    before = model.generation_config.to_dict()
    seen, expected_pieces = Recorder(), Recorder()
    expected = model.generate(**{**common, **make()}, streamer=expected_pieces)
    if drafter is None:
        drafter = oracle(batch, expected.sequences)
    switch = {"custom_generate": speculative, "drafter": drafter}
    found = model.generate(**{**common, **make()}, **switch, streamer=seen)
    assert found.sequences.dtype == expected.sequences.dtype
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert seen.pieces == expected_pieces.pieces
    assert seen.ended == expected_pieces.ended == 1
    assert len(found.scores) == len(expected.scores) == len(found.logits)
    width = batch["input_ids"].shape[1]
    counts = live_steps(expected.sequences, width, make())
    for row, count in enumerate(counts):
        for step in range(count):
            ours, theirs = found.scores[step][row], expected.scores[step][row]
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-5)
            ours, theirs = found.logits[step][row], expected.logits[step][row]
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        for step in range(count, len(found.scores)):
            token = int(found.sequences[row, width + step])
            assert float(found.scores[step][row].softmax(-1)[token]) == 1.0
    assert model.generation_config.to_dict() == before
    without = model.generate(**{**batch, **make()}, **switch)
    assert isinstance(without, Tensor)
    assert without.tolist() == expected.sequences.tolist()
    return found


# Greedy -----------------------------------------------------------------------------------------


class PositionBias(LogitsProcessor):
    """Looks at the length with padding, as processors of users do."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        bias = torch.zeros_like(scores)
        for row, ids in enumerate(input_ids):
            bias[row, (7 * (len(ids) - WIDTH) + int(ids[-1])) % 96] = 9.0
        return scores + bias


class Grammar(LogitsProcessor):
    """A list of digits, "[3,1,4]", followed token by token; keeps where it is."""

    OPEN, CLOSE, COMMA, END = 60, 61, 62, 2
    DIGITS = tuple(range(30, 40))

    def __init__(self) -> None:
        self.seen = 0
        self.state = "start"
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[1] == self.seen + 1 or not self.seen, "once per token, in order"
        if self.seen:
            token = int(input_ids[0, -1])
            moves = {self.OPEN: "digit", self.COMMA: "digit", self.CLOSE: "end"}
            self.state = moves.get(token, "next")
        self.seen = input_ids.shape[1]
        self.calls += 1
        allowed = {
            "start": (self.OPEN,),
            "digit": self.DIGITS,
            "next": (self.COMMA,) if self.calls < 12 else (self.CLOSE,),
            "end": (self.END,),
        }[self.state]
        mask = torch.full_like(scores, -torch.inf)
        mask[:, list(allowed)] = 0.0
        return scores + mask


class Trigger(LogitsProcessor):
    """Rules half of the tokens out, from the first time on that one of some comes last."""

    def __init__(self) -> None:
        self.on = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.on |= int(input_ids[0, -1]) % 12 == 3
        if self.on:
            scores = scores.clone()
            scores[:, ::2] = -torch.inf
        return scores


class SumCriterion(StoppingCriteria):
    """Ends a row by its text and its length with padding, at different places."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, -1] + input_ids[:, -2] + input_ids.shape[1]) % 9 == 3


def remembering() -> Callable[[Tensor, Tensor], Tensor]:
    """A function with state that no copy has apart."""
    seen = []

    def remember(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(int(input_ids[0, -1]))
        return scores.roll(len(seen) % 3, -1)

    return remember


def allowed_tokens(batch_id: int, text: Tensor) -> list[int]:
    return [token for token in range(3, 96) if (token + batch_id + len(text)) % 3]


def processors(*found: LogitsProcessor) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList(found)}


def criteria(*found: StoppingCriteria) -> dict[str, Any]:
    return {"stopping_criteria": StoppingCriteriaList(found)}


GREEDY: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {},
    "config": lambda: {
        "generation_config": GenerationConfig(max_new_tokens=9, eos_token_id=2, pad_token_id=PAD),
    },
    "max_length": lambda: {"max_new_tokens": None, "max_length": 19},
    "max_time": lambda: {"max_time": 1000.0},
    "repetition_penalty": lambda: {"repetition_penalty": 1.7},
    "encoder_repetition_penalty": lambda: {"encoder_repetition_penalty": 1.7},
    "no_repeat_ngram": lambda: {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram": lambda: {"encoder_no_repeat_ngram_size": 1},
    "bad_words": lambda: {"bad_words_ids": [[68], [75, 75], [11, 52], [40]]},
    "sequence_bias": lambda: {"sequence_bias": {(43,): -9.0, (75, 11): 6.0}},
    "suppress": lambda: {"suppress_tokens": [3, 75], "begin_suppress_tokens": [68, 43]},
    "forced_eos": lambda: {"forced_eos_token_id": 2},
    "decay": lambda: {"exponential_decay_length_penalty": (4, 1.5)},
    "renormalize": lambda: {"renormalize_logits": True, "repetition_penalty": 1.3},
    "eos list": lambda: {"eos_token_id": [75, 54, 3], "pad_token_id": PAD},
    "no eos": lambda: {"eos_token_id": [-1], "pad_token_id": PAD},
    "min_new_tokens": lambda: {
        "min_new_tokens": 9,
        "eos_token_id": [75, 54, 3, 43],
        "pad_token_id": PAD,
    },
    "min_length": lambda: {"min_length": 14, "eos_token_id": [75, 54, 3, 43]},
    "prefix_allowed_tokens_fn": lambda: {"prefix_allowed_tokens_fn": allowed_tokens},
    "own criterion": lambda: criteria(SumCriterion()),
    "stop_strings": lambda: {"stop_strings": ["gDg", "Y8<ex", "SAN"], "tokenizer": TOKENIZER},
    "own processor": lambda: processors(PositionBias()),
    "own warper, greedy": lambda: processors(TemperatureLogitsWarper(0.5), TopKLogitsWarper(4)),
    "watermark": lambda: {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "function": lambda: processors(lambda ids, scores: scores.roll(ids.shape[1] % 3, -1)),  # type: ignore[arg-type]
    "many": lambda: {
        **processors(PositionBias()),
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 5,
        "eos_token_id": [75, 54, 3, 20],
        "pad_token_id": PAD,
    },
}

ONE_ROW: dict[str, Callable[[], dict[str, Any]]] = {
    "grammar": lambda: processors(Grammar()),
    "trigger": lambda: processors(Trigger()),
    "closure": lambda: processors(remembering()),  # type: ignore[arg-type]
    "guidance": lambda: {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[9, 9, 5]])},
    "own length": lambda: criteria(MaxLengthCriteria(11)),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("options", GREEDY)
def test_greedy_tokens_scores_and_pieces_are_those_of_generate(
    target: TargetModel, options: str, batch: str
) -> None:
    found = assert_same(target.model, BATCHES[batch], None, with_length(GREEDY[options]))
    assert found.stats is not None and found.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("options", GREEDY)
def test_greedy_with_a_head(target: TargetModel, head: Drafter, options: str) -> None:
    assert_same(target.model, BATCHES["padded"], head, with_length(GREEDY[options]))


@pytest.mark.parametrize("batch", ["one", "padded one"])
@pytest.mark.parametrize("options", ONE_ROW)
def test_greedy_with_what_works_on_one_row(target: TargetModel, options: str, batch: str) -> None:
    found = assert_same(target.model, BATCHES[batch], None, with_length(ONE_ROW[options]))
    assert found.stats is not None and found.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("batch", ["even", "padded", "mask inferred"])
@pytest.mark.parametrize("rule", ["match", "block"])
@pytest.mark.parametrize("kind", [Grammar, Trigger])
def test_rows_keep_their_own_state(
    target: TargetModel, head: Drafter, kind: type, rule: str, batch: str
) -> None:
    """As if `generate` were called for each row, with an object of its own."""
    options = {"max_new_tokens": NEW, "pad_token_id": PAD, "eos_token_id": Grammar.END}
    rows = [
        target.model.generate(**one_row(batch, row), **options, **processors(kind()))[0]
        for row in range(len(BATCHES[batch]["input_ids"]))
    ]
    length = max(map(len, rows))
    expected = [row.tolist() + [PAD] * (length - len(row)) for row in rows]
    shared = kind()
    before = dict(vars(shared))
    drafts = {"tree": TreeOptions(5, 4, 1), "rule": rule}
    out = generate(target, BATCHES[batch], head, **options, **drafts, **processors(shared))
    assert out.tolist() == expected
    assert vars(shared) == before


@pytest.mark.parametrize("batch", ["even", "padded"])
@pytest.mark.parametrize("kind", [Grammar, Trigger])
def test_rows_that_share_state_are_noticed(
    target: TargetModel,
    head: Drafter,
    kind: type,
    batch: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the test above, were nothing copied."""
    monkeypatch.setattr(inference.hf.rows, "copied", lambda found, *_: tuple(found))
    monkeypatch.setattr(inference.texts, "apart", list)
    with pytest.raises(AssertionError):
        test_rows_keep_their_own_state(target, head, kind, "match", batch)


def one_row(batch: str, row: int) -> dict[str, Any]:
    """With its padding."""
    return {
        name: value[row : row + 1]
        for name, value in BATCHES[batch].items()
        if name in ("input_ids", "attention_mask")
    }


def test_a_kind_that_holds_something_for_each_row_keeps_its_own_state_too() -> None:
    """What is cut to its row is copied beside that."""

    class Mine(PrefixConstrainedLogitsProcessor):
        def __init__(self) -> None:
            super().__init__(lambda batch_id, text: [batch_id + len(self.seen)], 1)
            self.seen: list[int] = []

    rows = split_rows(padded(PROMPTS)["input_ids"], padded(PROMPTS)["attention_mask"], None, 1)
    given = Mine()
    own = [of_row([given], row, len(rows))[0] for row in rows]
    assert len({id(one.seen) for one in [given, *own]}) == 4
    assert of_row([given], rows[0], 1)[0].seen is given.seen
    scores = torch.zeros(1, 96)
    for index, one in enumerate(own):
        assert int(one(torch.tensor([[5]]), scores)[0].argmax()) == index


def with_length(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    def full() -> dict[str, Any]:
        options = make()
        return options if "generation_config" in options else {"max_new_tokens": NEW} | options

    return full


def test_stop_strings_need_the_tokenizer(target: TargetModel, head: Drafter) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        generate(target, BATCHES["one"], head, stop_strings=["a"])


def test_rows_that_stop_are_padded_where_there_is_no_eos(
    target: TargetModel, head: Drafter
) -> None:
    """Here plain `generate` lets them run on; up to their ends they are equal."""
    model = copy.deepcopy(target.model)
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": NEW, "pad_token_id": PAD, "output_scores": True}
    plain = model.generate(**BATCHES["padded"], **criteria(SumCriterion()), **options)
    found = model.generate(
        **BATCHES["padded"],
        **criteria(SumCriterion()),
        **options,
        return_dict_in_generate=True,
        custom_generate=speculative,
        drafter=build_proposer(head),
    )
    assert found.reasons == ["stop"] * 3
    assert found.sequences.shape == plain.shape
    counts = live_steps(plain, WIDTH, {"eos_token_id": 95, **criteria(SumCriterion())})
    assert len(set(counts)) > 1
    for row, count in enumerate(counts):
        assert (
            found.sequences[row, : WIDTH + count].tolist() == plain[row][: WIDTH + count].tolist()
        )
        assert found.sequences[row, WIDTH + count :].unique().tolist() in ([], [PAD])
    with pytest.raises(ValueError, match="pad_token_id= is needed"):
        model.generate(
            **BATCHES["padded"],
            **criteria(SumCriterion()),
            max_new_tokens=NEW,
            custom_generate=speculative,
            drafter=head,
        )


# Sampled ----------------------------------------------------------------------------------------

SAMPLED: dict[str, tuple[dict[str, Any], SamplingParams]] = {
    "bare": ({"top_k": 0}, SamplingParams(1.0)),
    "default": ({}, SamplingParams(1.0, 50)),
    "warpers": (
        {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95},
        SamplingParams(0.7, 12, 0.9, min_p=0.02, typical_p=0.95),
    ),
    "penalties": (
        {"temperature": 1.4, "top_k": 0, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        SamplingParams(1.4, repetition_penalty=1.5, no_repeat_ngram_size=2),
    ),
    "renormalized": (
        {"temperature": 0.9, "top_k": 30, "renormalize_logits": True},
        SamplingParams(0.9, 30),
    ),
}


@pytest.mark.parametrize("rule", ["match", "coupled"])
@pytest.mark.parametrize("options", SAMPLED)
def test_sampled_tokens_are_those_of_plain_decoding(
    target: TargetModel, head: Drafter, options: str, rule: str
) -> None:
    """Row b of the batch with seed + b, whatever stands beside it."""
    given, params = SAMPLED[options]
    out = generate(
        target, BATCHES["padded"], head, do_sample=True, seed=5, rule=rule, **given, eos_token_id=-1
    )
    for row, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(**{**vars(params), "seed": 5 + row})
        plain = plain_generate(
            target, [prompt], max_new_tokens=NEW, sampling=sampling, stop=Stop(())
        )
        assert out[row, WIDTH:].tolist() == plain.sequences[0]


def test_samples_come_from_the_global_generator(target: TargetModel, head: Drafter) -> None:
    def draw() -> list[list[int]]:
        return generate(
            target, BATCHES["one"], head, do_sample=True, num_return_sequences=4
        ).tolist()

    torch.manual_seed(3)
    first, second = draw(), draw()
    torch.manual_seed(3)
    assert draw() == first
    assert len({tuple(row) for row in first + second}) == 8
    state = torch.get_rng_state()
    generate(target, BATCHES["one"], head)
    generate(target, BATCHES["one"], head, do_sample=True, seed=1)
    assert torch.equal(torch.get_rng_state(), state), "drawn from without need"


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_rules_are_offered(target: TargetModel, head: Drafter, rule: str) -> None:
    tree = TreeOptions(5, 4, 1)
    out = [
        generate(target, BATCHES["padded"], head, do_sample=True, seed=1, rule=rule, tree=tree)
        for _ in range(2)
    ]
    assert torch.equal(*out)


def test_the_prefix_function_is_told_the_prompt(target: TargetModel, head: Drafter) -> None:
    seen = set()

    def allowed(batch_id: int, text: Tensor) -> list[int]:
        seen.add(batch_id)
        assert text[: WIDTH - 1].tolist() == BATCHES["padded"]["input_ids"][batch_id, :-1].tolist()
        return [10 * batch_id + 10, 10 * batch_id + 11]

    out = generate(
        target,
        BATCHES["padded"],
        head,
        do_sample=True,
        num_return_sequences=2,
        prefix_allowed_tokens_fn=allowed,
    )
    assert seen == {0, 1, 2}
    assert (out[:, WIDTH:] // 10 - 1).tolist() == [[row // 2] * NEW for row in range(6)]


def test_warpers_become_fields_only_in_the_order_of_generate() -> None:
    temperature, top_k, top_p = TemperatureLogitsWarper(0.5), TopKLogitsWarper(4), TopPLogitsWarper
    own = PositionBias()
    assert split_warpers([own, temperature, top_k, top_p(0.9)]) == (
        [own],
        {"temperature": 0.5, "top_k": 4, "top_p": 0.9},
    )
    assert split_warpers([top_k, temperature, top_p(0.9)]) == (
        [top_k],
        {"temperature": 0.5, "top_p": 0.9},
    )
    last = LogitNormalization()
    assert split_warpers([temperature, last]) == ([temperature, last], {})
    odd = [top_p(0.9, min_tokens_to_keep=2), top_p(0.0), TopKLogitsWarper(3, filter_value=-9.0)]
    for warper in odd:
        assert split_warpers([temperature, warper]) == ([temperature, warper], {})


# Streaming --------------------------------------------------------------------------------------


def test_text_streamers(
    target: TargetModel, head: Drafter, capsys: pytest.CaptureFixture[str]
) -> None:
    target.model.generate(
        **BATCHES["one"], max_new_tokens=NEW, streamer=TextStreamer(TOKENIZER, skip_prompt=True)
    )
    plain = capsys.readouterr().out
    generate(target, BATCHES["one"], head, streamer=TextStreamer(TOKENIZER, skip_prompt=True))
    assert capsys.readouterr().out == plain != ""


def test_a_consumer_in_another_thread_sees_the_end(target: TargetModel, head: Drafter) -> None:
    streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=60.0)
    worker = threading.Thread(
        target=generate, args=(target, BATCHES["one"], head), kwargs={"streamer": streamer}
    )
    worker.start()
    text = "".join(streamer)
    worker.join()
    assert text == TOKENIZER.decode(generate(target, BATCHES["one"], head)[0, 5:])


def test_tokens_are_streamed_while_decoding(target: TargetModel, head: Drafter) -> None:
    """The stopping criteria of a later token already find the earlier ones streamed."""
    lag = []

    class Watch(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            lag.append(input_ids.shape[1] - 5 - sum(map(len, seen.pieces[1:])))
            return torch.tensor([False])

    seen = Recorder()
    drafts = oracle(BATCHES["one"], generate(target, BATCHES["one"], head))
    generate(target, BATCHES["one"], drafts, streamer=seen, **criteria(Watch()))
    assert len(lag) == NEW
    assert 1 < max(lag) <= drafts.depth + 1


# Drafters ---------------------------------------------------------------------------------------


def generate(target: TargetModel, batch: dict[str, Any], drafter: Any, **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "pad_token_id": PAD, **options}
    return target.model.generate(
        **{**batch, **options}, custom_generate=speculative, drafter=drafter
    )


def test_a_head_may_be_attached_or_not_or_a_folder(
    target: TargetModel, head: Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = target.model.generate(**BATCHES["one"], max_new_tokens=NEW).tolist()
    head.save_pretrained(tmp_path / "head")
    free = type(head)(head.config)
    free.load_state_dict(head.state_dict())
    free.double().eval()
    reads = []

    def read_head(*args: Any) -> Drafter:
        reads.append(args[0])
        return read(*args)

    read = inference.hf.setup.read_head
    monkeypatch.setattr(inference.hf.setup, "read_head", read_head)
    folder = tmp_path / "head"
    for drafter in (head, free, build_proposer(head), folder, str(folder)):
        assert generate(target, BATCHES["one"], drafter).tolist() == plain
    assert free.target.model is target.model
    assert reads == [folder], "a folder is read once"
    head.save_pretrained(folder)
    assert generate(target, BATCHES["one"], folder).tolist() == plain
    assert reads == [folder, folder], "and again when it has changed"


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_target().model.requires_grad_(True)
    model.lm_head.weight.requires_grad_(False)
    before = [parameter.requires_grad for parameter in model.parameters()]
    names = set(model.state_dict())
    drafter = build_drafter("medusa", TargetModel(copy.deepcopy(model)), num_heads=2)
    drafter = type(drafter)(drafter.config).double()
    out = model.generate(
        **BATCHES["one"], max_new_tokens=NEW, custom_generate=speculative, drafter=drafter
    )
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert set(model.state_dict()) == names
    twin = copy.deepcopy(model)
    with pytest.raises(ValueError, match="attached to another model"):
        twin.generate(
            **BATCHES["one"], max_new_tokens=NEW, custom_generate=speculative, drafter=drafter
        )
    twin.lm_head.weight.mul_(torch.linspace(0.2, 2.0, 96)[:, None])
    options = {**BATCHES["one"], "max_new_tokens": NEW}
    own = twin.generate(**options, custom_generate=speculative, drafter=build_proposer(drafter))
    assert own.tolist() == twin.generate(**options).tolist() != out.tolist()


def test_what_is_kept_for_a_model_goes_with_it(tmp_path: Path) -> None:
    target = tiny_target()
    build_drafter("medusa", target, num_heads=2).double().save_pretrained(tmp_path / "head")
    generate(target, BATCHES["one"], tmp_path / "head")
    gone = weakref.ref(target.model)
    del target
    gc.collect()
    assert gone() is None


def test_a_partial_is_given_streamers_too(target: TargetModel, head: Drafter) -> None:
    seen = Recorder()
    out = target.model.generate(
        **BATCHES["one"],
        max_new_tokens=NEW,
        streamer=seen,
        custom_generate=functools.partial(speculative, drafter=head),
    )
    assert [token for piece in seen.pieces[1:] for token in piece] == out[0, 5:].tolist()
    assert seen.ended == 1


def test_other_functions_are_called_as_before(target: TargetModel) -> None:
    def other(model: Any, input_ids: Tensor, **kwargs: Any) -> Tensor:
        assert "tokenizer" not in kwargs and "drafter" not in kwargs
        return input_ids

    ids = BATCHES["one"]["input_ids"]
    out = target.model.generate(ids, custom_generate=other, tokenizer=TOKENIZER, max_new_tokens=1)
    assert out is ids


def test_the_output_holds_what_the_drafts_did(target: TargetModel, head: Drafter) -> None:
    options = {"return_dict_in_generate": True, "record_rounds": True}
    found = generate(target, BATCHES["padded"], head, **options)
    plain = target.model.generate(**BATCHES["padded"], max_new_tokens=NEW, pad_token_id=PAD)
    assert found["sequences"].tolist() == plain.tolist()
    assert found.reasons == ["length", "length", "eos"]
    emitted = [len(done.emitted) for done in found.rounds]
    assert sum(emitted) + 3 == sum(live_steps(plain, WIDTH, {}))  # one each in the prefill
    assert found.stats.num_drafts == len(emitted)
    assert {"prefill", "target", "draft", "total"} <= set(found.seconds)
    assert found.scores is found.logits is found.cache is None


# Refusals ---------------------------------------------------------------------------------------


class ForWholeBatches(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([False, False, True])


REFUSED: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "no drafter": ("drafter= must be", lambda: {"drafter": None}),
    "number": ("drafter= must be .* got 3", lambda: {"drafter": 3}),
    "no head": ("drafter='nothing/here'", lambda: {"drafter": "nothing/here"}),
    "other target": (
        "drafter=: wrong target",
        lambda: {"drafter": unattached(tiny_target(hidden=64))},
    ),
    "attached elsewhere": (
        "drafter= is attached to another model",
        lambda: {"drafter": build_drafter("medusa", tiny_target(), num_heads=2).double()},
    ),
    "tree": ("tree= must be TreeOptions", lambda: {"tree": 8}),
    "tree of a proposer": (
        "tree= has no effect beside drafter=NoisyOracle",
        lambda: {"tree": TreeOptions(), "drafter": NoisyOracle([])},
    ),
    "rule": ("rule must be one of", lambda: {"rule": "typical"}),
    "block tree": ("chains", lambda: {"rule": "block", "do_sample": True}),
    "seed": ("seed= must be an integer", lambda: {"seed": 0.5, "do_sample": True}),
    "greedy seed": ("seed= has no effect", lambda: {"seed": 1}),
    "rounds": ("record_rounds= has no effect", lambda: {"record_rounds": True}),
    "beams": ("ask for beam search", lambda: {"num_beams": 2}),
    "contrastive": ("ask for contrastive", lambda: {"penalty_alpha": 0.6, "top_k": 4}),
    "prompt lookup": ("ask for assisted", lambda: {"prompt_lookup_num_tokens": 4}),
    "assistant": (
        "assistant_model= and drafter=",
        lambda: {"assistant_model": tiny_target().model},
    ),
    "attentions": (
        "output_attentions=True is not offered",
        lambda: {"output_attentions": True, "return_dict_in_generate": True},
    ),
    "hidden states": (
        "output_hidden_states=True is not offered",
        lambda: {"output_hidden_states": True, "return_dict_in_generate": True},
    ),
    "past": ("cache= .* cannot be given", lambda: {"past_key_values": filled_cache()}),
    "empty past": ("cache= .* cannot be given", lambda: {"past_key_values": DynamicCache()}),
    "static cache": (
        "cache_implementation='static' has no effect",
        lambda: {"cache_implementation": "static"},
    ),
    "no cache": ("use_cache=False has no effect", lambda: {"use_cache": False}),
    "chunks": ("prefill_chunk_size=2 has no effect", lambda: {"prefill_chunk_size": 2}),
    "embeddings": (
        "inputs_embeds: not offered",
        lambda: {"input_ids": None, "inputs_embeds": torch.zeros(3, 8, 32, dtype=torch.float64)},
    ),
    "right padding": (
        "padding on the left",
        lambda: {"attention_mask": padded(PROMPTS)["attention_mask"].flip(1)},
    ),
    "hole": (
        "padding on the left",
        lambda: {"attention_mask": torch.tensor([[0, 1, 0, 1, 1, 1, 1, 1]] * 3)},
    ),
    "positions": (
        "position_ids= other than",
        lambda: {"position_ids": torch.arange(8).expand(3, -1) + 5},
    ),
    "too long": ("max_position_embeddings is 512", lambda: {"max_new_tokens": 600}),
    "sharded": ("synced_gpus= is not offered", lambda: {"synced_gpus": True}),
    "shared closure": (
        "remember cannot be copied .*logits_processor= .* all 3 rows",
        lambda: processors(remembering()),  # type: ignore[arg-type]
    ),
    "shared network": (
        "UnbatchedClassifierFreeGuidanceLogitsProcessor cannot be copied .* all 3 rows",
        lambda: {"guidance_scale": 1.5},
    ),
    "batch criterion": (
        "ForWholeBatches gave 3 answers for one row",
        lambda: criteria(ForWholeBatches()),
    ),
    "misspelt": ("unexpected|not used", lambda: {"drafts": 3}),
}


def unattached(target: TargetModel) -> Drafter:
    head = build_drafter("medusa", target, num_heads=2)
    return type(head)(head.config).double()


def filled_cache() -> DynamicCache:
    cache = DynamicCache()
    tiny_target().model(torch.tensor([[3, 4]] * 3), past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_refused(target: TargetModel, head: Drafter, case: str) -> None:
    message, make = REFUSED[case]
    options = {"drafter": head, **make()}
    with pytest.raises(ValueError, match=message):
        generate(target, BATCHES["padded"], options.pop("drafter"), **options)


def test_what_cannot_be_copied_is_refused_under_a_rule_that_looks_ahead(
    target: TargetModel, head: Drafter
) -> None:
    options = {"rule": "block", "tree": TreeOptions(5, 4, 1), "do_sample": True}
    for batch in ("one", "padded one"):
        for made, name in (
            (processors(remembering()), "remember"),  # type: ignore[arg-type]
            ({"prefix_allowed_tokens_fn": lambda *_: [len(options)]}, "PrefixConstrained"),
        ):
            with pytest.raises(ValueError, match=rf"{name}.* cannot be copied .* 'block'"):
                generate(target, BATCHES[batch], head, **options, **made)


def test_models_that_are_refused(head: Drafter) -> None:
    model = tiny_target().model.train()
    options = {"max_new_tokens": 4, "custom_generate": speculative, "drafter": head}
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        model.generate(torch.tensor([[5, 6]]), **options)
    config = BartConfig(
        vocab_size=96,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        BartForConditionalGeneration(config).eval().generate(torch.tensor([[5, 6]]), **options)
