"""The numbers of others, from records written by hand; see `tests.inference.recorded`.

Six rounds accept 3, 0, 2, 1, 0 (no draft) and 3, which is 9; they emit 4, 1, 2, 2, 1 and 4: 14.
"""

from dataclasses import replace

import pytest

from inference.measuring import conventions
from inference.measuring.evaluation_report import count_rounds
from inference.measuring.run_records import Run
from tests.inference.recorded import CELL, RESULT, small_run, traced


@pytest.fixture
def run() -> Run:
    return small_run()


def test_ours(run: Run) -> None:
    rounds = conventions.rounds_of_cell(run)
    assert conventions.acceptance_length(rounds) == 14 / 6
    assert conventions.accepted_per_round(rounds) == 9 / 6
    assert conventions.acceptance_length_per_request(run) == pytest.approx((7 / 3 + 3 / 2 + 4) / 3)
    assert conventions.survival(rounds) == [4 / 6, 3 / 6, 2 / 6]
    assert conventions.conditional(rounds) == [4 / 5, 3 / 4, 2 / 3]


def test_ours_are_the_reported_ones(run: Run) -> None:
    rounds = conventions.rounds_of_cell(run)
    stats = count_rounds(rounds)
    assert conventions.acceptance_length(rounds) == stats.acceptance_length
    assert conventions.accepted_per_round(rounds) == stats.accepted_per_round
    assert conventions.survival(rounds) == stats.survival
    assert conventions.conditional(rounds) == stats.conditional


def test_papers_and_benchmarks(run: Run) -> None:
    rounds = conventions.rounds_of_cell(run)
    assert conventions.eagle_tau(rounds) == 1 + 9 / 6
    assert conventions.eagle_n_alpha(rounds) == [4 / 5, 3 / 4, 2 / 3]
    assert conventions.spec_bench_mean_accepted_tokens(rounds) == 1 + 9 / 6
    assert conventions.speed_bench_average_al(run) == pytest.approx((7 / 3 + 3 / 2 + 4) / 3)
    assert conventions.dflash_average_acceptance_length(run) == pytest.approx((7 / 3 + 1.5 + 4) / 3)
    assert conventions.speed_bench_joint_rates(rounds) == [4 / 6, 3 / 6, 2 / 6]
    rates = conventions.speed_bench_conditional_rates(rounds)
    assert rates == pytest.approx([4 / 6, 3 / 4, 2 / 3])


def test_the_speed_of_spec_bench_averages_questions(run: Run) -> None:
    """a: 12 tokens in 7 s, plainly in 12 s; b: 5 tokens in 2 s, plainly in 5 s."""
    found = conventions.spec_bench_speedup(run)
    assert found == pytest.approx((12 / 7 + 5 / 2) / (12 / 12 + 5 / 5))
    bare = replace(run, requests=[replace(one, plain_seconds=None) for one in run.requests])
    with pytest.raises(ValueError, match="without --no-plain"):
        conventions.spec_bench_speedup(bare)


def test_trainers(run: Run) -> None:
    rounds = conventions.rounds_of_cell(run)
    products = 4 / 5 + 4 / 5 * 3 / 4 + 4 / 5 * 3 / 4 * 2 / 3
    assert conventions.specforge_simulated_acc_len(rounds) == pytest.approx(products)
    assert conventions.automodel_tau_sim(rounds) == pytest.approx(1 + products)
    assert conventions.deepspec_tau(run) == (7 + 4) / 4  # first turns alone
    warm = replace(run, result={**RESULT, "cells": [{**CELL, "temperature": 0.5}]})
    with pytest.raises(ValueError, match="temperature"):
        conventions.deepspec_tau(warm)


def test_engines(run: Run) -> None:
    rounds = conventions.rounds_of_cell(run)
    assert conventions.vllm_mean_acceptance_length(rounds) == 1 + 9 / 5  # five rounds drafted
    assert conventions.vllm_per_position_acceptance_rates(rounds) == [4 / 5, 3 / 5, 2 / 5]
    assert conventions.vllm_draft_acceptance_rate(rounds) == 9 / 15
    assert conventions.sglang_accept_length(run) == (8 + 4 + 5) / 6


def test_what_is_defined_on_chains_refuses_trees(run: Run) -> None:
    trees = [traced()]
    assert conventions.eagle_tau(trees) == 3.0
    with pytest.raises(ValueError, match=r"chains.*--branch 1"):
        conventions.eagle_n_alpha(trees)
    with pytest.raises(ValueError, match="chains"):
        conventions.deepspec_tau(replace(run, rounds=[replace(traced(), id="b")]))


def test_no_rounds_no_number(run: Run) -> None:
    """And not a crash: a text may end with the token of its prefill."""
    bare = replace(run, requests=[replace(run.requests[0], tokens=[1], pieces=["a"])], rounds=[])
    of_rounds = [
        conventions.acceptance_length,
        conventions.eagle_tau,
        conventions.survival,
        conventions.conditional,
        conventions.vllm_mean_acceptance_length,
        conventions.vllm_draft_acceptance_rate,
        conventions.specforge_simulated_acc_len,
    ]
    for convention in of_rounds:
        with pytest.raises(ValueError, match="no such round"):
            convention([])
    for of_run in (
        conventions.sglang_accept_length,
        conventions.speed_bench_average_al,
        conventions.deepspec_tau,
    ):
        with pytest.raises(ValueError, match="no such round"):
            of_run(bare)
