"""Suffix decoding: trees equal to scanning the texts, and past outputs never change the law."""

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import TargetModel
from inference.cache import TreeCache
from inference.engine import EagerEngine
from inference.generate import plain_generate, speculative_generate
from inference.proposers.base import RowState, Session
from inference.proposers.suffix import History, SuffixProposer
from inference.proposers.suffix_automaton import SuffixAutomaton
from inference.sampling import SamplingParams
from inference.timing import PhaseTimer
from inference.tree import Proposal, TokenTree
from inference.verify import verify
from tests.inference.proposers.test_suffix_automaton import (
    ONE_TEXT,
    Run,
    Texts,
    ends,
    following,
    longest_suffix,
    runs,
    walk,
)
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(layers=2)


@pytest.fixture(scope="module")
def one(target: TargetModel) -> Session:
    return session(target)


def session(target: TargetModel, rows: int = 1, rule: str = "match") -> Session:
    cache = TreeCache(target.model.config, rows, 64)
    return Session(EagerEngine(target), cache, rows, PhaseTimer(), rule, list(range(rows)))


def state(
    tokens: Sequence[int],
    prompt_length: int = 1,
    max_depth: int = 99,
    temperature: float = 0.0,
) -> RowState:
    hidden, sampling = torch.zeros(1, 4), SamplingParams(temperature)
    return RowState(list(tokens), prompt_length, None, hidden, max_depth, sampling)


def paths(tree: TokenTree) -> list[Run]:
    """The path of tokens to every node, in index order."""
    return [
        tuple(tree.token(above) for above in tree.path(node)[1:])
        for node in range(1, tree.num_nodes)
    ]


def naive_paths(proposer: SuffixProposer, past: Texts, text: list[int], room: int) -> list[Run]:
    """The tree, grown by scanning: its paths in the order in which they are added."""
    own_run = longest_suffix([text], text, proposer.max_match)
    past_run = longest_suffix(past, text, proposer.max_match)
    evidence = proposer.own_weight * len(own_run) + len(past_run)
    size = min(
        proposer.size - 1,
        int(proposer.factor * max(len(own_run), len(past_run)) + proposer.offset),
    )
    Node = tuple[float, int, Run, float, float]
    frontier: list[Node] = []
    added: list[Run] = []
    pushed = 0

    def push(path: Run, own: float, other: float) -> None:
        nonlocal pushed
        children: dict[int, list[float]] = {}
        for place, (texts, run, weight) in enumerate(
            (([text], own_run, own), (past, past_run, other))
        ):
            counts = following(texts, [*run, *path]) if weight else {}
            for token, count in counts.items():
                children.setdefault(token, [0.0, 0.0])[place] = weight * (
                    count / sum(counts.values())
                )
        likely = [(t, w) for t, w in children.items() if sum(w) >= proposer.min_probability]
        likely.sort(key=lambda pair: -sum(pair[1]))
        for token, weights in likely[: proposer.branch]:
            frontier.append((-sum(weights), pushed, (*path, token), *weights))
            pushed += 1

    depth = min(proposer.depth, room)
    if depth and evidence:
        push((), proposer.own_weight * len(own_run) / evidence, len(past_run) / evidence)
    while frontier and len(added) < size:
        best = min(frontier)
        frontier.remove(best)
        added.append(best[2])
        if len(best[2]) < depth:
            push(*best[2:])
    return added


# Past outputs ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(texts=st.lists(ONE_TEXT, min_size=1, max_size=12), limit=st.integers(1, 60))
def test_history_keeps_the_newest_texts_within_its_bound(
    texts: list[list[int]], limit: int
) -> None:
    history = History(limit, counted=5)
    for text in texts:
        history.add(text)
        assert history.num_tokens == sum(map(len, history.texts)) <= limit
    kept = [text[-limit:] for text in texts][-len(history.texts) :]
    assert list(history.texts) == kept
    for run in runs(kept, 5):
        assert history.automaton.count[walk(history.automaton, run)] == len(ends(kept, run))


