"""Decoding with whole rounds on the device: prompts and texts are the host's, rounds are not.

Letters: B sequences, T prompt tokens, E end tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters import TargetModel
from inference.append import append_prompts
from inference.counts import RoundCounts
from inference.decoding import Text
from inference.proposers.base import Proposer
from inference.proposers.heads import HeadProposer
from inference.proposers.laws import draft_law, proposal_kind
from inference.proposers.options import TreeOptions
from inference.sampling import SamplingParams
from inference.static.accept import EOS, LENGTH, STATIC_RULES, check_ended
from inference.static.draft_build import build_static_drafter
from inference.static.engine import StaticEngine
from inference.static.graphs import CudaCapture
from inference.static.growth import DraftLaw
from inference.static.laws import warpers_of
from inference.static.noise import seed_words
from inference.static.report import Report
from inference.static.rounds import Rounds, RoundState, Rule
from inference.static.sizes import Chooser, SizedProposer
from inference.static.words import MOST_ROWS
from inference.stats import AcceptanceStats
from inference.timing import PhaseTimer

ROUNDED = 1024
"""Capacities are multiples of it, so that texts of similar length share a captured round."""
KEPT = 4
"""Rounds kept; each holds a cache of its own."""
REASONS = {EOS: "eos", LENGTH: "length"}
INSTEAD = "use engine='packed', whose rounds are the host's"
OnToken = Callable[[int, list[int]], None]
OnCounts = Callable[[RoundCounts], None]


class DeviceEngine(StaticEngine):
    """A `StaticEngine` that also drafts, accepts and commits on the device.

    What rounds are made for (head, trees, rule, sampling, batch, capacity) is kept, so that later
    calls with the same find their graph captured. Without drafts, or for what rounds on the device
    cannot do, it is refused rather than slow.

    Args:
        target: whose weights do not change while the engine is open.
        compiled: as for `StaticEngine`.
        pack: as for `StaticEngine`.
    """

    def __init__(
        self, target: TargetModel, compiled: bool = False, pack: bool | None = None
    ) -> None:
        super().__init__(target, compiled, pack)
        self.name = "device"
        self._rounds: dict[tuple[Any, ...], Rounds] = {}

    def close(self) -> None:
        """Unpack, and free caches and graphs."""
        self._rounds.clear()
        super().close()

    def rounds(self, proposer: Proposer, texts: Sequence[Text], rule: str) -> Rounds:
        """Rounds for a batch of texts, made or found.

        Args:
            proposer: of a trained head, of one size or several.
            texts: B, with nothing decoded yet.
            rule: of acceptance.

        Raises:
            ValueError: what cannot be done on the device; the message says what to use instead.
        """
        head, sizes = check_device(proposer, texts, rule)
        params = [text.sampler.params for text in texts]
        ends = sorted(texts[0].stopper.eos_token_ids)
        capacity = max(text.limit for text in texts)
        found = self.rounds_for(head, sizes, params, rule, len(ends), capacity)
        found.restart(seed_words([p.seed for p in params]), torch.tensor(ends, dtype=torch.int64))
        return found

    def rounds_for(
        self,
        head: HeadProposer,
        sizes: Sequence[TreeOptions],
        params: Sequence[SamplingParams],
        rule: str,
        ends: int,
        capacity: int,
    ) -> Rounds:
        """Rounds of a batch, made or found, that still have their last text.

        Args:
            head: the head's proposer.
            sizes: of the trees, one for each kind of round.
            params: of B sequences.
            rule: of acceptance.
            ends: tokens that end a text.
            capacity: longest text; more is allocated.
        """
        capacity = -(-capacity // ROUNDED) * ROUNDED
        warpers_of(params)  # refuses what has no static form, also where rounds are kept
        kinds = tuple((p.temperature, p.top_k, p.top_p, p.min_p) for p in params)
        trees = tuple(map(_told_apart, sizes))
        key = (id(head.drafter), trees, rule, kinds, ends, capacity)
        if key not in self._rounds:
            while len(self._rounds) >= KEPT:
                del self._rounds[next(iter(self._rounds))]
            self._rounds[key] = self._new_rounds(head, sizes, params, rule, ends, capacity)
        found = self._rounds[key] = self._rounds.pop(key)  # the last to go
        return found

    def forget(self, rounds: Rounds) -> None:
        """Free what rounds hold that will not be asked for again."""
        self._rounds = {key: one for key, one in self._rounds.items() if one is not rounds}

    def _new_rounds(
        self,
        head: HeadProposer,
        sizes: Sequence[TreeOptions],
        params: Sequence[SamplingParams],
        rule: str,
        ends: int,
        capacity: int,
    ) -> Rounds:
        device, vocab = self.shape.device, head.drafter.draft_vocab
        self.prepare(head.drafter)
        state = RoundState.empty(len(params), ends, device)
        factor = head.options.draft_temperature or 1.0
        law = DraftLaw(
            proposal_kind(rule, params[0], head.draws),
            warpers_of([draft_law(p, factor) for p in params], device),
            state.seeds,
            state.lengths,
            head.options.sharpness,
            vocab,
        )
        rows = 1 + max(options.longest for options in sizes)
        drafters = [
            build_static_drafter(
                head.drafter, options, law, capacity, max_depth=state.max_depth, new_rows=rows
            )
            for options in sizes
        ]
        cache = self.new_cache(len(params), capacity + MOST_ROWS)
        how = Rule(rule, warpers_of(params, device), vocab)
        return Rounds(self, cache, drafters, state, how, self._capture())

    def _capture(self) -> CudaCapture | None:
        """Of one batch's rounds; their graphs share no memory with another batch's."""
        if self.shape.device.type != "cuda":
            return None
        return CudaCapture(
            self.shape.device,
            f"engine 'device': a round on target {self.target.name!r}",
            "decode with engine='packed'",
        )


def head_and_sizes(proposer: Proposer) -> tuple[HeadProposer, list[TreeOptions]]:
    """The head that drafts, and what it may draft in a round.

    Args:
        proposer: of a trained head, of one size or several.

    Raises:
        ValueError: it is of something else.
    """
    if isinstance(proposer, SizedProposer):
        return proposer.head, proposer.sizes
    if isinstance(proposer, HeadProposer):
        return proposer, [proposer.options]
    raise ValueError(
        f"engine 'device' drafts with trained heads, not {type(proposer).__name__}: {INSTEAD}"
    )


def _told_apart(options: TreeOptions) -> tuple[Any, ...]:
    """Equal for equal trees; two shapes of the same paths are not."""
    paths = None if options.shape is None else tuple(options.shape.paths())
    return replace(options, shape=None), paths


def check_device(
    proposer: Proposer, texts: Sequence[Text], rule: str
) -> tuple[HeadProposer, list[TreeOptions]]:
    """Refuse what rounds on the device cannot do.

    Args:
        proposer: where drafts come from.
        texts: to be decoded.
        rule: of acceptance.

    Returns:
        The head that drafts, and what it may draft in a round.

    Raises:
        ValueError: naming the argument.
    """
    found = head_and_sizes(proposer)
    if rule not in STATIC_RULES:
        raise ValueError(
            f"engine 'device' has the rules {', '.join(STATIC_RULES)}, not {rule!r}: {INSTEAD}"
        )
    if not all(text.stopper.only_tokens for text in texts):
        raise ValueError(f"stop: engine 'device' stops at tokens and lengths only: {INSTEAD}")
    if len({text.stopper.eos_token_ids for text in texts}) > 1:
        raise ValueError(f"stop: engine 'device' has one set of tokens for a batch: {INSTEAD}")
    if len({text.sampler.params.temperature > 0 for text in texts}) > 1:
        raise ValueError(
            f"sampling: engine 'device' decodes a batch greedily or sampled, not both: {INSTEAD}"
        )
    return found


def device_generate(
    engine: DeviceEngine,
    proposer: Proposer,
    texts: Sequence[Text],
    rule: str,
    timer: PhaseTimer,
    on_token: OnToken | None = None,
    on_counts: OnCounts | None = None,
) -> tuple[AcceptanceStats, int]:
    """Decode texts to their ends.

    Args:
        engine: whose rounds are run.
        proposer: of a trained head, of one size or several.
        texts: B, changed in place.
        rule: of acceptance.
        timer: of the phases "prefill" and "round".
        on_token: called with (row, new tokens).
        on_counts: called with what a round did, after `on_token`.

    Returns:
        What was accepted, and how many rounds there were.
    """
    rounds = engine.rounds(proposer, texts, rule)
    chooser = proposer.chooser if isinstance(proposer, SizedProposer) else None
    if chooser is not None:
        chooser.start(rule, texts[0].sampler.params.temperature, len(texts))
    with timer.phase("prefill"):
        _prefill(engine, rounds, texts)
    if on_token is not None:
        for row, text in enumerate(texts):
            on_token(row, text.tokens[-1:])
    stats, forwards = AcceptanceStats(), 0
    while any(text.running for text in texts):
        kind = 0 if chooser is None else _choice(chooser, texts)
        with timer.phase("round"):
            reports = rounds.run(kind)
        forwards += 1
        outcomes = []
        for row, (text, found) in enumerate(zip(texts, reports, strict=True)):
            if text.running:
                done = _take(row, text, found, stats)
                if on_token is not None:
                    on_token(row, done.emitted)
                if on_counts is not None:
                    on_counts(done)
                if text.running:
                    outcomes.append(found.outcome)
        if chooser is not None and outcomes:
            chooser.observe(outcomes)
    return stats, forwards


def _choice(chooser: Chooser, texts: Sequence[Text]) -> int | None:
    """The kind of the next round."""
    running = [text for text in texts if text.running]
    context = sum(len(text.tokens) for text in running) / len(running)
    room = max(text.limit - len(text.tokens) - 1 for text in running)
    return chooser.choose(context, len(texts), room)


def _prefill(engine: DeviceEngine, rounds: Rounds, texts: Sequence[Text]) -> None:
    """Run the prompts through target and head, and emit each text's first token."""
    prompts = [list(text.tokens) for text in texts]
    layers = rounds.drafter.feature_layers
    outputs = append_prompts(engine.target, rounds.cache, prompts, layers, engine.append)
    for text, out in zip(texts, outputs, strict=True):
        text.draw_first(out.logits[0])
    device, longest = engine.shape.device, max(map(len, prompts))
    tokens = [F.pad(torch.tensor(x.tokens[1:]), (0, longest - len(x.tokens) + 1)) for x in texts]
    features = [_padded(out.features, longest) for out in outputs if out.features is not None]
    lengths = [len(prompt) for prompt in prompts]
    committed = rounds.drafter.prefill(
        torch.stack(features) if features else None,
        torch.stack([_padded(out.last_hidden, longest) for out in outputs]),
        torch.stack(tokens).to(device),
        torch.tensor(lengths, device=device),
    )
    left = [text.limit - len(text.tokens) if text.running else 0 for text in texts]
    rounds.begin(committed, lengths, left)


def _padded(rows: Tensor, count: int) -> Tensor:
    """(n, ...) -> (count, ...), zeros behind."""
    return F.pad(rows, (0, 0, 0, count - len(rows)))


def _take(row: int, text: Text, found: Report, stats: AcceptanceStats) -> RoundCounts:
    """What a round did to a text, which goes on with it."""
    check_ended(found.ended)
    leaf = found.offered[-1] == 0
    done = RoundCounts(
        row, len(text.tokens), found.drafted, found.depth, found.accepted, found.tokens, leaf
    )
    text.tokens += found.tokens
    text.reason = REASONS.get(found.ended)
    stats.add_round(done.depth, done.draft_tokens, done.accepted, len(done.emitted))
    return done
