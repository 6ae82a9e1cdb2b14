"""Several sizes on engine device, with drafts of a chosen quality, on tiny models without a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from inference.generate import plain_generate
from inference.proposers import build_proposer
from inference.scheduling.costs import machine_key
from inference.static.rounds import Rounds
from inference.static.size_costs import RoundTable, fastest_proposer
from inference.static.sizes import PLAIN
from inference.static.tree import DraftTree
from inference.stopping import Stop
from scripts import gpu_check_sizes
from scripts.gpu_check_models import models, restarted
from scripts.gpu_check_sizes import (
    FORMS,
    NEVER,
    Always,
    counted,
    kinds_of,
    make_predictable,
    retold,
    right_ranks,
    simulated_rounds,
)

TEXTS = (1, 12)


@pytest.fixture(scope="module")
def simulated() -> Iterator[tuple[Rounds, torch.Tensor]]:
    with torch.inference_mode():
        engine, head = models(dry_run=True)
        make_predictable(engine.target)
        yield simulated_rounds(engine, head, TEXTS)


def test_every_token_is_followed_by_the_next_number() -> None:
    engine, _ = models(dry_run=True)
    target = engine.target
    with torch.no_grad():
        make_predictable(target)
    found = plain_generate(target, [[90, 3, 40]], max_new_tokens=70, stop=Stop(token_ids=()))
    assert found.sequences == [[(41 + k) % target.vocab_size for k in range(70)]]


def test_trees_are_retold_with_one_right_child_at_most() -> None:
    tokens = torch.tensor([[7, 50, 51, 52, 53, 54, 0]])
    parents = torch.tensor([[-1, 0, 0, 1, 2, 2, -1]])
    valid = torch.tensor([[True] * 6 + [False]])
    depths = torch.tensor([[0, 1, 1, 2, 2, 2, 0]])
    tree = DraftTree(tokens, parents, valid)
    right = torch.tensor([[0, 1, 1, 0, 0, 0, 0]])  # the second at depth 1, the first at depth 2
    found = retold(tree, depths, right, levels=2)
    # Ranks 0 1 | 0 | 0 1: wrong children are further ahead than by one, each by its own number.
    assert found.tolist() == [[7, 9, 8, 10, 9, 11, 0]]


@pytest.mark.parametrize("accept", [0.3, 0.8])
def test_ranks_are_geometric(accept: float) -> None:
    ranks = right_ranks(accept, 20000)
    assert abs((ranks == 0).double().mean() - accept) < 0.015
    later = ranks[ranks > 0]
    assert abs((later == 1).double().mean() - accept) < 0.02
    assert torch.equal(ranks, right_ranks(accept, 20000))
    assert right_ranks(0.0, 3).tolist() == [NEVER] * 3 and right_ranks(1.0, 2).tolist() == [0, 0]


@torch.inference_mode()
@pytest.mark.parametrize(("accept", "least", "most"), [(0.0, 1.0, 1.0), (1.0, 4.0, 4.0)])
def test_a_chain_of_right_drafts_is_accepted_whole(
    simulated: tuple[Rounds, torch.Tensor], accept: float, least: float, most: float
) -> None:
    rounds, right = simulated
    right.copy_(right_ranks(accept, len(right)))
    restarted(rounds, TEXTS[1])
    assert least <= counted(rounds, Always(0), TEXTS, count=5).tokens / 5 <= most
    assert FORMS[0] == (3, 1, 4), "a chain of three"


@torch.inference_mode()
def test_tokens_of_a_chain_are_what_the_formula_says(
    simulated: tuple[Rounds, torch.Tensor],
) -> None:
    rounds, right = simulated
    right.copy_(right_ranks(0.6, len(right)))
    restarted(rounds, TEXTS[1])
    found = counted(rounds, Always(0), TEXTS, count=150)
    # (1 - alpha^4) / (1 - alpha), arXiv:2211.17192; one round's deviation is below 1.3.
    assert abs(found.tokens / 150 - (1 - 0.6**4) / 0.4) < 3 * 1.3 / 150**0.5
    assert found.kinds == {0: 150}


@torch.inference_mode()
def test_plain_steps_emit_one_token_each(simulated: tuple[Rounds, torch.Tensor]) -> None:
    rounds, _ = simulated
    restarted(rounds, TEXTS[1])
    assert counted(rounds, Always(None), TEXTS, count=3).tokens == 3
    assert kinds_of(rounds) == [None, 0, 1, 2, 3]


def test_auto_is_compared_on_the_same_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the section says all that the verdicts ask for."""
    starts = []
    real = gpu_check_sizes.restarted

    def noted(rounds: Rounds, context: int) -> None:
        starts.append(context)
        real(rounds, context)

    monkeypatch.setattr(gpu_check_sizes, "restarted", noted)
    rows = list(gpu_check_sizes.sizes(dry_run=True))
    named = [row["what"] for row in rows]
    assert named[:5] == ["plain step", *(gpu_check_sizes.name_of(form) for form in FORMS)]
    assert [n for n in named if n.startswith("waits of the host")] == [
        f"waits of the host: {name}" for name in named[:5]
    ]
    changed = {row["what"]: row for row in rows}
    assert gpu_check_sizes.CHANGE in changed
    [auto] = [row for row in rows if "auto over it" in row]
    assert auto["auto over it"] == auto["auto, tokens/s"] / auto["its tokens/s"]
    assert len(set(starts[-5:])) == 1 and starts[-1] > TEXTS[1], "each size where auto began"


def test_auto_learns_from_what_the_rounds_report(
    simulated: tuple[Rounds, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With costs that are given, and a clock that follows them."""
    rounds, right = simulated
    costs = dict(zip([PLAIN, *FORMS], (1.0, 1.2, 1.27, 1.35, 1.45), strict=True))
    table = fixed_table(costs)

    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock, run = Clock(), rounds.run

    def timed_run(kind: int | None = 0) -> Any:
        clock.now += costs[PLAIN if kind is None else FORMS[kind]]
        return run(kind)

    monkeypatch.setattr(gpu_check_sizes, "time", clock)
    monkeypatch.setattr(rounds, "run", timed_run)
    effort = gpu_check_sizes.Effort([TEXTS], 0.0, (), 30, 30, 1)
    for accept, chosen in ((0.0, "plain step"), (0.95, "4 nodes, depth 3")):
        with torch.inference_mode():
            right.copy_(right_ranks(accept, len(right)))
            head = build_proposer(rounds.drafter.drafter)
            auto = fastest_proposer(head, table).chooser
            row = gpu_check_sizes.speeds(rounds, auto, accept, TEXTS, effort)
        assert row["chosen most"] == row["best fixed"] == chosen
        assert 0.9 < row["auto over it"] < 1.1


def fixed_table(costs: dict[tuple[int, int, int], float]) -> RoundTable:
    key = machine_key(torch.device("cpu"), torch.float32, {}, "device")
    return RoundTable(key, {(form, TEXTS[1], TEXTS[0]): cost for form, cost in costs.items()})
