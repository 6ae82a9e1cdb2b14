"""Prompt lookup: equal to a naive scan and to transformers' own, at a cost free of the length."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from drafters import TargetModel
from inference.cache import TreeCache
from inference.engine import EagerEngine
from inference.generate import plain_generate, speculative_generate
from inference.proposers.base import RowState, Session
from inference.proposers.ngram import Indices, NgramProposer, by_match, copy_from, merge_copies
from inference.sampling import SamplingParams
from inference.timing import PhaseTimer
from inference.tree import Proposal, TokenTree
from tests.tiny import tiny_target

Path = tuple[int, ...]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(layers=2)


@pytest.fixture(scope="module")
def one(target: TargetModel) -> Session:
    return session(target)


def session(target: TargetModel, rows: int = 1) -> Session:
    cache = TreeCache(target.model.config, rows, 64)
    return Session(EagerEngine(target), cache, rows, PhaseTimer(), "match", list(range(rows)))


def state(tokens: Sequence[int], max_depth: int = 99) -> RowState:
    return RowState(list(tokens), 1, None, torch.zeros(1, 4), max_depth, SamplingParams())


def paths(tree: TokenTree) -> list[Path]:
    """The path of tokens to every node, in index order."""
    return [
        tuple(tree.token(above) for above in tree.path(node)[1:])
        for node in range(1, tree.num_nodes)
    ]


def naive_paths(proposer: NgramProposer, tokens: list[int], max_depth: int) -> list[Path]:
    """Slow twin: scan the text for each n, list every prefix of every copy, sort."""
    depth = min(proposer.depth, max_depth)
    starts: list[int] = []
    for size in range(proposer.max_ngram, proposer.min_ngram - 1, -1):
        ends = [
            end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[-size:]
        ]
        if size < len(tokens) and ends:
            starts = ends
            break
    if proposer.occurrence == "last":
        starts = starts[::-1]
    copies = []
    for start in starts[: proposer.branch]:
        copy = tokens[start:]
        while proposer.occurrence == "last" and len(copy) < depth:
            copy = copy + tokens[start:]  # the copy runs on into itself
        copies.append(tuple(copy[:depth]))
    nodes = {copy[:level] for copy in copies for level in range(1, len(copy) + 1)}

    def badness(path: Path) -> tuple[int, int, int]:
        through = [rank for rank, copy in enumerate(copies) if copy[: len(path)] == path]
        return -len(through), through[0], len(path)

    return sorted(nodes, key=badness)[: proposer.size - 1]


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_equals_the_naive_scan_round_after_round(one: Session, data: st.DataObject) -> None:
    low = data.draw(st.integers(1, 3))
    proposer = NgramProposer(
        size=data.draw(st.integers(2, 12)),
        depth=data.draw(st.integers(1, 6)),
        branch=data.draw(st.integers(1, 4)),
        min_ngram=low,
        max_ngram=data.draw(st.integers(low, 4)),
        occurrence=data.draw(st.sampled_from(["last", "first"])),
    )
    proposer.start(one)
    alphabet = data.draw(st.integers(1, 4))
    token = st.integers(0, alphabet - 1)
    text = data.draw(st.lists(token, min_size=1, max_size=30))
    for new in data.draw(st.lists(st.lists(token, min_size=1, max_size=5), max_size=4)):
        room = data.draw(st.integers(0, 7))
        (tree,) = proposer.propose([state(text, room)])
        assert tree is not None
        assert tree.token(0) == text[-1]
        assert tree.proposal is Proposal.ONE_HOT
        assert paths(tree) == naive_paths(proposer, text, room)
        text = text + new


@settings(deadline=None, max_examples=100)
@given(
    text=st.lists(st.integers(0, 3), min_size=2, max_size=40),
    longest=st.integers(1, 4),
    count=st.integers(1, 6),
)
def test_first_with_one_branch_is_the_chain_of_transformers(
    one: Session, text: list[int], longest: int, count: int
) -> None:
    peer = PromptLookupCandidateGenerator(
        num_output_tokens=count, max_matching_ngram_size=longest, max_length=1000
    )
    theirs = peer.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()
    proposer = NgramProposer(
        size=count + 1, depth=count, branch=1, max_ngram=longest, occurrence="first"
    )
    proposer.start(one)
    (tree,) = proposer.propose([state(text)])
    assert tree is not None and tree.is_chain
    assert tree.tokens.tolist() == [text[-1], *theirs]


@settings(deadline=None, max_examples=100)
@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    shortest=st.integers(1, 4),
    more=st.integers(0, 6),
    branch=st.integers(1, 3),
)
def test_parts_by_match_draft_together_what_the_whole_drafts(
    one: Session, text: list[int], shortest: int, more: int, branch: int
) -> None:
    whole = NgramProposer(8, 4, branch, max_ngram=shortest + more, min_ngram=shortest)
    parts = list(by_match(whole).values())
    bounds = [(part.min_ngram, part.max_ngram) for part in parts]
    assert [n for low, high in bounds for n in range(low, high + 1)] == [
        *range(shortest, shortest + more + 1)
    ]
    found = []
    for proposer in (whole, *parts):
        proposer.start(one)
        (tree,) = proposer.propose([state(text)])
        assert tree is not None
        found.append(paths(tree))
    drafted = [tree for tree in found[1:] if tree]
    assert drafted == ([found[0]] if found[0] else [])


def test_a_longer_match_hides_shorter_ones(one: Session) -> None:
    chains = {}
    for longest in (1, 2, 3):
        proposer = NgramProposer(depth=2, branch=1, max_ngram=1, indices=Indices(1, longest))
        proposer.start(one)
        (tree,) = proposer.propose([state([5, 1, 2, 3, 4, 1, 2])])
        assert tree is not None
        chains[longest] = tree.tokens.tolist()
    assert chains == {1: [2, 3, 4], 2: [2], 3: [2]}
    with pytest.raises(ValueError, match="indices hold matches of 1 to 2 tokens, not of 1 to 3"):
        NgramProposer(indices=Indices(1, 2))


def test_parts_share_one_index(one: Session) -> None:
    parts = list(by_match(NgramProposer(max_ngram=10)).values())
    assert len({id(part.indices) for part in parts}) == 1
    for part in parts:
        part.start(one)
    text = [5, 1, 2, 3, 4, 1, 2]
    assert [part.copies([state(text)])[0] is None for part in parts] == [True, False, True, True]
    parts[0].finish(0, text)
    parts[1].finish(0, text)


def test_first_and_last_differ_and_last_is_the_default(one: Session) -> None:
    text = [1, 2, 3, 4, 1, 2, 5, 6, 1, 2]
    chains = {}
    for occurrence in ("first", "last"):
        proposer = NgramProposer(depth=2, branch=1, occurrence=occurrence)
        proposer.start(one)
        (tree,) = proposer.propose([state(text)])
        assert tree is not None
        chains[occurrence] = tree.tokens.tolist()
    assert chains == {"first": [2, 3, 4], "last": [2, 5, 6]}
    assert NgramProposer().occurrence == "last"


def test_what_occurrences_agree_on_comes_first() -> None:
    # The most recent copy says 9; two older ones say 5 and then differ.
    drafts, parents = merge_copies([[9, 9], [5, 6], [5, 7]], 4)
    assert list(zip(drafts, parents, strict=True)) == [(5, 0), (9, 0), (9, 2), (6, 1)]


def test_a_loop_is_drafted_as_deep_as_the_tree() -> None:
    assert copy_from([7, 1, 2], 1, 5, run_on=True) == [1, 2, 1, 2, 1]
    assert copy_from([7, 1, 2], 1, 5, run_on=False) == [1, 2]


def test_nothing_known_drafts_nothing(target: TargetModel) -> None:
    proposer = NgramProposer(min_ngram=2, max_ngram=3)
    proposer.start(session(target, 3))
    fresh, ended, full = proposer.propose([state([1, 2, 3, 9, 3]), None, state([1, 1, 1, 1], 0)])
    assert ended is None
    assert fresh is not None and fresh.num_nodes == 1
    assert full is not None and full.num_nodes == 1  # no room below the root


class CountingText(list[int]):
    """Counts the tokens that are read of it."""

    reads = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        CountingText.reads += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self):
        raise AssertionError("the whole text is read")


@pytest.mark.parametrize("period", [1, 2, 50])
def test_a_round_reads_only_what_is_new_and_what_it_drafts(one: Session, period: int) -> None:
    proposer = NgramProposer(size=16, depth=8, branch=4, max_ngram=3)
    proposer.start(one)
    costs = []
    for length in (300, 600, 3000):
        row = state([])
        for end in (length - 2, length):  # absorb the bulk, then measure a round with two new ones
            row.tokens = CountingText(place % period for place in range(end))
            CountingText.reads = 0
            proposer.propose([row])
        costs.append(CountingText.reads)
    assert len(set(costs)) == 1
    assert costs[0] <= 2 * (1 + 2 + 3) + (1 + 2 + 3) + 4 * 8 + 1


def test_an_ended_sequence_keeps_nothing_and_a_new_call_starts_afresh(target: TargetModel) -> None:
    proposer = NgramProposer()
    proposer.start(session(target, 2))
    text = [4, 5, 4]
    proposer.propose([state(text), state(text)])
    proposer.finish(0, text)
    assert list(proposer.indices._of_row) == [1]
    proposer.start(session(target))
    (tree,) = proposer.propose([state([9, 4])])
    assert tree is not None and tree.num_nodes == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 1}, "size >= 2"),
        ({"depth": 0}, "depth >= 1"),
        ({"branch": 0}, "branch >= 1"),
        ({"min_ngram": 0}, "min_ngram 0"),
        ({"min_ngram": 4}, "max_ngram 3"),
        ({"occurrence": "middle"}, "'middle'"),
    ],
)
def test_refuses_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NgramProposer(**options)


@pytest.mark.parametrize("rule", ["match", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("options", [{}, {"branch": 1, "occurrence": "first"}])
def test_output_is_plain_decoding(
    target: TargetModel, rule: str, temperature: float, options: dict
) -> None:
    prompts = [[5, 6, 7, 8, 5, 6], [9, 9, 9, 9, 9, 9, 9, 9, 9], [30, 31]]
    sampling = SamplingParams(temperature=temperature, top_k=3, seed=5)
    plain = plain_generate(target, prompts, max_new_tokens=40, sampling=sampling)
    drafted = speculative_generate(
        target,
        NgramProposer(size=12, **options),
        prompts,
        max_new_tokens=40,
        sampling=sampling,
        rule=rule,
    )
    assert drafted.sequences == plain.sequences
    assert drafted.num_forwards < 40
