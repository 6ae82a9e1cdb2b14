"""How much to draft, and by whom, decided anew in every round: none of it where that is faster.

In every round it is chosen for each sequence what drafts for it, and how much, or nothing: a plain
step. Who chooses knows what rounds cost and learns how good the drafts of each proposer ("arm") are
(`inference.proposers.deciding`): for all sequences of a batch at once, as they share one forward,
where they may look at each other; otherwise each for itself. Arms that copy text are asked first,
as it costs nothing to see what they have; what they would have got right is learnt whether they are
chosen or not.

An arm that is idle is not called. What it has to absorb is kept for it and handed over at once when
it is needed next, and what that costs counts when it is chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from inference.proposers.arms import (
    NEW,
    Backlog,
    all_layers,
    as_chosen,
    describe,
    of_row,
    outcome_of,
)
from inference.proposers.base import Proposer, RowState, Session
from inference.proposers.confident import Cuts
from inference.proposers.copying import CopyingProposer
from inference.proposers.deciding import (
    Deciding,
    Estimates,
    Heard,
    NewBatchChooser,
    NewChooser,
)
from inference.proposers.heads import HeadProposer
from inference.scheduling.batch_controller import Situation
from inference.scheduling.schedule import Choice, RoundCosts
from inference.tree import TokenTree


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
        new_chooser: builds what decides for one sequence.
        costs: of this machine, to cut drafts by confidence and to price what idle arms have to
            absorb; None does neither.
        confident: names of heads whose confidence output is trusted: it stops drafting where going
            on cannot pay, and cuts chains that are not drawn to the length that pays.
        new_batch: builds what decides for the sequences of a batch at once; None leaves each of
            them to itself.
        new_alone: builds what decides for a sequence that may look at nothing but its own rounds;
            None is ``new_chooser``.
        paced: costs as they come about, by which the others cut their drafts; None is ``costs``.

    Attributes:
        made: rounds by what was done in them: (arm or None, depth, children per node, nodes).
        drafted: sequences, in all rounds so far, whose drafts a network made.
        expected_tokens: of all rounds so far.
        expected_seconds: of all rounds so far; each sequence of a batch counts its rounds.
        absorbed: seconds, by the cost table, of taking in prompts and what arms had missed.

    Raises:
        ValueError: an arm that cannot be asked for trees of different sizes.
    """

    def __init__(
        self,
        arms: Mapping[str, Proposer],
        new_chooser: NewChooser,
        costs: RoundCosts | None = None,
        confident: Collection[str] = (),
        new_batch: NewBatchChooser | None = None,
        new_alone: NewChooser | None = None,
        paced: RoundCosts | None = None,
    ) -> None:
        if not arms:
            raise ValueError("AdaptiveProposer: one arm at least is needed")
        if len(set(map(id, arms.values()))) < len(arms):
            raise ValueError("AdaptiveProposer: one proposer is given twice; build one for each")
        self.arms = {name: describe(name, proposer) for name, proposer in arms.items()}
        self.proposers = dict(arms)
        self._copying = {
            name: arm for name, arm in arms.items() if isinstance(arm, CopyingProposer)
        }
        for name in confident:
            head = self.proposers.get(name)
            if not isinstance(head, HeadProposer) or head.drafter.confidence is None or not costs:
                raise ValueError(
                    f"AdaptiveProposer: confident names {name!r}: that takes costs and a head with "
                    "a confidence output"
                )
        self.confident = frozenset(confident)
        self.deciding = Deciding(list(self.arms.values()), new_chooser, new_batch, new_alone)
        self._costs = costs
        self._alone = None if costs is None else Cuts(costs, self.confident)
        self._paced = self._alone if paced is None else Cuts(paced, self.confident)
        self._backlog = Backlog(
            {name: arms[name].feature_layers for name, arm in self.arms.items() if not arm.copies}
        )
        self._done: dict[int, _Done] = {}
        self._width, self._late = 1, 0
        self._session: Session
        self.made: Counter[tuple[str | None, int, int, int]] = Counter()
        self.drafted = 0
        self.expected_tokens = self.expected_seconds = self.absorbed = 0.0

    @property
    def estimates(self) -> Estimates:
        """By arm, what was learnt in all calls where sequences may look at others."""
        return self.deciding.shared

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """All layers that an arm asks for, each once."""
        return all_layers(self.proposers.values())

    @property
    def chains(self) -> bool:
        """Whether no arm's node has a second child."""
        return all(arm.top_k == 1 for arm in self.arms.values())

    def start(self, session: Session) -> None:
        """Start all arms."""
        self._session, self._done = session, {}
        self.deciding.start(session)
        self._backlog.start()
        for proposer in self.proposers.values():
            proposer.start(session)

    def finish(self, row: int, tokens: list[int]) -> None:
        """Tell all arms, and forget what waits for them."""
        for proposer in self.proposers.values():
            proposer.finish(row, tokens)
        self._backlog.finish(row)
        self._done.pop(row, None)

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """Learn from the last round, choose, and let the chosen arms draft."""
        live = {row: state for row, state in enumerate(states) if state is not None}
        copies = {name: proposer.copies(states) for name, proposer in self._copying.items()}
        heard = {row: self._heard(row, state) for row, state in live.items() if row in self._done}
        self.deciding.learn(live, heard, self._width)
        for row, state in live.items():
            self._backlog.add(row, state)
        situations = {
            row: self._situation(row, state, of_row(copies, row)) for row, state in live.items()
        }
        choices = self.deciding.choose(live, situations)
        self._late = 0
        trees = self._cut(live, choices, self._draft(live, choices, copies))
        for row, tree in trees.items():
            choice = choices[row]
            self._done[row] = _Done(len(live[row].tokens), choice, tree, of_row(copies, row))
            self.made[choice.same] += 1
            self.expected_tokens += choice.tokens
            self.expected_seconds += choice.seconds
        self.drafted += len(self.drafting())
        self._width = max(tree.num_nodes for tree in trees.values())
        return [trees.get(row) for row in range(len(states))]

    def drafting(self) -> list[tuple[Choice, TokenTree]]:
        """Of this round: what was chosen that networks drafted for, and the tree."""
        copied = self._copying.keys() | {None}
        return [(d.choice, d.tree) for d in self._done.values() if d.choice.arm not in copied]

    def _heard(self, row: int, state: RowState) -> Heard:
        """What became of the last round."""
        done = self._done.pop(row)
        new = state.tokens[done.length :]
        others = {
            name: outcome_of(tree, new, verified=False)
            for name, tree in done.copies.items()
            if name != done.choice.arm
        }
        return Heard(outcome_of(done.tree, new), others)

    def _situation(self, row: int, state: RowState, copies: Mapping[str, TokenTree]) -> Situation:
        limits = dict.fromkeys(self._copying, (0, 1))
        limits |= {name: (tree.depth, tree.num_nodes) for name, tree in copies.items()}
        behind: dict[str, float] = {}
        if self._costs is not None:
            for name in self._backlog.layers:
                positions = self._backlog.positions(name, row, state)
                if positions:
                    behind[name] = self._costs.absorb(name, positions)
        return Situation(len(state.tokens), state.max_depth, limits, behind)

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
                found[row] = as_chosen(tree, choice)
            else:
                proposer = self.proposers[choice.arm]
                alike: tuple = (choice.arm,)
                if isinstance(proposer, HeadProposer):  # trees of a size, stopped by a rate
                    alike = (*choice.same, row if choice.arm in self.confident else None)
                groups.setdefault(alike, []).append(row)
        floor = self._floor(choices)
        for rows in groups.values():
            found |= self._draft_alike(live, {row: choices[row] for row in rows}, floor)
        return found

    def _draft_alike(
        self, live: Mapping[int, RowState], choices: Mapping[int, Choice], floor: int
    ) -> dict[int, TokenTree]:
        """The trees of rows that one arm drafts for, in one call."""
        name = next(iter(choices.values())).arm
        assert name is not None
        proposer = self.proposers[name]
        asked: list[RowState | None] = [None] * self._session.batch_size
        for row, choice in choices.items():
            state = self._backlog.take(name, row, self.feature_layers)
            late = max(len(state.hidden) - NEW, 0)
            self._late += late
            if self._costs is not None:
                self.absorbed += self._costs.absorb(name, late)
            asked[row] = replace(state, max_depth=min(state.max_depth, choice.depth))
        if isinstance(proposer, HeadProposer):
            row, choice = next(iter(choices.items()))
            self._set_options(proposer, choice, row, live[row], floor)
        else:  # a draft model has the whole batch in its cache
            for row in live.keys() - choices.keys():
                asked[row] = replace(live[row], max_depth=0)
        trees = proposer.propose(asked)
        found = {}
        for row in choices:
            tree = trees[row]
            assert tree is not None, "no tree for a running sequence"
            found[row] = tree
        return found

    def _set_options(
        self, head: HeadProposer, choice: Choice, row: int, state: RowState, floor: int
    ) -> None:
        """Make the head draft trees of the chosen size."""
        least, cuts = 0.0, self._cuts(state)
        if cuts is not None and choice.arm in self.confident:
            shared = self.deciding.is_shared(state)
            least = cuts.least(
                choice,
                self.deciding.rate(row, state),
                len(state.tokens),
                self._batch(state),
                floor if shared else 1,
            )
        head.options = replace(
            head.options,
            size=choice.size,
            depth=choice.depth,
            top_k=choice.top_k,
            shape=None,
            grown=True,
            min_survival=least,
        )

    # Confidence ---------------------------------------------------------------------------------

    def _batch(self, state: RowState) -> int:
        """Sequences that drafts are cut for."""
        session = self._session
        return len(session.live) if self.deciding.is_shared(state) else session.batch_size

    def _cuts(self, state: RowState) -> Cuts | None:
        """What cuts the drafts of a sequence."""
        return self._paced if self.deciding.sees_others(state) else self._alone

    def _floor(self, choices: Mapping[int, Choice]) -> int:
        """Rows that the round has in any case: those of trees that are not cut."""
        fixed = [choice.size for choice in choices.values() if choice.arm not in self.confident]
        return max(fixed, default=1)

    def _cut(
        self,
        live: Mapping[int, RowState],
        choices: Mapping[int, Choice],
        trees: dict[int, TokenTree],
    ) -> dict[int, TokenTree]:
        """Chains that are not drawn, cut where verifying more of them does not pay."""
        if not self.confident:
            return trees
        shared: dict[int, TokenTree] = {}
        found: dict[int, TokenTree] = {}
        for row, tree in trees.items():
            state, name = live[row], choices[row].arm
            if self.deciding.is_shared(state):
                shared[row] = tree
                continue
            rate, cuts = self.deciding.rate(row, state), self._cuts(state)
            assert cuts is not None, "confident arms take costs"
            found[row] = cuts.alone(name, tree, rate, len(state.tokens), self._batch(state))
        if not shared:
            return found
        row, batch = next(iter(shared)), len(self._session.live)
        assert self._paced is not None, "confident arms take costs"
        return found | self._paced.together(
            {row: choices[row].arm for row in shared},
            shared,
            self.deciding.rate(row, live[row]) * batch,
            sum(len(state.tokens) for state in live.values()) / len(live),
            batch,
            max((tree.num_nodes for tree in found.values()), default=1),
        )
