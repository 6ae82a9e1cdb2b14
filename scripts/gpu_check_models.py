"""Targets and heads of random weights, and rounds over them, for `scripts.gpu_check`.

Weights are made on the device they are for, so nothing is read or downloaded. Texts are made up,
too: a cache is filled with noise and told its length, as what a forward costs does not depend on
what it reads.

Letters: B batch, P committed tokens, N tree nodes.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from drafters import Drafter, TargetModel, build_drafter
from inference.proposers import TreeOptions, build_proposer
from inference.sampling import SamplingParams
from inference.static.cache import StaticCache
from inference.static.draft_base import Committed
from inference.static.draft_build import build_static_drafter
from inference.static.engine import StaticEngine
from inference.static.graphs import WARM_UPS, Capture, CudaCapture, Replayed, called_each_time
from inference.static.growth import DraftLaw
from inference.static.laws import warpers_of
from inference.static.rounds import Rounds, RoundState, Rule
from inference.static.words import MOST_ROWS
from inference.tree import Proposal

SPARE = 1024
"""Tokens that there is room for behind a text."""
REPEATS = 10
"""Timings of which the median is taken."""
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
"""Llama 3.1 8B."""
SMOL = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
"""SmolLM2-135M."""
TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
DRAFT_VOCAB = {128256: 32000, 96: 60}
"""Columns of a head's output matrix, by the target's vocabulary."""


def random_target(
    shape: dict[str, int], dtype: torch.dtype, device: torch.device, std: float = 0.02
) -> TargetModel:
    """A Llama of random weights, with a tokenizer that knows no words."""
    config = LlamaConfig(**shape, initializer_range=std)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    words = Tokenizer(WordLevel({"<unk>": 0, "<mask>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", mask_token="<mask>"
    )
    return TargetModel(model, tokenizer, name="random")


def random_head(target: TargetModel) -> Drafter:
    """An EAGLE-3 head of random weights."""
    columns = DRAFT_VOCAB.get(target.vocab_size)
    with torch.device(target.device):
        head = build_drafter("eagle3", target, draft_vocab_size=columns)
    return head.to(target.dtype).eval().requires_grad_(False)


def capture_for(device: torch.device, graphs: bool, warm_ups: int = WARM_UPS) -> Capture:
    """Graphs of a memory pool of their own; on a CPU, or without graphs, calls."""
    if not graphs or device.type == "cpu":
        return called_each_time
    return CudaCapture(device, "gpu_check: a part of a round", "that is a bug", warm_ups)


def filled_cache(engine: StaticEngine, batch: int, context: int) -> StaticCache:
    """A cache of B texts of P tokens, and room behind them."""
    cache = engine.new_cache(batch, context + SPARE + MOST_ROWS)
    cache.kv.normal_()
    cache.lengths[:] = [context] * batch
    return cache


def forward_of(
    engine: StaticEngine,
    cache: StaticCache,
    rows: int,
    feature_layers: tuple[int, ...],
) -> Replayed:
    """The target's forward of a chain of so many rows behind each text, ready to run."""
    assert engine.graphs is not None
    batch = len(cache.lengths)
    chain = torch.arange(rows)
    seen = torch.ones(rows, rows, dtype=torch.bool).tril()
    tokens = chain % engine.target.vocab_size
    return engine.graphs.loaded(
        cache, [tokens] * batch, [chain] * batch, [seen] * batch, feature_layers
    )


@dataclass(frozen=True)
class Work:
    """One kind of round: B, P, N, depth of the trees and their branching."""

    batch: int
    context: int
    size: int
    depth: int
    top_k: int

    @property
    def options(self) -> TreeOptions:
        """Of the trees."""
        return TreeOptions(size=self.size, depth=self.depth, top_k=self.top_k, grown=True)


def rounds_of(
    engine: StaticEngine, cache: StaticCache, head: Drafter, work: Work, graphs: bool
) -> Rounds:
    """Greedy rounds behind the texts of a cache, as `inference.static.decoding` makes them."""
    device, batch = engine.shape.device, work.batch
    state = RoundState.empty(batch, 0, device)
    options = build_proposer(head, work.options).options
    greedy = warpers_of([SamplingParams()] * batch, device)
    vocab: Tensor | None = head.draft_vocab
    law = DraftLaw(
        Proposal.ONE_HOT, greedy, state.seeds, state.lengths, options.sharpness, vocab
    )  # fmt: skip
    capacity = cache.capacity - MOST_ROWS
    drafter = build_static_drafter(head, options, law, capacity, max_depth=state.max_depth)
    rule = Rule("match", greedy, vocab)
    capture = capture_for(device, graphs, warm_ups=0) if graphs else None
    rounds = Rounds(engine, cache, [drafter], state, rule, capture)
    restarted(rounds, work.context)
    return rounds


def restarted(rounds: Rounds, context: int) -> None:
    """Put rounds behind texts of P tokens; buffers and graph stay."""
    engine, drafter = rounds.engine, rounds.drafter
    batch, rows, target = drafter.batch, drafter.new_rows, engine.target
    device, wide = engine.shape.device, len(drafter.feature_layers) * target.hidden_size
    new = Committed(
        torch.zeros(batch, rows, dtype=torch.int64, device=device),
        torch.ones(batch, dtype=torch.int64, device=device),
        torch.randn(batch, rows, target.hidden_size, dtype=target.dtype, device=device),
        torch.randn(batch, rows, wide, dtype=target.dtype, device=device) if wide else None,
    )
    for cache in drafter.caches:
        cache.lengths.fill_(context - 1)
    rounds.begin(new, [context] * batch, [SPARE] * batch)


def parts_of(rounds: Rounds, graphs: bool) -> list[Callable[[], Any]]:
    """Draft, verify, and accept with commit, each by itself, to be called in this order.

    Each graph has a pool of its own: what one leaves is what the next one reads.
    """
    device = rounds.engine.shape.device
    # Drafting counts what it absorbs, so it is not repeated for warming up.
    rounds.run()
    draft = capture_for(device, graphs, 0)(rounds.draft)
    tree = draft()
    verify = capture_for(device, graphs, 0)(lambda: rounds.verify(tree))
    verified = verify()
    settle = capture_for(device, graphs, 0)(lambda: rounds.settle(verified))
    settle()
    return [draft, verify, settle]


def milliseconds(parts: list[Callable[[], Any]], device: torch.device) -> list[float]:
    """Median time on the device of each part, all run in turn; a first time does not count."""
    found: list[list[float]] = [[] for _ in parts]
    for repeat in range(REPEATS + 1):
        times = _cpu_times(parts) if device.type == "cpu" else _cuda_times(parts)
        if repeat:
            for place, each in enumerate(times):
                found[place].append(each)
    return [statistics.median(each) for each in found]


def _cpu_times(parts: list[Callable[[], Any]]) -> list[float]:
    marks = [time.perf_counter()]
    for part in parts:
        part()
        marks.append(time.perf_counter())
    return [(end - start) * 1e3 for start, end in pairwise(marks)]


def _cuda_times(parts: list[Callable[[], Any]]) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for part, event in zip(parts, events[1:], strict=True):
        part()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def wall_milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call that waits for its result, the host's part included."""
    found = []
    for _ in range(REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found[1:])
