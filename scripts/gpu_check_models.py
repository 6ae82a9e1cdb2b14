"""Targets and heads of random weights, and rounds over them, for `scripts.gpu_check`.

Weights are made on the device they are for, so nothing is read or downloaded. Texts are made up,
too: a cache is filled with noise and told its length, as what a forward costs does not depend on
what it reads.

Letters: B batch, P committed tokens, N tree nodes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from drafters import Drafter, TargetModel, build_drafter
from inference.proposers import TreeOptions, build_proposer
from inference.sampling import SamplingParams
from inference.static.cache import StaticCache
from inference.static.decoding import DeviceEngine
from inference.static.engine import StaticEngine
from inference.static.graphs import Graphs, Replayed
from inference.static.rounds import Rounds
from inference.static.size_costs import behind
from inference.static.words import MOST_ROWS
from scripts.gpu_check_timing import capture_for, device_of

SPARE = 1024
"""Tokens that there is room for behind a text."""
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


def models(dry_run: bool) -> tuple[DeviceEngine, Drafter]:
    """The engine on a random target of 8B, and a head."""
    dtype = torch.float32 if dry_run else torch.bfloat16
    target = random_target(TINY if dry_run else LLAMA_8B, dtype, device_of(dry_run))
    return DeviceEngine(target, pack=False), random_head(target)


def use_graphs(engine: StaticEngine, graphs: bool) -> None:
    """Have the engine's forwards captured, or not."""
    engine.graphs = Graphs(engine.run, capture_for(engine.shape.device, graphs))


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


def tree_of(size: int, depth: int, top_k: int) -> TreeOptions:
    """Grown trees of so many nodes, levels and children of a node."""
    return TreeOptions(size=size, depth=depth, top_k=top_k, grown=True)


def rounds_of(
    engine: DeviceEngine,
    head: Drafter,
    sizes: Sequence[TreeOptions],
    texts: tuple[int, int],
    graphs: bool = True,
) -> Rounds:
    """Greedy rounds of the engine that start behind texts of noise.

    Args:
        engine: of the target.
        head: that drafts.
        sizes: of trees, one for each kind of round.
        texts: B and P.
        graphs: capture them, where that is possible.
    """
    batch, context = texts
    params = [SamplingParams()] * batch
    rounds = engine.rounds_for(build_proposer(head), sizes, params, "match", 0, context + SPARE)
    engine.forget(rounds)  # the next ones are new
    rounds.cache.kv.normal_()
    if not graphs:
        rounds.capture = None
    restarted(rounds, context)
    return rounds


def restarted(rounds: Rounds, context: int) -> None:
    """Put rounds behind texts of P tokens; buffers and graphs stay."""
    behind(rounds, context)
    rounds.state.remaining.fill_(SPARE)


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
