"""Sizes and speeds by a cost table, against counts by hand.

Letters: S survival, m tokens that rounds emit.
"""

from dataclasses import dataclass

import pytest
import torch

from inference.prediction.choice import best_sizes, fitted, rank_table, replayed, static_survival
from inference.prediction.text import Answer, Look
from inference.shapes.static_tree import static_tree


@dataclass
class Costs:
    """A plain step takes one second, a further row and a draft level what is said."""

    row: float = 0.0
    level: float = 0.0
    most: int = 64

    def verify(self, width: int, context: float, batch: float = 1) -> float:
        return 1.0 + self.row * (width - 1)

    def draft(self, name: str, depth: int, width: int = 1, batch: float = 1) -> float:
        return self.level * depth

    def absorb(self, name: str, positions: int) -> float:
        return 0.0

    def rest(self, batch: float = 1) -> float:
        return 0.0

    def widest(self, batch: float = 1) -> int:
        return self.most

    def widths(self, batch: float = 1) -> list[int]:
        return [1, 2, 4, 8]


def look_of(ranks: list[list[int | None]]) -> Look:
    """A text that is long enough, with the ranks of its tokens."""
    m = len(ranks)
    chains = []
    for row in ranks:
        hits = [float(rank == 0) for rank in row]
        chains.append([min(hits[: n + 1]) for n in range(len(row))])
    return Look(
        Answer([1], [0] * (m + 1), m + 10),
        survival=chains,
        depths=[2.0] * m,
        rows=[3.0] * m,
        chains=chains,
        ranks=ranks,
    )


LOOK = look_of([[0, 0], [0, 1], [1, 0], [0, 15], [2, 0], [0, 1], [0, 0], [1, 1], [0, 0], [0]])


def test_rates_by_rank() -> None:
    table = rank_table([LOOK], 2)
    assert table[0, :3].tolist() == pytest.approx([0.7, 0.2, 0.1])
    assert table[1, :2].tolist() == pytest.approx([5 / 9, 3 / 9])
    assert float(table[1].sum()) == pytest.approx(8 / 9)


def test_a_static_tree_is_replayed_path_by_path() -> None:
    shape = static_tree([(0,), (1,), (1, 0)])
    found = static_survival(LOOK, shape)
    assert found[0] == [1.0, 0.0] and found[2] == [1.0, 1.0] and found[4] == [0.0, 0.0]
    assert found[9] == [1.0]
    assert static_survival(look_of([[None, 0]]), shape) == [[0.0]]
    # Rounds start at 0, 2 (accepts two), 5, 7, 9: five for ten tokens.
    assert replayed([LOOK], [found], shape.depth) == pytest.approx(2.0)


def test_a_chain_is_cut_to_every_length() -> None:
    best = best_sizes([LOOK], 2, 8, None, "head", 5.0, drawn=False)
    # One draft: rounds at 0, 2, 3, 5, 7, 8. Two: 0 (two), 3 (one), 5 (one), 7, 8 (ends the text).
    assert [way.tau for way in best.chains] == pytest.approx([10 / 6, 10 / 5])
    assert best.choice is None and best.plain is None


def test_the_fastest_size_follows_the_costs() -> None:
    def choice(row: float, level: float) -> tuple[str, int]:
        found = best_sizes([LOOK], 2, 8, Costs(row, level), "head", 5.0, drawn=False).choice
        assert found is not None
        return found.drafts, found.size

    assert choice(0.0, 0.0)[0] == "static"
    assert choice(9.0, 0.0) == ("none", 1)
    assert choice(0.4, 0.0) == ("chain", 2)
    found = best_sizes([LOOK], 2, 8, Costs(0.1, 0.2), "head", 5.0, drawn=False)
    assert found.chains[1].tokens_per_second == pytest.approx(2.0 / (1.0 + 0.2 + 0.4))
    assert found.plain == pytest.approx(1.0)


def test_sizes_that_were_not_measured_have_no_speed() -> None:
    found = best_sizes([LOOK], 2, 8, Costs(most=2), "head", 5.0, drawn=False)
    assert found.chains[0].tokens_per_second is not None
    assert found.chains[1].tokens_per_second is None


def test_drawn_drafts_have_no_static_trees() -> None:
    assert best_sizes([LOOK], 2, 8, None, "head", 5.0, drawn=True).trees == []


def test_rates_that_make_no_tree() -> None:
    assert fitted(torch.zeros(2, 4), 8) is None
