"""`model.generate` with drafts: two more arguments, the same output.

    from inference.hf import speculative
    model.generate(**inputs, max_new_tokens=200, custom_generate=speculative, drafter="my-head")

`generate` prepares inputs, logits processors and stopping criteria as ever, and hands the decoding
loop to :func:`speculative`. Greedy output is that of plain `generate`. Sampled output has the same
law, but other random numbers: its tokens are those of `plain_generate` with the same seed. What
differs:

* Processors and criteria are called for one row at a time, padding included, and criteria with None
  as scores. Of several rows, each has a deep copy of every processor, so these may keep state; one
  that cannot be copied serves a single row only. `prefix_allowed_tokens_fn` is not copied: it is
  told the prompt's index, by which it must tell apart whatever it remembers.
* A row that has ended is padded, also where `generate`, without an end-of-sequence token, lets it
  run on until the last one ends.

Letters: B rows, T prompt tokens with padding, n new tokens of the longest row, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import (
    BaseStreamer,
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode

from inference.engine import Engine
from inference.generate import Generation, Round, speculative_generate
from inference.hf.rows import Row, RowEnd, check_rule, row_samplings, split_rows
from inference.hf.setup import deliver_everything_to, engine_of, resolve
from inference.proposers import TreeOptions
from inference.stats import AcceptanceStats
from inference.stopping import Stop

_WITHOUT_EFFECT = {
    "use_cache": (True, None),
    "cache_implementation": (None, "dynamic"),
    "cache_config": (None,),
    "prefill_chunk_size": (None,),
    "compile_config": (None,),
}
"""Options of the decoding loop that this one replaces, and their values that ask for nothing."""

_UNDERSTOOD = {"attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep"}
"""Inputs of the model that are looked at, or that `generate` always adds."""


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` gives, and what the drafts did.

    `scores` and `logits` of a row that has ended are 0 at the padding token and -inf elsewhere.
    `cache` is None: ours cannot be continued by `generate`.

    Attributes:
        stats: acceptance over all rounds.
        reasons: why each row ended: "eos", "stop" (a stop string or criterion) or "length".
        seconds: wall-clock by phase, as in `inference.generate.Generation`.
        rounds: what happened in each, with `record_rounds=True`.
    """

    stats: AcceptanceStats | None = None
    reasons: list[str] | None = None
    seconds: dict[str, float] | None = None
    rounds: list[Round] | None = None


