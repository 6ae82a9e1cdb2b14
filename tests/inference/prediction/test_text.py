"""Laws along a text, and how deep drafts may go.

Letters: m tokens that rounds emit.
"""

import pytest
import torch

from inference.prediction.text import Answer, Look, TextLaws
from inference.sampling import SamplingParams
from tests.tiny import tiny_target


def test_laws_are_asked_for_in_order_and_forgotten() -> None:
    target = tiny_target(layers=1)
    calls: list[int] = []

    def counting(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(ids.shape[1])
        return scores

    sampling = SamplingParams(0.7, processors=(counting,))
    answer = Answer([5, 6], [7, 8, 9, 10], 4, sampling)
    logits = torch.randn(3, 96, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    laws = TextLaws(answer, logits, target)
    assert torch.allclose(laws.law(2), (logits[2] / 0.7).softmax(-1))
    assert calls == [3, 4, 5]
    assert laws.best(1) == int(logits[1].argmax()) and torch.equal(laws.law(0), laws.soft(0))
    laws.forget(0)
    with pytest.raises(AssertionError, match="gone"):
        laws.law(0)


def test_at_temperature_0_laws_are_one_hot_and_soft_ones_are_not() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]], dtype=torch.float64)
    laws = TextLaws(Answer([0], [1, 2], 2), logits, tiny_target(layers=1))
    assert laws.law(0).tolist() == [0.0, 1.0, 0.0]
    assert torch.allclose(laws.soft(0), logits[0].softmax(-1))


def test_room_ends_with_the_text_and_before_the_last_token_of_the_length() -> None:
    look = Look(Answer([0], [1] * 5, 5), survival=[[]] * 4)
    assert look.room == [3, 2, 1, 0]
    assert Look(Answer([0], [1] * 5, 50), survival=[[]] * 4).room == [4, 3, 2, 1]
