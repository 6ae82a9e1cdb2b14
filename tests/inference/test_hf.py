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
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import inference.hf.setup
from drafters import Drafter, TargetModel, build_drafter
from inference.generate import plain_generate
from inference.hf import SpeculativeOutput, speculative
from inference.hf.rows import split_warpers
from inference.proposers import Proposer, TreeOptions, build_proposer
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
    common = {"return_dict_in_generate": True, "output_scores": True, **batch}
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
    assert len(found.scores) == len(expected.scores)
    width = batch["input_ids"].shape[1]
    counts = live_steps(expected.sequences, width, make())
    for row, count in enumerate(counts):
        for step in range(count):
            ours, theirs = found.scores[step][row], expected.scores[step][row]
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-5)
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


class SumCriterion(StoppingCriteria):
    """Ends a row by its text, at different places."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, -1] + input_ids[:, -2]) % 5 == 3


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
    "guidance": lambda: {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[9, 9, 5]])},
    "watermark": lambda: {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "own length": lambda: criteria(MaxLengthCriteria(11)),
    "closure": lambda: processors(lambda ids, scores: scores.roll(ids.shape[1] % 3, -1)),  # type: ignore[arg-type]
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


def with_length(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    def full() -> dict[str, Any]:
        options = make()
        return options if "generation_config" in options else {"max_new_tokens": NEW} | options

    return full
