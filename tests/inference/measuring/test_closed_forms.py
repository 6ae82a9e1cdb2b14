"""Every reported number, on a target and a head with known laws, against its closed form.

A figure may be off by 4 standard errors of the mean over requests; seeds are fixed. Planted bugs
show that this is close enough to find them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import inference.measuring.evaluation_report as evaluation_report
import inference.verify as verify_module
from inference.measuring.evaluation import Prompt, Report, measure
from inference.measuring.run_records import RoundRecord
from inference.proposers import TreeOptions
from inference.proposers.simulated import SimulatedProposer
from inference.sampling import SamplingParams
from inference.shapes.static_tree import static_tree
from inference.stats import AcceptanceStats
from tests.inference.bigram import (
    BigramProposer,
    Expected,
    bigram_target,
    chosen,
    coupled,
    drawn,
    expected,
    greedy,
    near,
    random_table,
)

SIGMA = 4.0
NEW = 30
P = random_table(1)
Q = near(P, 2)
CHAIN = TreeOptions(4, 3, 1)
TREE = TreeOptions(shape=static_tree([(0,), (1,), (0, 0), (1, 0)]))
CASES: dict[str, tuple[str, float, TreeOptions, list[Tensor], list[int]]] = {
    "rejection chain": ("rejection", 1.0, CHAIN, [drawn(P, Q)] * 3, [1] * 3),
    "match chain": ("match", 1.0, CHAIN, [chosen(P, Q)] * 3, [1] * 3),
    "coupled chain": ("coupled", 1.0, CHAIN, [coupled(P, Q)] * 3, [1] * 3),
    "match tree": ("match", 1.0, TREE, [chosen(P, Q, 2), chosen(P, Q)], [2, 2]),
    "greedy tree": ("match", 0.0, TREE, [chosen(greedy(P), Q, 2), chosen(greedy(P), Q)], [2, 2]),
}
"""Rule, temperature, drafts, acceptance by depth, draft tokens by depth."""


def decoded(case: str, requests: int, prompt: Sequence[int] = (1, 2, 3)) -> Report:
    rule, temperature, options, _, _ = CASES[case]
    return measure(
        bigram_target(P),
        BigramProposer(Q, options),
        [Prompt(list(prompt), id=str(number)) for number in range(requests)],
        max_new_tokens=NEW,
        sampling=SamplingParams(temperature, seed=5),
        rule=rule,
        compare=None,
        batch_size=requests,
    )


def closed(case: str) -> Expected:
    _, temperature, _, accept, widths = CASES[case]
    return expected(P if temperature else greedy(P), accept, widths, last=3, new=NEW)


def check(
    found: float | None, tops: Sequence[float], bottoms: Sequence[float], top: float, bottom: float
) -> None:
    """A ratio of sums over requests against the ratio of their expectations.

    Args:
        found: as reported.
        tops, bottoms: per request what it is the ratio of.
        top, bottom: their expectations.
    """
    if bottom == 0:
        assert found is None or found == 0
        return
    assert found is not None
    truth, n = top / bottom, len(tops)
    off = [one - truth * two for one, two in zip(tops, bottoms, strict=True)]
    error = math.sqrt(sum(value**2 for value in off) / n) / math.sqrt(n) / bottom
    assert abs(found - truth) <= SIGMA * error + 1e-9, f"{found} is not {truth} within {error}"


def check_all(report: Report, truth: Expected) -> None:
    """Every figure of a report."""
    result: dict[str, Any] = report.to_dict()
    stats = [request.stats for request in report.requests]
    rounds = [float(one.num_drafts) for one in stats]
    accepted = [float(one.num_accepted_tokens) for one in stats]
    drafts = [float(one.num_draft_tokens) for one in stats]
    emitted, ones = [float(truth.emitted)] * len(stats), [1.0] * len(stats)
    assert [one.num_emitted for one in stats] == emitted
    every = sum(truth.accepted)
    check(result["acceptance_length"], emitted, rounds, truth.emitted, truth.rounds)
    check(result["accepted_per_round"], accepted, rounds, every, truth.rounds)
    check(result["acceptance_rate"], accepted, drafts, every, truth.draft_tokens)
    check(result["draft_tokens_per_round"], drafts, rounds, truth.draft_tokens, truth.rounds)
    widths = [one + two for one, two in zip(drafts, rounds, strict=True)]
    check(result["verify_width"], widths, rounds, truth.draft_tokens + truth.rounds, truth.rounds)
    means = [one / two for one, two in zip(emitted, rounds, strict=True)]
    check(result["acceptance_length_per_request"], means, ones, truth.per_request, 1.0)
    check(result["accepted_per_request"], [m - 1 for m in means], ones, truth.per_request - 1, 1.0)
    rates = result["acceptance_by_position"]
    for d in range(len(truth.accepted)):
        hits = [float(one.accepted_by_depth[d + 1]) for one in stats]
        reached = [float(one.reached_by_depth[d + 1]) for one in stats]
        check(rates["survival"][d], hits, rounds, truth.accepted[d], truth.rounds)
        check(rates["conditional"][d], hits, reached, truth.accepted[d], truth.reached[d])
        proposed = [float(one.proposed_by_depth[d + 1]) for one in stats]
        found = result["proposed_by_depth"][d] / len(stats)
        check(found, proposed, ones, truth.proposed[d], 1.0)


SLOW = ("match chain", "coupled chain", "greedy tree")
"""A fast run leaves these out."""


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]
)
def test_every_figure_has_its_expectation(case: str) -> None:
    requests = 48 if CASES[case][1] else 2
    check_all(decoded(case, requests), closed(case))


@pytest.mark.slow
def test_acceptance_by_context_has_its_expectation() -> None:
    """Texts that begin below 128 tokens and end above."""
    report, truth = decoded("rejection chain", 48, [1, 2, 3] * 38), closed("rejection chain")
    below, above = report.to_dict()["by_context"]
    assert (below["from"], below["to"], above["from"], above["to"]) == (0, 128, 128, 256)
    for bucket in (below, above):
        # 114 prompt tokens and 30 - r new ones, the prefill's among them, are there with r to come
        places = [
            left for left in range(1, NEW) if (114 + NEW - left < 128) == (bucket["from"] == 0)
        ]
        inside: list[list[RoundRecord]] = [
            [each for each in request.rounds if 114 + NEW - each.context in places]
            for request in report.requests
        ]
        tops = [float(sum(len(each.emitted) for each in rounds)) for rounds in inside]
        bottoms = [float(len(rounds)) for rounds in inside]
        top, bottom = (
            sum(column[left] for left in places) for column in (truth.gains, truth.starts)
        )
        assert bucket["num_drafts"] == sum(bottoms)
        check(bucket["acceptance_length"], tops, bottoms, top, bottom)


def accept_like_match(residual: Tensor, proposed: Tensor | None, token: int) -> float:
    return float(residual[token])


def one_more(rounds: Sequence[RoundRecord]) -> AcceptanceStats:
    """The prefill's token counted as a round's."""
    stats = count(rounds)
    return replace(stats, num_emitted=stats.num_emitted + 1)


def unconditional(rounds: Sequence[RoundRecord]) -> AcceptanceStats:
    """Reached is taken for proposed."""
    stats = count(rounds)
    return replace(stats, reached_by_depth=stats.proposed_by_depth)


count = evaluation_report.count_rounds


@pytest.mark.parametrize(
    ("module", "name", "bug"),
    [
        (verify_module, "accept_probability", accept_like_match),
        (evaluation_report, "count_rounds", one_more),
        (evaluation_report, "count_rounds", unconditional),
    ],
)
def test_planted_bugs_are_found(
    module: Any, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, bug)
    with pytest.raises(AssertionError):
        check_all(decoded("rejection chain", 48), closed("rejection chain"))


def test_a_wrong_expectation_is_found() -> None:
    """A head that is a little better than the one that decoded."""
    better = [drawn(P, near(P, 2, noise=0.5))] * 3
    with pytest.raises(AssertionError):
        check_all(decoded("rejection chain", 48), expected(P, better, [1] * 3, last=3, new=NEW))


# Simulated drafts ---------------------------------------------------------------------------------


def geometric(accept: float, depth: int) -> Expected:
    """Every token right with the same chance: the tables do not matter."""
    table = torch.ones(1, 1, dtype=torch.float64)
    return expected(table, [accept * table] * depth, [1] * depth, last=0, new=NEW)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "temperature"), [("match", 0.0), ("match", 1.0), ("coupled", 1.0), ("rejection", 0.0)]
)
def test_simulated_drafts_give_the_geometric_formula(rule: str, temperature: float) -> None:
    accept, depth = 0.7, 4
    report = measure(
        bigram_target(P),
        SimulatedProposer(accept, depth),
        [Prompt([1, 2, 3], id=str(number)) for number in range(32)],
        max_new_tokens=NEW,
        sampling=SamplingParams(temperature, seed=1),
        rule=rule,
        batch_size=32,
    )
    assert report.identical is True
    check_all(report, geometric(accept, depth))
    full = [each for request in report.requests for each in request.rounds if each.depth == depth]
    emitted = [float(len(each.emitted)) for each in full]
    formula = (1 - accept ** (depth + 1)) / (1 - accept)
    check(sum(emitted) / len(full), emitted, [1.0] * len(full), formula, 1.0)


@pytest.mark.parametrize(("accept", "length"), [(0.0, 1.0), (1.0, 29 / 6)])
def test_drafts_that_are_never_or_always_right(accept: float, length: float) -> None:
    """29 tokens behind the prefill's are five rounds of five drafts, and one of four."""
    report = measure(
        bigram_target(P),
        SimulatedProposer(accept, 4),
        [Prompt([1, 2, 3], id="a")],
        max_new_tokens=NEW,
        compare=None,
    )
    assert report.to_dict()["acceptance_length"] == pytest.approx(length)


def test_simulated_drafts_need_a_text_that_is_known() -> None:
    with pytest.raises(ValueError, match=r"rule 'rejection' at a temperature.*match or coupled"):
        measure(
            bigram_target(P),
            SimulatedProposer(0.5),
            [Prompt([1, 2, 3])],
            max_new_tokens=4,
            sampling=SamplingParams(1.0),
            rule="rejection",
        )


@pytest.mark.parametrize("options", [(1.1, 3), (-0.1, 3), (0.5, 0)])
def test_simulated_options_out_of_range_are_refused(options: tuple[float, int]) -> None:
    with pytest.raises(ValueError, match=r"accept|depth"):
        SimulatedProposer(*options)