def test_rebuilding_costs_at_most_as_much_as_adding(monkeypatch: pytest.MonkeyPatch) -> None:
    appended, append = [], SuffixAutomaton.append
    monkeypatch.setattr(
        SuffixAutomaton, "append", lambda self, token: (appended.append(0), append(self, token))
    )
    history = History(400, counted=4)
    for _ in range(300):
        history.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert 3000 < len(appended) <= 2 * 3000


def test_no_history_if_it_is_turned_off() -> None:
    history = History(0, counted=4)
    history.add([1, 2, 3])
    assert not history.texts and history.automaton.next == [{}]


# The proposer ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_trees_are_those_of_scanning(one: Session, data: st.DataObject) -> None:
    proposer = SuffixProposer(
        size=data.draw(st.integers(2, 12)),
        depth=data.draw(st.integers(1, 4)),
        branch=data.draw(st.integers(1, 3)),
        max_match=data.draw(st.integers(1, 4)),
        factor=data.draw(st.sampled_from([0.0, 0.5, 2.0])),
        offset=data.draw(st.sampled_from([0.0, 1.5, 5.0])),
        min_probability=data.draw(st.sampled_from([0.01, 0.3])),
        own_weight=data.draw(st.sampled_from([0.3, 1.0, 2.0])),
    )
    past = data.draw(st.lists(ONE_TEXT, max_size=3))
    for text in past:
        proposer.start(one)
        proposer.propose([state(text[:1])])  # of the prompt's one token, the output's context
        proposer.finish(0, text)
    proposer.start(one)
    text = data.draw(ONE_TEXT)
    for new in data.draw(st.lists(ONE_TEXT.map(lambda tokens: tokens[:4]), max_size=3)):
        room = data.draw(st.integers(0, 5))
        (tree,) = proposer.propose([state(text, max_depth=room)])
        assert tree is not None
        assert tree.token(0) == text[-1] and tree.proposal is Proposal.ONE_HOT
        assert tree.is_chain or proposer.branch > 1
        assert paths(tree) == naive_paths(proposer, past, text, room)
        text = text + new


def test_probability_of_a_path_is_the_product_of_shares(one: Session) -> None:
    text = [1, 2, 1, 3, 5, 1, 3, 4, 1]  # behind 1: 2 once, 3 twice; behind 13: 5 and 4 once each
    proposer = SuffixProposer(offset=9, min_probability=0.35, max_match=1)
    proposer.start(one)
    (tree,) = proposer.propose([state(text)])
    assert tree is not None
    assert paths(tree) == [(3,)]  # 2/3; the 2 has 1/3, and 34 and 35 have 2/3 · 1/2
    (tree,) = replaced(proposer, one, min_probability=0.33).propose([state(text)])
    assert tree is not None
    assert paths(tree)[:4] == [(3,), (2,), (3, 4), (3, 5)]


def replaced(proposer: SuffixProposer, one: Session, **options) -> SuffixProposer:
    new = replace(proposer, **options)
    new.start(one)
    return new


def test_past_outputs_are_drafted_from_in_the_next_call_only(target: TargetModel) -> None:
    prompt, output = [1, 2, 3], [4, 5, 6, 7]
    proposer = SuffixProposer(max_match=2, offset=8)
    proposer.start(session(target, 2))
    proposer.propose([state(prompt, 3), None])
    proposer.finish(0, prompt + output)
    (_, tree) = proposer.propose([None, state(prompt, 3)])
    assert tree is not None and tree.num_nodes == 1  # rows of one call know nothing of each other
    proposer.finish(1, prompt)
    proposer.start(session(target))
    (tree,) = proposer.propose([state(prompt, 3)])
    assert tree is not None
    assert paths(tree) == [(4,), (4, 5), (4, 5, 6), (4, 5, 6, 7)]
    (tree,) = replaced(proposer, session(target), max_history_tokens=0).propose([state(prompt, 3)])
    assert tree is not None and tree.num_nodes == 1


