"""SuffixDecoding (arXiv:2411.04975): drafts from the text itself and from what was written before.

Two suffix automata per sequence say how often any run of tokens has occurred and what followed it:
one of the sequence's own prompt and output, one of past outputs. The longest suffix of the text
that each of them knows is continued by how often each continuation was seen. All of it is a
deterministic function of texts, so the proposals are one-hot.

Legend: L tokens of a text, m length of a match, D estimated probability of a node given the root.
"""

import heapq
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from drafters import TargetModel
from inference.proposers.base import RowState, Session
from inference.proposers.copying import CopyingProposer, one_hot_tree
from inference.proposers.suffix_automaton import SuffixAutomaton
from inference.tree import TokenTree
from inference.verify import SAME_TOKENS


class History:
    """Past outputs, the oldest forgotten first.

    When there are more than ``max_tokens`` the oldest go until half is left, and the automaton is
    built anew: amortised, that at most doubles the cost of a token.

    Args:
        max_tokens: kept at most.
        counted: of the automaton.
    """

    def __init__(self, max_tokens: int, counted: int) -> None:
        self.max_tokens, self.counted = max_tokens, counted
        self.automaton = SuffixAutomaton(counted)
        self.texts: deque[list[int]] = deque()

    def add(self, text: list[int]) -> None:
        """Add a text, or its end if it is too long by itself."""
        if not self.max_tokens:
            return
        self.texts.append(text[-self.max_tokens :])
        if self.num_tokens <= self.max_tokens:
            self._absorb(self.texts[-1])
            return
        while self.num_tokens > self.max_tokens // 2 and len(self.texts) > 1:
            self.texts.popleft()
        self.automaton = SuffixAutomaton(self.counted)
        for kept in self.texts:
            self._absorb(kept)

    @property
    def num_tokens(self) -> int:
        """Tokens kept."""
        return sum(map(len, self.texts))

    def _absorb(self, text: list[int]) -> None:
        self.automaton.begin_text()
        for token in text:
            self.automaton.append(token)


@dataclass(frozen=True)
class Place:
    """A node of the tree as one automaton sees it.

    Attributes:
        automaton: one of the two.
        state: of the match followed by the path from the root to the node.
        weight: what this automaton adds to D of the node.
    """

    automaton: SuffixAutomaton
    state: int
    weight: float

    def shares(self) -> dict[int, float]:
        """What it adds to D of each child: its weight by count(child) / count of all children.

        The child that was seen last comes first.
        """
        count, latest = self.automaton.count, self.automaton.latest
        children = sorted(
            self.automaton.next[self.state].items(), key=lambda child: -latest[child[1]]
        )
        total = sum(count[state] for _, state in children)
        return {token: self.weight * (count[state] / total) for token, state in children}

    def child(self, token: int, weight: float) -> "Place":
        """The place of a child."""
        return Place(self.automaton, self.automaton.next[self.state][token], weight)


def grow(
    anchors: Sequence[Place], size: int, depth: int, branch: int, min_probability: float
) -> tuple[list[int], list[int]]:
    """Grow a tree best first: always the node with the highest D next.

    Among equal children those of the first anchor win, and then those seen last.

    Args:
        anchors: the root, in each automaton that has a match; weights sum to 1.
        size: nodes at most, root excluded.
        depth: longest path.
        branch: children per node at most; 1 grows a chain.
        min_probability: nodes with a smaller D are left out.

    Returns:
        Tokens of the nodes and indices of their parents in the tree, whose root has the index 0.
    """
    tokens: list[int] = []
    parents: list[int] = []
    heap: list[tuple[float, int, int, int, int, list[Place]]] = []
    pushed = 0

    def push_children(node: int, level: int, places: Sequence[Place]) -> None:
        nonlocal pushed
        shares = [place.shares() for place in places]
        total: dict[int, float] = {}
        for share in shares:
            for token, weight in share.items():
                total[token] = total.get(token, 0.0) + weight
        likely = [pair for pair in total.items() if pair[1] >= min_probability]
        for token, probability in heapq.nlargest(branch, likely, key=lambda pair: pair[1]):
            below = [
                place.child(token, share[token])
                for place, share in zip(places, shares, strict=True)
                if token in share
            ]
            pushed += 1  # equals come out in the order they went in
            heapq.heappush(heap, (-probability, pushed, node, level, token, below))

    if depth:
        push_children(0, 1, anchors)
    while heap and len(tokens) < size:
        _, _, parent, level, token, places = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        if level < depth:
            push_children(len(tokens), level + 1, places)
    return tokens, parents


@dataclass
class _Row:
    """One sequence: its own automaton, and its place in the one of past outputs."""

    prompt_length: int
    own: SuffixAutomaton
    past: SuffixAutomaton
    absorbed: int = 0
    state: int = 0
    length: int = 0


