"""Measured rates are those of the decoder: by walking trees, by enumeration, and by decoding.

Letters: V vocabulary, K depths, R ranks.
"""

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import TargetModel
from inference.generate import plain_generate, speculative_generate
from inference.proposers import HeadProposer, RowState, TreeOptions
from inference.proposers.growth import new_tree
from inference.sampling import SamplingParams
from inference.shapes.rates import Rates, drawn_chances, measure_rates, rank_of
from inference.shapes.sequoia import expected_tokens, optimal_tree
from inference.shapes.static_tree import optimal_static_tree, static_tree
from inference.stopping import Stop
from inference.tree import Proposal, TokenTree
from tests.inference.drafting import noisy_copy
from tests.inference.oracles import by_depth, drawn_trees, outcomes, prefix_of, random_laws, walk_of
from tests.tiny import tiny_target

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [20] * 11, [30, 4], [50, 51, 52], [61, 7, 8, 61]]
NO_END = Stop(token_ids=())
SAMPLED = SamplingParams(1.0, seed=3)


@functools.cache
def models() -> tuple[TargetModel, TargetModel]:
    """A target, and a draft model that often agrees with it."""
    target = tiny_target(layers=2)
    return target, noisy_copy(target, functools.partial(tiny_target, layers=2), 0.12)


class ModelHead(HeadProposer):
    """A "head" that is a whole model run anew for each node."""

    def __init__(self, options: TreeOptions) -> None:
        self.drafter: Any = SimpleNamespace(draft_vocab=None, feature_layers=())
        self.options, self._rule, self.rounds = options, "match", 0

    def reset(self, batch_size: int) -> None:
        self.rounds = 0

    def logits(self, text: list[int]) -> Tensor:
        return models()[1].forward(torch.tensor([text]), logits_to_keep=1).logits[0, -1]

    def forced(self, state: RowState, tokens: list[int]) -> list[Tensor]:
        assert len(state.hidden) == (len(state.tokens) - 1 if self.rounds == 0 else 1)
        self.rounds += 1
        return [self.logits(state.tokens + tokens[:n]) for n in range(len(tokens) + 1)]

    def grow(self, row: int, state: RowState) -> TokenTree:
        tree = new_tree(self.options, state, self._rule, CPU, 96)
        frontier, paths = torch.zeros(1, dtype=torch.int64), {0: list(state.tokens)}
        while len(frontier) and tree.depth:
            rows = [self.logits(paths[node]) for node in frontier.tolist()]
            start = len(tree.candidates.tokens)
            tree.add_children(frontier, torch.stack(rows))
            for node in range(start, len(tree.candidates.tokens)):
                parent = int(tree.candidates.parents[node])
                paths[node] = [*paths[parent], int(tree.candidates.tokens[node])]
            frontier = tree.frontier()
        return tree.finish()[0]


def measured(
    rule: str, sampling: SamplingParams, depths: int, ranks: int, new: int, most: int = 10**6
) -> tuple[Rates, list[list[int]]]:
    """Rates over the target's own answers, and the texts."""
    target, _ = models()
    head = ModelHead(TreeOptions(depths + 1, depths, 1, draft_temperature=1.0))
    rates, texts = Rates.none(depths, ranks), []
    for prompt in PROMPTS:
        [answer] = plain_generate(
            target, [prompt], max_new_tokens=new, sampling=sampling, stop=NO_END
        ).sequences
        texts.append(prompt + answer)
        measure_rates(rates, target, head, texts[-1], len(prompt), sampling, rule, most)
    return rates, texts


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [("match", SamplingParams()), ("match", SAMPLED), ("coupled", SamplingParams(0.7, 20, seed=3))],
)
def test_counts_are_those_of_walks_in_a_full_tree(rule: str, sampling: SamplingParams) -> None:
    depths, ranks = 2, 3
    rates, texts = measured(rule, sampling, depths, ranks, 9)
    every = [p for d in (1, 2) for p in itertools.product(range(ranks), repeat=d)]
    shape = static_tree(every)
    head = ModelHead(TreeOptions(shape=shape, draft_temperature=1.0))
    head._rule = rule
    accepted, reached = torch.zeros(depths, ranks), torch.zeros(depths)
    rounds = 0
    for prompt, text in zip(PROMPTS, texts, strict=True):
        for root in range(len(prompt), len(text) - 1):
            state = RowState(text[: root + 1], 1, None, torch.zeros(0, 1), 9, sampling)
            tree, node = head.grow(0, state), 0
            rounds += 1
            for depth, token in enumerate(text[root + 1 : root + 1 + depths]):
                reached[depth] += 1
                child = tree.child_with_token(node, token)
                if child is None:
                    break
                accepted[depth, int(shape.ranks[child])] += 1
                node = child
    assert rates.rounds == rounds == len(rates.seconds) and accepted.sum() > 9
    assert torch.equal(rates.accepted.float(), accepted)
    assert torch.equal(rates.reached.float(), reached)


def test_the_full_tree_is_worth_what_was_counted() -> None:
    """Products of the rates of all ranks are the rates of whole paths."""
    rates, _ = measured("match", SamplingParams(), 2, 4, 12)
    rates.reached[1] = rates.accepted[0].sum()  # as if no text ended in between
    every = static_tree([p for d in (1, 2) for p in itertools.product(range(4), repeat=d)])
    per_round = rates.accepted.sum() / rates.reached[0]
    assert expected_tokens(every, rates.table) == pytest.approx(1.0 + float(per_round), abs=1e-12)


