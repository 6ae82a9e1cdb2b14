"""The rounds of speculative decoding: draft, verify, commit.

Legend: B sequences still running, T prompt, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inference.append import append_prompts
from inference.cache import BLOCK
from inference.engine import Engine
from inference.laws import tree_laws
from inference.processors import Sampler
from inference.proposers.base import Proposer, Resume, RowState, Session
from inference.stats import AcceptanceStats
from inference.stopping import Stopper
from inference.timing import PhaseTimer
from inference.tree import TokenTree
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
        chances: per node the target's probability of its token behind its parent, under the law
            that decided; None for the root and where it was not asked. None unless traced.
    """

    row: int
    tree: TokenTree
    accepted: list[int]
    next_token: int | None
    all_accepted: bool
    chances: list[float | None] | None = None

    @property
    def path(self) -> list[int]:
        """The accepted nodes, from the root down, without it."""
        nodes = [0]
        for token in self.accepted:
            nodes.append(_child(self.tree, nodes[-1], token))
        return nodes[1:]

    @property
    def emitted(self) -> list[int]:
        """Tokens this round added to the output."""
        return self.accepted + ([] if self.next_token is None else [self.next_token])


@dataclass
class Keep:
    """What of each emitted token's law is kept, beside the token.

    Attributes:
        scores: the scores it was chosen by, after processors and warpers, as `generate`'s.
        logprobs: its log-probability under the target's own logits.
        logits: the target's own logits.
        chances: not of emitted tokens but of all that were drafted: `Round.chances`.
    """

    scores: bool = False
    logprobs: bool = False
    logits: bool = False
    chances: bool = False


@dataclass
class Text:
    """One sequence of a decoding call.

    Attributes:
        tokens: prompt and what was emitted.
        prompt_length: how many were given.
        limit: longest text.
        sampler: turns logits into laws.
        stopper: tells the end.
        keep: what is recorded.
        reason: why it ended ("eos", "stop", "length"); None while it runs.
        state: for the proposer; None once it has ended.
        scores: (V,) per emitted token, if kept.
        logprobs: per emitted token, if kept.
        logits: (V,) per emitted token, if kept.
        chances: of the nodes of the last round, if kept.
    """

    tokens: list[int]
    prompt_length: int
    limit: int
    sampler: Sampler
    stopper: Stopper
    keep: Keep
    reason: str | None = None
    state: RowState | None = None
    scores: list[Tensor] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    chances: list[float | None] | None = None

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.reason is None

    def draw_first(self, logits: Tensor) -> None:
        """Emit the token after the prompt from its logits (V,)."""
        found = self.sampler.scores(logits, self.tokens)
        token = self.sampler.draw(found, len(self.tokens))
        self.record(token, found, logits)
        self.tokens.append(token)
        self.reason = self.stopper.ended(self.tokens)

    def verify(self, tree: TokenTree, logits: Tensor, rule: str) -> Verdict:
        """Walk down the tree, emit, and note whether the text has ended.

        Args:
            tree: drafted.
            logits: (N, V) of its nodes.
            rule: of acceptance.
        """
        start, last = len(self.tokens), 0  # the last node emitted so far
        laws = tree_laws(self.sampler, tree, logits, self.tokens, rule)

        def ended(path: list[int]) -> bool:
            nonlocal last
            laws.settle(last)
            last = _child(tree, last, path[-1])
            self.reason = self.stopper.ended(self.tokens[:start] + path)
            return self.reason is not None

        seed = self.sampler.params.seed
        verdict = verify(tree, laws.law, rule, seed, start - 1, ended=ended, draw=laws.draw)
        emitted = [tree.token(node) for node in verdict.path]
        if verdict.next_token is not None:
            laws.settle(last)
            emitted.append(verdict.next_token)
        for token, node in zip(emitted, [0, *verdict.path], strict=False):
            self.record(token, laws.scores[node], logits[node])
        if self.keep.chances:
            self.chances = laws.chances()
        self.tokens += emitted
        if verdict.next_token is not None:
            self.reason = self.stopper.ended(self.tokens)
        return verdict

    def record(self, token: int, scores: Tensor, logits: Tensor) -> None:
        """Keep what was asked for of one emitted token."""
        if self.keep.scores:
            self.scores.append(scores.clone())
        if self.keep.logprobs:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            self.logprobs.append(float(wide.log_softmax(-1)[token]))
        if self.keep.logits:
            self.logits.append(logits.clone())

    def hand_over(self, features: Tensor | None, hidden: Tensor) -> None:
        """State for the next round, with the target's hidden states of what was committed."""
        if not self.running:
            self.state = None
            return
        room = self.limit - len(self.tokens) - 1  # the target adds a token of its own
        self.state = RowState(
            self.tokens, self.prompt_length, features, hidden, room, self.sampler.params
        )


