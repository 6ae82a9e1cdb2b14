"""transformers' own decoders as contenders of `scripts.benchmark`, plain, compiled and with drafts.

Letters: B sequences of a batch, T longest prompt, S columns of a static cache.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.config
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, StaticCache
from transformers.generation import BaseStreamer, GenerationConfig

from drafters import TargetModel
from drafters.hub import split_revision
from inference.measuring.compare import clean_generation_config
from scripts.benchmark_contenders import LENGTH, MATCH, Contender
from scripts.benchmark_protocol import Answer

CACHE_STEP = 64
"""Static caches are as long as the longest text, rounded up to this."""

CPU_COMPILER: dict[str, Any] = {"cpp_wrapper": True}
"""Inductor's settings on the CPU: calls are made from C++. Not `freezing`, which packs the weights:
a step of one row is slower with packed weights than without. SmolLM2-135M, float32, one thread of
an AVX-512 CPU, tokens per second in one race: eager 16.4, compiled and frozen 14.1.
"""


def build_theirs(target: TargetModel, found: Contender, name: str) -> "Generate | Compiled":
    """One of transformers' contenders.

    Args:
        target: the model.
        found: which.
        name: folder or hub id of the target.
    """
    if found.kind == "plain-compiled":
        return Compiled(target)
    options, assistant = their_options(target, found, name)
    return Generate(target, options, assistant)


def their_options(
    target: TargetModel, found: Contender, name: str
) -> tuple[dict[str, Any], PreTrainedModel | None]:
    """Fields of the generation config, and the assistant model if there is one.

    Args:
        target: the model.
        found: one of `THEIRS` that `generate` can do.
        name: folder or hub id of the target.
    """
    settings = found.settings
    constant = chains(int(settings["length"])) if "length" in settings else {}
    if found.kind == "plain":
        return {}, None
    if found.kind == "prompt-lookup":
        return {
            "prompt_lookup_num_tokens": int(settings.get("length", LENGTH)),
            "max_matching_ngram_size": int(settings.get("match", MATCH)),
        }, None
    if found.kind == "early-exit":
        first = int(settings["first"])
        check_layers(target, found.name, first)
        return {"assistant_early_exit": first, **constant}, None
    assert found.kind == "assisted"
    draft = load_draft(target, found, name)
    vars(draft.model.generation_config).update(constant)
    return {}, draft.model


def chains(length: int) -> dict[str, Any]:
    """transformers' settings for chains of one length, whatever their confidence."""
    return {
        "num_assistant_tokens": length,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def check_layers(target: TargetModel, name: str, first: int) -> None:
    """Refuse a draft of all layers.

    Raises:
        ValueError: there are not so many.
    """
    if first >= target.num_layers:
        raise ValueError(f"{name}: first must be below the target's {target.num_layers} layers")


def load_draft(target: TargetModel, found: Contender, name: str) -> TargetModel:
    """The draft model of an `assisted` contender, or of ours that drafts as it does.

    Args:
        target: the model.
        found: with `first` or `model` among its settings.
        name: folder or hub id of the target.
    """
    if "model" in found.settings:
        return TargetModel.load(found.settings["model"], target.dtype, target.device)
    first = int(found.settings["first"])
    check_layers(target, found.name, first)
    return first_layers(name, first, target)


def first_layers(name: str, count: int, target: TargetModel) -> TargetModel:
    """The first layers of a target as a model of its own.

    Args:
        name: folder or hub id of the target.
        count: layers, fewer than the target has.
        target: the model.
    """
    place, revision = split_revision(name)
    version = {"revision": revision or "main"}
    config = AutoConfig.from_pretrained(place, **version)
    text = config.get_text_config()
    text.num_hidden_layers = count
    if (types := getattr(text, "layer_types", None)) is not None:
        text.layer_types = types[:count]
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # the other layers are left out on purpose
    model = AutoModelForCausalLM.from_pretrained(
        place, config=config, dtype=target.dtype, **version
    )
    transformers.logging.set_verbosity(verbosity)
    return TargetModel(model.to(target.device), target.tokenizer)


# generate ---------------------------------------------------------------------------------------


class Clock(BaseStreamer):
    """Notes when `generate` hands out tokens, and how many: the prompts first."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        """Called with the tokens of one forward."""
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        """Called once."""


class Generate:
    """`generate`, greedy, with a config of its own in the place of the model's.

    Args:
        target: the model.
        options: other fields of the config.
        assistant: draft model.
    """

    def __init__(
        self, target: TargetModel, options: dict[str, Any], assistant: PreTrainedModel | None = None
    ) -> None:
        self.target, self.options = target, options
        self.assistant = {} if assistant is None else {"assistant_model": assistant}
        self.chained = bool(options or self.assistant)

    def warm_up(self, prompts: list[list[int]], longest: int, new_tokens: int) -> None:
        """First calls are slow."""
        self.decode(prompts, new_tokens)

    def decode(self, prompts: list[list[int]], new_tokens: int) -> Answer:
        """Decode one batch; prompts of several lengths are padded on the left."""
        target, model, clock = self.target, self.target.model, Clock()
        config = clean_generation_config(target, new_tokens, **self.options)
        ids, mask = padded(prompts, pad_token(config), target.device)
        own, model.generation_config = model.generation_config, config
        start = time.perf_counter()
        try:
            out = model.generate(ids, attention_mask=mask, streamer=clock, **self.assistant)
            rows = out[:, ids.shape[1] :].tolist()
        finally:
            model.generation_config = own
        seconds = time.perf_counter() - start
        tokens = [cut(row[:new_tokens], target.eos_token_ids) for row in rows]
        _, first, *later = clock.counts
        rounds = [[len(prompts), 0, 0, count] for count in later] if self.chained else None
        return Answer(
            tokens,
            seconds,
            clock.times[1] - start,
            min(first, sum(map(len, tokens))),
            rounds=rounds,
        )


def padded(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, ...]:
    """(B, T) token ids, padded on the left, and (B, T) where they are tokens.

    Args:
        prompts: B lists.
        pad: token id.
        device: of the result.
    """
    longest = max(map(len, prompts))
    rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor(mask, device=device)


def pad_token(config: GenerationConfig) -> int:
    """The padding token of a clean config."""
    assert isinstance(config.pad_token_id, int)
    return config.pad_token_id


def cut(row: Sequence[int], ends: Sequence[int]) -> list[int]:
    """A row up to its first end of text, which is part of it."""
    place = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
    return list(row[: place + 1])


# Compiled ---------------------------------------------------------------------------------------


class Compiled:
    """Greedy decoding with transformers' forward, compiled, on its static cache.

    The loop is written out: `generate` would add its own work on the host to every step. One step
    is one call of compiled code from token to token. The prefill runs eagerly, as `generate` does.

    Args:
        target: the model.
    """

    def __init__(self, target: TargetModel) -> None:
        self.target = target
        self._step: Callable[..., Tensor] = self._eager
        self._cache: StaticCache | None = None
        self._shape = (0, 0)
        self._on_cpu = target.device.type == "cpu"

    def _eager(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """(B, n) tokens at (B, n) positions -> (B, 1) next ones."""
        out = self.target.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def warm_up(self, prompts: list[list[int]], longest: int, new_tokens: int) -> None:
        """Compile for this batch size and this length, and decode once."""
        room = -(-(longest + new_tokens) // CACHE_STEP) * CACHE_STEP
        if self._shape != (len(prompts), room):
            self._shape = (len(prompts), room)
            torch.compiler.reset()  # frozen weights of another shape would stay in memory
            self._cache = StaticCache(config=self.target.model.config, max_cache_len=room)
            mode = None if self._on_cpu else "reduce-overhead"
            self._step = torch.compile(self._eager, dynamic=False, mode=mode)
        with torch._inductor.config.patch(CPU_COMPILER if self._on_cpu else {}):
            self.decode(prompts, new_tokens)

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], new_tokens: int) -> Answer:
        """Decode one batch; prompts of several lengths are padded on the left."""
        cache, ends = self._cache, self.target.eos_token_ids
        assert cache is not None, "warm up first"
        start = time.perf_counter()
        cache.reset()
        ids, real = padded(prompts, 0, self.target.device)
        positions = (real.cumsum(1) - 1).clamp_min(0)
        mask = None
        if len(prompts) > 1:  # a column for each of the cache's: the shape must not change
            mask = torch.ones(len(prompts), self._shape[1], dtype=real.dtype, device=real.device)
            mask[:, : real.shape[1]] = real
        token = self._eager(ids, positions, mask)
        rows = token.tolist()
        prefill = time.perf_counter() - start
        position = positions[:, -1:]
        ended = [row[-1] in ends for row in rows]
        for _ in range(new_tokens - 1):
            if all(ended):
                break
            position = position + 1
            token = self._step(token, position, mask).clone()  # graphs write to it again
            for place, [new] in enumerate(token.tolist()):
                rows[place].append(new)
                ended[place] |= new in ends
        tokens = [cut(row, ends) for row in rows]
        return Answer(tokens, time.perf_counter() - start, prefill, len(prompts))