def test_under_rejection_likeliest_children_are_counted_by_rank() -> None:
    """A head that draws nothing there: its rates are those of `match`, as its drafts are."""
    target, _ = models()
    prompt = PROMPTS[0]
    [answer] = plain_generate(
        target, [prompt], max_new_tokens=12, sampling=SAMPLED, stop=NO_END
    ).sequences
    found = []
    for rule, draws in (("match", None), ("rejection", "none"), ("rejection", "all")):
        options = TreeOptions(3, 2, 1, draft_temperature=1.0, draws=draws)
        rates = Rates.none(2, 3)
        measure_rates(
            rates, target, ModelHead(options), prompt + answer, len(prompt), SAMPLED, rule, 99
        )
        found.append(rates.table)
    assert torch.equal(found[0], found[1]) and not torch.allclose(found[1], found[2])
    head = ModelHead(TreeOptions(3, 2, 1, draws="one"))
    with pytest.raises(ValueError, match="all drawn or none"):
        measure_rates(
            Rates.none(2, 3), target, head, prompt + answer, len(prompt), SAMPLED, "rejection", 9
        )


def test_rounds_stop_at_the_number_asked_for() -> None:
    assert measured("match", SamplingParams(), 2, 3, 9, most=13)[0].rounds == 13


def test_chances_of_drawn_children_are_exact_on_average() -> None:
    """Against every draw and every choice of the verifier."""
    vocab, count, token = 4, 2, 2
    p, q = random_laws(1, vocab, 0.8)(()), random_laws(2, vocab, 0.8)(())
    exact, joint = [0.0] * count, 0.0
    for weight, tree in drawn_trees(lambda _: q, by_depth(count)):
        for probability, verdict in outcomes(walk_of(tree, lambda _: p, "rejection")):
            if verdict.path:
                exact[verdict.path[0] - 1] += weight * probability
                if prefix_of(tree, verdict.path[0]) == (token,):
                    joint += weight * probability
    law = SamplingParams(1.0, seed=5)
    found = [drawn_chances(p, q.log(), None, law, count, token, place) for place in range(600)]
    chances = torch.stack([one for one, _ in found]).mean(0)
    assert chances.tolist() == pytest.approx(exact, abs=0.01)
    passed = sum(one for _, one in found) / len(found)
    assert passed == pytest.approx(joint / float(p[token]), abs=0.03)


def test_chances_of_a_reduced_vocabulary() -> None:
    """Equal laws accept the first child; tokens that the draft lacks are never it."""
    p = torch.tensor([0.0, 0.5, 0.2, 0.3], dtype=torch.float64)
    ids = torch.tensor([1, 2, 3])
    chances, _ = drawn_chances(p, p[ids].log(), ids, SamplingParams(1.0), 2, 2, 9)
    assert chances.tolist() == pytest.approx([1.0, 0.0])
    rest = p.clone()
    rest[:] = torch.tensor([0.6, 0.2, 0.1, 0.1])
    law = SamplingParams(1.0)
    found = [drawn_chances(rest, p[ids].log(), ids, law, 3, 0, place) for place in range(200)]
    chances = torch.stack([one for one, _ in found]).mean(0)
    assert float(chances.sum()) == pytest.approx(0.4, abs=0.01)
    assert all(passed == 0.0 for _, passed in found)


def test_ranks() -> None:
    logits, law = torch.tensor([0.0, 2.0, -torch.inf, 1.0]), SamplingParams()
    ids = torch.tensor([4, 7, 8, 9])
    found = [rank_of(logits, t, ids, law, Proposal.ONE_HOT, 3, 0.8) for t in (4, 7, 8, 9, 5)]
    assert found == [2, 0, None, 1, None]
    assert rank_of(logits, 3, None, law, Proposal.ONE_HOT, 3, 0.8) == 1
    assert rank_of(logits, 6, None, law, Proposal.ONE_HOT, 3, 0.8) is None


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [("match", SamplingParams()), ("coupled", SAMPLED), ("rejection", SAMPLED)],
)
def test_predictions_come_true(rule: str, sampling: SamplingParams) -> None:
    """The fitted tree's expected tokens per round, against decoding other texts with it."""
    rates, _ = measured(rule, sampling, 3, 4, 40)
    if rule == "rejection":
        shape, expected = optimal_tree(rates.table, 7)
    else:
        shape = optimal_static_tree(rates.table, 6)
        expected = expected_tokens(shape, rates.table)
    head = ModelHead(TreeOptions(shape=shape, draft_temperature=1.0))
    head._rule = rule

    class Ruled(ModelHead):
        def start(self, session: Any) -> None:
            self._rule = session.rule

    prompts = [[prompt[-1], *prompt] for prompt in PROMPTS]
    stats = speculative_generate(
        models()[0],
        Ruled(head.options),
        prompts,
        max_new_tokens=40,
        sampling=sampling,
        rule=rule,
        stop=NO_END,
    ).stats
    assert expected > 1.3 and stats.num_drafts > 60
    assert 1.0 + stats.accepted_per_round == pytest.approx(expected, rel=0.15)


def test_draft_seconds_by_level_or_in_one_pass() -> None:
    rates = Rates.none(4, 2)
    with pytest.raises(ValueError, match="long enough for 4 drafts"):
        rates.draft_seconds(True)
    rates.seconds += [0.3, 0.4, 9.0]
    assert rates.draft_seconds(True) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert rates.draft_seconds(False) == pytest.approx([0.4] * 4)
