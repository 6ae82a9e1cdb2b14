"""Targets x proposers x rules x batch x cache: the output is always plain decoding's own.

Every cell decodes three prompts of different lengths, past the window of the targets that have one,
in float64. The rules that promise tokens are compared with plain decoding with the same seed; those
that promise the law must give every sequence the same tokens alone and in the batch, tokens the
warped law allows, and plain decoding's at temperature 0.
"""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch

import inference.engine as engine_module
from drafters import TargetModel, build_drafter
from inference.cache import TreeCache
from inference.generate import plain_generate, speculative_generate
from inference.proposers import (
    MedusaProposer,
    Proposer,
    SequentialProposer,
    TreeOptions,
    build_proposer,
)
from inference.proposers.compose import ComposedProposer
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.heads import chain_shape
from inference.proposers.layer_skip import LayerSkipProposer
from inference.proposers.ngram import NgramProposer
from inference.proposers.suffix import SuffixProposer
from inference.sampling import SamplingParams
from inference.stopping import Stop
from tests.oracle import NoisyOracle
from tests.zoo import ZOO, zoo_target

PROMPTS = [[5, 6, 7, 8, 9, 5, 6], [11, 12, 13], [20, 21, 22, 23] * 4]
NEW = 11
NO_END = Stop(token_ids=())

GREEDY = SamplingParams()
WARM = SamplingParams(0.8, seed=7)
WARPED = SamplingParams(
    1.2, top_k=30, top_p=0.9, seed=5, repetition_penalty=1.2, presence_penalty=0.3
)
TOKENS = [("match", GREEDY), ("coupled", WARM), ("match", WARPED), ("coupled", WARPED)]
"""Rules and laws that promise plain decoding's own tokens; at temperature 0 all rules are one."""
LAWS = [("rejection", WARM), ("rejection", WARPED), ("block", WARM)]


def head(target: TargetModel, family: str, **options: object) -> torch.nn.Module:
    made = build_drafter(family, target, seed=1, **options).double()
    made.set_draft_vocab(torch.arange(target.vocab_size))
    return made.eval()


def eagle(target: TargetModel, *tree: int, **options: object) -> Proposer:
    options, draft = {"draft_vocab_size": 60, **options}, TreeOptions(*tree)
    return SequentialProposer(head(target, "eagle3", feature_layers=[1, 2, 3], **options), draft)  # type: ignore[arg-type]


def medusa(target: TargetModel, options: TreeOptions) -> Proposer:
    return MedusaProposer(head(target, "medusa", num_heads=3), options)  # type: ignore[arg-type]


def family(target: TargetModel, name: str, *tree: int, **options: object) -> Proposer:
    if name in ("peagle", "dflash", "dspark"):
        options = {"feature_layers": [1, 3], **options}
    return build_proposer(head(target, name, **options), TreeOptions(*tree))  # type: ignore[arg-type]


FAMILIES: dict[str, Callable[[TargetModel], Proposer]] = {
    "hydra++": lambda t: family(t, "hydra", 9, 3, 3, num_heads=3, num_layers=1),
    "eagle1": lambda t: family(t, "eagle1", 9, 3, 3),
    "eagle3 layers": lambda t: eagle(t, 9, 3, 3, num_layers=2, qk_norm=True, sliding_window=9),
    "mtp shared": lambda t: family(t, "mtp", 9, 3, 3),
    "mtp separate": lambda t: family(t, "mtp", 4, 3, 1, num_modules=3),
    "peagle": lambda t: family(t, "peagle", 9, 4, 3, num_drafts=4, num_layers=2),
    "dflash": lambda t: family(t, "dflash", 9, 3, 3, block_size=4, num_layers=2),
    "jetspec": lambda t: family(t, "dflash", 4, 3, 1, block_size=4, causal=True),
    "dspark": lambda t: family(t, "dspark", 9, 3, 3, block_size=3, markov_rank=8),
}
"""Every other head family; they run on the architectures of FAMILY_TARGETS."""
PROPOSERS: dict[str, Callable[[TargetModel], Proposer]] = {
    **FAMILIES,
    "eagle3 tree": lambda t: eagle(t, 10, 3, 3),
    "eagle3 chain": lambda t: eagle(t, 4, 3, 1),
    "medusa": lambda t: medusa(t, TreeOptions(size=9)),
    "blockwise": lambda t: medusa(t, TreeOptions(shape=chain_shape(3))),
    "ngram": lambda t: NgramProposer(8, 4, 2),
    "suffix": lambda t: SuffixProposer(8, 4),
    "draft model": lambda t: DraftModelProposer(draft_model(), TreeOptions(7, 3, 2)),
    "layer skip": lambda t: LayerSkipProposer(2, width=2, depth=2),
    "layer subset": lambda t: LayerSkipProposer(layers=[0, 2, 3], width=1, depth=3),
    "head + ngram": lambda t: ComposedProposer(eagle(t, 6, 2, 2), NgramProposer(6, 3, 2), size=10),
}
CHAINS = {"eagle3 chain", "blockwise", "layer subset", "mtp separate", "jetspec"}
REPRESENTATIVES = {"eagle3 tree", "ngram", "layer skip"}
"""What runs on every architecture of the zoo."""
NAMED = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "gpt_neox",
    "granite",
    "smollm3",
    "gpt_oss",
    "qwen3_moe",
    "mixtral",
]
"""Architectures on which everything runs."""
FAMILY_TARGETS = ["llama", "gemma3_text", "granite", "gpt_oss", "gpt_neox", "qwen3_moe"]
"""Plain, mixed windows with scaled embeddings, scaled logits, sinks, another layout, experts."""
AMPLE, GROWING = "ample", "growing"
"""Caches: room for all from the start, or one that has to grow again and again."""
CELLS = [
    (name, proposer, cache)
    for name, proposer, cache in itertools.product(ZOO, PROPOSERS, (AMPLE, GROWING))
    if proposer in REPRESENTATIVES
    or (cache == AMPLE and name in (FAMILY_TARGETS if proposer in FAMILIES else NAMED))
]


