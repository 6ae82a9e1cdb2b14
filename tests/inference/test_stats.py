"""Acceptance statistics against hand counts."""

import json
import math

import pytest

from inference.stats import AcceptanceStats


def example() -> AcceptanceStats:
    stats = AcceptanceStats()
    stats.add_round(tree_depth=3, num_draft_tokens=5, accepted=3, emitted=4)
    stats.add_round(tree_depth=3, num_draft_tokens=5, accepted=0, emitted=1)
    stats.add_round(tree_depth=1, num_draft_tokens=1, accepted=1, emitted=2)
    stats.add_round(tree_depth=2, num_draft_tokens=2, accepted=1, emitted=1)  # the text ended
    return stats


def test_counts_and_both_conventions() -> None:
    stats = example()
    assert (stats.num_drafts, stats.num_draft_tokens) == (4, 13)
    assert (stats.num_accepted_tokens, stats.num_emitted) == (5, 8)
    assert stats.acceptance_length == 8 / 4
    assert stats.accepted_per_round == 5 / 4
    assert stats.acceptance_rate == 5 / 13


def test_conditional_counts_only_rounds_that_got_there() -> None:
    stats = example()
    assert stats.survival == [3 / 4, 1 / 4, 1 / 4]
    # depth 2: of the three rounds that accepted depth 1, one had no second draft token
    assert stats.conditional == [3 / 4, 1 / 2, 1 / 1]
    assert sum(stats.survival) == stats.accepted_per_round


def test_merge_equals_counting_together() -> None:
    merged = example().merge(example())
    together = example()
    for counts in [(3, 5, 3, 4), (3, 5, 0, 1), (1, 1, 1, 2), (2, 2, 1, 1)]:
        together.add_round(*counts)
    assert merged == together
    assert merged.acceptance_length == example().acceptance_length


def test_merge_leaves_its_parts_alone() -> None:
    left, right = example(), AcceptanceStats()
    left.merge(right).add_round(1, 1, 1, 2)
    assert left == example()
    assert right == AcceptanceStats()


def test_rounds_without_drafts() -> None:
    stats = AcceptanceStats()
    stats.add_round(tree_depth=0, num_draft_tokens=0, accepted=0, emitted=1)
    stats.add_round(tree_depth=0, num_draft_tokens=0, accepted=0, emitted=1)
    assert stats.acceptance_length == 1.0
    assert stats.survival == stats.conditional == []
    assert math.isnan(stats.acceptance_rate)


def test_dict_is_strict_json_even_when_empty() -> None:
    for stats in (AcceptanceStats(), example()):
        text = json.dumps(stats.to_dict(), allow_nan=False)
        assert json.loads(text) == stats.to_dict()
    assert AcceptanceStats().to_dict()["acceptance_length"] is None


def test_dict_holds_the_shared_keys() -> None:
    numbers = example().to_dict()
    assert numbers["acceptance_length"] == 2.0
    assert numbers["accepted_per_round"] == 1.25
    assert numbers["acceptance_by_position"] == {
        "conditional": [0.75, 0.5, 1.0],
        "survival": [0.75, 0.25, 0.25],
    }
    assert numbers["accepted_histogram"] == [1, 2, 0, 1]
    assert numbers["proposed_by_depth"] == [4, 3, 2]


@pytest.mark.parametrize("counts", [(2, 2, 3, 4), (2, 1, 1, 2), (2, 2, 1, 3), (1, 1, -1, 0)])
def test_impossible_rounds_are_caught(counts: tuple[int, int, int, int]) -> None:
    with pytest.raises(AssertionError):
        AcceptanceStats().add_round(*counts)
