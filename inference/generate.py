"""Decoding: speculative, and plain as its slow twin.

``speculative_generate`` emits exactly what ``plain_generate`` emits with the same sampling
parameters (rules ``match`` and ``coupled``, any temperature), or samples from exactly the same law
(``rejection``, ``block``). It runs any unmodified Hugging Face causal LM whose layers all keep keys
and values that can be taken back (``TreeCache``).

Legend: B sequences, n new tokens, V vocabulary.
"""

import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import DynamicCache

from drafters import TargetModel
from inference.append import append_prompts
from inference.cache import BLOCK
from inference.counts import RoundCounts, counts_of
from inference.decoding import Decoding, Keep, Round, Text
from inference.engine import EagerEngine, Engine
from inference.proposers.base import Proposer
from inference.rules.lossy import LossyWarning
from inference.sampling import SamplingParams
from inference.static.decoding import DeviceEngine, device_generate
from inference.stats import AcceptanceStats
from inference.stopping import Stop
from inference.support import check_tree_support
from inference.texts import new_texts
from inference.timing import PhaseTimer
from inference.verify import ALL_RULES, LOSSY_RULES

__all__ = ["Generation", "Round", "plain_generate", "speculative_generate"]


@dataclass
class Generation:
    """Result of a decoding call.

    Attributes:
        sequences: new tokens of each sequence, prompt excluded, end-of-sequence token included.
        reasons: why each ended: "eos", "stop" (a stop string or criterion) or "length".
        stats: acceptance over all rounds (empty for plain decoding).
        seconds: wall-clock by phase: "prefill"; "draft" (networks), "build" (trees), "target",
            "accept" and "commit"; and "total" of everything after the prefill. Whole rounds on the
            device are one phase, "round".
        num_forwards: target forwards after the prefill.
        rounds: what happened in each, if asked for.
        scores: per sequence (n, V), what each new token was chosen by, after processors and
            warpers; equal to those of `generate`. Empty unless asked for.
        logprobs: per sequence the n log-probabilities of the new tokens under the target's own
            logits, before processors and warpers. Empty unless asked for.
        logits: per sequence (n, V), the target's own at each new token. Empty unless asked for.
    """

    sequences: list[list[int]]
    reasons: list[str] = field(default_factory=list)
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    seconds: dict[str, float] = field(default_factory=dict)
    num_forwards: int = 0
    rounds: list[Round] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


OnRound = Callable[[Round], None]
OnToken = Callable[[int, list[int]], None]
OnCounts = Callable[[RoundCounts], None]


@torch.inference_mode()
def speculative_generate(
    target: TargetModel,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    rule: str = "match",
    stop: Stop | Sequence[Stop] | None = None,
    engine: Engine | None = None,
    on_round: OnRound | None = None,
    on_token: OnToken | None = None,
    on_counts: OnCounts | None = None,
    output_scores: bool = False,
    output_logprobs: bool = False,
    output_logits: bool = False,
    record_rounds: bool = False,
    trace: Collection[int] = (),
) -> Generation:
    """Decode with drafts.

    ``max_new_tokens``, ``sampling`` and ``stop`` may be given once for all sequences or once for
    each. What a sequence emits does not depend on the others; equal prompts with equal sampling
    parameters, seed included, give equal texts.

    Args:
        target: the model whose output it is.
        proposer: where drafts come from.
        prompts: B lists of token ids, of any lengths.
        max_new_tokens: per sequence.
        sampling: temperature, warpers, processors and seed; None is greedy.
        rule: "match", "coupled", "rejection" or "block"; "lossy_typical" changes the output and
            warns.
        stop: what ends a sequence before its length does; None is the target's end-of-sequence
            tokens.
        engine: runs the target (`inference.engines.build_engine`); None is "eager".
        on_round: called after every round of every sequence.
        on_token: called with (row, new tokens) as soon as they are known: once with the token of
            the prefill, then with those of each round, before `on_counts` and `on_round`.
        on_counts: called after every round of every sequence with its numbers, which all engines
            have; `on_round` needs trees on the host.
        output_scores: fill `Generation.scores`.
        output_logprobs: fill `Generation.logprobs`.
        output_logits: fill `Generation.logits`.
        record_rounds: fill `Generation.rounds`.
        trace: sequences whose rounds carry the target's chance of every drafted token.

    Raises:
        ValueError: empty prompt, no room within the target's positions, unknown rule, unsupported
            layers or processors; before any token is produced.
    """
    _check_drafts(proposer, rule)
    keep = Keep(output_scores, output_logprobs, output_logits)
    texts = new_texts(target, prompts, max_new_tokens, sampling, stop, keep, rule)
    if rule in LOSSY_RULES:
        warnings.warn(f"rule {rule!r} changes the target's output", LossyWarning, stacklevel=3)
    timer, engine = PhaseTimer(target.device), _engine(target, engine)
    if isinstance(engine, DeviceEngine):
        if record_rounds or on_round is not None or trace:
            raise ValueError(
                "record_rounds, on_round, trace: engine 'device' keeps no trees; use on_counts, or "
                "engine 'packed'"
            )
        return _on_device(engine, proposer, texts, rule, timer, on_token, on_counts)
    check_tree_support(engine)
    _keep_chances(texts, trace)
    loop = Decoding(engine, proposer, texts, rule, timer)
    return _by_host(loop, timer, on_round, on_token, on_counts, record_rounds)


