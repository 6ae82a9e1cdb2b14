"""Decoding: speculative, and plain as its slow twin.

``speculative_generate`` emits exactly what ``plain_generate`` emits with the same sampling
parameters (rules ``match`` and ``coupled``, any temperature), or samples from exactly the same law
(``rejection``). It runs any unmodified Hugging Face causal LM that ``TreeCache`` accepts.

Legend: B batch, T prompt, N tree nodes, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache

from drafters import TargetModel, TargetOutput
from inference.attention import mask_for, tree_attention_mask
from inference.cache import TreeCache
from inference.proposers.base import Proposer, RowState
from inference.sampling import SamplingParams, probabilities, sample
from inference.stats import AcceptanceStats
from inference.timing import PhaseTimer
from inference.tree import Proposal, TokenTree
from inference.verify import Verdict, verify


@dataclass(frozen=True)
class Round:
    """What one target forward did to one sequence.

    Attributes:
        row: sequence in the batch.
        tree: what was proposed.
        accepted: accepted draft tokens that reached the output.
        next_token: the recovered or bonus token, or None if the text ended before it.
        all_accepted: the walk ended at a leaf, so ``next_token`` is a bonus rather than a recovered
            token.
    """

    row: int
    tree: TokenTree
    accepted: list[int]
    next_token: int | None
    all_accepted: bool

    @property
    def emitted(self) -> list[int]:
        """Tokens this round added to the output."""
        return self.accepted + ([] if self.next_token is None else [self.next_token])


@dataclass
class Generation:
    """Result of a decoding call.

    Attributes:
        sequences: new tokens of each row, prompt excluded, end-of-sequence token included.
        stats: acceptance over all rounds (empty for plain decoding).
        seconds: wall-clock by phase: "prefill", "target", "draft", and "total" of everything after
            the prefill.
        num_forwards: target forwards after the prefill.
    """

    sequences: list[list[int]]
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    seconds: dict[str, float] = field(default_factory=dict)
    num_forwards: int = 0


OnRound = Callable[[Round], None]
OnToken = Callable[[int, list[int]], None]


@torch.inference_mode()
def speculative_generate(
    target: TargetModel,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    rule: str = "match",
    eos_token_ids: Sequence[int] | None = None,
    on_round: OnRound | None = None,
    on_token: OnToken | None = None,
) -> Generation:
    """Decode with drafts.

    Args:
        target: the model whose output it is.
        proposer: where drafts come from.
        prompts: B lists of token ids, of any lengths.
        max_new_tokens: per sequence.
        sampling: temperature, top-k, top-p, seed; None is greedy.
        rule: "match", "coupled" or "rejection".
        eos_token_ids: tokens that end a sequence; None takes the target's.
        on_round: called after every round of every sequence.
        on_token: called with (row, new tokens) as soon as they are known: once with the token of
            the prefill, then with those of each round, before `on_round`.

    Raises:
        ValueError: empty prompt, no room within the target's positions, unknown rule, unsupported
            layers.
    """
    sampling = sampling or SamplingParams()
    check_lengths(target, prompts, max_new_tokens)
    timer = PhaseTimer(target.device)
    proposer.start(len(prompts), timer)
    loop = _Decoding(target, proposer, prompts, max_new_tokens, sampling, rule, timer)
    loop.eos = frozenset(target.eos_token_ids if eos_token_ids is None else eos_token_ids)
    with timer.phase("prefill"):
        first = loop.prefill()
    start = time.perf_counter()
    if on_token is not None:
        for row, token in enumerate(first):
            on_token(row, [token])
    while not all(loop.finished):
        for done in loop.round():
            if on_token is not None:
                on_token(done.row, done.emitted)
            if on_round is not None:
                on_round(done)
    seconds = {**timer.seconds, "total": time.perf_counter() - start}
    new = [tokens[len(prompt) :] for tokens, prompt in zip(loop.tokens, prompts, strict=True)]
    return Generation(new, loop.stats, seconds, loop.forwards)


@torch.inference_mode()
def plain_generate(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    eos_token_ids: Sequence[int] | None = None,
) -> Generation:
    """One token per forward, one sequence after the other, with transformers' own cache: the slow
    twin.

    Args:
        target: the model.
        prompts: B lists of token ids.
        max_new_tokens: per sequence.
        sampling: None is greedy.
        eos_token_ids: None takes the target's.

    Raises:
        ValueError: empty prompt, or no room within the target's positions.
    """
    sampling = sampling or SamplingParams()
    check_lengths(target, prompts, max_new_tokens)
    eos = frozenset(target.eos_token_ids if eos_token_ids is None else eos_token_ids)
    timer = PhaseTimer(target.device)
    result = Generation([])
    for prompt in prompts:
        cache = DynamicCache(config=target.model.config)
        tokens, pending, phase = list(prompt), list(prompt), "prefill"
        while True:
            with timer.phase(phase):
                ids = torch.tensor([pending], device=target.device)
                logits = target.forward(ids, cache=cache, logits_to_keep=1).logits[0, -1]
            started = time.perf_counter()
            result.num_forwards += phase == "target"
            token = sample(probabilities(logits, sampling), sampling.seed, len(tokens))
            tokens.append(token)
            timer.seconds["sample"] += time.perf_counter() - started
            if token in eos or len(tokens) - len(prompt) == max_new_tokens:
                break
            pending, phase = [token], "target"
        result.sequences.append(tokens[len(prompt) :])
    result.seconds = {
        **timer.seconds,
        "total": timer.seconds["target"] + timer.seconds.pop("sample", 0.0),
    }
    return result


def check_lengths(
    target: TargetModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Refuse what cannot be decoded before any token is produced.

    Raises:
        ValueError: naming the argument.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("prompts: every prompt needs at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    longest = max(map(len, prompts)) + max_new_tokens
    if longest > target.max_length:
        raise ValueError(
            f"prompt plus max_new_tokens is {longest} tokens but the target's "
            f"max_position_embeddings is {target.max_length}: shorten the prompt or lower "
            "max_new_tokens"
        )


class _Decoding:
    """State of one speculative call."""

    eos: frozenset[int]

    def __init__(
        self,
        target: TargetModel,
        proposer: Proposer,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: SamplingParams,
        rule: str,
        timer: PhaseTimer,
    ) -> None:
        self.target, self.proposer, self.sampling, self.rule, self.timer = (
            target,
            proposer,
            sampling,
            rule,
            timer,
        )
        self.tokens = [list(prompt) for prompt in prompts]
        self.limits = [len(prompt) + max_new_tokens for prompt in prompts]
        self.finished = [False] * len(prompts)
        capacity = max(self.limits) + 64
        self.cache = TreeCache(target.model.config, len(prompts), capacity)
        self.states: list[RowState | None] = [None] * len(prompts)
        self.stats = AcceptanceStats()
        self.forwards = 0

    def prefill(self) -> list[int]:
        """Run the prompts as chains, emit and return each row's first token."""
        width = max(map(len, self.tokens))
        masks = [torch.ones(len(row), len(row), dtype=torch.bool).tril() for row in self.tokens]
        rows = [torch.tensor(row) for row in self.tokens]
        positions = [torch.arange(len(row)) for row in self.tokens]
        last = torch.tensor([len(row) - 1 for row in self.tokens])
        out = self._forward(rows, positions, masks, width, logits_to_keep=last.unique())
        self.cache.commit([range(len(row)) for row in self.tokens])
        column = {int(index): place for place, index in enumerate(last.unique())}
        for row, tokens in enumerate(self.tokens):
            length = len(tokens)
            law = probabilities(out.logits[row, column[length - 1]], self.sampling)
            token = sample(law, self.sampling.seed, length)
            features = None if out.features is None else out.features[row, :length]
            self._advance(row, [token], features, out.last_hidden[row, :length])
        return [tokens[-1] for tokens in self.tokens]

    def round(self) -> list[Round]:
        """Draft, verify, commit; every unfinished row emits at least one token."""
        trees = self.proposer.propose(self.states, self.sampling, self.rule)
        device = self.target.device
        ended = TokenTree(torch.zeros(1, dtype=torch.int64), torch.tensor([-1]), Proposal.ONE_HOT)
        run = [tree or ended for tree in trees]
        width = max(tree.num_nodes for tree in run)
        positions = [
            len(t) - 1 + tree.depths.to("cpu") for t, tree in zip(self.tokens, run, strict=True)
        ]
        masks = [tree.ancestor_mask() for tree in run]
        with self.timer.phase("target"):
            out = self._forward([tree.tokens for tree in run], positions, masks, width)
        self.forwards += 1
        verdicts = [self._verify(row, tree, out.logits) for row, tree in enumerate(trees)]
        kept = [[] if verdict is None else [0, *verdict.path] for verdict in verdicts]
        self.cache.commit(kept)
        rounds = []
        for row, (tree, verdict) in enumerate(zip(trees, verdicts, strict=True)):
            if tree is None or verdict is None:
                continue
            index = torch.tensor(kept[row], device=device)
            features = None if out.features is None else out.features[row, index]
            rounds.append(self._record(row, tree, verdict, features, out.last_hidden[row, index]))
        return rounds

    def _verify(self, row: int, tree: TokenTree | None, logits: Tensor) -> Verdict | None:
        if tree is None:
            return None
        position = len(self.tokens[row]) - 1
        return verify(
            tree,
            lambda node: probabilities(logits[row, node], self.sampling),
            self.rule,
            self.sampling.seed,
            position,
        )

    def _record(
        self, row: int, tree: TokenTree, verdict: Verdict, features: Tensor | None, hidden: Tensor
    ) -> Round:
        drafts = [tree.token(node) for node in verdict.path]
        emitted = self._advance(row, [*drafts, verdict.next_token], features, hidden)
        accepted = drafts[: len(emitted)]  # what lies behind the end of the text does not count
        self.stats.add_round(
            int(tree.depths.max()), tree.num_draft_tokens, len(accepted), len(emitted)
        )
        leaf = verdict.path[-1] if verdict.path else 0
        bonus = verdict.next_token if len(emitted) > len(drafts) else None
        return Round(row, tree, accepted, bonus, not tree.children(leaf))

    def _advance(
        self, row: int, new: list[int], features: Tensor | None, hidden: Tensor
    ) -> list[int]:
        """Append ``new`` up to the end of the text; returns what was appended."""
        room = self.limits[row] - len(self.tokens[row])
        ends = [place + 1 for place, token in enumerate(new) if token in self.eos]
        emitted = new[: min([room, *ends])]
        self.tokens[row] += emitted
        left = self.limits[row] - len(self.tokens[row])
        self.finished[row] = left == 0 or emitted[-1] in self.eos
        self.states[row] = (
            None if self.finished[row] else RowState(self.tokens[row], features, hidden, left - 1)
        )
        return emitted

    def _forward(
        self,
        tokens: Sequence[Tensor],
        positions: Sequence[Tensor],
        masks: Sequence[Tensor],
        width: int,
        logits_to_keep: int | Tensor = 0,
    ) -> TargetOutput:
        """Append rows to the cache: B lists of up to ``width`` rows, padded."""
        device = self.target.device
        ids = torch.zeros(len(tokens), width, dtype=torch.int64, device=device)
        places = torch.zeros_like(ids)
        for row, (some, where) in enumerate(zip(tokens, positions, strict=True)):
            ids[row, : len(some)] = some.to(device)
            places[row, : len(where)] = where.to(device)
        mask = tree_attention_mask(
            self.cache.lengths, [m.to(device) for m in masks], self.cache.columns(width)
        )
        return self.target.forward(
            ids,
            attention_mask=mask_for(self.target.config, mask, self.target.dtype),
            position_ids=places,
            cache=self.cache,
            feature_layers=self.proposer.feature_layers,
            logits_to_keep=logits_to_keep,
        )