def speculative(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    *,
    drafter: Any = None,
    rule: str = "match",
    tree: TreeOptions | None = None,
    engine: str | Engine = "eager",
    seed: int | None = None,
    record_rounds: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_model: PreTrainedModel | None = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """The decoding loop: pass it to `generate` as `custom_generate=`, and its options beside it.

    Args that are not listed are what `generate` prepares, or refused.

    Args:
        streamer: is given a step of all rows as soon as each row has got there or has ended.
        drafter: a trained head (`drafters.Drafter`), its folder or hub name, or any
            `inference.proposers.Proposer`.
        rule: of acceptance, see `speculative_generate`.
        tree: what a head drafts.
        engine: what runs the model: a name of `inference.engines.ENGINES`, or an engine. One that
            is named is built at the first call and stays with the model, whose weights must not
            change meanwhile, until a call names another.
        seed: row b draws with seed + b. None draws the seeds from torch's global generator, so that
            `torch.manual_seed` reproduces.
        record_rounds: fill `SpeculativeOutput.rounds`.
        tokenizer: of the model, for stop strings and for proposers that compare tokenizers.

    Returns:
        (B, T + n) prompts and new tokens, or a `SpeculativeOutput` that holds them.

    Raises:
        ValueError: an option that is wrong, not offered or without effect; before any token.
    """
    _check_model(model, synced_gpus, assistant_model)
    _check_options(generation_config, model_kwargs, seed, record_rounds)
    batch = _prepare(input_ids, stopping_criteria, generation_config, model_kwargs)
    target, proposer = resolve(model, drafter, tree, tokenizer)
    check_rule(logits_processor, batch.rows[0], rule, target.vocab_size)
    seeds = _seeds(seed, len(batch.rows)) if generation_config.do_sample else None
    as_dict = bool(generation_config.return_dict_in_generate)
    found = speculative_generate(
        target,
        proposer,
        [row.prompt for row in batch.rows],
        max_new_tokens=batch.max_new_tokens,
        sampling=row_samplings(logits_processor, batch.rows, seeds, target.device),
        rule=rule,
        engine=engine_of(target, engine),
        stop=batch.stops,
        on_token=None if streamer is None else _Feed(streamer, batch),
        output_scores=as_dict and bool(generation_config.output_scores),
        output_logits=as_dict and bool(generation_config.output_logits),
        record_rounds=record_rounds,
    )
    if streamer is not None:
        streamer.end()
    new = _padded(found.sequences, batch.pad).to(input_ids.device)
    sequences = torch.cat((input_ids, new), dim=1)
    return _output(found, sequences, batch.pad) if as_dict else sequences


deliver_everything_to(speculative)


# Checks -----------------------------------------------------------------------------------------


def _check_model(model: PreTrainedModel, synced_gpus: bool, assistant_model: Any) -> None:
    """Refuse models, and company, that this loop cannot decode with."""
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model; speculative decodes causal "
            "language models only"
        )
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    if assistant_model is not None:
        raise ValueError("assistant_model= and drafter= both draft: give one of them")
    if synced_gpus:
        raise ValueError(
            "synced_gpus= is not offered: gather a sharded model onto one device before decoding"
        )


def _check_options(
    config: GenerationConfig, model_kwargs: dict[str, Any], seed: int | None, record_rounds: bool
) -> None:
    """Refuse other ways of decoding, outputs that are not offered, and options without effect."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"the options ask for {mode.value.replace('_', ' ')}, but speculative is greedy or "
            "samples: leave num_beams, penalty_alpha, prompt_lookup_num_tokens and the like out"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise ValueError(f"{name}=True is not offered with drafts: leave it out")
    for name, harmless in _WITHOUT_EFFECT.items():
        if (value := getattr(config, name)) not in harmless:
            raise ValueError(
                f"{name}={value!r} has no effect with drafts, which bring a cache and a loop of "
                "their own: leave it out"
            )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ValueError(f"seed= must be an integer or None, got {seed!r}")
    if seed is not None and not config.do_sample:
        raise ValueError("seed= has no effect on greedy decoding: leave it out, or set do_sample")
    if record_rounds and not config.return_dict_in_generate:
        raise ValueError("record_rounds= has no effect without return_dict_in_generate=True")
    _check_inputs(model_kwargs)


def _check_inputs(model_kwargs: dict[str, Any]) -> None:
    """Refuse inputs other than tokens, and caches with a past."""
    given = {name for name, value in model_kwargs.items() if value is not None}
    if others := sorted(given - _UNDERSTOOD):
        raise ValueError(f"{', '.join(others)}: not offered with drafts, which see tokens only")
    cache = model_kwargs.get("cache")  # `generate` marks those that it did not make itself
    if getattr(cache, "_is_user_defined", False):
        raise ValueError(
            "cache= (past_key_values=) cannot be given, for drafts need one that rolls back: pass "
            "the whole text as input_ids"
        )


# What `generate` prepared, for each row ---------------------------------------------------------


@dataclass(frozen=True)
class _Batch:
    """The batch of `generate`, as sequences.

    Attributes:
        rows: B of them.
        ends: what ends rows beside tokens and length.
        stops: what ends each row.
        max_new_tokens: of every row.
        pad: token behind the end of a row; None if all end together.
    """

    rows: list[Row]
    ends: list[RowEnd]
    stops: list[Stop]
    max_new_tokens: int
    pad: int | None


def _prepare(
    input_ids: Tensor,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> _Batch:
    """Split the batch into rows, and the criteria into what we have ourselves and others."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    rows = split_rows(input_ids, mask, positions, config.num_return_sequences or 1)
    limit = min(one.max_length for one in criteria if type(one) is MaxLengthCriteria)
    tokens = {
        token
        for one in criteria
        if type(one) is EosTokenCriteria
        for token in one.eos_token_id.tolist()
        if token >= 0  # -1 is a way to say "none"
    }
    others = [one for one in criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)]
    padding = config._pad_token_tensor
    if padding is None and len(rows) > 1 and (tokens or others):
        raise ValueError(
            "pad_token_id= is needed, for rows that end before others are padded; set it in "
            "generation_config or pass it"
        )
    ends = [RowEnd(row, others) for row in rows]
    return _Batch(
        rows=rows,
        ends=ends,
        stops=[Stop(tuple(sorted(tokens)), (), (end,) if others else ()) for end in ends],
        max_new_tokens=max(limit - input_ids.shape[1], 1),
        pad=None if padding is None else int(padding),
    )


