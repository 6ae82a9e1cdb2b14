"""Rounds of several sizes in one call: which is next is decided on the host, between rounds.

A head drafts a tree of one of several sizes in every round, or nothing: a plain step. All sequences
of a batch get the same, as a round is one function of the whole batch. What decides sees what the
host has read anyway: how long texts are and what became of the drafts of earlier rounds. So it only
ever looks backwards (`inference.scheduling.schedule.may_look`).

On engine "device" every size is a kind of round (`inference.static.rounds`). On other engines the
head's own proposer drafts trees of the chosen size, sequence by sequence: the readable twin, which
gives the same text by the same choices.

Letters: B sequences, K depths, R ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from inference.proposers.adaptive import outcome_of
from inference.proposers.base import Proposer, RowState, Session
from inference.proposers.heads import HeadProposer
from inference.proposers.options import TreeOptions
from inference.scheduling.controller import Controller, ControllerSettings
from inference.scheduling.priors import Memory
from inference.scheduling.schedule import (
    Arm,
    Choice,
    RoundCosts,
    Table,
    chain_tokens,
    may_look,
    tree_tokens,
)
from inference.scheduling.survival import Outcome, Prior, SurvivalEstimator
from inference.tree import Proposal, TokenTree

ARM = "head"
Form = tuple[int, int, int]
"""Depth, children per node, nodes with the root: what a round drafts."""
PLAIN: Form = (0, 1, 1)


def default_forms(options: TreeOptions) -> list[Form]:
    """Sizes worth preparing, up to that of some trees; each is a graph of its own on CUDA.

    Chains of 1, 2, 3 and all drafts, and trees of 8, 16, 32, ... nodes: the smaller the tree, the
    shallower, as a level costs a step of a head that drafts step by step.

    Args:
        options: of the largest trees, as a head's proposer resolved them.
    """
    deepest = options.longest
    chains = [(depth, 1, depth + 1) for depth in sorted({1, 2, 3, deepest}) if depth <= deepest]
    if options.chains:
        return chains
    size = options.size if options.shape is None else options.shape.num_nodes
    top_k = options.top_k
    trees = [
        (min(deepest, nodes.bit_length() - 1), top_k, nodes)
        for nodes in (8, 16, 32, 64)
        if nodes < size
    ]
    return [*chains, *trees, (deepest, top_k, size)]


def sizes_of(head: HeadProposer, forms: Sequence[Form]) -> list[TreeOptions]:
    """Trees of these forms, grown; draws and draft temperature are those of the head's options."""
    return [
        replace(head.options, depth=depth, top_k=top_k, size=size, shape=None, grown=True)
        for depth, top_k, size in forms
    ]


class Chooser(Protocol):
    """What decides, once per round."""

    def start(self, rule: str, temperature: float, batch: int) -> None:
        """A call begins.

        Args:
            rule: of acceptance.
            temperature: of the sampling.
            batch: B.

        Raises:
            ValueError: it cannot decide under this rule.
        """
        ...

    def choose(self, context: float, batch: int, room: int) -> int | None:
        """The next round: the number of a size, or None for a plain step.

        Args:
            context: committed tokens, the mean of the texts that still run.
            batch: B.
            room: longest path that any of them has room for.
        """
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """What became of it, in the texts that go on."""
        ...


