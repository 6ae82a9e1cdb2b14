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
from inference.decoding import Text
from inference.proposers.base import Proposer
from inference.proposers.heads import HeadProposer
from inference.proposers.laws import draft_law, proposal_kind
from inference.static.accept import EOS, LENGTH, STATIC_RULES, check_ended
from inference.static.draft_build import build_static_drafter
from inference.static.engine import StaticEngine
from inference.static.graphs import CudaCapture
from inference.static.growth import DraftLaw
from inference.static.laws import warpers_of
from inference.static.noise import seed_words
from inference.static.rounds import Rounds, RoundState, Rule
from inference.static.words import MOST_ROWS
from inference.stats import AcceptanceStats
from inference.timing import PhaseTimer

ROUNDED = 1024
"""Capacities are multiples of it, so that texts of similar length share a captured round."""
KEPT = 4
"""Rounds kept; each holds a cache of its own."""
REASONS = {EOS: "eos", LENGTH: "length"}
OnToken = Callable[[int, list[int]], None]


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
            proposer: of a trained head.
            texts: B, with nothing decoded yet.
            rule: of acceptance.

        Raises:
            ValueError: what cannot be done on the device; the message says what to use instead.
        """
        head = check_device(proposer, texts, rule)
        params = [text.sampler.params for text in texts]
        ends = sorted(texts[0].stopper.eos_token_ids)
        capacity = -(-max(text.limit for text in texts) // ROUNDED) * ROUNDED
        warpers_of(params)  # refuses what has no static form, also where rounds are kept
        kinds = tuple((p.temperature, p.top_k, p.top_p, p.min_p) for p in params)
        shape = head.options.shape  # two of the same paths are not equal
        paths = None if shape is None else tuple(shape.paths())
        trees = (replace(head.options, shape=None), paths)
        key = (id(head.drafter), trees, rule, kinds, len(ends), capacity)
        if key not in self._rounds:
            while len(self._rounds) >= KEPT:
                del self._rounds[next(iter(self._rounds))]
            self._rounds[key] = self._new_rounds(head, texts, rule, capacity)
        found = self._rounds[key] = self._rounds.pop(key)  # the last to go
        found.restart(seed_words([p.seed for p in params]), torch.tensor(ends, dtype=torch.int64))
        return found

    def _new_rounds(
        self, head: HeadProposer, texts: Sequence[Text], rule: str, capacity: int
    ) -> Rounds:
        device, params = self.shape.device, [text.sampler.params for text in texts]
        state = RoundState.empty(len(texts), len(texts[0].stopper.eos_token_ids), device)
        options, vocab = head.options, head.drafter.draft_vocab
        factor = options.draft_temperature or 1.0
        law = DraftLaw(
            proposal_kind(rule, params[0], head.draws),
            warpers_of([draft_law(p, factor) for p in params], device),
            state.seeds,
            state.lengths,
            options.sharpness,
            vocab,
        )
        drafter = build_static_drafter(
            head.drafter, options, law, capacity, max_depth=state.max_depth
        )
        cache = self.new_cache(len(texts), capacity + MOST_ROWS)
        children = options.top_k
        if options.shape is not None:
            children = max(map(len, options.shape.children))
        how = Rule(rule, warpers_of(params, device), children, vocab)
        return Rounds(self, cache, drafter, state, how, self._capture())

    def _capture(self) -> CudaCapture | None:
        """Of one batch's rounds; their graphs share no memory with another batch's."""
        if self.shape.device.type != "cuda":
            return None
        return CudaCapture(
            self.shape.device,
            f"engine 'device': a round on target {self.target.name!r}",
            "decode with engine='packed'",
        )


def check_device(proposer: Proposer, texts: Sequence[Text], rule: str) -> HeadProposer:
    """Refuse what rounds on the device cannot do.

    Args:
        proposer: where drafts come from.
        texts: to be decoded.
        rule: of acceptance.

    Raises:
        ValueError: naming the argument.
    """
    instead = "use engine='packed', whose rounds are the host's"
    if not isinstance(proposer, HeadProposer):
        raise ValueError(
            f"engine 'device' drafts with trained heads, not {type(proposer).__name__}: {instead}"
        )
    if rule not in STATIC_RULES:
        raise ValueError(
            f"engine 'device' has the rules {', '.join(STATIC_RULES)}, not {rule!r}: {instead}"
        )
    if not all(text.stopper.only_tokens for text in texts):
        raise ValueError(f"stop: engine 'device' stops at tokens and lengths only: {instead}")
    if len({text.stopper.eos_token_ids for text in texts}) > 1:
        raise ValueError(f"stop: engine 'device' has one set of tokens for a batch: {instead}")
    if len({text.sampler.params.temperature > 0 for text in texts}) > 1:
        raise ValueError(
            f"sampling: engine 'device' decodes a batch greedily or sampled, not both: {instead}"
        )
    return proposer


def device_generate(
    engine: DeviceEngine,
    proposer: Proposer,
    texts: Sequence[Text],
    rule: str,
    timer: PhaseTimer,
    on_token: OnToken | None = None,
) -> tuple[AcceptanceStats, int]:
    """Decode texts to their ends.

    Args:
        engine: whose rounds are run.
        proposer: of a trained head.
        texts: B, changed in place.
        rule: of acceptance.
        timer: of the phases "prefill" and "round".
        on_token: called with (row, new tokens).

    Returns:
        What was accepted, and how many rounds there were.
    """
    rounds = engine.rounds(proposer, texts, rule)
    with timer.phase("prefill"):
        _prefill(engine, rounds, texts)
    if on_token is not None:
        for row, text in enumerate(texts):
            on_token(row, text.tokens[-1:])
    stats, forwards = AcceptanceStats(), 0
    while any(text.running for text in texts):
        with timer.phase("round"):
            reports = rounds.run()
        forwards += 1
        for row, (text, found) in enumerate(zip(texts, reports, strict=True)):
            if text.running:
                new = _take(text, found, stats)
                if on_token is not None:
                    on_token(row, new)
    return stats, forwards


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


def _take(text: Text, found: list[int], stats: AcceptanceStats) -> list[int]:
    """What a round emitted for a text; see `inference.static.rounds.report`."""
    accepted, ended, depth, drafted, *tokens = found
    check_ended(ended)
    new = [token for token in tokens if token >= 0]
    text.tokens += new
    text.reason = REASONS.get(ended)
    stats.add_round(depth, drafted, accepted, len(new))
    return new