def _seeds(seed: int | None, count: int) -> list[int]:
    """One for each row."""
    if seed is None:
        return torch.randint(2**63 - 1, (count,)).tolist()
    return [seed + row for row in range(count)]


class _Feed:
    """Hands tokens to a streamer as `generate` does: one step of all rows at a time.

    Args:
        streamer: has been given the prompts by `generate`.
        batch: whose tokens come.
    """

    def __init__(self, streamer: BaseStreamer, batch: _Batch) -> None:
        self.streamer, self.batch, self.pad = streamer, batch, batch.pad
        self.last = [-1] * len(batch.rows)
        self.waiting: list[deque[int]] = [deque() for _ in batch.rows]
        self.given = [0] * len(batch.rows)

    def __call__(self, row: int, tokens: list[int]) -> None:
        """Take new tokens of a row."""
        self.waiting[row].extend(tokens)
        self.given[row] += len(tokens)
        self.last[row] = tokens[-1]
        while any(self.waiting) and all(map(self._ready, range(len(self.given)))):
            step = [tokens.popleft() if tokens else self.pad for tokens in self.waiting]
            self.streamer.put(torch.tensor(step))

    def _ready(self, row: int) -> bool:
        """Whether a row has a token to give, or has ended."""
        batch, tokens = self.batch, self.batch.stops[row].token_ids or ()
        ended = self.given[row] in (batch.max_new_tokens, batch.ends[row].new_tokens)
        return bool(self.waiting[row]) or ended or self.last[row] in tokens


# Results ----------------------------------------------------------------------------------------


def _padded(texts: Sequence[list[int]], pad: int | None) -> Tensor:
    """(B, n) new tokens."""
    longest = max(map(len, texts))
    fill = [] if pad is None else [pad]  # without a padding token all are equally long
    return torch.tensor([text + fill * (longest - len(text)) for text in texts])


def _output(found: Generation, sequences: Tensor, pad: int | None) -> SpeculativeOutput:
    return SpeculativeOutput(
        sequences=sequences,  # type: ignore[arg-type]
        scores=_steps(found.scores, pad, sequences.device),
        logits=_steps(found.logits, pad, sequences.device),
        stats=found.stats,
        reasons=found.reasons,
        seconds=found.seconds,
        rounds=found.rounds or None,
    )


def _steps(rows: Sequence[Tensor], pad: int | None, device: torch.device) -> Any:
    """B times (new tokens, V) -> n times (B, V) in float32, as in `generate`; None if empty."""
    if not rows:
        return None
    shape = (len(rows), max(map(len, rows)), rows[0].shape[-1])
    steps = torch.full(shape, -torch.inf, device=device)
    if pad is not None:
        steps[:, :, pad] = 0.0
    for row, values in enumerate(rows):
        steps[row, : len(values)] = values
    return steps.unbind(dim=1)
