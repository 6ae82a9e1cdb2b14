"""One teacher-forced pass over a text: how often drafts made along it would be accepted.

The target sees the whole text at once, without a cache. At every position a round is drafted by the
code that the decoder drafts with, from the target's hidden states of that pass. What the round
would accept follows from laws and text alone, without verifying anything
(`inference.prediction.survival`). So it shares with the decoder the head's drafting, and neither
the target's cache, tree attention, commits and verification, nor the coins.

Letters: m tokens that rounds emit, K depths, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from drafters import TargetModel
from inference.engine import EagerEngine
from inference.prediction.survival import (
    chain_survival,
    drawn_survival,
    path_survival,
    share_of,
)
from inference.prediction.text import MEASURES, Answer, Look, TextLaws
from inference.proposers import HeadProposer, RowState
from inference.proposers.base import Session
from inference.proposers.laws import draft_law, proposal_kind
from inference.sampling import SamplingParams, lowest_argmax, probabilities
from inference.shapes.rates import rank_of
from inference.timing import PhaseTimer
from inference.tree import DRAWN_KINDS, Proposal, TokenTree
from inference.verify import RULES

TREES = 4
"""Drawn trees per position whose weights are averaged."""


@torch.no_grad()
def look_at(
    target: TargetModel,
    proposer: HeadProposer,
    answer: Answer,
    rule: str,
    sizes: Sequence[int] = (),
) -> Look:
    """Draft along one text.

    Args:
        target: the model.
        proposer: of the head. It is left alone: copies of it draft.
        answer: the text.
        rule: of acceptance.
        sizes: other numbers of nodes that grown trees are tried with.
    """
    found = Look(answer, grown={size: [] for size in sizes})
    ids, start = [*answer.prompt, *answer.tokens], len(answer.prompt)
    if len(answer.tokens) < 2:
        return found
    device = target.device
    out = target.forward(
        torch.tensor([ids[:-1]], device=device),
        feature_layers=proposer.feature_layers,
        logits_to_keep=torch.arange(start, len(ids) - 1, device=device),
    )
    laws = TextLaws(answer, out.logits[0], target)
    drafting = Drafting(target, proposer, answer, rule, sizes)
    known = 0
    for place in range(len(answer.tokens) - 1):
        root = start + place
        features = None if out.features is None else out.features[0, known:root]
        room = start + answer.max_new_tokens - root - 2
        hidden = out.last_hidden[0, known:root]
        state = RowState(ids[: root + 1], start, features, hidden, room, answer.sampling)
        drafting.alongside(found, state, ids[root + 1 :], laws, place)
        drafting.trees(found, state, ids[root + 1 :], laws, place)
        _count_token(found, laws, place, ids[root + 1])
        laws.forget(place)
        known = root
    return found


def _count_token(found: Look, laws: TextLaws, place: int, token: int) -> None:
    """Is this token one that the target would emit?"""
    law = laws.soft(place)
    logs = law.clamp(min=1e-9).log()
    entropy = float(torch.special.entr(law).sum())
    found.surprise -= float(logs[token])
    found.entropy += entropy
    found.variance += max(float((law * logs**2).sum()) - entropy**2, 0.0)
    found.best += laws.best(place) == token


class Drafting:
    """What is drafted along one text.

    Args:
        target: the model.
        proposer: of the head.
        answer: the text.
        rule: of acceptance.
        sizes: other numbers of nodes that grown trees are tried with.

    Raises:
        ValueError: a rule that changes the output, or one whose drafts have no known chance.
    """

    def __init__(
        self,
        target: TargetModel,
        proposer: HeadProposer,
        answer: Answer,
        rule: str,
        sizes: Sequence[int],
    ) -> None:
        options, sampling = proposer.options, answer.sampling
        self.rule, self.options = rule, options
        self.kind = kind_of(proposer, rule, sampling)
        self.drawn = self.kind in DRAWN_KINDS
        self.by_formula = self.drawn and proposer.chains and not options.min_survival
        self.law = draft_law(sampling, options.draft_temperature or 1.0)
        self.soft = SamplingParams(1.0) if sampling.temperature == 0 else self.law
        self.vocab = proposer.drafter.draft_vocab
        self.depth = deepest(proposer)
        session = Session(EagerEngine(target), None, 1, PhaseTimer(target.device), rule, [0])

        def own(size: int | None = None) -> HeadProposer:
            other = copy.copy(proposer)
            if size is not None:
                other.options = replace(options, size=size)
            other.start(session)  # gives it caches of its own
            return other

        self.forced = own()
        self.growers = [] if self.by_formula else [own() for _ in range(TREES if self.drawn else 1)]
        self.others = {size: own(size) for size in sizes}

    def alongside(
        self, found: Look, state: RowState, following: list[int], laws: TextLaws, place: int
    ) -> None:
        """Drafts made given the text, at every depth, and what is theirs in common with it."""
        following = following[: self.depth]
        drafts = self.forced.forced(state, following[: self.depth - 1])
        rows: dict[str, list[float]] = {name: [] for name in MEASURES}
        alone: list[float] = []
        ratios: list[float] = []
        ranks: list[int | None] = []
        for depth, (logits, token) in enumerate(zip(drafts, following, strict=False)):
            ids = self._ids(logits)
            q, p = probabilities(logits, self.soft).double(), laws.soft(place + depth)
            best = int(ids[lowest_argmax(logits)])
            rows["overlap"].append(float(torch.minimum(p[ids], q).sum()))
            rows["p_of_draft"].append(float(p[best]))
            rows["agreement"].append(float(best == laws.best(place + depth)))
            if self.drawn:
                alone.append(rows["overlap"][-1])
                ratios.append(share_of(float(q[ids == token].sum()), float(p[token])))
            else:
                where, sharp = len(state.tokens) + depth, self.options.sharpness
                ranks.append(rank_of(logits, token, self.vocab, self.law, self.kind, where, sharp))
                alone.append(float(ranks[-1] == 0))
        for name in MEASURES:
            found.measures[name].append(rows[name])
        found.alone.append(alone)
        found.ranks.append(ranks)
        room = max(state.max_depth, 0)
        chain = (
            chain_survival(ratios, self.rule) if self.drawn else chain_survival(alone, "rejection")
        )
        found.chains.append(chain[:room])

    def trees(
        self, found: Look, state: RowState, following: list[int], laws: TextLaws, place: int
    ) -> None:
        """The drafts that the decoder would verify here."""
        if self.by_formula:
            chain = found.chains[-1]
            found.survival.append(chain)
            found.depths.append(float(min(self.depth, max(state.max_depth, 0))))
            found.rows.append(found.depths[-1] + 1.0)
            return
        grown = [
            grower.grow(0, self._reseeded(state, turn)) for turn, grower in enumerate(self.growers)
        ]
        found.survival.append(self._mean(grown, following, laws, place))
        found.depths.append(sum(float(tree.depths.max()) for tree in grown) / len(grown))
        found.rows.append(sum(tree.num_nodes for tree in grown) / len(grown))
        for size, grower in self.others.items():
            found.grown[size].append(self._mean([grower.grow(0, state)], following, laws, place))

    def _mean(
        self, trees: list[TokenTree], following: list[int], laws: TextLaws, place: int
    ) -> list[float]:
        weights = [
            drawn_survival(tree, following, laws, place)
            if self.drawn
            else path_survival(tree, following)
            for tree in trees
        ]
        most = max(map(len, weights))
        padded = [row + [0.0] * (most - len(row)) for row in weights]
        return [sum(column) / len(trees) for column in zip(*padded, strict=True)]

    def _reseeded(self, state: RowState, turn: int) -> RowState:
        """Other draws in each turn; what is not drawn keeps the seed that the target draws with."""
        if not self.drawn:
            return state
        sampling = replace(state.sampling, seed=state.sampling.seed + 7919 * turn)
        return replace(state, sampling=sampling)

    def _ids(self, logits: Tensor) -> Tensor:
        if self.vocab is not None:
            return self.vocab
        return torch.arange(len(logits), device=logits.device)


def kind_of(proposer: HeadProposer, rule: str, sampling: SamplingParams) -> Proposal:
    """How the head drafts in this cell.

    Raises:
        ValueError: a rule for which nothing is predicted.
    """
    if rule not in RULES:
        raise ValueError(
            f"rule {rule!r} changes the output, so that texts of the target are not the decoder's: "
            f"nothing is predicted for it; use one of {', '.join(RULES)}"
        )
    kind = proposal_kind(rule, sampling, proposer.draws)
    if rule == "block" and kind in DRAWN_KINDS and proposer.options.min_survival:
        raise ValueError(
            "min_survival (--min-confidence): nothing is predicted for it under rule 'block'; use "
            "'rejection', or leave it out"
        )
    return kind


def deepest(proposer: HeadProposer) -> int:
    """The longest path that the head's trees can have."""
    options = proposer.options
    if options.shape is None:
        return min(options.longest, options.size - 1)
    return options.longest