def _keep_chances(texts: list[Text], rows: Collection[int]) -> None:
    for row in rows:
        texts[row].keep = replace(texts[row].keep, chances=True)


def _by_host(
    loop: Decoding,
    timer: PhaseTimer,
    on_round: OnRound | None,
    on_token: OnToken | None,
    on_counts: OnCounts | None,
    record: bool,
) -> Generation:
    """Rounds that the host walks through; arguments as in `speculative_generate`."""
    with timer.phase("prefill"):
        loop.prefill()
    start = time.perf_counter()
    if on_token is not None:
        for row, text in enumerate(loop.sequences):
            on_token(row, text.tokens[-1:])
    rounds = _all_rounds(loop, on_round, on_token, on_counts, record)
    seconds = {**timer.seconds, "total": time.perf_counter() - start}
    return _generation(loop.sequences, loop.stats, seconds, loop.forwards, rounds)


def _all_rounds(
    loop: Decoding,
    on_round: OnRound | None,
    on_token: OnToken | None,
    on_counts: OnCounts | None,
    record: bool,
) -> list[Round]:
    """Decode to the end; the rounds, if they are to be recorded."""
    rounds: list[Round] = []
    while loop.running:
        for done in loop.round():
            if record:
                rounds.append(done)
            if on_token is not None:
                on_token(done.row, done.emitted)
            if on_counts is not None:
                on_counts(counts_of(done, len(loop.sequences[done.row].tokens)))
            if on_round is not None:
                on_round(done)
    return rounds


@torch.inference_mode()
def plain_generate(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    stop: Stop | Sequence[Stop] | None = None,
    engine: Engine | None = None,
    output_scores: bool = False,
    output_logprobs: bool = False,
    output_logits: bool = False,
) -> Generation:
    """One token per forward, one sequence after the other, with transformers' own cache: the slow
    twin. With an engine, the same by that engine, all sequences together.

    Args:
        target: the model.
        prompts: B lists of token ids.
        max_new_tokens: per sequence.
        sampling: None is greedy.
        stop: None is the target's end-of-sequence tokens.
        engine: runs the target; None is the target itself, without any of this project's caches.
        output_scores: fill `Generation.scores`.
        output_logprobs: fill `Generation.logprobs`.
        output_logits: fill `Generation.logits`.

    Raises:
        ValueError: empty prompt, or no room within the target's positions.
    """
    keep = Keep(output_scores, output_logprobs, output_logits)
    texts = new_texts(target, prompts, max_new_tokens, sampling, stop, keep, "match")
    if engine is not None:
        return _without_drafts(_engine(target, engine), texts)
    timer, forwards = PhaseTimer(target.device), 0
    for text in texts:
        cache = DynamicCache(config=target.model.config)
        pending, phase = list(text.tokens), "prefill"
        while text.running:
            with timer.phase(phase):
                ids = torch.tensor([pending], device=target.device)
                logits = target.forward(ids, cache=cache, logits_to_keep=1).logits[0, -1]
            started = time.perf_counter()
            forwards += phase == "target"
            text.draw_first(logits)
            pending, phase = text.tokens[-1:], "target"
            timer.seconds["sample"] += time.perf_counter() - started
    seconds = {
        **timer.seconds,
        "total": timer.seconds["target"] + timer.seconds.pop("sample", 0.0),
    }
    return _generation(texts, AcceptanceStats(), seconds, forwards, [])