class Decoding:
    """State of one speculative call.

    Args:
        engine: runs the target.
        proposer: where drafts come from.
        sequences: what to decode.
        rule: of acceptance.
        timer: of the phases.
    """

    def __init__(
        self,
        engine: Engine,
        proposer: Proposer,
        sequences: Sequence[Text],
        rule: str,
        timer: PhaseTimer,
    ) -> None:
        self.engine, self.target = engine, engine.target
        self.proposer, self.sequences = proposer, list(sequences)
        self.rule, self.timer = rule, timer
        longest = max(len(sequence.tokens) for sequence in sequences)
        room = min(max(sequence.limit for sequence in sequences) - longest, 4 * BLOCK)
        cache = engine.new_cache(len(sequences), longest + room + 64)
        live = list(range(len(sequences)))
        self.session = Session(engine, cache, len(sequences), timer, rule, live)
        self.stats = AcceptanceStats()
        self.forwards = 0
        proposer.start(self.session)

    @property
    def running(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self.session.live)

    def prefill(self) -> None:
        """Run the prompts as chains and emit each sequence's first token."""
        prompts = [list(sequence.tokens) for sequence in self.sequences]
        layers = self.proposer.feature_layers
        outputs = append_prompts(
            self.target, self.session.cache, prompts, layers, self.engine.append
        )
        for sequence, out in zip(self.sequences, outputs, strict=True):
            sequence.draw_first(out.logits[0])
            sequence.hand_over(out.features, out.last_hidden)
        self._drop_ended()

    def round(self) -> list[Round]:
        """Draft, verify, commit; every running sequence emits at least one token."""
        run = self._trees()
        resume = self.proposer.resume()
        with self.timer.phase("target"):
            out = self.engine.append(
                self.session.cache,
                [tree.tokens for tree in run],
                [tree.depths for tree in run],
                [tree.ancestor_mask() for tree in run],
                feature_layers=self.proposer.feature_layers,
                **({} if resume is None else self._resumed(resume)),
            )
        self.forwards += 1
        rounds, kept = [], []
        with self.timer.phase("accept"):
            for place, (row, tree) in enumerate(zip(self.session.live, run, strict=True)):
                sequence = self.sequences[row]
                verdict = sequence.verify(tree, out.logits[place], self.rule)
                kept.append([0, *verdict.path])
                index = torch.tensor(kept[-1], device=out.last_hidden.device)
                features = None if out.features is None else out.features[place, index]
                sequence.hand_over(features, out.last_hidden[place, index])
                rounds.append(self._record(row, tree, verdict))
        with self.timer.phase("commit"):
            self.session.cache.commit(kept)
        self._drop_ended()
        return rounds

    def _trees(self) -> list[TokenTree]:
        """Of the running sequences. What drafting spends outside of networks is "build"."""
        seconds = self.timer.seconds
        before, start = seconds["draft"], time.perf_counter()
        trees = self.proposer.propose([sequence.state for sequence in self.sequences])
        run = [self._checked(trees[row]) for row in self.session.live]
        seconds["build"] += time.perf_counter() - start - (seconds["draft"] - before)
        return run

    def _checked(self, tree: TokenTree | None) -> TokenTree:
        """A running sequence needs a tree, if only its root, of tokens that the target has."""
        assert tree is not None, "no tree for a running sequence"
        largest = max(tree.token(node) for node in range(tree.num_nodes))
        if largest >= self.target.vocab_size:
            raise ValueError(
                f"{type(self.proposer).__name__} drafted token {largest}, but the target has "
                f"{self.target.vocab_size} tokens: was it built for another target?"
            )
        return tree

    def _resumed(self, resume: Resume) -> dict[str, Any]:
        """Go on where drafting left the nodes."""
        layers = range(resume.first_layer, self.target.num_layers)
        return {"run_layers": layers, "entering": resume.entering}

    def _record(self, row: int, tree: TokenTree, verdict: Verdict) -> Round:
        accepted = [tree.token(node) for node in verdict.path]
        emitted = len(accepted) + (verdict.next_token is not None)
        self.stats.add_round(tree.depth, tree.num_draft_tokens, len(accepted), emitted)
        leaf = verdict.path[-1] if verdict.path else 0
        bonus, chances = not tree.children(leaf), self.sequences[row].chances
        return Round(row, tree, accepted, verdict.next_token, bonus, chances)

    def _drop_ended(self) -> None:
        """Take sequences that have ended out of the batch: they cost nothing any more."""
        session = self.session
        ended = [row for row in session.live if not self.sequences[row].running]
        if not ended:
            return
        still = [place for place, row in enumerate(session.live) if row not in ended]
        if still:
            session.cache.select(still)
        else:  # whoever keeps the session keeps no keys and values
            session.cache.release()
        session.live[:] = [session.live[place] for place in still]
        for row in ended:
            self.proposer.finish(row, self.sequences[row].tokens)


def _child(tree: TokenTree, node: int, token: int) -> int:
    child = tree.child_with_token(node, token)
    assert child is not None, "only tokens of the tree are accepted"
    return child