@pytest.mark.parametrize(
    ("rule", "temperature", "used"),
    [
        ("match", 0.8, True),
        ("coupled", 0.8, True),
        ("rejection", 0.0, True),
        ("rejection", 0.8, False),
        ("block", 0.8, False),
    ],
)
def test_where_coins_judge_the_drafts_past_outputs_are_not_used(
    target: TargetModel, rule: str, temperature: float, used: bool
) -> None:
    proposer = SuffixProposer()
    for _ in range(2):
        proposer.start(session(target, rule=rule))
        (tree,) = proposer.propose([state([1, 2, 3], temperature=temperature)])
        proposer.finish(0, [1, 2, 3, 4])
    assert tree is not None
    assert (tree.num_nodes > 1) == used


def test_control_drafting_an_output_of_the_same_seed_is_biased_under_rejection() -> None:
    """Why: the first output is a function of the coins that then judge it."""
    law = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)

    def emit(seed: int, draft: int) -> int:
        tree = TokenTree.chain(torch.tensor([0, draft]))
        verdict = verify(tree, lambda _: law, "rejection", seed, position=7)
        return tree.token(1) if verdict.path else verdict.next_token

    first = [emit(seed, 1) for seed in range(1000)]
    again = [emit(seed, token) for seed, token in enumerate(first)]
    other = [emit(seed + 1000, token) for seed, token in enumerate(first)]
    deviation = (0.3 * 0.7 / 1000) ** 0.5
    assert abs(first.count(1) / 1000 - 0.3) < 4 * deviation
    assert abs(again.count(1) / 1000 - 0.3) > 8 * deviation
    assert abs(other.count(1) / 1000 - 0.3) < 4 * deviation


def test_of_a_long_prompt_only_the_end_is_kept(target: TargetModel) -> None:
    proposer = SuffixProposer(max_match=2)
    proposer.start(session(target))
    proposer.propose([state([9, 8, 7, 6], 4)])
    proposer.finish(0, [9, 8, 7, 6, 5])
    proposer.start(session(target))
    assert list(proposer._history.texts) == [[7, 6, 5]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 1}, "size >= 2"),
        ({"depth": 0}, "depth >= 1"),
        ({"branch": 0}, "branch >= 1"),
        ({"max_match": 0}, "max_match >= 1"),
        ({"factor": -1.0}, "factor >= 0"),
        ({"offset": -0.5}, "offset >= 0"),
        ({"max_history_tokens": -1}, "max_history_tokens >= 0"),
        ({"min_probability": 0.0}, "min_probability"),
        ({"min_probability": 1.5}, "min_probability"),
        ({"own_weight": 0.0}, "own_weight"),
    ],
)
def test_refuses_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SuffixProposer(**options)


def test_every_option_is_checked() -> None:
    assert {field.name for field in fields(SuffixProposer) if field.init} == {
        "size", "depth", "branch", "max_match", "factor", "offset", "max_history_tokens",
        "min_probability", "own_weight",
    }  # fmt: skip


@pytest.mark.parametrize("rule", ["match", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_output_is_plain_decoding_whatever_was_written_before(
    target: TargetModel, rule: str, temperature: float
) -> None:
    prompts = [[5, 6, 7, 8, 5, 6], [9, 9, 9, 9, 9, 9, 9, 9, 9], [30, 31]]
    sampling = SamplingParams(temperature=temperature, top_k=3, seed=5)
    plain = plain_generate(target, prompts, max_new_tokens=40, sampling=sampling)
    proposer = SuffixProposer(size=16, offset=2)
    forwards = []
    for _ in range(3):
        drafted = speculative_generate(
            target, proposer, prompts, max_new_tokens=40, sampling=sampling, rule=rule
        )
        assert drafted.sequences == plain.sequences
        forwards.append(drafted.num_forwards)
    assert forwards[0] < 40
    assert forwards[1] < forwards[0]  # the same outputs again: they were remembered
    other = replace(sampling, seed=6)  # other outputs than those remembered
    again = speculative_generate(
        target, proposer, prompts, max_new_tokens=40, sampling=other, rule=rule
    )
    expected = plain_generate(target, prompts, max_new_tokens=40, sampling=other)
    assert again.sequences == expected.sequences