@functools.cache
def model(name: str) -> TargetModel:
    return zoo_target(name)


@functools.cache
def draft_model() -> TargetModel:
    return zoo_target("llama", seed=1, num_hidden_layers=2)


@functools.cache
def expected(name: str, sampling: SamplingParams) -> list[list[int]]:
    plain = plain_generate(model(name), PROMPTS, max_new_tokens=NEW, sampling=sampling, stop=NO_END)
    return plain.sequences


def set_cache(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if cache == GROWING:

        def small(config: object, batch_size: int, capacity: int) -> TreeCache:
            return TreeCache(config, batch_size, 1)  # type: ignore[arg-type]

        monkeypatch.setattr(engine_module, "TreeCache", small)
        monkeypatch.setattr("inference.cache.BLOCK", 4)


def decode(
    name: str, proposer: Proposer, rows: list[int], rule: str, sampling: SamplingParams
) -> list[list[int]]:
    prompts = [PROMPTS[row] for row in rows]
    options = {"max_new_tokens": NEW, "sampling": sampling, "rule": rule, "stop": NO_END}
    return speculative_generate(model(name), proposer, prompts, **options).sequences  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "kind", "cache"), CELLS)
def test_tokens(name: str, kind: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_cache(cache, monkeypatch)
    proposer = PROPOSERS[kind](model(name))
    for rule, sampling in TOKENS:
        found = decode(name, proposer, [0, 1, 2], rule, sampling)
        assert found == expected(name, sampling), (rule, sampling)
    row = len(kind) % 3  # alone: all of the rows in turn, over the proposers
    for rule, sampling in [("coupled", WARM), ("match", GREEDY)]:
        assert decode(name, proposer, [row], rule, sampling) == [expected(name, sampling)[row]]


@pytest.mark.parametrize(("name", "kind", "cache"), CELLS)
def test_laws(name: str, kind: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_cache(cache, monkeypatch)

    def run(rows: list[int], rule: str, sampling: SamplingParams) -> list[list[int]]:
        proposer = PROPOSERS[kind](model(name))  # anew: one with a history drafts otherwise
        return decode(name, proposer, rows, rule, sampling)

    for rule, sampling in LAWS:
        if rule == "block" and kind not in CHAINS:
            continue
        together = run([0, 1, 2], rule, sampling)
        row = (len(kind) + len(name)) % 3
        assert run([row], rule, sampling) == [together[row]], rule
        logits = model(name).forward(torch.tensor([PROMPTS[row] + together[row]])).logits[0]
        if sampling.top_k is not None:  # the penalties can only swap who is in at the edge
            best = logits[len(PROMPTS[row]) - 1 : -1].topk(sampling.top_k + NEW).indices
            assert all(t in kept for t, kept in zip(together[row], best.tolist(), strict=True))
    for rule in ("rejection", "block") if kind in CHAINS else ("rejection",):
        assert run([0, 1, 2], rule, GREEDY) == expected(name, GREEDY), rule


@pytest.mark.parametrize("cache", [AMPLE, GROWING])
@pytest.mark.parametrize("name", ZOO)
def test_accepted_branches(name: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Untrained heads are mostly rejected: an oracle makes rounds of all depths end anywhere."""
    set_cache(cache, monkeypatch)
    for rule, sampling in TOKENS:
        truth = expected(name, sampling)
        texts = [prompt + new for prompt, new in zip(PROMPTS, truth, strict=True)]
        assert decode(name, NoisyOracle(texts), [0, 1, 2], rule, sampling) == truth, rule
