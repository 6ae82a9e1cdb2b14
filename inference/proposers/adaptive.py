"""How much to draft, and by whom, decided anew in every round: none of it where that is faster.

Every sequence asks its controller (`inference.controller`), which knows what rounds cost and learns
how good the drafts of each proposer ("arm") are, and gets a tree of the size it chose, or the root
alone: a plain step. Arms that copy text are asked first, as it costs nothing to see what they have;
what they would have got right is learnt whether they are chosen or not.

An arm that is idle is not called. What it has to absorb is kept for it and handed over at once when
it is needed next.

Which rows learn from each other is `may_look`'s to say: where a sequence may look at itself only,
its controller is new in every call and starts from the priors. Each sequence takes the others of
the batch to be like itself.

Letters: n positions, F·D captured features, D hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from inference.proposers.base import Proposer, RowState, Session
from inference.proposers.compose import select_layers
from inference.proposers.draft_model import DraftModelProposer
from inference.proposers.heads import HeadProposer
from inference.proposers.ngram import NgramProposer
from inference.proposers.suffix import SuffixProposer
from inference.schedule import (
    Arm,
    Choice,
    RoundCosts,
    cut_chain,
    cut_tree,
    first_chain,
    least_survival,
    may_look,
)
from inference.survival import Outcome, SurvivalEstimator
from inference.tree import DRAWN_KINDS, Proposal, TokenTree


class Chooser(Protocol):
    """What decides for one sequence; `inference.controller.Controller` does."""

    @property
    def rate(self) -> float:
        """Tokens per second that are earned otherwise."""
        ...

    def choose(
        self,
        context: float,
        batch: float = 1,
        depth: int | None = None,
        limits: Mapping[str, tuple[int, int]] | None = None,
    ) -> Choice:
        """What to do in the next round."""
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """What became of the last choice."""
        ...

    def note(self, arm: str, outcome: Outcome) -> None:
        """What would have become of the drafts of another arm."""
        ...


Estimates = dict[str, SurvivalEstimator]
NewChooser = Callable[[Sequence[Arm], Estimates], Chooser]
"""Arms and the estimates to learn into, which may be shared -> what decides for one sequence."""


class _Done(NamedTuple):
    """A round whose outcome is not known yet.

    Attributes:
        length: of the text before it.
        choice: that was made.
        tree: that was proposed.
        copies: by arm, what copying arms had.
    """

    length: int
    choice: Choice
    tree: TokenTree
    copies: dict[str, TokenTree]


class AdaptiveProposer(Proposer):
    """Lets a controller choose among proposers, in every round of every sequence.

    Args:
        arms: by name, as in the cost table: trained heads, copying proposers, or draft models that
            draft chains. Their options say what they may be asked for at most; shapes are not kept:
            heads grow trees of the size that is chosen.
        new_chooser: builds a controller.
        costs: of this machine, to cut drafts by confidence; None cuts nothing.
        confident: names of heads whose confidence output is trusted: it stops drafting where going
            on cannot pay, and cuts chains that are not drawn to the length that pays.

    Attributes:
        made: rounds by what was done in them: (arm or None, depth, children per node, nodes).
        expected_tokens: of all rounds so far.
        expected_seconds: of all rounds so far; each sequence of a batch counts its rounds.

    Raises:
        ValueError: an arm that cannot be asked for trees of different sizes.
    """

    def __init__(
        self,
        arms: Mapping[str, Proposer],
        new_chooser: NewChooser,
        costs: RoundCosts | None = None,
        confident: Collection[str] = (),
    ) -> None:
        if not arms:
            raise ValueError("AdaptiveProposer: one arm at least is needed")
        if len(set(map(id, arms.values()))) < len(arms):
            raise ValueError("AdaptiveProposer: one proposer is given twice; build one for each")
        self.arms = {name: describe(name, proposer) for name, proposer in arms.items()}
        self.proposers = dict(arms)
        self.confident = frozenset(confident)
        for name in self.confident:
            head = self.proposers.get(name)
            if not isinstance(head, HeadProposer) or head.drafter.confidence is None or not costs:
                raise ValueError(
                    f"AdaptiveProposer: confident names {name!r}: that takes costs and a head with "
                    "a confidence output"
                )
        self._new_chooser, self._costs = new_chooser, costs
        self._shared: Estimates = {}
        self._lasting: dict[int, Chooser] = {}
        self._choosers: dict[int, Chooser] = {}
        self._done: dict[int, _Done] = {}
        self._waiting: dict[tuple[str, int], list[RowState]] = {}
        self._session: Session
        self.made: Counter[tuple[str | None, int, int, int]] = Counter()
        self.expected_tokens = self.expected_seconds = 0.0

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """All layers that an arm asks for, each once."""
        layers = (layer for arm in self.proposers.values() for layer in arm.feature_layers)
        return tuple(dict.fromkeys(layers))

    @property
    def chains(self) -> bool:
        """Whether no arm's node has a second child."""
        return all(arm.top_k == 1 for arm in self.arms.values())

    def start(self, session: Session) -> None:
        """Start all arms."""
        self._session = session
        self._choosers, self._done, self._waiting = {}, {}, {}
        for proposer in self.proposers.values():
            proposer.start(session)

    def finish(self, row: int, tokens: list[int]) -> None:
        """Tell all arms, and forget what waits for them."""
        for name, proposer in self.proposers.items():
            proposer.finish(row, tokens)
            self._waiting.pop((name, row), None)
        self._done.pop(row, None)

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """Learn from the last round, choose, and let the chosen arms draft."""
        live = {row: state for row, state in enumerate(states) if state is not None}
        copies = {
            name: proposer.propose(states)
            for name, proposer in self.proposers.items()
            if self.arms[name].copies
        }
        choices: dict[int, Choice] = {}
        for row, state in live.items():
            self._learn(row, state)
            for name, arm in self.arms.items():
                if not arm.copies:
                    self._waiting.setdefault((name, row), []).append(state)
            choices[row] = self._choose(row, state, _of_row(copies, row))
        trees = self._draft(live, choices, copies)
        for row, tree in trees.items():
            choice = choices[row]
            self._done[row] = _Done(len(live[row].tokens), choice, tree, _of_row(copies, row))
            self.made[choice.same] += 1
            self.expected_tokens += choice.tokens
            self.expected_seconds += choice.seconds
        return [trees.get(row) for row in range(len(states))]

    # Choosing -----------------------------------------------------------------------------------

    def _chooser(self, row: int, state: RowState) -> Chooser:
        """The row's own, or one that has learnt from other rows and calls where that is allowed."""
        if row not in self._choosers:
            arms = list(self.arms.values())
            temperature = state.sampling.temperature
            if may_look(self._session.rule, Proposal.ONE_HOT, temperature).others:
                if row not in self._lasting:
                    self._lasting[row] = self._new_chooser(arms, self._shared)
                self._choosers[row] = self._lasting[row]
            else:
                self._choosers[row] = self._new_chooser(arms, {})
        return self._choosers[row]

    def _choose(self, row: int, state: RowState, copies: Mapping[str, TokenTree]) -> Choice:
        limits = {name: (int(tree.depths.max()), tree.num_nodes) for name, tree in copies.items()}
        batch = self._batch(state)
        chooser = self._chooser(row, state)
        return chooser.choose(len(state.tokens), batch, state.max_depth, limits)

    def _batch(self, state: RowState) -> int:
        """Sequences that a round is priced for: those that still run, where others may be looked
        at.
        """
        others = may_look(self._session.rule, Proposal.ONE_HOT, state.sampling.temperature).others
        return len(self._session.live) if others else self._session.batch_size

    def _learn(self, row: int, state: RowState) -> None:
        """Tell the controller what became of its last choice."""
        done = self._done.pop(row, None)
        if done is None:
            return
        chooser, new = self._chooser(row, state), state.tokens[done.length :]
        chooser.observe([outcome_of(done.tree, new)])
        for name, tree in done.copies.items():
            if name != done.choice.arm:
                chooser.note(name, outcome_of(tree, new, verified=False))

    # Drafting -----------------------------------------------------------------------------------

    def _draft(
        self,
        live: Mapping[int, RowState],
        choices: Mapping[int, Choice],
        copies: Mapping[str, Sequence[TokenTree | None]],
    ) -> dict[int, TokenTree]:
        """The trees of all rows, as they were chosen."""
        found: dict[int, TokenTree] = {}
        groups: dict[tuple, list[int]] = {}
        for row, choice in choices.items():
            if choice.arm is None:
                token = torch.tensor(live[row].tokens[-1:], device=live[row].hidden.device)
                found[row] = TokenTree.chain(token)
            elif self.arms[choice.arm].copies:
                tree = copies[choice.arm][row]
                assert tree is not None
                found[row] = _like(tree, choice)
            else:
                proposer = self.proposers[choice.arm]
                alike: tuple = (choice.arm,)
                if isinstance(proposer, HeadProposer):  # trees of a size, stopped by a rate
                    alike = (*choice.same, row if choice.arm in self.confident else None)
                groups.setdefault(alike, []).append(row)
        for rows in groups.values():
            found |= self._draft_alike(live, {row: choices[row] for row in rows})
        return found

    def _draft_alike(
        self, live: Mapping[int, RowState], choices: Mapping[int, Choice]
    ) -> dict[int, TokenTree]:
        """The trees of rows that one arm drafts for, in one call."""
        name = next(iter(choices.values())).arm
        assert name is not None
        proposer = self.proposers[name]
        asked: list[RowState | None] = [None] * self._session.batch_size
        for row, choice in choices.items():
            state = self._caught_up(name, row)
            asked[row] = replace(state, max_depth=min(state.max_depth, choice.depth))
        if isinstance(proposer, HeadProposer):
            row, choice = next(iter(choices.items()))
            self._set_options(name, proposer, choice, self._choosers[row], len(live[row].tokens))
        else:  # a draft model has the whole batch in its cache
            for row in live.keys() - choices.keys():
                asked[row] = replace(live[row], max_depth=0)
        trees = proposer.propose(asked)
        found = {}
        for row in choices:
            tree = trees[row]
            assert tree is not None, "no tree for a running sequence"
            found[row] = self._cut(name, tree, row, len(live[row].tokens))
        return found

    def _caught_up(self, name: str, row: int) -> RowState:
        """The row's state with all positions since the arm's last call, in its own layers."""
        waiting = self._waiting.pop((name, row))
        features = [state.features for state in waiting if state.features is not None]
        layers = self.proposers[name].feature_layers
        return replace(
            waiting[-1],
            features=select_layers(
                torch.cat(features) if features else None, self.feature_layers, layers
            ),
            hidden=torch.cat([state.hidden for state in waiting]),
        )

    def _set_options(
        self, name: str, head: HeadProposer, choice: Choice, chooser: Chooser, context: int
    ) -> None:
        """Make the head draft trees of the chosen size."""
        least = 0.0
        if name in self.confident:
            least = least_survival(chooser.rate, self._seconds(choice, context))
        head.options = replace(
            head.options,
            size=choice.size,
            depth=choice.depth,
            top_k=choice.top_k,
            shape=None,
            grown=True,
            min_survival=least,
        )

    def _seconds(self, choice: Choice, context: int) -> list[float]:
        """Of rounds of 0, 1, ... drafts of a chain, without what all rounds take."""
        assert self._costs is not None and choice.arm is not None
        batch = self._session.batch_size
        return [
            self._costs.draft(choice.arm, drafts, choice.top_k, batch)
            + self._costs.verify(drafts + 1, context, batch)
            for drafts in range(choice.depth + 1)
        ]

    def _cut(self, name: str, tree: TokenTree, row: int, context: int) -> TokenTree:
        """A chain that is not drawn, cut where verifying more of it does not pay."""
        if name not in self.confident or tree.survival is None or not tree.is_chain:
            return tree
        if tree.proposal in DRAWN_KINDS:  # `may_look`: its tokens have no say any more
            return tree
        assert self._costs is not None
        costs, batch = self._costs, self._session.batch_size
        drafts = cut_chain(
            tree.survival.tolist()[1:],
            self._choosers[row].rate,
            lambda rows: costs.verify(rows, context, batch),
        )
        return cut_tree(tree, drafts + 1, drafts)