@dataclass(eq=False)
class SuffixProposer(CopyingProposer):
    """Drafts what most often followed the longest known suffix of the text.

    A child's probability is D(child) = D(parent) · count(child) / count(parent), where the parent's
    count is of those occurrences that go on. With a match in both automata D is the mean of the
    two, weighted by the lengths of the matches, the own text's times ``own_weight``. A longer match
    is better evidence, so the tree may hold ``factor`` · m + ``offset`` drafts.

    The texts of a call join the past outputs when the next call starts: within a call the drafts
    of a sequence depend on no other sequence of the batch.

    Under ``match`` and ``coupled``, and at temperature 0, past outputs cannot change what is
    emitted. The other rules toss coins over the drafts, and a past output with the same seed is a
    function of the same coins: drafting it would bias the law. There the own text is all that is
    used; in it, drafts and coins of a round never come from the same positions.

    A round costs O(new tokens · (max_match + depth)) plus the children of every node that was
    added, whatever the length of the text and of the past outputs.

    Attributes:
        size: nodes the target verifies per round, root included.
        depth: longest drafted path.
        branch: children per node; 1 drafts a chain.
        max_match: longest suffix looked for.
        factor: drafts per matched token.
        offset: drafts on top of that.
        min_probability: drafts with a smaller D are left out.
        own_weight: of the own text against past outputs, at equal lengths of match.
        max_history_tokens: past outputs kept, at about half a kilobyte of memory each; 0 turns
            them off.

    Raises:
        ValueError: an option out of range.
    """

    size: int = 32
    depth: int = 16
    branch: int = 8
    max_match: int = 32
    factor: float = 1.0
    offset: float = 8.0
    min_probability: float = 0.1
    own_weight: float = 2.0
    max_history_tokens: int = 65_536
    _history: History = field(init=False, repr=False)
    _ended: list[list[int]] = field(default_factory=list, init=False, repr=False)
    _rows: dict[int, _Row] = field(default_factory=dict, init=False, repr=False)
    _rule: str = field(default="match", init=False, repr=False)
    _target: "weakref.ref[TargetModel] | None" = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the options."""
        if self.size < 2:
            raise ValueError(f"SuffixProposer: size >= 2 is needed, got {self.size}")
        for name in ("depth", "branch", "max_match"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"SuffixProposer: {name} >= 1 is needed, got {getattr(self, name)}"
                )
        for name in ("factor", "offset", "max_history_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"SuffixProposer: {name} >= 0 is needed, got {getattr(self, name)}"
                )
        if not 0 < self.min_probability <= 1:
            raise ValueError(
                f"SuffixProposer: min_probability must lie in (0, 1], got {self.min_probability}"
            )
        if not self.own_weight > 0:
            raise ValueError(f"SuffixProposer: own_weight > 0 is needed, got {self.own_weight}")
        self._history = History(self.max_history_tokens, self._counted)

    @property
    def _counted(self) -> int:
        """Longest run whose count is looked at: a match and a path below it."""
        return self.max_match + self.depth

    @property
    def chains(self) -> bool:
        """Whether no node has a second child."""
        return self.branch == 1

    def start(self, session: Session) -> None:
        """The texts of the last call join the past outputs; those of another target go."""
        if self._target is None or self._target() is not session.target:
            self._history, self._ended = History(self.max_history_tokens, self._counted), []
            self._target = weakref.ref(session.target)
        for text in self._ended:
            self._history.add(text)
        self._ended, self._rows, self._rule = [], {}, session.rule

    def finish(self, row: int, tokens: list[int]) -> None:
        """Keep the output, and of the prompt the end that its first tokens are matched by."""
        known = self._rows.pop(row, None)
        if known is not None:
            self._ended.append(tokens[max(known.prompt_length - self.max_match, 0) :])

    def _new_row(self, state: RowState) -> _Row:
        safe = self._rule in SAME_TOKENS or state.sampling.temperature == 0
        past = self._history.automaton if safe else SuffixAutomaton(self._counted)
        return _Row(state.prompt_length, SuffixAutomaton(self._counted), past)

    def copy(self, row: int, state: RowState) -> TokenTree | None:
        """Absorb the new tokens of the text and continue it."""
        if row not in self._rows:
            self._rows[row] = self._new_row(state)
        return self._continue(self._rows[row], state)

    def _continue(self, row: _Row, state: RowState) -> TokenTree | None:
        past = row.past
        for token in state.tokens[row.absorbed :]:
            row.own.append(token)
            row.state, row.length = past.advance(row.state, row.length, token, self.max_match)
        row.absorbed = len(state.tokens)
        own_state, own_length = row.own.repeated_suffix(self.max_match)
        past_state, past_length = past.going_on(row.state, row.length)
        evidence = self.own_weight * own_length + past_length
        anchors = [
            Place(automaton, place, weight / evidence)
            for automaton, place, weight in (
                (row.own, own_state, self.own_weight * own_length),
                (past, past_state, float(past_length)),
            )
            if weight
        ]
        budget = int(self.factor * max(own_length, past_length) + self.offset)
        tokens, parents = grow(
            anchors,
            min(self.size - 1, budget),
            min(self.depth, state.max_depth),
            self.branch,
            self.min_probability,
        )
        if not tokens:
            return None
        return one_hot_tree([state.tokens[-1], *tokens], [-1, *parents], state.hidden.device)
