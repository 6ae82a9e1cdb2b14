"""The suffix automaton: how often any run of tokens has occurred, and what followed it.

Plain Python, grown token by token, of any number of texts. Its slow twin, counting by scanning the
texts, is in the tests.

Legend: L tokens of a text.
"""


class SuffixAutomaton:
    """The smallest automaton that knows every run of tokens of several texts, grown online.

    A state stands for all runs that end at the same places; they are suffixes of one another, with
    lengths from `length[link[state]] + 1` to `length[state]`. State 0 is the empty run. Every text
    starts again from state 0, so that no run reaches from one text into the next.

    How often a run occurred would have to be added to every state along the suffix links of a new
    token, which in a text like aaaa... are as many as the text is long. Only the last ``counted``
    tokens are followed instead: their state is kept up to date in O(1), and at most ``counted``
    links lead from it to state 0. A new token costs amortised O(1) for the automaton itself (and
    at most 2 states), plus at most ``counted`` steps for the counts.

    Args:
        counted: `count` is exact for states with a run of at most this length.

    Attributes:
        next: per state, token -> state of the run with that token appended.
        link: per state, the state of its longest suffix that occurs in more places; -1 for state 0.
        length: per state, its longest run.
        count: per state, the occurrences of its runs; 0 for state 0.
        latest: per state, when its runs last occurred, in tokens of all texts; exact as `count` is.
    """

    def __init__(self, counted: int) -> None:
        self.counted = counted
        self.next: list[dict[int, int]] = []
        self.link: list[int] = []
        self.length: list[int] = []
        self.count: list[int] = []
        self.latest: list[int] = []
        self._tokens = 0
        self._add_state({}, link=-1, length=0)
        self.begin_text()

    def begin_text(self) -> None:
        """What is appended from here on has nothing to do with what was."""
        self._text = 0  # state of the whole text
        self.tail, self.tail_length = 0, 0  # state of its last min(L, counted) tokens

    def append(self, token: int) -> None:
        """Add a token to the text."""
        self._text = self._extend(token)
        # If the tail's state was split just now, both halves lead to the same state.
        self.tail_length = min(self.tail_length + 1, self.counted)
        self.tail = state = self.trim(self.next[self.tail][token], self.tail_length)
        self._tokens += 1
        while state:
            self.count[state] += 1
            self.latest[state] = self._tokens
            state = self.link[state]

    def trim(self, state: int, length: int) -> int:
        """The state of the last ``length`` tokens of a run in ``state``."""
        while state and self.length[self.link[state]] >= length:
            state = self.link[state]
        return state

    def advance(self, state: int, length: int, token: int, longest: int) -> tuple[int, int]:
        """Follow a text from outside: the longest known suffix when it grows by a token.

        Amortised O(1) over a text: the match grows by one a token, and every link shortens it.

        Args:
            state: of the longest suffix known before.
            length: of that suffix.
            token: appended.
            longest: matches are not followed beyond this length.

        Returns:
            State and length of the longest known suffix now.
        """
        while token not in self.next[state]:
            if not state:
                return 0, 0
            state = self.link[state]
            length = self.length[state]
        length = min(length + 1, longest)
        return self.trim(self.next[state][token], length), length

    def going_on(self, state: int, length: int) -> tuple[int, int]:
        """State and length of the longest suffix of a run that is not only the end of texts.

        Args:
            state: of the run.
            length: of the run.
        """
        while state and not self.next[state]:
            state = self.link[state]
        return state, min(length, self.length[state])

    def repeated_suffix(self, longest: int) -> tuple[int, int]:
        """State and length of the longest suffix of the text that it also holds elsewhere.

        Args:
            longest: looked for, at most `counted`.
        """
        state = self.trim(self.tail, longest)
        while state and self.count[state] < 2:
            state = self.link[state]
        return state, min(self.length[state], longest)

    def _extend(self, token: int) -> int:
        """State of the text with ``token`` appended (Blumer et al. 1985, for several texts)."""
        state, length = self._text, self.length[self._text] + 1
        if token in self.next[state]:  # an earlier text had it
            return self._with_longest(state, token)
        new = self._add_state({}, link=0, length=length)
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state >= 0:
            self.link[new] = self._with_longest(state, token)
        return new

    def _with_longest(self, state: int, token: int) -> int:
        """The state of `state`'s longest run + ``token``; split off if it holds longer ones."""
        found = self.next[state][token]
        length = self.length[state] + 1
        if self.length[found] == length:
            return found
        split = self._add_state(dict(self.next[found]), self.link[found], length)
        self.count[split], self.latest[split] = self.count[found], self.latest[found]
        self.link[found] = split
        while state >= 0 and self.next[state].get(token) == found:
            self.next[state][token] = split
            state = self.link[state]
        return split

    def _add_state(self, following: dict[int, int], link: int, length: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(0)
        self.latest.append(0)
        return len(self.link) - 1