class SizedProposer(Proposer):
    """A head that drafts trees of one of several sizes, or none.

    Args:
        head: its proposer; draws, draft temperature and the like are those of its options.
        forms: the sizes.
        chooser: decides among them.

    Raises:
        ValueError: no size.
    """

    def __init__(self, head: HeadProposer, forms: Sequence[Form], chooser: Chooser) -> None:
        if not forms:
            raise ValueError("SizedProposer: one size at least is needed")
        self.head, self.chooser = head, chooser
        self.sizes = sizes_of(head, forms)
        self._waiting: dict[int, list[RowState]] = {}
        self._done: dict[int, tuple[int, TokenTree]] = {}
        self._batch, self._rule = 1, "match"
        self._begun = False

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers the head reads."""
        return self.head.feature_layers

    @property
    def chains(self) -> bool:
        """Whether no node has a second child."""
        return all(options.chains for options in self.sizes)

    # The twin: rounds by the host -----------------------------------------------------------------

    def start(self, session: Session) -> None:
        """Start the head; the chooser starts with the first round, which knows the sampling."""
        self._waiting, self._done = {}, {}
        self._batch, self._rule, self._begun = session.batch_size, session.rule, False
        self.head.start(session)

    def finish(self, row: int, tokens: list[int]) -> None:
        """Forget what waits for the head."""
        self._waiting.pop(row, None)
        self._done.pop(row, None)
        self.head.finish(row, tokens)

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """Learn from the last round, choose, and let the head draft."""
        live = {row: state for row, state in enumerate(states) if state is not None}
        if not self._begun:
            temperature = next(iter(live.values())).sampling.temperature
            self.chooser.start(self._rule, temperature, self._batch)
            self._begun = True
        if self._done:
            self.chooser.observe(
                [
                    outcome_of(tree, live[row].tokens[start:])
                    for row, (start, tree) in self._done.items()
                ]
            )
        for row, state in live.items():
            self._waiting.setdefault(row, []).append(state)
        context = sum(len(state.tokens) for state in live.values()) / len(live)
        room = max(state.max_depth for state in live.values())
        trees = self._draft(live, self.chooser.choose(context, self._batch, room))
        self._done = {row: (len(live[row].tokens), tree) for row, tree in trees.items()}
        return [trees.get(row) for row in range(len(states))]

    def _draft(self, live: Mapping[int, RowState], chosen: int | None) -> dict[int, TokenTree]:
        if chosen is None:
            return {
                row: TokenTree.chain(torch.tensor(state.tokens[-1:], device=state.hidden.device))
                for row, state in live.items()
            }
        self.head.options = self.sizes[chosen]
        asked: list[RowState | None] = [None] * self._batch
        for row in live:
            asked[row] = _joined(self._waiting.pop(row))
        trees = self.head.propose(asked)
        return {row: tree for row, tree in enumerate(trees) if tree is not None}


def _joined(waiting: Sequence[RowState]) -> RowState:
    """The last state, with the positions of all."""
    features = [state.features for state in waiting if state.features is not None]
    return replace(
        waiting[-1],
        features=torch.cat(features) if features else None,
        hidden=torch.cat([state.hidden for state in waiting]),
    )


# Deciding -----------------------------------------------------------------------------------------

SizeSeconds = Callable[[Form, float, float], float]
"""(form, context, batch) -> seconds of a whole round."""


class FastestSizes:
    """Chooses the size with the most expected tokens per second
    (`inference.scheduling.controller`).

    Args:
        forms: the sizes.
        costs: of plain steps; only those are asked for.
        seconds: of whole rounds of a form.
        prior: rates of acceptance that were measured before, or None.
        settings: how it learns.
        memory: where what is learnt is kept from run to run; None keeps nothing.
    """

    def __init__(
        self,
        forms: Sequence[Form],
        costs: RoundCosts,
        seconds: SizeSeconds,
        prior: Prior | None = None,
        settings: ControllerSettings | None = None,
        memory: Memory | None = None,
    ) -> None:
        self._forms, self._costs = list(forms), costs
        self._seconds = functools.lru_cache(4096)(seconds)
        self._priors = {} if prior is None else {ARM: prior}
        self._settings, self._memory = settings or ControllerSettings(), memory
        self._shared: dict[str, SurvivalEstimator] = {}
        self._lasting: Controller | None = None
        self._controller: Controller | None = None

    def start(self, rule: str, temperature: float, batch: int) -> None:
        """Go on learning where earlier calls may be looked at, start over where not."""
        if may_look(rule, Proposal.ONE_HOT, temperature).others:
            if self._lasting is None:
                self._lasting = self._new(self._shared)
            self._controller = self._lasting
            return
        if batch > 1:
            raise ValueError(
                f"rule {rule!r}: one size is chosen for a whole batch, but under this rule at a "
                "temperature a text must not depend on the others: decode one at a time (batch "
                "size 1), or with a fixed size, or with rule 'match' or 'coupled'"
            )
        self._controller = self._new({})

    def _new(self, estimates: dict[str, SurvivalEstimator]) -> Controller:
        forms = self._forms
        arm = Arm(
            ARM,
            max(depth for depth, _, _ in forms),
            max(top_k for _, top_k, _ in forms),
            max(size for _, _, size in forms),
        )
        return Controller(
            [arm],
            self._costs,
            self._priors,
            self._settings,
            estimates=estimates,
            offers=self._offers,
        )

    def choose(self, context: float, batch: int, room: int) -> int | None:
        """The size that the controller chooses."""
        assert self._controller is not None, "start() comes first"
        choice = self._controller.choose(context, batch, room)
        if choice.arm is None:
            return None
        return self._forms.index((choice.depth, choice.top_k, choice.size))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Tell the controller."""
        assert self._controller is not None, "start() comes first"
        self._controller.observe(outcomes)

    def keep(self, say: Callable[[str], None]) -> None:
        """Leave what was learnt to the next run. At the end of one: nothing reads it before.

        Args:
            say: called with a line if that cannot be done.
        """
        if self._memory is not None and self._memory.law.teaches and self._shared:
            self._memory.write({ARM: self._shared[ARM].counts()}, say)

    def _offers(
        self,
        arm: Arm,
        table: Table,
        costs: RoundCosts,
        context: float,
        batch: float = 1,
        depth: int | None = None,
        size: int | None = None,
    ) -> list[Choice]:
        """What `inference.scheduling.schedule.menu` is for arms of any size: a choice for every
        form.

        A round takes as long whether the text has room for its deepest paths or not.
        """
        deepest = arm.depth if depth is None else min(arm.depth, depth)
        if deepest < 1:
            return []
        chains = chain_tokens(row[0] for row in table[:deepest])
        rates = [row[: arm.top_k] for row in table[:deepest]]
        trees = tree_tokens(rates, arm.size)
        found = []
        for deep, top_k, nodes in self._forms:
            usable = min(deep, deepest)
            tokens = chains[usable] if top_k == 1 else trees[usable - 1][nodes - 1]
            seconds = self._seconds((deep, top_k, nodes), context, batch)
            found.append(Choice(arm.name, deep, top_k, nodes, tokens, seconds))
        return found