def describe(name: str, proposer: Proposer) -> Arm:
    """What a proposer may be asked for, by its options.

    Args:
        name: of the arm.
        proposer: a head's, a copying one or a draft model's.

    Raises:
        ValueError: trees of another size cannot be asked of it.
    """
    if isinstance(proposer, NgramProposer | SuffixProposer):
        return Arm(name, proposer.depth, proposer.branch, proposer.size, copies=True)
    if isinstance(proposer, DraftModelProposer) and proposer.chains:
        return Arm(name, proposer.options.longest)
    if isinstance(proposer, HeadProposer):
        options = proposer.options
        if options.chains:
            return Arm(name, options.longest)
        size = options.size if options.shape is None else options.shape.num_nodes
        return Arm(name, options.longest, options.top_k, size)
    raise ValueError(
        f"AdaptiveProposer: {type(proposer).__name__} cannot be an arm: it takes a trained head, "
        "NgramProposer, SuffixProposer, or a DraftModelProposer of chains (top_k=1)"
    )


def outcome_of(tree: TokenTree, new: Sequence[int], verified: bool = True) -> Outcome:
    """What became of a tree, seen from the text.

    Args:
        tree: that was proposed, or would have been.
        new: tokens that the round emitted; the text goes on behind them.
        verified: the round verified it. Then the last of the tokens is the target's own, whatever
            the tree holds there.
    """
    node = 0
    ranks: list[int] = []
    offered: list[int] = []
    for token in new:
        children = tree.children(node)
        if not children:
            break
        offered.append(len(children))
        child = tree.child_with_token(node, token)
        if child is None or (verified and len(ranks) == len(new) - 1):
            break
        ranks.append(children.index(child))
        node = child
    return Outcome(ranks, offered, len(new), tree.num_nodes, int(tree.depths.max()))


def _of_row(trees: Mapping[str, Sequence[TokenTree | None]], row: int) -> dict[str, TokenTree]:
    """By arm, the tree of one row."""
    found = {name: own[row] for name, own in trees.items()}
    return {name: tree for name, tree in found.items() if tree is not None}


def _like(tree: TokenTree, choice: Choice) -> TokenTree:
    """A copied tree, cut to what was chosen."""
    if choice.top_k == 1:
        return first_chain(tree, choice.depth)
    return cut_tree(tree, choice.size, choice.depth)
