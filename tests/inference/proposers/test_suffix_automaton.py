"""The suffix automaton: counts and matches equal to scanning the texts, at near-linear cost."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.proposers.suffix_automaton import SuffixAutomaton

Run = tuple[int, ...]
Texts = Sequence[Sequence[int]]

ONE_TEXT = st.integers(1, 4).flatmap(
    lambda alphabet: st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=30)
)
TEXTS = st.lists(ONE_TEXT, min_size=1, max_size=4)


def build(texts: Texts, counted: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton(counted)
    for text in texts:
        automaton.begin_text()
        for token in text:
            automaton.append(token)
    return automaton


# Slow twin: everything by scanning -----------------------------------------------------------


def ends(texts: Texts, run: Sequence[int]) -> list[int]:
    """Places right behind each occurrence of a run, in tokens of all texts."""
    found, before = [], 0
    for text in texts:
        for end in range(len(run), len(text) + 1):
            if tuple(text[end - len(run) : end]) == tuple(run):
                found.append(before + end)
        before += len(text)
    return found


def runs(texts: Texts, longest: int) -> Iterator[Run]:
    for text in texts:
        for start in range(len(text)):
            for end in range(start + 1, min(start + longest, len(text)) + 1):
                yield tuple(text[start:end])


def following(texts: Texts, run: Sequence[int]) -> dict[int, int]:
    """Token -> occurrences behind a run, the one seen last first."""
    seen = {token: ends(texts, [*run, token]) for text in texts for token in text}
    behind = {token: places for token, places in seen.items() if places}
    return {t: len(behind[t]) for t in sorted(behind, key=lambda token: -behind[token][-1])}


def longest_suffix(texts: Texts, text: Sequence[int], longest: int) -> Run:
    """The longest suffix of a text that occurs in others and goes on there."""
    for length in range(min(longest, len(text)), 0, -1):
        if following(texts, text[-length:]):
            return tuple(text[-length:])
    return ()


# The automaton ---------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(texts=TEXTS, counted=st.integers(1, 8))
def test_counts_are_those_of_scanning(texts: Texts, counted: int) -> None:
    automaton = build(texts, counted)
    known = {(): 0}
    for run in runs(texts, 99):
        assert run[:-1] in known
        known[run] = automaton.next[known[run[:-1]]][run[-1]]
        if len(run) <= counted:
            places = ends(texts, run)
            assert automaton.count[known[run]] == len(places)
            assert automaton.latest[known[run]] == places[-1]
    for run, place in known.items():  # and nothing else is known: no run spans two texts
        children = {token for token in range(4) if (*run, token) in known}
        assert set(automaton.next[place]) == children
    assert len(automaton.link) <= 2 * sum(map(len, texts))


@settings(deadline=None, max_examples=150)
@given(texts=TEXTS, text=ONE_TEXT, longest=st.integers(1, 6))
def test_matches_of_another_text_are_those_of_scanning(
    texts: Texts, text: list[int], longest: int
) -> None:
    automaton = build(texts, counted=8)
    place, length = 0, 0
    for end in range(1, len(text) + 1):
        place, length = automaton.advance(place, length, text[end - 1], longest)
        known = [n for n in range(1, min(end, longest) + 1) if ends(texts, text[end - n : end])]
        assert length == max(known, default=0)
        assert place == walk(automaton, text[end - length : end])
        on, shorter = automaton.going_on(place, length)
        run = longest_suffix(texts, text[:end], longest)
        assert (on, shorter) == (walk(automaton, run), len(run))


@settings(deadline=None, max_examples=100)
@given(text=ONE_TEXT, longest=st.integers(1, 6))
def test_the_repeated_suffix_is_that_of_scanning(text: list[int], longest: int) -> None:
    automaton = SuffixAutomaton(counted=7)
    for end, token in enumerate(text, start=1):
        automaton.append(token)
        run = longest_suffix([text[:end]], text[:end], longest)
        assert automaton.repeated_suffix(longest) == (walk(automaton, run), len(run))


def walk(automaton: SuffixAutomaton, run: Sequence[int]) -> int:
    place = 0
    for token in run:
        place = automaton.next[place][token]
    return place


class CountingList(list[int]):
    """Counts how often an element is read."""

    reads = 0

    def __getitem__(self, key):
        CountingList.reads += 1
        return super().__getitem__(key)


def fibonacci(length: int) -> list[int]:
    short, long = [0], [0, 1]
    while len(long) < length:
        short, long = long, long + short
    return long[:length]


REPETITIVE = {
    "aaaa": lambda length: [7] * length,
    "abab": lambda length: [place % 2 for place in range(length)],
    "aaab": lambda length: [0] * (length // 2) + [1] + [0] * (length // 2),
    "fibonacci": fibonacci,
    "random": lambda length: torch.randint(
        0, 3, (length,), generator=torch.Generator().manual_seed(0)
    ).tolist(),
}


@pytest.mark.parametrize("name", sorted(REPETITIVE))
def test_links_followed_per_token_do_not_grow_with_the_text(name: str) -> None:
    counted = 12
    costs = []
    for length in (500, 4000):
        automaton = SuffixAutomaton(counted)
        automaton.link = CountingList(automaton.link)
        CountingList.reads = 0
        place, matched = 0, 0
        for _ in range(2):  # a second text repeats the first
            automaton.begin_text()
            for token in REPETITIVE[name](length):
                automaton.append(token)
                automaton.repeated_suffix(8)
        for token in REPETITIVE[name](length):
            place, matched = automaton.advance(place, matched, token, 8)
        costs.append(CountingList.reads / length)
    assert costs[1] <= 1.2 * costs[0] + 1
    assert costs[1] <= 2 * (3 * counted + 12)
