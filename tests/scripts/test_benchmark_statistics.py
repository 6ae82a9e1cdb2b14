"""scripts.benchmark_statistics against numbers worked out by hand."""

import math

import pytest

from scripts.benchmark_statistics import (
    Measured,
    acceptance_length,
    median_interval,
    predicted_speed,
    ratio,
    split,
    summarise,
)


def measured(
    seconds: float = 3.0, tokens: int = 11, category: str = "a", **options: object
) -> Measured:
    """Eleven tokens in three seconds, one of them and one second in the prefill: 5 tokens/s."""
    return Measured(category, tokens, 1, seconds, 1.0, **options)  # type: ignore[arg-type]


def test_speeds_leave_the_prefill_out_or_in() -> None:
    found = measured()
    assert found.decoding == 2.0
    assert found.speed == 5.0
    assert found.whole_speed == pytest.approx(11 / 3)


def test_a_text_that_ends_at_once_has_no_decoding_speed() -> None:
    found = Measured("a", 1, 1, 1.0, 1.0)
    assert found.speed is None and found.whole_speed == 1.0
    assert ratio([found.speed], [5.0]) is None
    assert summarise([found], [found])["tokens_per_second"] is None


def test_ratio_is_the_median_of_the_ratios_not_the_ratio_of_medians() -> None:
    found = ratio([2.0, 9.0, 5.0], [1.0, 3.0, 10.0])  # 2, 3, 0.5
    assert found is not None
    assert (found.median, found.count) == (2.0, 3)


def test_ratio_skips_batches_that_one_side_lacks() -> None:
    found = ratio([2.0, None, 6.0, 1.0], [1.0, 1.0, 2.0, None])
    assert found is not None
    assert (found.median, found.count, found.low) == (2.5, 2, None)


def test_ratio_of_different_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0], [1.0, 2.0])


def test_interval_of_equal_values_is_a_point_and_of_few_there_is_none() -> None:
    assert median_interval([1.5] * 6) == (1.5, 1.5)
    assert median_interval([1.0, 2.0]) is None


def test_interval_of_three_values_spans_them() -> None:
    """All three resampled values are the smallest with probability 7/27, far above 2.5 %."""
    assert median_interval([1.0, 2.0, 3.0]) == (1.0, 3.0)


def test_interval_is_that_of_order_statistics() -> None:
    """The median of 99 resampled places of 0..98: binomial, 49 ± 1.96 · √99/2."""
    low, high = median_interval(list(range(99))) or (math.nan, math.nan)
    assert abs(low - (49 - 1.96 * math.sqrt(99) / 2)) <= 2
    assert abs(high - (49 + 1.96 * math.sqrt(99) / 2)) <= 2
    assert median_interval(list(range(99))) == (low, high), "the same draws every time"


def test_a_narrower_level_gives_a_narrower_interval() -> None:
    values = [float(value) for value in range(40)]
    wide, narrow = median_interval(values), median_interval(values, level=0.5)
    assert wide is not None and narrow is not None
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_acceptance_length_is_pooled_over_rounds() -> None:
    found = [measured(rounds=2, emitted=10), measured(rounds=8, emitted=10)]
    assert acceptance_length(found) == 2.0
    assert acceptance_length([*found, measured()]) == 2.0, "one without drafts changes nothing"
    assert acceptance_length([measured()]) is None


def test_shares_of_the_step_sum_to_one() -> None:
    found = [
        measured(parts={"verify": 1.0, "draft": 0.5, "host": 0.5}),
        measured(parts={"verify": 2.0, "host": 0.0}),
    ]
    shares = split(found)
    assert shares == {"draft": 0.125, "verify": 0.75, "host": 0.125}
    assert list(shares) == ["draft", "verify", "host"]
    assert split([measured()]) == {}


def test_possible_speed_counts_the_two_models_only() -> None:
    """Ten tokens for 1 s of forwards."""
    found = measured(parts={"draft": 0.25, "verify": 0.75, "host": 1.0})
    assert found.possible_speed == 10.0
    assert measured().possible_speed is None


def test_predicted_speed() -> None:
    assert predicted_speed(30, 2.0) == 15.0
    assert predicted_speed(0, 0.0) is None


def test_summary_of_known_batches() -> None:
    parts = {"draft": 0.2, "verify": 0.6, "host": 0.2}
    own = [measured(2.0, parts=parts, rounds=5, emitted=10) for _ in range(3)]
    other = [measured(3.0), measured(3.0), measured(5.0)]
    found = summarise(own, other)
    assert found["tokens_per_second"] == 10.0
    assert found["whole_tokens_per_second"] == pytest.approx(5.5)
    assert found["acceptance_length"] == 2.0
    assert found["ratio"] == {"median": 2.0, "interval": [2.0, 4.0], "count": 3}
    assert found["whole_ratio"]["median"] == pytest.approx(1.5)
    assert found["possible_ratio"] == pytest.approx(10 / 0.8 / 5), "12.5 tokens/s beside 5"
    assert found["reached"] == pytest.approx(0.8)
    assert "ratio" not in summarise(own, None)
