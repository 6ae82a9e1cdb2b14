"""What training draws: keyed by the use of a sequence, independent of everything else."""

import pytest
import torch

from training.draws import generator, uniform_rows

LIKE = torch.zeros(1, dtype=torch.float64)


def test_rows_are_uniform_around_zero() -> None:
    rows = uniform_rows(torch.tensor([3, 4]), (200, 50), LIKE)
    assert rows.shape == (2, 200, 50)
    assert rows.min() >= -0.5
    assert rows.max() < 0.5
    assert abs(rows.mean()) < 0.01
    assert abs(rows.std() - 12**-0.5) < 0.01


def test_a_row_depends_on_its_number_alone() -> None:
    """Not on its place in the batch, on the others, or on the state of torch's own generator."""
    torch.manual_seed(0)
    together = uniform_rows(torch.tensor([5, 6, 7]), (4, 3), LIKE)
    torch.manual_seed(1)
    for place, number in enumerate((5, 6, 7)):
        assert torch.equal(uniform_rows(torch.tensor([number]), (4, 3), LIKE)[0], together[place])
    assert torch.equal(uniform_rows(torch.tensor([7, 5]), (4, 3), LIKE)[0], together[2])


def test_numbers_draw_different_rows() -> None:
    rows = uniform_rows(torch.arange(50), (8,), LIKE)
    assert len({tuple(row.tolist()) for row in rows}) == 50
    correlation = torch.corrcoef(uniform_rows(torch.arange(2), (5000,), LIKE))[0, 1]
    assert abs(correlation) < 0.05


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    uniform_rows(torch.tensor([1]), (2,), LIKE)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_result_has_the_dtype_asked_for(dtype: torch.dtype) -> None:
    rows = uniform_rows(torch.tensor([1]), (2, 2), torch.zeros(1, dtype=dtype))
    assert rows.dtype == dtype
    exact = uniform_rows(torch.tensor([1]), (2, 2), LIKE)
    assert (rows.double() - exact).abs().max() < 0.01, "the draw itself does not depend on it"


def test_purposes_are_streams_of_their_own() -> None:
    def first(draw: int, purpose: int) -> list[float]:
        return torch.rand(4, generator=generator(draw, purpose)).tolist()

    assert first(2, 0) == first(2, 0)
    drawn = {tuple(first(draw, purpose)) for draw in range(20) for purpose in range(5)}
    assert len(drawn) == 100