def _engine(target: TargetModel, engine: Engine | None) -> Engine:
    if engine is None:
        return EagerEngine(target)
    if engine.target is not target:
        raise ValueError("engine: it runs another target; build one for this target")
    return engine


def _on_device(
    engine: DeviceEngine,
    proposer: Proposer,
    texts: list[Text],
    rule: str,
    timer: PhaseTimer,
    on_token: OnToken | None,
    on_counts: OnCounts | None,
) -> Generation:
    """Whole rounds on the device.

    Raises:
        ValueError: something is to be kept of every token that the host never sees.
    """
    if texts[0].keep != Keep():
        raise ValueError(
            "output_scores, output_logprobs, output_logits: engine 'device' hands over tokens "
            "alone; use 'packed'"
        )
    check_tree_support(engine)
    start = time.perf_counter()
    stats, forwards = device_generate(engine, proposer, texts, rule, timer, on_token, on_counts)
    total = time.perf_counter() - start - timer.seconds["prefill"]
    return _generation(texts, stats, {**timer.seconds, "total": total}, forwards, [])


def _without_drafts(engine: Engine, texts: list[Text]) -> Generation:
    """Plain decoding by an engine; no part of it is shared with verification."""
    check_tree_support(engine)
    timer, forwards = PhaseTimer(engine.target.device), 0
    longest, limit = max(len(text.tokens) for text in texts), max(text.limit for text in texts)
    cache = engine.new_cache(len(texts), longest + min(limit - longest, 4 * BLOCK) + 64)
    with timer.phase("prefill"):
        prompts = [list(text.tokens) for text in texts]
        outputs = append_prompts(engine.target, cache, prompts, (), engine.append)
        for text, out in zip(texts, outputs, strict=True):
            text.draw_first(out.logits[0])
    start, live = time.perf_counter(), list(range(len(texts)))
    root, itself = torch.zeros(1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    while running := [place for place, row in enumerate(live) if texts[row].running]:
        cache.select(running)
        live = [live[place] for place in running]
        count, tokens = len(live), [torch.tensor(texts[row].tokens[-1:]) for row in live]
        with timer.phase("target"):
            out = engine.append(cache, tokens, [root] * count, [itself] * count)
        cache.commit([[0]] * count)
        forwards += 1
        for place, row in enumerate(live):
            texts[row].draw_first(out.logits[place, 0])
    seconds = {**timer.seconds, "total": time.perf_counter() - start}
    return _generation(texts, AcceptanceStats(), seconds, forwards, [])


def _check_drafts(proposer: Proposer, rule: str) -> None:
    """Refuse a rule that does not exist or that the proposer's trees do not suit."""
    if not isinstance(proposer, Proposer):
        raise ValueError(
            f"proposer must be a Proposer, got {type(proposer).__name__}: for a trained head it is "
            "inference.proposers.build_proposer(head)"
        )
    if rule not in ALL_RULES:
        raise ValueError(f"rule must be one of {', '.join(ALL_RULES)}; got {rule!r}")
    if rule == "block" and not proposer.chains:
        raise ValueError(
            f"rule 'block' verifies chains, and {type(proposer).__name__} drafts trees: let it "
            "draft one child per node (branch 1, top_k 1, width 1), or use rule 'rejection'"
        )


def _generation(
    texts: list[Text],
    stats: AcceptanceStats,
    seconds: dict[str, float],
    forwards: int,
    rounds: list[Round],
) -> Generation:
    kept = texts[0].keep
    return Generation(
        sequences=[text.tokens[text.prompt_length :] for text in texts],
        reasons=[str(text.reason) for text in texts],
        stats=stats,
        seconds=seconds,
        num_forwards=forwards,
        rounds=rounds,
        scores=[torch.stack(text.scores) for text in texts] if kept.scores else [],
        logprobs=[text.logprobs for text in texts] if kept.logprobs else [],
        logits=[torch.stack(text.logits) for text in texts] if kept.logits else [],
    )
